// Products with scales of blocks, and what goes with them, emulated. Meanings: isa.hpp.
#pragma once

#include <algorithm>

#include "formats/e2m1.hpp"
#include "formats/ue8m0.hpp"
#include "isa/emu/units/block_scaled.hpp"
#include "isa/emu/words/arithmetic.hpp"
#include "isa/emu/words/matrix.hpp"

namespace qattn::isa {
inline namespace QATTN_TARGET {

inline constexpr bool has_scaled_mma = true;

template <Scaled S, int M, int N, int Byte = 0>
void mma_scaled(float (&d)[M][N][4], const std::uint32_t (&a)[M][4], const std::uint32_t (&b)[N][2],
                const std::uint32_t (&sa)[M], const std::uint32_t (&sb)[N],
                Where where = Where::current()) {
  static_assert(has_scale_byte<S, Byte>, "no such byte of scales");
  emu::ScaledProduct mine{{&d[0][0][0], &a[0][0], &b[0][0], M, N}, sa, sb};
  emu::warp_collective(S == Scaled::mxfp8 ? Word::mma_mxfp8 : Word::mma_fp4, mine, where,
                       [](emu::Block& block, emu::Arguments<emu::ScaledProduct> lanes) {
                         emu::multiply_scaled(block, lanes, S, Byte);
                       });
}

template <Element A, Element B, int M, int N>
void mma_f8f6f4(float (&d)[M][N][4], const std::uint32_t (&a)[M][4], const std::uint32_t (&b)[N][2],
                Where where = Where::current()) {
  static_assert(is_f8f6f4(A) && is_f8f6f4(B), "no such product");
  emu::Product mine{&d[0][0][0], &a[0][0], &b[0][0], M, N};
  emu::warp_collective(Word::mma_f8f6f4, mine, where,
                       [](emu::Block& block, emu::Arguments<emu::Product> lanes) {
                         emu::multiply_accumulate(block, lanes, A, B, emu::AccumulatorKind::float32,
                                                  Word::mma_f8f6f4);
                       });
}

template <int N>
void load_bytes_transposed(std::uint32_t (&r)[N][4], const SharedAddress (&row)[N],
                           Where where = Where::current()) {
  emu::MatrixRows mine{&r[0][0], row, N, 4, where};
  emu::warp_collective(Word::load_bytes_transposed, mine, where,
                       [](emu::Block& block, emu::Arguments<emu::MatrixRows> lanes) {
                         emu::load_bytes_transposed(block, lanes);
                       });
}

inline std::uint32_t pack_e2m1(const float (&x)[8], Where where = Where::current()) {
  emu::current_block().require(Word::convert_e2m1, where);
  count_word(Word::convert_e2m1);
  std::uint32_t word = 0;
  for (int i = 0; i < 8; ++i) {
    word |= static_cast<std::uint32_t>(formats::E2m1::encode(x[i])) << 4 * i;
  }
  return word;
}

/// Two codes, `up` away from zero and else toward it. As CUDA's headers have it on the host: of the
/// magnitude, infinities as the largest number.
inline std::uint16_t pack_ue8m0_as(float lo, float hi, bool up, const Where& where) {
  emu::current_block().require(Word::convert_ue8m0, where);
  count_word(Word::convert_ue8m0);
  const auto code = [up](float x) -> std::uint32_t {
    if (std::isnan(x)) return formats::Ue8m0::nan;
    const float magnitude = std::min(std::fabs(x), std::numeric_limits<float>::max());
    const std::uint32_t below = formats::Ue8m0::floor_encode(magnitude, 0);
    const bool beyond = magnitude > formats::Ue8m0::decode(static_cast<std::uint8_t>(below));
    return up && beyond && below < 254 ? below + 1 : below;
  };
  return static_cast<std::uint16_t>(code(lo) | code(hi) << 8);
}
inline std::uint16_t pack_ue8m0(float lo, float hi, Where where = Where::current()) {
  return pack_ue8m0_as(lo, hi, false, where);
}
inline std::uint16_t pack_ue8m0_up(float lo, float hi, Where where = Where::current()) {
  return pack_ue8m0_as(lo, hi, true, where);
}

}  // namespace QATTN_TARGET
}  // namespace qattn::isa
