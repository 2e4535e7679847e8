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
  /// The tiles that every row sees whole: the first, and how far behind it the last is.
  int plain_first;
  unsigned plain_span;

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
    const int from = p.window_left < 0 ? 0 : first + S::rows - 1 - p.window_left;
    const int last = params.general ? -1 : (end < length ? end : length) - S::keys;
    // Opaque, or ptxas may work them out again for every tile, between the exponentials and the
    // products: that took 4 % (H200, e4m3 P, S 4096).
    plain_first = isa::opaque(last < from ? no_tile : from);
    plain_span = static_cast<unsigned>(isa::opaque(last < from ? 0 : last - from));
    const float scale = p.scale * tile::log2_e;
#pragma unroll
    for (int r = 0; r < R; ++r) this->row_scale[r] = this->query_scale(r) * scale;
  }

  /// Does every row see every key of the tile? None does of a negative one.
  QATTN_DEVICE bool sees_whole(int tile) const {
    return static_cast<unsigned>(tile - plain_first) <= plain_span;
  }

 private:
  static constexpr int no_tile = 0x40000000;  ///< behind all that there can be, 2^30 at most
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
