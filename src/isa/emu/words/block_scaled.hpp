// Products with scales of blocks, and what goes with them, emulated. Meanings: isa.hpp.
#pragma once

#include <algorithm>

#include "formats/e2m1.hpp"
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

}  // namespace QATTN_TARGET
}  // namespace qattn::isa
