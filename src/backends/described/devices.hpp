// GPUs that are not here: what is known of them, and a backend that plans calls for one as the
// GPU's own library would there. It is that library's host code, compiled without its kernels, so
// that the same supports() answers. It has no memory and runs nothing.
#pragma once

#include <string>

#include "backends/described/gpus.hpp"

namespace qattn::described {

/// The code that libqattn_cuda is taken to have: of every architecture that is released.
std::string released_code();

/// Calls with tensors of its type are planned for that GPU as long as this object lives: plan() and
/// explain() need no memory, run() refuses. One at a time, and not while other threads call qattn.
class OnGpu {
 public:
  explicit OnGpu(const Gpu& gpu);
  ~OnGpu();
  OnGpu(const OnGpu&) = delete;
  OnGpu& operator=(const OnGpu&) = delete;
};

}  // namespace qattn::described
