// Prefill attention for GeForce Blackwell: products with scales of groups, which sm_120 has in code
// of its family alone. FP8 without groups takes them, too, with scales of 1: on GeForce plain FP8
// products with float32 sums have half their rate (docs/internals/geforce.md).
#pragma once

#include "kernels/attention/mma/kernel.cuh"
#include "kernels/attention/mma/ring.cuh"
#include "kernels/attention/sm120a/config.hpp"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

/// A kernel whose code is for `Target`. Those without scales in their products can be compiled for
/// sm_90a, too, to be timed there.
template <Sm120Config C, isa::Target Target>
struct Sm120Code {
  using Params = Sm120Params<C>;
  using S = MmaShape<mma_config(C)>;
  static constexpr int threads = S::block_threads, shared_bytes = S::shared_bytes, min_blocks = 1;
  static constexpr isa::Target target = Target;
  static_assert(shared_bytes <= isa::shared_bytes_of(120));
  static constexpr bool scaled = S::qk_scaled || S::pv_scaled;
  static constexpr bool has_products = Target.number == 120
                                           ? isa::has_scaled_mma
                                           : !scaled && isa::target_architecture >= Target.number;

  static QATTN_DEVICE void run(const Params& p) {
    if constexpr (has_products) {
      if constexpr (S::ring) {
        RingKernel<S>::run(p);
      } else {
        MmaAttention<S>::run(p);
      }
    }
  }
};

/// Those of the library.
template <Sm120Config C>
struct Sm120Attention : Sm120Code<C, isa::sm_120f> {};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
