// The GPUs that qattn knows by name, and what plans need to know of one that is not here.
#pragma once

#include <span>
#include <string_view>

#include "qattn/qattn.hpp"

namespace qattn::described {

struct Gpu {
  const char* name;      ///< sm_90, gfx950
  const char* products;  ///< of that name; the first is the one that `multiprocessors` is of
  DeviceType type;
  int architecture;  ///< 90 for sm_90; 0: not NVIDIA's
  int multiprocessors;
};

std::span<const Gpu> gpus();

/// Errors: invalid_argument, with the names that are known.
Result<Gpu> gpu_named(std::string_view name);

}  // namespace qattn::described
