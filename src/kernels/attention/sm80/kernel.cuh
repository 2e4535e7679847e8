// Portable prefill attention: mma.sync and cp.async, for every NVIDIA GPU from sm_80 on.
#pragma once

#include "kernels/attention/mma/kernel.cuh"
#include "kernels/attention/sm80/config.hpp"

namespace qattn::kernels {

inline namespace QATTN_TARGET {

/// GeForce, which also runs code of sm_80, multiplies 16 bits with float32 sums at half the rate of
/// others, and its lanes have time. General kernels sum in the same way everywhere.
constexpr MmaConfig config_here(const Sm80Config& c) {
  MmaConfig m = mma_config(c);
  const bool whole_rate = isa::target_architecture == 90 || isa::target_architecture == 100;
  m.lane_sums = !c.general && !whole_rate;
  return m;
}

/// GPUs whose mma.sync of FP8 is not one instruction get empty kernels, and supports() refuses
/// them.
template <Sm80Config C>
struct Sm80Attention {
  using Params = AttentionParams;
  using S = MmaShape<config_here(C)>;
  /// 255 registers hold 32 rows of D = 128; with D = 64 three blocks of 168 hide more latency.
  static constexpr int min_blocks = C.d == 64 ? 3 : 2;
  static constexpr int threads = S::threads, shared_bytes = S::shared_bytes;
  static constexpr bool has_fp8 = !isa::has_mma(C.qk, 80) || !isa::has_mma(C.pv, 80);
  static constexpr isa::Target target = has_fp8 ? isa::sm_89 : isa::sm_80;

  static QATTN_DEVICE void run(const Params& p) {
    if constexpr (isa::has_mma(C.qk, isa::target_architecture) &&
                  isa::has_mma(C.pv, isa::target_architecture)) {
      MmaAttention<S>::run(p);
    }
  }
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
