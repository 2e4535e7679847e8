// Decode attention over K and V that come as 8-bit codes (kernel.cuh): what is selected at
// compile time, and what a launch is told.
#pragma once

#include "isa/launch.hpp"
#include "kernels/attention/common/params.hpp"

namespace qattn::kernels {

struct Uniform8Config {
  int d = 128;                         ///< padded head dimension of Q, K and V
  isa::Element qk = isa::Element::s8;  ///< Q and K: s8 or e4m3
  isa::Element pv = isa::Element::u8;  ///< P: u8, and V has s8; or e4m3, and V has it, too
  bool operator==(const Uniform8Config&) const = default;
};

/// FP8 needs conversions to f16, which older GPUs lack.
inline constexpr int uniform8_fp8_architecture = 89;
inline constexpr int uniform8_rows = 8, coded_tile_keys = 64;  ///< of a block and its tiles

/// Blocks that a multiprocessor runs at a time, by 227 KiB of shared memory (sm_90 and sm_100;
/// others run them in turns) and by registers.
QATTN_CONSTEXPR int uniform8_blocks(int d) { return d <= 64 ? 12 : d <= 128 ? 11 : 6; }

inline namespace QATTN_TARGET {

/// Scales as they were given: element outer * o + head * h + token * t + channel * c, where o is
/// the page or the sequence and t the token in it.
struct Uniform8Scales {
  const float* data = nullptr;
  std::int64_t outer = 0, head = 0, token = 0, channel = 0;
  std::int64_t tokens = -1;  ///< that have scales of their own; negative: all have the same
};

struct Uniform8Params {
  AttentionParams call;
  std::int32_t page_shift = -1;  ///< log2 of the page size, if that is a power of two
  Uniform8Scales k_scale, v_scale;
  /// Format of Q where this kernel makes its codes: f16 or bf16; none: prepare() has made them.
  Format fused_q_quant = Format::none;
};

template <Uniform8Config C>
isa::LaunchError launch_uniform8(const Uniform8Params& params, isa::Index3 grid, void* stream,
                                 isa::Start start);

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
