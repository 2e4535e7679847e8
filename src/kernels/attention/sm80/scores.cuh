// First half of the portable prefill kernel (kernel.cuh): what a block of threads holds, its loads,
// the product of Q and K, and what happens to scores before the softmax.
#pragma once

#include "kernels/attention/common/check.cuh"
#include "kernels/attention/common/epilogue.cuh"
#include "kernels/attention/common/query_mean.hpp"

namespace qattn::kernels {

template <Sm80Config C>
struct Sm80Shape {
  using Fragment = isa::MmaFragment;
  static constexpr bool qk_16bit = isa::is_16bit(C.qk), pv_16bit = isa::is_16bit(C.pv);
  /// The second one costs registers: 1196 bytes of spills at D 256 on sm_100.
  static constexpr bool two_row_ends = false, divides = true, staged_rows = false;
  static constexpr bool u8 = C.pv == Element::u8, e4m3_pv = C.pv == Element::e4m3;
  /// P V joins the output as floats that it is already (AttentionRows::as_float()). Not where
  /// scales per channel stand between: of such small numbers these would cost bits.
  static constexpr bool direct_sums = u8 && !C.general;
  /// log2 of what P is scaled by: e4m3's largest code is 448, and below 2^-6 it loses bits.
  static constexpr float p_log2 = e4m3_pv ? 8.0f : 0.0f;
  static constexpr int d = C.d, dv = d, keys = 64, rows = C.d > 128 ? 64 : 128;
  static constexpr int m_tiles = C.d > 128 ? 1 : 2, warp_rows = 16 * m_tiles;
  static constexpr int warps = rows / warp_rows, threads = 32 * warps;
  static constexpr int thread_rows = 2 * m_tiles;  ///< query rows that a thread holds parts of
  static constexpr int n_tiles = keys / 8, d_tiles = C.d / 8;

  static constexpr int qk_bytes = C.d * (qk_16bit ? 2 : 1), qk_row = tile::padded_row(qk_bytes);
  static constexpr int v_bytes = pv_16bit ? 2 * C.d : keys, v_row = tile::padded_row(v_bytes);
  static constexpr int v_rows = pv_16bit ? keys : C.d + (e4m3_pv ? 8 : 0);
  static constexpr int k_at = rows * qk_row, v_at = k_at + keys * qk_row;
  static constexpr int tail_at = v_at + v_rows * v_row;  ///< log, inverse, flags of a V tile
  static constexpr int tail_bytes = pv_16bit ? 0 : 8 * keys + 16;
  static constexpr int k_scale_at = tail_at + tail_bytes;
  static constexpr int mean_at = k_scale_at + 4 * keys;  ///< smooth_q: 64 floats a block of Q
  static constexpr int used_bytes =
      C.general && !qk_16bit ? mean_at + 4 * keys * thread_rows * warps : k_scale_at;
  static constexpr int out_channels = C.d;  ///< that leave through shared memory together
  static constexpr int out_row = tile::padded_row(2 * out_channels);
  static constexpr int shared_bytes = used_bytes > rows* out_row ? used_bytes
                                                                 : (rows* out_row + 15) / 16 * 16;
};

inline namespace QATTN_TARGET {

template <Sm80Config C>
struct Sm80Scores : Epilogue<Sm80Shape<C>> {
  using S = Sm80Shape<C>;
  using F = typename S::Fragment;
  using Base = Epilogue<S>;
  using Base::M, Base::R, Base::bad_rows, Base::lane, Base::local_row, Base::p, Base::unit,
      Base::warp, Base::work;
  using typename Base::Scores;

  SharedAddress base = isa::shared_base();
  tile::RowSource k_source, v_source;

  QATTN_DEVICE Sm80Scores(const AttentionParams& params, const WorkTile& w)
      : Base(params, w, isa::thread() / 32) {}

  QATTN_DEVICE static tile::RowSource prepared_source(const PreparedRows& x, int head,
                                                      std::int64_t slot, std::int64_t length) {
    tile::RowSource s;
    s.base = reinterpret_cast<const std::byte*>(x.codes) + unit(x, head, slot) * x.row_bytes;
    s.stride = s.row_bytes = x.row_bytes;
    s.length = static_cast<std::int32_t>(length);
    return s;
  }

  /// All warps, those without rows at other places of the code (pass_tiles()).
  QATTN_DEVICE static void meet() { isa::barrier_sync_anywhere(1, S::threads); }

  /// Does none of this warp's rows exist?
  QATTN_DEVICE bool idle() const { return this->query_of(warp * S::warp_rows) >= work.q.length; }

  // ---- Loads ----------------------------------------------------------------------------------

  QATTN_DEVICE void set_sources() {
    k_source = p.k.data == nullptr ? prepared_source(p.k8, work.kv_head, work.k_slot, work.k.length)
                                   : tile::row_source(p.k, work.k, work.b, work.kv_head,
                                                      S::qk_16bit ? 2 : 1, p.k_vectors);
    if constexpr (S::pv_16bit) {
      v_source = tile::row_source(p.v, work.k, work.b, work.kv_head, 2, p.v_vectors);
    }
  }

  QATTN_DEVICE void start_queries() {
    const tile::RowSource source =
        p.q.data == nullptr
            ? prepared_source(p.q8, work.head, work.q_slot, work.q.length)
            : tile::row_source(p.q, work.q, work.b, work.head, S::qk_16bit ? 2 : 1, p.q_vectors);
    if (p.pack_gqa > 1) {
      const std::int64_t head_stride =
          p.q.data == nullptr ? p.q8.slots * p.q8.row_bytes : p.q.head * (S::qk_16bit ? 2 : 1);
      tile::copy_gqa_rows<S::qk_bytes, S::rows, S::threads>(base, source, p.pack_gqa, head_stride);
      return;
    }
    tile::copy_rows<S::qk_bytes, S::rows, S::threads, C.general>(base, source, work.first_row,
                                                                 p.error);
  }

  QATTN_DEVICE void start_keys(int tile) {
    tile::copy_rows<S::qk_bytes, S::keys, S::threads, C.general>(base + S::k_at, k_source, tile,
                                                                 p.error);
  }

  /// K's scales of a tile come with its V: softmax reads them when the next tile's K is on its way.
  QATTN_DEVICE void start_key_scales(int tile) {
    if constexpr (C.general && !S::qk_16bit) {
      const float* scales = p.k8.scale + unit(p.k8, work.kv_head, work.k_slot + tile);
      tile::copy_linear<S::threads>(base + S::k_scale_at,
                                    reinterpret_cast<const std::byte*>(scales), 4 * S::keys);
    }
  }

  QATTN_DEVICE void start_values(int tile) {
    if constexpr (S::pv_16bit) {
      tile::copy_rows<S::v_bytes, S::keys, S::threads, C.general>(base + S::v_at, v_source, tile,
                                                                  p.error);
    } else {
      const TileOffsets at = tile_offsets(p.v8.channels);
      const std::int64_t index = (work.kv_head * p.v8.slots + work.k_slot + tile) / S::keys;
      const auto* record = reinterpret_cast<const std::byte*>(p.v8.tiles) + index * at.bytes;
      if (!C.general || p.v8.channels == C.d) {
        tile::copy_packed64<S::v_rows, S::threads>(base + S::v_at, record);
      } else {  // the weights go behind the padded channels
        tile::copy_packed64<S::threads>(base + S::v_at, record, p.v8.channels);
        if constexpr (S::e4m3_pv) {
          tile::copy_packed64<S::threads>(base + S::v_at + C.d * S::v_row,
                                          record + p.v8.channels * S::keys, 8);
        }
      }
      static_assert(S::tail_bytes <= 16 * S::threads);
      if (isa::thread() < S::tail_bytes / 16) {
        isa::copy_async16(base + S::tail_at + 16 * isa::thread(),
                          record + at.log + 16 * isa::thread(), 16);
      }
    }
  }

  /// V's padded channels, which no copy writes.
  QATTN_DEVICE void clear_missing_channels() {
    if constexpr (!S::pv_16bit && C.general) {
      for (int n = p.v8.channels * 4 + isa::thread(); n < C.d * 4; n += S::threads) {
        isa::store_shared(base + S::v_at + n / 4 * S::v_row + n % 4 * 16, isa::Words4{});
      }
    }
  }

  // ---- Product of Q and K ---------------------------------------------------------------------

  QATTN_DEVICE void multiply_queries(Scores& scores) {
    isa::Accumulator<C.qk> acc[M][S::n_tiles][4];
    const SharedAddress q = base + (warp * S::warp_rows + lane % 16) * S::qk_row + lane / 16 * 16;
    const SharedAddress k =
        base + S::k_at + (lane % 8 + lane / 16 * 8) * S::qk_row + lane / 8 % 2 * 16;
#pragma unroll
    for (int step = 0; step < S::qk_bytes / 32; ++step) {
      std::uint32_t a[M][4], pair[S::n_tiles / 2][4], b[S::n_tiles][2];
      SharedAddress a_row[M], b_row[S::n_tiles / 2];
#pragma unroll
      for (int m = 0; m < M; ++m) a_row[m] = q + m * 16 * S::qk_row + step * 32;
#pragma unroll
      for (int n = 0; n < S::n_tiles / 2; ++n) b_row[n] = k + n * 16 * S::qk_row + step * 32;
      isa::load_matrix<M>(a, a_row);
      isa::load_matrix<S::n_tiles / 2>(pair, b_row);
#pragma unroll
      for (int n = 0; n < S::n_tiles; ++n) {
        b[n][0] = pair[n / 2][n % 2 * 2], b[n][1] = pair[n / 2][n % 2 * 2 + 1];
      }
      if (step == 0) {
        isa::mma_zero<C.qk, C.qk, M, S::n_tiles>(acc, a, b);
      } else {
        isa::mma<C.qk, C.qk, M, S::n_tiles>(acc, a, b);
      }
    }
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
      for (int n = 0; n < S::n_tiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[m][n][i] = isa::to_float(acc[m][n][i]);
      }
    }
  }

  // ---- From scores to units of log2 -----------------------------------------------------------

  /// Is V's token at this key of the tile flagged by clean_values()?
  QATTN_DEVICE bool bad_value(int key) const {
    return isa::load_shared<std::uint32_t>(flag_address(key)) != 0;
  }
  QATTN_DEVICE SharedAddress flag_address(int key) const {
    return base + S::v_at + key * S::v_row + S::v_bytes;  // in the padding of V's row
  }

  /// The bounds of a tile that not every row sees whole. `bad_values`: flagged tokens of V turn the
  /// rows that see them into NaN.
  QATTN_DEVICE void mask_edge(Scores& s, int tile, bool bad_values) {
    Base::mask_edge(s, tile, [&](int key) { return S::pv_16bit && bad_values && bad_value(key); });
  }

  /// Everything that may happen to a score; leaves units of log2.
  QATTN_DEVICE void finish_scores(Scores& s, int tile, bool bad_values) {
    const auto key_scale = [&](int key) {
      return S::qk_16bit ? 1.0f : isa::load_shared<float>(base + S::k_scale_at + 4 * key);
    };
    const auto add = [&](Scores& scores) {
      if (!S::qk_16bit && p.q_mean.data != nullptr) add_query_mean(scores, tile);
    };
    Base::finish_scores(s, tile, key_scale, add,
                        [&](int key) { return S::pv_16bit && bad_values && bad_value(key); });
  }

  /// smooth_q: what Q's means took from the scores. Rows that share r are eight in a row of the
  /// sequence, and blocks are multiples of eight.
  QATTN_DEVICE void add_query_mean(Scores& s, int tile) {
    const SharedAddress mine = base + S::mean_at + warp * R * 4 * S::keys;
    const int first_row = work.first_row + warp * S::warp_rows, size = p.q_mean.block;
    const int length = static_cast<int>(work.q.length), past = first_row + S::warp_rows;
    const int first = first_row / size, last = ((past < length ? past : length) - 1) / size;
    if (first_row >= length) return;
    const std::int64_t table =
        work.head * p.q_mean.blocks + tile::first_block(p.q, work.q, work.b, size);
    isa::sync_warp();  // the tile before is read
#pragma unroll 1
    for (int block = first; block <= last; ++block) {
      tile::store_mean_scores<S::keys>(p, work.k, work.b, work.kv_head, table + block, tile,
                                       mine + (block - first) * 4 * S::keys);
    }
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const int block = (first_row + r / 2 * 16 + r % 2 * 8) / size;
      const SharedAddress scores = mine + ((block < last ? block : last) - first) * 4 * S::keys +
                                   4 * this->first_column();
#pragma unroll
      for (int n = 0; n < S::n_tiles; ++n) {
#pragma unroll
        for (int e = 0; e < F::row_elements; ++e) {
          this->element(s, r, n, e) += isa::load_shared<float>(scores + 4 * this->column(n, e));
        }
      }
    }
  }

  /// One K scale for the whole tile (plain variant).
  QATTN_DEVICE float key_scale(int tile) const {
    if constexpr (S::qk_16bit || C.general) return 1.0f;
    return isa::load_global(p.k8.scale + unit(p.k8, work.kv_head, work.k_slot + tile));
  }

  // ---- Values that are not numbers ------------------------------------------------------------

  /// Marks this warp's rows of Q that are not finite.
  QATTN_DEVICE void check_queries() {
    bool bad = false;
    const SharedAddress row = base + (warp * S::warp_rows + lane % S::warp_rows) * S::qk_row;
#pragma unroll 4
    for (int c = 0; c < S::qk_bytes; c += 16) {
      bad |= not_finite<C.qk>(isa::load_shared<isa::Words4>(row + c));
    }
    const std::uint32_t rows = isa::ballot(bad);
#pragma unroll
    for (int r = 0; r < R; ++r) {
      bad_rows |= (rows >> (local_row(r) - warp * S::warp_rows) & 1) != 0 ? 1u << r : 0u;
    }
  }

  /// This block's share of the tests of Q and K.
  QATTN_DEVICE void check_operands() {
    check_queries();
    if (p.bad_keys == nullptr) return;
    KeyCheck<C.qk, S::qk_bytes, S::threads>{p, work, k_source, isa::thread()}.run(S::rows);
  }

  /// 16-bit V: zeros in the place of tokens that hold NaN or Inf, and a flag in each row's padding.
  /// Needed only where some row must not see such a token. Returns whether there was one.
  QATTN_DEVICE bool clean_values() {
    const SharedAddress any = base + S::k_at + S::qk_bytes;  // in the padding of K's first row
    if (isa::thread() < S::keys) isa::store_shared(flag_address(isa::thread()), 0u);
    if (isa::thread() == 0) isa::store_shared(any, 0u);
    meet();
    constexpr int chunks = S::v_bytes / 16;
    for (int n = isa::thread(); n < S::keys * chunks; n += S::threads) {
      const auto v =
          isa::load_shared<isa::Words4>(base + S::v_at + n / chunks * S::v_row + n % chunks * 16);
      if (not_finite<C.pv>(v)) {
        isa::atomic_max_shared(flag_address(n / chunks), 1u);
        isa::atomic_max_shared(any, 1u);
      }
    }
    meet();
    if (isa::load_shared<std::uint32_t>(any) == 0) return false;
    for (int n = isa::thread(); n < S::keys * chunks; n += S::threads) {
      if (bad_value(n / chunks)) {
        isa::store_shared(base + S::v_at + n / chunks * S::v_row + n % chunks * 16, isa::Words4{});
      }
    }
    meet();
    return true;
  }
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
