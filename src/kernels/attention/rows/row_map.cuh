// Which query rows a thread has, where they are in its accumulators, and which keys they see.
#pragma once

#include "isa/fragment.hpp"
#include "kernels/attention/common/score.hpp"
#include "kernels/attention/common/work_tile.cuh"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

/// The rows of a thread of a warp that owns M tiles of rows. Accumulators lie as the kernel's
/// fragment says (isa/fragment.hpp): x[m][n][i] is element i of a lane in row tile m and column
/// tile n. `S` gives Fragment, rows, keys, m_tiles, warp_rows.
template <class S>
struct RowMap {
  using F = typename S::Fragment;
  static constexpr int M = S::m_tiles, R = F::rows * M;

  const AttentionParams& p;
  const WorkTile& work;
  int warp;   ///< among those that own rows
  int exist;  ///< rows of the block that do
  int lane = isa::lane();

  QATTN_DEVICE RowMap(const AttentionParams& params, const WorkTile& w, int row_warp)
      : p(params), work(w), warp(row_warp), exist(existing_rows(params, w)) {}

  /// Row r of this thread inside the block.
  QATTN_DEVICE int local_row(int r) const {
    return warp * S::warp_rows + r / F::rows * F::tile_rows + F::row(lane, r % F::rows);
  }

  /// Element e of row r in column tile n of accumulators.
  template <class T, int N>
  QATTN_DEVICE static auto& element(T (&x)[M][N][F::elements], int r, int n, int e) {
    return x[r / F::rows][n][F::element(r % F::rows, e)];
  }
  /// How far that element's column is behind first_column().
  QATTN_CONSTEXPR static int column(int n, int e) {
    return n * F::tile_columns + F::element_column(e);
  }
  QATTN_DEVICE int first_column() const { return F::lane_column(lane); }

  /// Does row r of this thread exist?
  QATTN_DEVICE bool exists(int r) const { return local_row(r) < exist; }

  /// Which query a row of the block is.
  QATTN_DEVICE int query_of(int row) const {
    row += work.first_row;
    return p.pack_gqa > 1 ? row * p.pack_gqa_inverse >> 16 : row;
  }
  /// Which query row r is, and of which head.
  QATTN_DEVICE int query(int r) const { return query_of(local_row(r)); }
  QATTN_DEVICE int head(int r) const {
    return p.pack_gqa > 1 ? work.head + local_row(r) - query(r) * p.pack_gqa : work.head;
  }
  /// Does row r see a key that lies below the floats, if its scores are all -infinity?
  QATTN_DEVICE bool sees_below(int r) const {
    return exists(r) && tile::sees_key(p, work.b, head(r), query(r), work.shift,
                                       static_cast<int>(work.k.length));
  }

  QATTN_DEVICE tile::ScoreRow score_row(int r) const {
    tile::ScoreRow row;
    row.i = query(r);
    row.head = head(r);
    row.diagonal = row.i + work.shift;
    row.end = visible_end(p.window_right, row.diagonal, static_cast<int>(work.k.length));
    row.begin = visible_begin(p.window_left, row.diagonal);
    return row;
  }

  /// Does every row of the block see every key of the tile?
  QATTN_DEVICE bool whole(int tile) const {
    const int first = work.first_row + work.shift, last = first + S::rows - 1;
    return all_visible(p, first, last, tile, tile + S::keys, work.k.length);
  }
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
