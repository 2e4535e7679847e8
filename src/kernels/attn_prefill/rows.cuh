// What prefill kernels know of their query rows, whatever multiplies the matrices: which rows and
// keys a block works on, what happens to scores before the softmax, and how rows end.
//
// A warp owns 16 M rows. Its accumulators lie as mma and wgmma leave them: x[m][n][i] of a lane is
// row 16m + g + 8(i / 2), column 8n + 2t + i % 2, with g = lane / 4 and t = lane % 4.
#pragma once

#include "kernels/attn_prefill/params.hpp"
#include "tile/copy.hpp"
#include "tile/finish.hpp"
#include "tile/score.hpp"

namespace qattn::kernels {

using isa::Element;
using isa::SharedAddress;

inline constexpr float log2_255 = 7.99435343685885793f;

inline namespace QATTN_TARGET {

/// The part of the problem that a block works on.
struct PrefillWork {
  int b, head, kv_head, first_row;
  tile::Span q, k;
  int key_begin, key_end;  ///< that any of the rows can see
  int shift;               ///< Sk - Sq
  std::int64_t q_slot, k_slot;
};

/// Work number `index` of p.q_blocks * heads * batches, in blocks of `rows`; tiles of `keys`.
QATTN_DEVICE PrefillWork locate_work(const PrefillParams& p, int index, int rows, int keys) {
  PrefillWork w;
  int block;
  const int heads = p.q.heads;
  if (p.heads_first) {  // causal: the longest blocks of all heads start first
    w.head = index % heads, index /= heads;
    w.b = index % p.q.batches, block = p.q_blocks - 1 - index / p.q.batches;
  } else {  // neighbours share K and V in L2
    block = index % p.q_blocks, index /= p.q_blocks;
    w.head = index % heads, w.b = index / heads;
  }
  w.kv_head = w.head / p.group;
  w.first_row = block * rows;
  w.q = tile::span_of(p.q, w.b);
  w.k = tile::span_of(p.k, w.b);
  w.k.bad |= w.q.length > p.mask_queries || w.k.length > p.mask_keys;
  w.q_slot = tile::first_slot(p.q, w.q, w.b);
  w.k_slot = tile::first_slot(p.k, w.k, w.b);
  w.shift = static_cast<int>(w.k.length - w.q.length);
  const int length = static_cast<int>(w.k.length);
  const int past = static_cast<int>(w.q.length) < w.first_row + rows ? static_cast<int>(w.q.length)
                                                                     : w.first_row + rows;
  const int end = p.window_right < 0 ? length : past + w.shift + p.window_right;
  const int begin = p.window_left < 0 ? 0 : w.first_row + w.shift - p.window_left;
  const bool none = past <= w.first_row || w.q.bad || w.k.bad;
  w.key_end = none ? 0 : end < length ? end : length;
  w.key_begin = begin < 0 ? 0 : begin / keys * keys;
  return w;
}

/// `S` gives rows, keys, d, m_tiles, warp_rows, n_tiles, d_tiles, out_row, p_log2, wide_qk, wide_pv
/// and u8.
template <class S>
struct PrefillRows {
  static constexpr int M = S::m_tiles, R = 2 * M;
  using Scores = float[M][S::n_tiles][4];

  const PrefillParams& p;
  const PrefillWork& work;
  int lane = isa::lane();
  int warp;  ///< among those that own rows
  float out[M][S::d_tiles][4] = {};
  float max[R], sum[R] = {};
  float row_scale[R];     ///< from a row's products to scores in units of log2: Q's scale and
                          ///< softmax_scale * log2 e
  unsigned bad_rows = 0;  ///< bit r: row r of this thread is NaN
  bool doubtful = false;  ///< 16-bit V: a row has met NaN or Inf in V, and may not have seen it

  QATTN_DEVICE PrefillRows(const PrefillParams& params, const PrefillWork& w, int row_warp)
      : p(params), work(w), warp(row_warp) {
#pragma unroll
    for (int r = 0; r < R; ++r) max[r] = -tile::infinity();
  }

  // ---- Where things are -----------------------------------------------------------------------

  /// Row r of this thread inside the block.
  QATTN_DEVICE int local_row(int r) const {
    return warp * S::warp_rows + r / 2 * 16 + lane / 4 + r % 2 * 8;
  }

  QATTN_DEVICE static std::int64_t unit(const PreparedRows& x, int head, std::int64_t slot) {
    return head * x.slots + slot;
  }

  QATTN_DEVICE tile::ScoreRow score_row(int r) const {
    tile::ScoreRow row;
    row.i = work.first_row + local_row(r);
    row.diagonal = row.i + work.shift;
    const int length = static_cast<int>(work.k.length);
    const int end = p.window_right < 0 ? length : row.diagonal + p.window_right + 1;
    row.end = end < length ? end : length;
    row.begin = p.window_left < 0 ? 0 : row.diagonal - p.window_left;
    return row;
  }

  /// Does every row of the block see every key of the tile?
  QATTN_DEVICE bool whole(int tile) const {
    const int first = work.first_row + work.shift, last = first + S::rows - 1;
    return tile + S::keys <= work.k.length &&
           (p.window_right < 0 || tile + S::keys <= first + p.window_right + 1) &&
           (p.window_left < 0 || tile >= last - p.window_left);
  }

  // ---- Scores ---------------------------------------------------------------------------------

  /// softmax_scale q . mu, what smooth_k took from every score of the row.
  QATTN_DEVICE float mean_dot(int r) const {
    const int i = work.first_row + local_row(r);
    if (i >= work.q.length) return 0.0f;
    return p.scale * isa::load_global(p.q8.dot_mean + unit(p.q8, work.head, work.q_slot + i));
  }

  /// Q's scale of the row, 1 for one that is bad (bad_rows) or does not exist.
  QATTN_DEVICE float query_scale(int r) {
    if constexpr (S::wide_qk) return 1.0f;
    const int i = work.first_row + local_row(r);
    if (i >= work.q.length) return 1.0f;
    const float s = isa::load_global(p.q8.scale + unit(p.q8, work.head, work.q_slot + i));
    if (tile::is_nan(s)) bad_rows |= 1u << r;
    return tile::is_nan(s) ? 1.0f : s;
  }

  /// The bounds of a tile that not every row sees whole. `bad_value(key)`: V's token there turns
  /// the rows that see it into NaN.
  template <class BadValue>
  QATTN_DEVICE void mask_edge(Scores& s, int tile, BadValue bad_value) {
    tile::ScoreRow rows[R];
#pragma unroll
    for (int r = 0; r < R; ++r) rows[r] = score_row(r);
    tile::each_score(s, [&](int r, int key, float& x) {
      const bool visible = tile + key < rows[r].end;
      // An infinity of a 16-bit product must not look like a masked score.
      if (S::wide_qk && x == -tile::infinity()) x = tile::quiet_nan();
      if (!visible) x = -tile::infinity();
      if (visible && bad_value(key)) x = tile::quiet_nan();
    });
  }

  /// Everything that may happen to a score; leaves units of log2. `key_scale(key)`: K's scale;
  /// `add(scores)`: what else belongs to them, in natural units.
  template <class KeyScale, class Add, class BadValue>
  QATTN_DEVICE void finish_scores(Scores& s, int tile, KeyScale key_scale, Add add,
                                  BadValue bad_value) {
    tile::ScoreRow rows[R];
    float factor[R], offset[R] = {};
#pragma unroll
    for (int r = 0; r < R; ++r) {
      rows[r] = score_row(r);
      if (rows[r].i >= work.q.length) rows[r].end = 0;  // masks have no row for it
      factor[r] = row_scale[r] * tile::ln_2;
      if (p.q8.dot_mean != nullptr) offset[r] = mean_dot(r);
    }
    tile::each_score(s, [&](int r, int key, float& x) {
      x *= factor[r] * key_scale(key);
      if (!tile::is_finite(x)) x = tile::quiet_nan();
    });
    add(s);
    if (p.softcap > 0) {
      const float inverse = 1.0f / p.softcap;
      tile::each_score(
          s, [&](int r, int, float& x) { x = tile::soft_cap(x + offset[r], p.softcap, inverse); });
    }
    if (p.alibi.data != nullptr) {
      const float slope = tile::load_number(
          p.alibi.data, p.alibi.format, work.b * p.alibi.stride[0] + work.head * p.alibi.stride[1]);
      tile::each_score(s, [&](int r, int key, float& x) {
        x += slope * static_cast<float>(tile + key - rows[r].diagonal);
      });
    }
    if (p.mask.data != nullptr) tile::apply_mask(p.mask, work.b, work.head, rows, tile, s);
    tile::each_score(s, [&](int r, int key, float& x) {
      x *= tile::log2_e;
      const int j = tile + key;
      if (j < rows[r].begin || j >= rows[r].end) x = -tile::infinity();
      if (x != -tile::infinity() && bad_value(key)) x = tile::quiet_nan();
    });
  }

  // ---- Softmax --------------------------------------------------------------------------------

  static constexpr float slack = S::u8 ? 32.0f : 0.0f;

  /// Takes the tile's maxima into the references; what was accumulated shrinks accordingly. With u8
  /// P, relative to its own tile, any reference serves that keeps exponentials in range: it moves
  /// only when a maximum is far above it, which is rare.
  QATTN_DEVICE void raise_maxima(const float (&top)[R]) {
    float shrink[R];
    bool changed = false;
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const float next = top[r] > max[r] + slack ? top[r] : max[r];
      shrink[r] = max[r] == -tile::infinity() ? 0.0f : isa::exp2(max[r] - next);
      changed |= next != max[r];
      max[r] = next;
      sum[r] *= shrink[r];
    }
    if (!isa::any(changed)) return;
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
      for (int n = 0; n < S::d_tiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) out[m][n][i] *= shrink[2 * m + i / 2];
      }
    }
  }

  /// The reference that is subtracted in exponents: 0 where nothing was seen, so that masked scores
  /// give 0 and not NaN.
  QATTN_DEVICE static float reference(float top) { return top == -tile::infinity() ? 0.0f : top; }

  /// The maxima of all four lanes that share a row.
  QATTN_DEVICE static void row_maxima(float (&x)[R]) {
#pragma unroll
    for (int mask = 1; mask <= 2; mask *= 2) {
      float other[R];
#pragma unroll
      for (int r = 0; r < R; ++r) other[r] = isa::shuffle_xor(x[r], mask);
#pragma unroll
      for (int r = 0; r < R; ++r) x[r] = fmaxf(x[r], other[r]);
    }
  }

  // ---- Output ---------------------------------------------------------------------------------

  /// Ends all rows and writes them. `rows`: shared memory for S::out_row bytes a row of the block,
  /// of which a warp touches its own rows only.
  // Short code matters here: with few tiles a block, fetching a long epilogue costs more than
  // running it (10 tiles' worth at S = 1024 on an H200, before this was a loop).
  QATTN_DEVICE void write(SharedAddress rows) {
    float mean_weight[R];
#pragma unroll
    for (int r = 0; r < R; ++r) mean_weight[r] = normalise(r);
    if (p.v_mean != nullptr) add_mean(mean_weight);
    if (p.out.format == Format::f32) {
      store_floats();
      return;
    }
    isa::sync_warp();  // rows of earlier work have left
    stage(rows);
    isa::sync_warp();
    if (p.out.vectors) {
      store_rows<isa::Words4>(rows);
    } else {
      store_rows<std::uint16_t>(rows);
    }
  }

  /// Ends row r: turns its accumulators into the output and writes its LSE. Returns the weight of
  /// V's mean.
  QATTN_DEVICE float normalise(int r) {
    float total = sum[r];
    total += isa::shuffle_xor(total, 1);
    total += isa::shuffle_xor(total, 2);
    const int i = work.first_row + local_row(r);
    // Any of the four lanes that share the row may have found it bad.
    const unsigned bad_lanes = isa::ballot((bad_rows >> r & 1) != 0);
    const bool bad = (bad_lanes >> (lane & ~3) & 15u) != 0;
    const float offset =
        p.q8.dot_mean != nullptr && p.softcap <= 0 ? mean_dot(r) * tile::log2_e : 0.0f;
    tile::RowEnd end = tile::finish_row(p, work.b, work.head, i < work.q.length, bad,
                                        max[r] - S::p_log2, total, offset);
    // An index tensor that holds nonsense makes the whole row NaN; so does, in all channels, a bad
    // token of 16-bit V in one.
    const float channels = row_poison(r);
    const bool exists = i < work.q.length;  // Q of a row that does not may hold anything
    const float poison = work.k.bad || work.q.bad ? tile::quiet_nan() : exists ? channels : 0.0f;
    // With NaN or Inf in Q or K the sum is none either, and rightly so.
    if constexpr (S::wide_pv) doubtful |= tile::is_nan(poison) && !bad && tile::is_finite(total);
    const bool empty = end.factor == 0.0f;
    if (lane % 4 == 0 && p.out.lse != nullptr && i < work.q.rows) {
      isa::store_global(p.out.lse + work.b * p.out.lse_batch +
                            (work.q.begin + i) * p.out.lse_token + work.head * p.out.lse_head,
                        end.lse + poison);
    }
#pragma unroll
    for (int n = 0; n < S::d_tiles; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& x = out[r / 2][n][r % 2 * 2 + e];
        x = (empty ? 0.0f : x * end.factor) + poison;
      }
    }
    return end.mean_weight;
  }

  /// NaN if a channel of row r is not finite, else 0.
  QATTN_DEVICE float row_poison(int r) const {
    if constexpr (!S::wide_pv) return 0.0f;
    float poison = 0.0f;
#pragma unroll
    for (int n = 0; n < S::d_tiles; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) poison = fmaf(out[r / 2][n][r % 2 * 2 + e], 0.0f, poison);
    }
    poison += isa::shuffle_xor(poison, 1);
    return poison + isa::shuffle_xor(poison, 2);
  }

  QATTN_DEVICE void add_mean(const float (&weight)[R]) {
    const float* mean =
        p.v_mean + (work.b * p.k.heads + work.kv_head) * std::int64_t{p.v_mean_channels};
#pragma unroll
    for (int n = 0; n < S::d_tiles; ++n) {
      const int c = 8 * n + lane % 4 * 2;
      if (c >= p.v_mean_channels) break;
      const float m[2] = {isa::load_global(mean + c), isa::load_global(mean + c + 1)};
#pragma unroll
      for (int r = 0; r < R; ++r) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if (weight[r] != 0.0f) out[r / 2][n][r % 2 * 2 + e] += weight[r] * m[e];
        }
      }
    }
  }

  /// The warp's rows in the output's 16 bits to shared memory.
  QATTN_DEVICE void stage(SharedAddress rows) {
    const bool half = p.out.format == Format::f16;
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const SharedAddress row = rows + local_row(r) * S::out_row + lane % 4 * 4;
#pragma unroll
      for (int n = 0; n < S::d_tiles; ++n) {
        const float lo = out[r / 2][n][r % 2 * 2], hi = out[r / 2][n][r % 2 * 2 + 1];
        isa::store_shared(row + 16 * n, half ? isa::pack_f16(lo, hi) : isa::pack_bf16(lo, hi));
      }
    }
  }

  /// From shared memory to the output, in pieces of one type.
  template <class Piece>
  QATTN_DEVICE void store_rows(SharedAddress rows) {
    constexpr int width = sizeof(Piece) / 2, pieces = S::d / width;
#pragma unroll 4
    for (int n = lane; n < S::warp_rows * pieces; n += 32) {
      const int row = warp * S::warp_rows + n / pieces, c = n % pieces * width;
      if (work.first_row + row >= work.q.rows || c >= p.out.channels) continue;
      const auto v = isa::load_shared<Piece>(rows + row * S::out_row + 2 * c);
      auto* to = static_cast<std::uint16_t*>(p.out.data) + out_offset(row) + c;
      isa::store_global(reinterpret_cast<Piece*>(to), v);
    }
  }

  QATTN_DEVICE void store_floats() {
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const int row = local_row(r), c = lane % 4 * 2;
      if (work.first_row + row >= work.q.rows) continue;
      float* to = static_cast<float*>(p.out.data) + out_offset(row) + c;
#pragma unroll
      for (int n = 0; n < S::d_tiles; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if (8 * n + c + e < p.out.channels) {
            isa::store_global(to + 8 * n + e, out[r / 2][n][r % 2 * 2 + e]);
          }
        }
      }
    }
  }

  QATTN_DEVICE std::int64_t out_offset(int row) const {
    return work.b * p.out.batch + (work.q.begin + work.first_row + row) * p.out.token +
           work.head * p.out.head;
  }
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
