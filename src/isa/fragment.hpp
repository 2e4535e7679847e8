// How the accumulators of a matrix product lie in the lanes of a warp, for what is written once for
// all machines: which rows a lane has, and how the lanes that share a row join what they have.
//
// A fragment cuts accumulators into tiles of tile_rows x tile_columns. Of each tile a lane holds
// `elements` numbers: row_elements of each of `rows` rows. Row r of a lane is row(lane, r) of the
// tile; element e of it lies in column lane_column(lane) + element_column(e), of which compilers
// know the second, and is number element(r, e). Elements lie in runs of `run` neighbours. The lanes
// of a row differ in the bits of first_mask to last_mask alone.
//
// "Row" is a query and "column" a key or a channel, whichever of the product's they are: kernels
// that multiply K Q^T take a transposed fragment. Layouts: the PTX ISA's (mma.sync, wgmma,
// tcgen05.ld), AMD's matrix instruction calculator (MFMA).
#pragma once

#include "isa/isa.hpp"

namespace qattn::isa {

/// mma.sync with 16 x 8 results; wgmma's, a warp of whose four has 16 rows.
struct MmaFragment {
  static constexpr int warp_lanes = 32, tile_rows = 16, tile_columns = 8;
  static constexpr int rows = 2, row_elements = 2, run = 2, elements = 4;
  static constexpr int first_mask = 1, last_mask = 2;

  QATTN_CONSTEXPR static int row(int lane, int r) { return lane / 4 + r * 8; }
  QATTN_CONSTEXPR static int lane_column(int lane) { return lane % 4 * 2; }
  QATTN_CONSTEXPR static int element_column(int e) { return e; }
  QATTN_CONSTEXPR static int element(int r, int e) { return r * 2 + e; }
};

/// The same of a product whose columns are the queries: keys or channels are its 16 rows.
struct MmaTransposedFragment {
  static constexpr int warp_lanes = 32, tile_rows = 8, tile_columns = 16;
  static constexpr int rows = 2, row_elements = 2, run = 1, elements = 4;
  static constexpr int first_mask = 4, last_mask = 16;

  QATTN_CONSTEXPR static int row(int lane, int r) { return lane % 4 * 2 + r; }
  QATTN_CONSTEXPR static int lane_column(int lane) { return lane / 4; }
  QATTN_CONSTEXPR static int element_column(int e) { return e * 8; }
  QATTN_CONSTEXPR static int element(int r, int e) { return e * 2 + r; }
};

/// tcgen05.ld of shape 32x32b: a lane has a row to itself.
struct TensorMemoryFragment {
  static constexpr int warp_lanes = 32, tile_rows = 32, tile_columns = 8;
  static constexpr int rows = 1, row_elements = 8, run = 8, elements = 8;
  static constexpr int first_mask = 1, last_mask = 0;

  QATTN_CONSTEXPR static int row(int lane, int) { return lane; }
  QATTN_CONSTEXPR static int lane_column(int) { return 0; }
  QATTN_CONSTEXPR static int element_column(int e) { return e; }
  QATTN_CONSTEXPR static int element(int, int e) { return e; }
};

/// MFMA of gfx9 with 32 x 32 results in warps of 64, whose columns are the queries.
struct Mfma32TransposedFragment {
  static constexpr int warp_lanes = 64, tile_rows = 32, tile_columns = 32;
  static constexpr int rows = 1, row_elements = 16, run = 4, elements = 16;
  static constexpr int first_mask = 32, last_mask = 32;

  QATTN_CONSTEXPR static int row(int lane, int) { return lane % 32; }
  QATTN_CONSTEXPR static int lane_column(int lane) { return lane / 32 * 4; }
  QATTN_CONSTEXPR static int element_column(int e) { return e / 4 * 8 + e % 4; }
  QATTN_CONSTEXPR static int element(int, int e) { return e; }
};

/// MFMA of gfx9 with 16 x 16 results, likewise.
struct Mfma16TransposedFragment {
  static constexpr int warp_lanes = 64, tile_rows = 16, tile_columns = 16;
  static constexpr int rows = 1, row_elements = 4, run = 4, elements = 4;
  static constexpr int first_mask = 16, last_mask = 32;

  QATTN_CONSTEXPR static int row(int lane, int) { return lane % 16; }
  QATTN_CONSTEXPR static int lane_column(int lane) { return lane / 16 * 4; }
  QATTN_CONSTEXPR static int element_column(int e) { return e; }
  QATTN_CONSTEXPR static int element(int, int e) { return e; }
};

/// mma.sync's, of products whose columns were dealt out so that a lane has eight neighbours of each
/// half of 64, as 4-bit A operands want them.
struct MmaFragmentOfEights : MmaFragment {
  QATTN_CONSTEXPR static int lane_column(int lane) { return lane % 4 * 8; }
  QATTN_CONSTEXPR static int column_of_tile(int n) { return n / 4 * 32 + n % 4 * 2; }
};

/// Where the columns of tile n begin.
template <class F>
QATTN_CONSTEXPR int column_of_tile(int n) {
  if constexpr (requires { F::column_of_tile(n); }) {
    return F::column_of_tile(n);
  } else {
    return n * F::tile_columns;
  }
}

/// Which of a lane's rows its element `i` belongs to, and which of that row's it is.
template <class F>
QATTN_CONSTEXPR int row_of_element(int i) {
  return F::element(1, 0) == 1 ? i % F::rows : i / F::row_elements;
}
template <class F>
QATTN_CONSTEXPR int place_in_row(int i) {
  return F::element(1, 0) == 1 ? i / F::rows : i % F::row_elements;
}

inline namespace QATTN_TARGET {

/// Joins what the lanes that share a row have of it, for N rows. (warp)
template <class F, int N, class T, class Join>
QATTN_DEVICE void join_rows(T (&x)[N], Join join) {
#pragma unroll
  for (int mask = F::first_mask; mask <= F::last_mask; mask *= 2) {
    T other[N];
#pragma unroll
    for (int r = 0; r < N; ++r) other[r] = shuffle_xor(x[r], mask);
#pragma unroll
    for (int r = 0; r < N; ++r) x[r] = join(x[r], other[r]);
  }
}
/// Of one row.
template <class F, class T, class Join>
QATTN_DEVICE T join_row(T x, Join join) {
  T one[1] = {x};
  join_rows<F>(one, join);
  return one[0];
}
template <class F, class T>
QATTN_DEVICE T row_sum(T x) {
  return join_row<F>(x, [](T a, T b) { return a + b; });
}
template <class F, int N, class T>
QATTN_DEVICE void add_rows(T (&x)[N]) {
  join_rows<F>(x, [](T a, T b) { return a + b; });
}
template <class F, int N>
QATTN_DEVICE void row_maxima(float (&x)[N]) {
  join_rows<F>(x, [](float a, float b) { return fmaxf(a, b); });
}

/// The bits in which the lanes that share a row differ.
template <class F>
inline constexpr int row_mask = F::last_mask < F::first_mask ? 0 : 2 * F::last_mask - F::first_mask;

/// Of the lanes that share a row, is it the one with the row's first elements?
template <class F>
QATTN_DEVICE bool leads_row(int lane) {
  return (lane & row_mask<F>) == 0;
}

/// Is it so in any lane that shares this one's rows? (warp) `Bool` is bool: a template's, for not
/// every machine has both ballots.
template <class F, class Bool>
QATTN_DEVICE bool any_in_row(int lane, Bool x) {
  constexpr auto sharers = [] {  // of row 0: bits of lanes
    std::uint64_t bits = 0;
    for (int n = 0; n < F::warp_lanes; ++n) bits |= std::uint64_t{(n & ~row_mask<F>) == 0} << n;
    return bits;
  }();
  const int first = lane & ~row_mask<F>;
  if constexpr (F::warp_lanes == 64) {
    return (ballot64(x) >> first & sharers) != 0;
  } else {
    return (ballot(x) >> first & static_cast<std::uint32_t>(sharers)) != 0;
  }
}

}  // namespace QATTN_TARGET
}  // namespace qattn::isa
