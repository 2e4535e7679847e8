// Portable prefill attention: mma.sync and cp.async, for every NVIDIA GPU from sm_80 on.
//
// A block of four warps owns 128 query rows of one head (64 where D = 256), 32 (16) a warp, and
// walks the keys in tiles of 64 from last to first. K and V have one buffer each: V of a tile
// arrives under the product of Q and K, K of the next under softmax and the product with V; the
// second block on the multiprocessor fills what is left. 32 rows a warp halve the reads of K and V
// from shared memory, which otherwise bind 8-bit products (an ldmatrix.x4 takes 4 clocks, two mma
// of 8 bits take 3.2).
//
// u8 P (int8_full) is scaled to the maximum of its own tile and row; products with V are exact in
// int32 and join O in float32 tile by tile. The row sum of the rounded P comes from eight extra
// rows of V that weigh each code by 1 / scale of its token (kernels/quantize/prepared.hpp).
//
// e4m3 P (int8_fp8, fp8) is relative to the running maximum, and 2^8 times that; products and row
// sums take the same way. GPUs whose mma.sync of FP8 is not one instruction get empty kernels, and
// supports() refuses them.
#pragma once

#include "kernels/attn_prefill/sm80_values.cuh"
#include "tile/finish.hpp"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

template <PrefillConfig C>
struct Prefill : PrefillValues<C> {
  using Params = PrefillParams;
  using S = PrefillShape<C>;
  using Base = PrefillValues<C>;
  using Base::M, Base::R, Base::base, Base::channels, Base::lane, Base::max, Base::out, Base::p,
      Base::row_scale, Base::sum, Base::warp, Base::work;
  using typename Base::Scores;
  /// 255 registers hold 32 rows of D = 128; with D = 64 three blocks of 168 hide more latency.
  static constexpr int min_blocks = C.d == 64 ? 3 : 2;

  using Base::Base;

  // ---- The tiles ------------------------------------------------------------------------------

  /// The next tile at or below `tile` that the block mask does not forbid; negative: none is left.
  QATTN_DEVICE int visible_tile(int tile) const {
    if constexpr (C.general) {
      while (p.block_mask.data != nullptr && tile >= work.key_begin) {
        const std::int64_t at = work.b * p.block_mask.stride[0] +
                                work.head * p.block_mask.stride[1] +
                                work.first_row / p.block_mask_q * p.block_mask.stride[2] +
                                tile / p.block_mask_k * p.block_mask.stride[3];
        if (isa::load_global(static_cast<const std::uint8_t*>(p.block_mask.data) + at) != 0) break;
        tile -= S::keys;
      }
    }
    return tile < work.key_begin ? -1 : tile;
  }

  /// Does every row of the block see every key of the tile?
  QATTN_DEVICE bool whole(int tile) const {
    const int first = work.first_row + work.shift, last = first + S::rows - 1;
    return tile + S::keys <= work.k.length &&
           (p.window_right < 0 || tile + S::keys <= first + p.window_right + 1) &&
           (p.window_left < 0 || tile >= last - p.window_left);
  }

  /// Softmax and product with V. `Special`: some rows do not see all keys, or some values are not
  /// numbers. Two copies of this code, so that the common one has no branches: they keep ptxas from
  /// mixing what can be mixed.
  template <bool Special>
  QATTN_DEVICE void attend(Scores& s, int tile, float k_scale) {
    const bool bad_keys = Special && tile::is_nan(k_scale);
    if constexpr (Special) {
      const bool edge = !whole(tile);
      const bool bad_values =
          S::wide_pv && (edge || p.mask.data != nullptr) && this->clean_values();
      if constexpr (C.general) {
        this->finish_scores(s, tile, bad_values);
      } else {
        this->mask_edge(s, tile, bad_values);
        if (bad_keys) {
          tile::each_score(
              s, [&](int, int, float& x) { x = x == -tile::infinity() ? x : tile::quiet_nan(); });
        }
      }
    }
    float scale[R];  // from what `s` holds to units of log2
#pragma unroll
    for (int r = 0; r < R; ++r) {
      scale[r] = C.general    ? 1.0f
                 : S::wide_qk ? p.scale * tile::log2_e
                              : row_scale[r] * (bad_keys ? 1.0f : k_scale);
    }
    if constexpr (S::wide_pv) {
      this->attend_wide(s, scale);
    } else if constexpr (S::u8) {
      this->template attend_u8<Special>(s, scale, bad_keys);
    } else {
      this->template attend_e4m3<Special>(s, scale);
    }
  }

  QATTN_DEVICE void run_tile(int tile, int next) {
    this->start_values(tile);
    this->start_key_scales(tile);
    isa::copy_async_commit();
    const float k_scale = this->key_scale(tile);
    Scores s;
    this->multiply_queries(s);
    isa::copy_async_wait<0>();
    isa::sync_threads();  // V is there, and nobody reads K any more
    if (next >= 0) this->start_keys(next);
    isa::copy_async_commit();
    if constexpr (C.general) {
      if (!S::wide_pv && p.v8.channel_scale != nullptr) channels = this->channel_scales(tile);
      attend<true>(s, tile, k_scale);
    } else if (!whole(tile) || tile::is_nan(k_scale) || this->value_flags() != 0) {
      attend<true>(s, tile, k_scale);
    } else {
      attend<false>(s, tile, k_scale);
    }
  }

  QATTN_DEVICE void run_tiles() {
    const int none = work.key_end <= work.key_begin;
    int tile = none ? -1 : visible_tile((work.key_end - 1) / S::keys * S::keys);
    if (tile < 0) return;
    this->set_sources();
    this->start_queries();
    this->start_keys(tile);
    isa::copy_async_commit();
    this->clear_missing_channels();
#pragma unroll
    for (int r = 0; r < R; ++r) {
      row_scale[r] = this->query_scale(r) * p.scale * (C.general ? 1.0f : tile::log2_e);
    }
    while (tile >= 0) {
      const int next = visible_tile(tile - S::keys);
      isa::copy_async_wait<0>();
      isa::sync_threads();  // K is there, and nobody reads V any more
      run_tile(tile, next);
      tile = next;
    }
    isa::copy_async_wait<0>();
  }

  // ---- Output ---------------------------------------------------------------------------------

  // Short code matters here: with few tiles a block, fetching a long epilogue costs more than
  // running it (10 tiles' worth at S = 1024 on an H200, before this was a loop).
  QATTN_DEVICE void write() {
    isa::sync_threads();  // the rows leave through the same shared memory
    float mean_weight[R];
#pragma unroll
    for (int r = 0; r < R; ++r) mean_weight[r] = normalise(r);
    if (p.v_mean != nullptr) add_mean(mean_weight);
    if (p.out.format == Format::f32) {
      store_floats();
    } else {
      stage();
      isa::sync_warp();
      if (p.out.vectors) {
        store_rows<isa::Words4>();
      } else {
        store_rows<std::uint16_t>();
      }
    }
  }

  /// Ends row r: turns its accumulators into the output and writes its LSE. Returns the weight of
  /// V's mean.
  QATTN_DEVICE float normalise(int r) {
    float total = sum[r];
    total += isa::shuffle_xor(total, 1);
    total += isa::shuffle_xor(total, 2);
    const int i = work.first_row + this->local_row(r);
    // Any of the four lanes that share the row may have found it bad.
    const unsigned bad_lanes = isa::ballot((this->bad_rows >> r & 1) != 0);
    const bool bad = (bad_lanes >> (lane & ~3) & 15u) != 0;
    const float offset =
        p.q8.dot_mean != nullptr && p.softcap <= 0 ? this->mean_dot(r) * tile::log2_e : 0.0f;
    tile::RowEnd end = tile::finish_row(p, work.b, work.head, i < work.q.length, bad,
                                        max[r] - S::p_log2, total, offset);
    // An index tensor that holds nonsense makes the whole row NaN; so does, in all channels, a bad
    // token of 16-bit V in one.
    const float poison = work.k.bad || work.q.bad ? tile::quiet_nan() : row_poison(r);
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
  QATTN_DEVICE void stage() {
    const bool half = p.out.format == Format::f16;
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const SharedAddress row = base + this->local_row(r) * S::out_row + lane % 4 * 4;
#pragma unroll
      for (int n = 0; n < S::d_tiles; ++n) {
        const float lo = out[r / 2][n][r % 2 * 2], hi = out[r / 2][n][r % 2 * 2 + 1];
        isa::store_shared(row + 16 * n, half ? isa::pack_f16(lo, hi) : isa::pack_bf16(lo, hi));
      }
    }
  }

  /// From shared memory to the output, in pieces of one type.
  template <class Piece>
  QATTN_DEVICE void store_rows() {
    constexpr int width = sizeof(Piece) / 2, pieces = C.d / width;
#pragma unroll 4
    for (int n = lane; n < S::warp_rows * pieces; n += 32) {
      const int row = warp * S::warp_rows + n / pieces, c = n % pieces * width;
      if (work.first_row + row >= work.q.rows || c >= p.out.channels) continue;
      const auto v = isa::load_shared<Piece>(base + row * S::out_row + 2 * c);
      auto* to = static_cast<std::uint16_t*>(p.out.data) + out_offset(row) + c;
      isa::store_global(reinterpret_cast<Piece*>(to), v);
    }
  }

  QATTN_DEVICE void store_floats() {
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const int row = this->local_row(r), c = lane % 4 * 2;
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

  // ---- Entry ----------------------------------------------------------------------------------

  /// The block's rows and the keys that they can see.
  QATTN_DEVICE static PrefillWork locate(const Params& p) {
    PrefillWork w;
    int index = isa::block().x, block;
    const int heads = p.q.heads;
    if (p.heads_first) {  // causal: the longest blocks of all heads start first
      w.head = index % heads, index /= heads;
      w.b = index % p.q.batches, block = p.q_blocks - 1 - index / p.q.batches;
    } else {  // neighbours share K and V in L2
      block = index % p.q_blocks, index /= p.q_blocks;
      w.head = index % heads, w.b = index / heads;
    }
    w.kv_head = w.head / p.group;
    w.first_row = block * S::rows;
    w.q = tile::span_of(p.q, w.b);
    w.k = tile::span_of(p.k, w.b);
    w.k.bad |= w.q.length > p.mask_queries || w.k.length > p.mask_keys;
    if ((w.q.bad || w.k.bad) && isa::thread() == 0)
      isa::atomic_or_global(p.error, tile::error_sequence);
    w.q_slot = tile::first_slot(p.q, w.q, w.b);
    w.k_slot = tile::first_slot(p.k, w.k, w.b);
    w.shift = static_cast<int>(w.k.length - w.q.length);
    const int length = static_cast<int>(w.k.length);
    const int past = static_cast<int>(w.q.length) < w.first_row + S::rows
                         ? static_cast<int>(w.q.length)
                         : w.first_row + S::rows;
    const int end = p.window_right < 0 ? length : past + w.shift + p.window_right;
    const int begin = p.window_left < 0 ? 0 : w.first_row + w.shift - p.window_left;
    const bool none = past <= w.first_row || w.q.bad || w.k.bad;
    w.key_end = none ? 0 : end < length ? end : length;
    w.key_begin = begin < 0 ? 0 : begin / S::keys * S::keys;
    return w;
  }

  static QATTN_DEVICE void run(const Params& p) {
    if constexpr (isa::has_mma(C.qk, isa::target_architecture) &&
                  isa::has_mma(C.pv, isa::target_architecture)) {
      const PrefillWork work = locate(p);
      if (work.first_row >= work.q.rows) return;
      Prefill self(p, work);
      self.run_tiles();
      if constexpr (S::wide_qk && !C.general) {
        if (work.key_begin < work.key_end) self.check_operands();
      }
      if constexpr (S::e4m3_pv && !C.general) self.scale_channels();
      self.write();
    }
  }
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
