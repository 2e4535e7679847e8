// What isa/launch.hpp promises, of a GPU that is described and not here: calls are planned for it
// as on the GPU itself, and nothing is launched, so that no kernel is instantiated. Included by
// isa/launch.hpp where QATTN_DESCRIBED is defined.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "isa/launch.hpp"

namespace qattn::isa {
inline namespace QATTN_TARGET {

/// The GPU that plans are made for: set by backends/described/devices.hpp.
struct DescribedGpu {
  int architecture = 0, code_architecture = 0;
  int multiprocessors = 1;
  std::vector<Target> code;  ///< machine code that runs there
};
inline DescribedGpu& described_gpu() {
  static DescribedGpu gpu;
  return gpu;
}

template <class K>
LaunchError launch(const typename K::Params& /*params*/, Index3 /*grid*/, void* /*stream*/,
                   Start /*start*/ = Start::after_all) {
  return "the GPU is described and not here";
}

constexpr bool builds_for(Vendor /*vendor*/) { return true; }

inline Gpu gpu(int /*device*/) { return gpu_of(described_gpu().architecture); }
inline int code_architecture() { return described_gpu().code_architecture; }
inline int multiprocessors() { return described_gpu().multiprocessors; }
inline std::uint32_t* error_word() { return nullptr; }

template <class K>
bool has_code() {
  return std::ranges::any_of(described_gpu().code,
                             [](Target code) { return has_all(code, target_of<K>()); });
}

}  // namespace QATTN_TARGET
}  // namespace qattn::isa
