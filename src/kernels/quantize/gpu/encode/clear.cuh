// Zeros for what later launches count or take maxima into.
#pragma once

#include "isa/isa.hpp"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

struct ClearParams {
  static constexpr int tables = 5;
  std::uint32_t* words[tables] = {};
  std::int64_t counts[tables] = {};
  std::uint64_t* saturated = nullptr;  ///< three counters
  std::int64_t saturated_stride = 0;
};

struct ClearWords {
  using Params = ClearParams;
  static constexpr int threads = 256, min_blocks = 1, shared_bytes = 0;
  static constexpr bool dependent = true;

  static QATTN_DEVICE void run(const Params& p) {
    isa::grid_dependency_launch();
    isa::grid_dependency_wait();
    const std::int64_t step = std::int64_t{isa::grid().x} * threads;
    const std::int64_t mine = std::int64_t{isa::block().x} * threads + isa::thread();
    for (int n = 0; n < Params::tables; ++n) {
      for (std::int64_t i = mine; i < p.counts[n]; i += step) {
        isa::store_global(p.words[n] + i, 0u);
      }
    }
    if (p.saturated != nullptr && mine < 3) {
      isa::store_global(p.saturated + mine * p.saturated_stride, std::uint64_t{0});
    }
  }
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
