// What every softmax of the Hopper prefill kernel knows of its rows.
#pragma once

#include "kernels/attn_prefill/rows_out.cuh"
#include "kernels/attn_prefill/sm90a_params.hpp"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

template <Sm90Config C>
struct Sm90Rows : PrefillOutput<Sm90Shape<C>> {
  using S = Sm90Shape<C>;
  using Base = PrefillOutput<S>;
  using Base::p, Base::R, Base::work;

  const Sm90Params& params;
  int plain_first, plain_last;  ///< bounds of the tiles that every row sees whole

  /// `buffer`: Q's.
  QATTN_DEVICE Sm90Rows(const Sm90Params& a, const PrefillWork& w, int row_warp, int buffer)
      : Base(a, w, row_warp), params(a) {
    this->scales_at = isa::shared_base() + S::facts_at + buffer * S::fact_bytes +
                      4 * S::warp_rows * (row_warp % 4);
    this->dots_at = this->scales_at + S::dots_at;
  }

  QATTN_DEVICE void start_rows() {
    const int first = work.first_row + work.shift, length = static_cast<int>(work.k.length);
    const int end = p.window_right < 0 ? length : first + p.window_right + 1;
    plain_first = p.window_left < 0 ? 0 : first + S::rows - 1 - p.window_left;
    plain_last = params.general ? -1 : (end < length ? end : length) - S::keys;
    const float scale = p.scale * tile::log2_e;
#pragma unroll
    for (int r = 0; r < R; ++r) this->row_scale[r] = this->query_scale(r) * scale;
  }

  /// Does every row see every key of the tile?
  QATTN_DEVICE bool sees_whole(int tile) const { return tile >= plain_first && tile <= plain_last; }
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
