// Words on matrices that a warp holds or moves, emulated. Meanings: isa.hpp.
#pragma once

#include <algorithm>
#include <iterator>

#include "isa/emu/units/matrix.hpp"
#include "isa/emu/words/order.hpp"

namespace qattn::isa {
inline namespace QATTN_TARGET {

// ---- Loads, stores -----------------------------------------------------------------------------

template <bool Transposed, int Matrices, int N>
void load_matrices(std::uint32_t (&r)[N][Matrices], const SharedAddress (&row)[N],
                   const Where& where) {
  emu::MatrixRows mine{&r[0][0], row, N, Matrices, where};
  emu::warp_collective(Word::load_matrix, mine, where,
                       [](emu::Block& block, emu::Arguments<emu::MatrixRows> lanes) {
                         emu::load_matrix(block, lanes, Transposed);
                       });
}
template <int N>
void load_matrix(std::uint32_t (&r)[N][4], const SharedAddress (&row)[N],
                 Where where = Where::current()) {
  load_matrices<false>(r, row, where);
}
template <int N>
void load_matrix_transposed(std::uint32_t (&r)[N][4], const SharedAddress (&row)[N],
                            Where where = Where::current()) {
  load_matrices<true>(r, row, where);
}
template <int N>
void load_matrix2(std::uint32_t (&r)[N][2], const SharedAddress (&row)[N],
                  Where where = Where::current()) {
  load_matrices<false>(r, row, where);
}
template <int N>
void load_matrix2_transposed(std::uint32_t (&r)[N][2], const SharedAddress (&row)[N],
                             Where where = Where::current()) {
  load_matrices<true>(r, row, where);
}
template <int N>
void load_matrix1(std::uint32_t (&r)[N][1], const SharedAddress (&row)[N],
                  Where where = Where::current()) {
  load_matrices<false>(r, row, where);
}
template <int N>
void load_matrix1_transposed(std::uint32_t (&r)[N][1], const SharedAddress (&row)[N],
                             Where where = Where::current()) {
  load_matrices<true>(r, row, where);
}

template <bool Transposed, int Matrices, int N>
void store_matrices(const SharedAddress (&row)[N], const std::uint32_t (&r)[N][Matrices],
                    const Where& where) {
  emu::MatrixRows mine{const_cast<std::uint32_t*>(&r[0][0]), row, N, Matrices, where};
  emu::warp_collective(Word::store_matrix, mine, where,
                       [](emu::Block& block, emu::Arguments<emu::MatrixRows> lanes) {
                         emu::store_matrix(block, lanes, Transposed);
                       });
}
template <int N>
void store_matrix(const SharedAddress (&row)[N], const std::uint32_t (&r)[N][4],
                  Where where = Where::current()) {
  store_matrices<false>(row, r, where);
}
template <int N>
void store_matrix_transposed(const SharedAddress (&row)[N], const std::uint32_t (&r)[N][4],
                             Where where = Where::current()) {
  store_matrices<true>(row, r, where);
}
template <int N>
void store_matrix2(const SharedAddress (&row)[N], const std::uint32_t (&r)[N][2],
                   Where where = Where::current()) {
  store_matrices<false>(row, r, where);
}
template <int N>
void store_matrix2_transposed(const SharedAddress (&row)[N], const std::uint32_t (&r)[N][2],
                              Where where = Where::current()) {
  store_matrices<true>(row, r, where);
}
template <int N>
void store_matrix1(const SharedAddress (&row)[N], const std::uint32_t (&r)[N][1],
                   Where where = Where::current()) {
  store_matrices<false>(row, r, where);
}
template <int N>
void store_matrix1_transposed(const SharedAddress (&row)[N], const std::uint32_t (&r)[N][1],
                              Where where = Where::current()) {
  store_matrices<true>(row, r, where);
}

inline std::uint32_t transpose_matrix(std::uint32_t v, Where where = Where::current()) {
  emu::current_block().require(Word::transpose_matrix, where);
  Shuffled<std::uint32_t> mine{v, 0, v};
  emu::warp_collective(Word::shuffle, mine, where,
                       [](emu::Block&, emu::Arguments<Shuffled<std::uint32_t>> lanes) {
                         for (int i = 0; i < 32; ++i) {
                           const int g = i / 4, t = i % 4, shift = g % 2 * 16;
                           const auto half = [&](int row) {
                             return lanes[row * 4 + g / 2].value >> shift & 0xffffu;
                           };
                           lanes[i].result = half(2 * t) | half(2 * t + 1) << 16;
                         }
                       });
  return mine.result;
}

// ---- Products ----------------------------------------------------------------------------------

template <Element A, Element B>
constexpr bool can_multiply() {
  if (is_16bit(A) || is_16bit(B)) return A == B;
  if (A == Element::e2m1 || B == Element::e2m1) return false;
  return is_integer(A) == is_integer(B);
}
template <Element A, Element B, int M, int N>
void mma(Accumulator<A> (&d)[M][N][4], const std::uint32_t (&a)[M][4],
         const std::uint32_t (&b)[N][2], Where where = Where::current()) {
  static_assert(can_multiply<A, B>(), "no such product");
  emu::Product mine{&d[0][0][0], &a[0][0], &b[0][0], M, N};
  emu::warp_collective(
      emu::mma_word(A), mine, where, [](emu::Block& block, emu::Arguments<emu::Product> lanes) {
        constexpr auto kind =
            is_integer(A) ? emu::AccumulatorKind::int32 : emu::AccumulatorKind::float32;
        emu::multiply_accumulate(block, lanes, A, B, kind, emu::mma_word(A));
      });
}
template <Element A, Element B, int M, int N>
void mma_zero(Accumulator<A> (&d)[M][N][4], const std::uint32_t (&a)[M][4],
              const std::uint32_t (&b)[N][2], Where where = Where::current()) {
  for (auto& row : d) {
    for (auto& tile : row) std::fill(std::begin(tile), std::end(tile), Accumulator<A>{});
  }
  mma<A, B, M, N>(d, a, b, where);
}
template <Element A, Element B, int M, int N, int Total>
void mma_at(Accumulator<A> (&d)[M][Total][4], int first, const std::uint32_t (&a)[M][4],
            const std::uint32_t (&b)[N][2], Where where = Where::current()) {
  Accumulator<A> part[M][N][4];
  for (int m = 0; m < M; ++m) std::copy_n(&d[m][first][0], 4 * N, &part[m][0][0]);
  mma<A, B, M, N>(part, a, b, where);
  for (int m = 0; m < M; ++m) std::copy_n(&part[m][0][0], 4 * N, &d[m][first][0]);
}
template <int M, int N>
void mma_f16(std::uint32_t (&d)[M][N][2], const std::uint32_t (&a)[M][4],
             const std::uint32_t (&b)[N][2], Where where = Where::current()) {
  emu::Product mine{&d[0][0][0], &a[0][0], &b[0][0], M, N};
  emu::warp_collective(Word::mma_f16, mine, where,
                       [](emu::Block& block, emu::Arguments<emu::Product> lanes) {
                         emu::multiply_accumulate(block, lanes, Element::f16, Element::f16,
                                                  emu::AccumulatorKind::float16, Word::mma_f16);
                       });
}

}  // namespace QATTN_TARGET
}  // namespace qattn::isa
