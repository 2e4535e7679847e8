// One row (a token of one head) in half a warp: lane s of sixteen holds channels s, s + 16, ..., so
// that the sixteen sums of formats/kv/quantize.hpp are the lanes' own and are added in halves by
// exchanges. Codes, scales and rotations are those functions' bit for bit.
#pragma once

#include "formats/bf16.hpp"
#include "formats/hadamard.hpp"
#include "formats/kv/quantize.hpp"
#include "isa/isa.hpp"
#include "kernels/operand/input_kind.hpp"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

inline constexpr int row_lanes = formats::kv_lanes;
static_assert(row_lanes == 16);

QATTN_DEVICE int row_lane() { return isa::lane() % row_lanes; }
/// Which of a warp's two rows this lane works on.
QATTN_DEVICE int row_of_warp() { return isa::lane() / row_lanes; }

QATTN_DEVICE float widen(std::uint16_t bits, bool bf16) {
  return bf16 ? isa::unpack_bf16(bits).lo : isa::unpack_f16(bits).lo;
}
/// As the host reads rows: infinities become NaN, -0 becomes +0.
QATTN_DEVICE float clean(float x) { return formats::add_rn(x, formats::add_rn(x, -x)); }

/// The window's 16 bits of a number. One NaN for all: what sum and conversion make of its payload
/// differs between machines.
QATTN_DEVICE std::uint16_t narrow(float x, bool bf16) {
  if (!formats::is_finite(x)) return bf16 ? 0x7fc0 : 0x7e00;
  x = clean(x);
  return bf16 ? formats::Bf16::encode(x) : formats::F16::encode(x);
}

/// The window's 16 bits of an element of a tensor; as it came where the formats are the same.
QATTN_DEVICE std::uint16_t window_bits(const void* data, InputKind kind, std::int64_t at,
                                       bool bf16) {
  float x;
  if (kind == InputKind::f32) {
    x = isa::load_global(static_cast<const float*>(data) + at);
  } else {
    const std::uint16_t bits = isa::load_global(static_cast<const std::uint16_t*>(data) + at);
    if ((kind == InputKind::bf16) == bf16) return bits;
    x = widen(bits, !bf16);
  }
  return narrow(x, bf16);
}

/// N registers hold up to 16 N channels; those past a row's are zeros.
template <int N>
struct LaneRow {
  float x[N];

  QATTN_DEVICE static int channel(int j) { return row_lane() + row_lanes * j; }

  /// Signs, then the Hadamard matrix of the channels' blocks: formats::rotate(). Collective.
  QATTN_DEVICE void rotate(int channels) {
    signs();
    hadamard(channels);
  }
  /// formats::unrotate(). Collective.
  QATTN_DEVICE void unrotate(int channels) {
    hadamard(channels);
    signs();
  }
  QATTN_DEVICE void signs() {
#pragma unroll
    for (int j = 0; j < N; ++j) x[j] = formats::mul_rn(x[j], formats::rotation_sign(channel(j)));
  }
  QATTN_DEVICE void hadamard(int channels) {
    const int block = formats::rotation_block(channels);
#pragma unroll
    for (int distance = 1; distance < row_lanes; distance *= 2) {
      const bool upper = (row_lane() & distance) != 0;
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const float other = isa::shuffle_xor(x[j], distance);
        x[j] = upper ? formats::add_rn(other, -x[j]) : formats::add_rn(x[j], other);
      }
    }
#pragma unroll
    for (int step = 1; step < N; step *= 2) {
      if (row_lanes * step >= block) continue;
#pragma unroll
      for (int j = 0; j < N; ++j) {
        if ((j & step) != 0 || j + step >= N) continue;
        const float a = x[j], b = x[j + step];
        x[j] = formats::add_rn(a, b);
        x[j + step] = formats::add_rn(a, -b);
      }
    }
    const float norm = formats::rotation_norm(block);
#pragma unroll
    for (int j = 0; j < N; ++j) x[j] = formats::mul_rn(x[j], norm);
  }

  /// Bits of the largest magnitude, NaN's if there is a NaN or an infinity. Collective.
  QATTN_DEVICE float amax() const {
    float top = 0.0f;
#pragma unroll
    for (int j = 0; j < N; ++j) top = formats::fold_amax(top, x[j]);
#pragma unroll
    for (int mask = row_lanes / 2; mask > 0; mask /= 2) {
      top = formats::fold_amax(top, isa::shuffle_xor(top, mask));
    }
    return top;
  }

  /// formats::kv_error() under a scale whose reciprocal is known. Collective.
  QATTN_DEVICE float error(int channels, int bits, float scale, float inverse) const {
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      if (row_lanes * j >= channels) continue;
      const float y = formats::mul_rn(x[j], inverse);
      const float e = formats::add_rn(y, -formats::kv_grid(y, bits));
      sum = formats::add_rn(sum, formats::mul_rn(e, e));
    }
#pragma unroll
    for (int step = row_lanes / 2; step > 0; step /= 2) {
      sum = formats::add_rn(sum, isa::shuffle_xor(sum, step));
    }
    return formats::mul_rn(formats::mul_rn(scale, scale), sum);
  }

  /// formats::kv_row_scale(). Lane i works out candidate i. Collective.
  QATTN_DEVICE std::uint16_t scale_code(int channels, int bits) const {
    const float top = amax();
    const std::uint32_t mine = formats::kv_candidate(top, bits, row_lane());
    // A candidate that vanished, or lies beyond f16, is passed over below.
    const bool usable = mine != 0 && mine < formats::kv_infinite_scale;
    const float scale = usable ? formats::F16::decode(static_cast<std::uint16_t>(mine)) : 1.0f;
    const float inverse = formats::reciprocal(scale);
    const int first = row_of_warp() * row_lanes;
    const std::uint32_t largest = isa::shuffle(mine, first + formats::kv_candidates - 1);
    std::uint32_t best = largest;
    float least = formats::float_of(formats::kInfBits);
#pragma unroll 4
    for (int i = 0; i < formats::kv_candidates; ++i) {
      const std::uint32_t code = isa::shuffle(mine, first + i);
      const float e =
          error(channels, bits, isa::shuffle(scale, first + i), isa::shuffle(inverse, first + i));
      const bool better = code != 0 && e < least;
      least = better ? e : least;
      best = better ? code : best;
    }
    if (!formats::is_finite(top) || largest >= formats::kv_infinite_scale) {
      return formats::kv_nan_scale;
    }
    return static_cast<std::uint16_t>(best);
  }

  /// Does every channel hold a finite number? Collective.
  QATTN_DEVICE bool finite() const { return formats::is_finite(amax()); }
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
