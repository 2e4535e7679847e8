// What every softmax of the Hopper prefill kernel asks of its rows: which tiles they see whole, and
// what they see of others.
#pragma once

#include "kernels/attention/rows/epilogue.cuh"
#include "kernels/attention/sm90a/load.cuh"
#include "kernels/attention/sm90a/params.hpp"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

/// In the flags of a tile: the block mask forbids its first half, and in the next bit its second.
inline constexpr int hidden_at = 28;
QATTN_DEVICE std::uint32_t hidden_halves(std::uint32_t flags) { return flags >> hidden_at & 3; }

/// `Kernel`: Sm90Consumer.
template <class Kernel>
struct Sm90Edges {
  using S = typename Kernel::S;
  using F = typename S::Fragment;
  using Scores = typename Kernel::Scores;
  static constexpr int R = Kernel::R;

  Kernel& k;

  QATTN_DEVICE void start_rows() {
    const float scale = k.p.scale * tile::log2_e;
    const bool staged = k.rules.has_staged(k.p);  // one branch for all rows
    if (staged) {
#pragma unroll
      for (int r = 0; r < R; ++r) {
        k.rules.row_scale[r] =
            k.rules.template query_scale<S::staged_rows>(k.map, r, k.state) * scale;
      }
    } else {
#pragma unroll
      for (int r = 0; r < R; ++r)
        k.rules.row_scale[r] = k.rules.query_scale(k.map, r, k.state) * scale;
    }
  }

  /// The largest of a row's scores in 64 keys: elements 4 n and 4 n + 1 of `first`.
  template <class Product>
  QATTN_DEVICE static Product largest_of(const Product* first) {
    Product largest = first[0] > first[1] ? first[0] : first[1];
    if constexpr (S::tuning.tree_maxima) {
      const auto at = [&](int n) { return first[4 * (n / 2) + n % 2]; };
      Product part[5];
#pragma unroll
      for (int n = 0; n < 5; ++n) part[n] = isa::max3(at(3 * n), at(3 * n + 1), at(3 * n + 2));
      const Product low = isa::max3(part[0], part[1], part[2]);
      const Product high = isa::max3(part[3], part[4], at(15));
      largest = low > high ? low : high;
    } else {
#pragma unroll
      for (int n = 1; n < slot_tile / 8; ++n) {
        largest = isa::max3(largest, first[4 * n], first[4 * n + 1]);
      }
    }
    return largest;
  }

  /// Row and first score tile of group `g` of exponentials: four of one row, from two tiles.
  QATTN_DEVICE static int row_of(int g) { return (S::tuning.paired_groups ? g / 2 : g) % 2; }
  QATTN_DEVICE static int tile_of(int g) {
    return S::tuning.paired_groups ? g / 4 * 4 + g % 2 * 2 : g / 2 * 2;
  }

  /// 0, of two exponentials: ptxas cannot move what takes it as an operand in front of the maxima.
  QATTN_DEVICE static std::uint32_t no_sign(float a, float b) {
    return (formats::bits_of(a) | formats::bits_of(b)) >> 31;
  }

  /// Does every row see every key of the tile? None does of a negative one.
  QATTN_DEVICE bool sees_whole(int tile) const {
    return static_cast<unsigned>(tile - k.unmasked_first) <= k.unmasked_span;
  }

  /// Are there keys in half `h` of a tile, and none that the block mask forbids?
  QATTN_DEVICE bool has_half(int h, std::uint32_t flags, int tile) const {
    return tile + h * slot_tile < k.work.k.length && (hidden_halves(flags) >> h & 1) == 0;
  }

  /// The bounds of row r in a tile.
  QATTN_DEVICE tile::ScoreRow edge_row(int r, std::uint32_t flags, int tile) const {
    tile::ScoreRow row = k.map.score_row(r);
    const int middle = tile + S::keys / 2;
    if ((hidden_halves(flags) & 1) != 0 && row.begin < middle) row.begin = middle;
    if ((hidden_halves(flags) & 2) != 0 && row.end > middle) row.end = middle;
    return row;
  }

  /// What this thread's rows see of an edge tile, in keys behind the thread's first: its keys have
  /// fixed places in the tile, so that bounds meet constants.
  struct EdgeBounds {
    int begin[R], end[R];
    bool late;   ///< a row of the warp begins inside the tile
    bool upper;  ///< and one sees keys of the second half
  };
  QATTN_DEVICE EdgeBounds edge_bounds(std::uint32_t flags, int tile) const {
    const int mine = tile + k.map.lane % 4 * 2;
    EdgeBounds b;
    bool late = false, upper = false;
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const tile::ScoreRow row = edge_row(r, flags, tile);
      b.begin[r] = row.begin - mine, b.end[r] = row.end - mine;
      late |= b.begin[r] > 0, upper |= b.end[r] > slot_tile;
    }
    b.late = isa::any(late), b.upper = isa::any(upper);
    return b;
  }
  /// Products, -infinity where a row does not see the key.
  template <class Product>
  QATTN_DEVICE void edge_products(const Product* s, const EdgeBounds& b, Scores& y) const {
#pragma unroll
    for (int n = 0; n < S::n_tiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float x = isa::to_float(s[4 * n + i]);
        // An infinity of a 16-bit product must not look like a masked score.
        if (S::qk_16bit && x == -tile::infinity()) x = tile::quiet_nan();
        y[0][n][i] = 8 * n + i % 2 < b.end[i / 2] ? x : -tile::infinity();
      }
    }
    if (!b.late) return;
#pragma unroll
    for (int n = 0; n < S::n_tiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (8 * n + i % 2 < b.begin[i / 2]) y[0][n][i] = -tile::infinity();
      }
    }
  }
  /// From those to scores in units of log2. Not 0, which -infinity does not survive; nor does it
  /// NaN, so that such keys make a tile a special one.
  QATTN_DEVICE float edge_scale(int r, float key_scale) const {
    return fmaxf(k.rules.row_scale[r] * key_scale, formats::kMinNormal);
  }

  /// Rows of an edge tile whose scores all lie below the floats, though they see a key: no number
  /// is their result. `largest`: of the products that this thread has of a row; `top`: of its
  /// scores.
  QATTN_DEVICE void spoil_overflow(const float (&largest)[R], const float (&top)[R]) {
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const bool hidden = largest[r] == -tile::infinity();
      if (top[r] == -tile::infinity() && !hidden) k.state.sum[r] = tile::quiet_nan();
    }
  }

  /// Hides what the block mask forbids of scores that are ready.
  QATTN_DEVICE static void hide_half(Scores& s, std::uint32_t flags) {
    if (hidden_halves(flags) == 0) return;
    tile::each_score<F>(s, [&](int, int key, float& x) {
      if ((hidden_halves(flags) >> key / slot_tile & 1) != 0) x = -tile::infinity();
    });
  }
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
