// Prefill attention for GeForce Blackwell: products with scales of groups, which sm_120 has in code
// of its family alone. FP8 without groups takes them, too, with scales of 1: on GeForce plain FP8
// products with float32 sums have half their rate (docs/internals/geforce.md).
#pragma once

#include "kernels/attention/mma/kernel.cuh"
#include "kernels/attention/sm120a/config.hpp"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

template <Sm120Config C>
struct Sm120Attention {
  using Params = AttentionParams;
  using S = MmaShape<mma_config(C)>;
  static constexpr int threads = S::threads, shared_bytes = S::shared_bytes, min_blocks = 1;
  static constexpr isa::Target target = isa::sm_120f;
  static_assert(shared_bytes <= 101376, "what a block of sm_120 can have");

  static QATTN_DEVICE void run(const Params& p) {
    if constexpr (isa::has_scaled_mma) MmaAttention<S>::run(p);
  }
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
