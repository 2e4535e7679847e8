// smooth_q: the means of Q's blocks times K, which the attention kernels add to the scores. K of 16
// bits in the matrix unit, which takes the means as sums of two or three numbers of 16 bits; K of
// 32 bits without it.
#pragma once

#include "isa/fragment.hpp"
#include "kernels/operand/copy.hpp"
#include "kernels/quantize/gpu/encode/groups.cuh"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

/// nvfp4's second level of Q or K. Where all numbers are zeros, any serves, and 1 is far from the
/// ends of the floats.
QATTN_DEVICE float row_global(const Grouping& g, const tile::Rows& r, const tile::Span& span, int b,
                              int head) {
  const float amax = formats::float_of(isa::load_global(g.maxima + g.base(r, span, b, head)));
  return amax == 0.0f ? 1.0f : formats::nvfp4_global(amax);
}

struct MeanScoreParams {
  tile::Rows q, k;       ///< as they came
  bool aligned = false;  ///< K's rows allow 16-byte accesses
  PreparedMeans means;
  const float* k_mean = nullptr;  ///< [batches][heads of K][padded], or none
  float scale = 1.0f;             ///< of the products: softmax_scale, or 1
  Micro micro = Micro::none;      ///< nvfp4: scores are in units of the codes' products
  Grouping q_grouping, k_grouping;
  std::uint32_t* k_flags = nullptr;  ///< PreparedRows::flags; formats of groups
};

/// Up to `Means` means of a head and sequence, and `Keys` keys, which a block of threads serves.
template <int Means, int Keys>
struct MeanScoreWork {
  using Params = MeanScoreParams;
  const Params& p;
  int b, head, kv_head;
  tile::Span q, k;
  std::int64_t first_mean;  ///< of all sequences
  int first_of_sequence;    ///< the same of its own
  int means;                ///< from there on
  std::int64_t first_key;

  /// Blocks for all heads. Packed sequences: Keys are 64, a tile of slots.
  static constexpr std::int64_t blocks(const Params& p) {
    const std::int64_t tiles =
        p.k.cu_seqlens != nullptr ? p.means.key_slots / slot_tile : p.k.batches * tiles_of(p);
    return p.q.heads * groups_of(p) * tiles;
  }
  /// Of a sequence that is not packed.
  QATTN_CONSTEXPR static std::int64_t tiles_of(const Params& p) {
    return (p.k.max_length + Keys - 1) / Keys;
  }
  QATTN_CONSTEXPR static std::int64_t groups_of(const Params& p) {
    return (p.means.most + Means - 1) / Means;
  }

  /// By all threads. False: nothing is there to do.
  QATTN_DEVICE bool find() {
    const int groups = static_cast<int>(groups_of(p));
    int index = isa::block().x;
    const int first = index % groups * Means;
    index /= groups;
    head = index % p.q.heads, index /= p.q.heads;
    kv_head = head / (p.q.heads / p.k.heads);
    if (p.k.cu_seqlens != nullptr) {
      const TilePlace place = find_tile(p.k, index, kv_head, Keys, isa::shared_base());
      b = place.b, first_key = place.first;
      if (!place.used) return false;
    } else {
      const int tiles = static_cast<int>(tiles_of(p));
      b = index / tiles, first_key = std::int64_t{index % tiles} * Keys;
    }
    q = tile::span_of(p.q, b);
    k = tile::span_of(p.k, b);
    first_of_sequence = first;
    first_mean = tile::first_block(p.q, q, b, p.means.block) + first;
    const int left = (static_cast<int>(q.length) + p.means.block - 1) / p.means.block - first;
    means = left < Means ? left : Means;
    return left > 0 && !q.bad && !k.bad && first_key < k.length;
  }

  QATTN_DEVICE const float* mean(int n) const {
    return p.means.data + (head * p.means.blocks + first_mean + n) * p.means.channels;
  }
  QATTN_DEVICE const float* key_mean() const {
    return p.k_mean + (std::int64_t{b} * p.k.heads + kv_head) * p.means.channels;
  }
  /// What a product is multiplied with. In two steps: their product may leave the floats.
  QATTN_DEVICE void factors(float (&factor)[2]) const {
    factor[0] = p.scale, factor[1] = 1.0f;
    if (p.micro != Micro::nvfp4) return;
    factor[0] = 1.0f / row_global(p.q_grouping, p.q, q, b, head);
    factor[1] = 1.0f / row_global(p.k_grouping, p.k, k, b, kv_head);
  }

  /// Infinity becomes NaN, too, and `bad` NaN with it.
  QATTN_DEVICE static float checked(float x, float& bad) {
    bad = fmaf(x, 0.0f, bad);
    return fmaf(x, 0.0f, x);
  }
  /// Formats of groups cannot carry what is not a number: the key's tile becomes one with bad
  /// tokens.
  QATTN_DEVICE void flag(int key, float bad) const {
    if (bad == 0.0f || p.k_flags == nullptr || first_key + key >= k.length) return;
    const std::int64_t slot = kv_head * tile::slot_count(p.k) + tile::first_slot(p.k, k, b);
    isa::atomic_or_global(p.k_flags + (slot + first_key + key) / slot_tile, tile_has_bad);
  }
  QATTN_DEVICE float* scores(int mean) const {
    const std::int64_t row = head * p.means.most + first_of_sequence + mean;
    return p.means.scores + row * p.means.key_slots + tile::first_slot(p.k, k, b) + first_key;
  }
};

/// A number as a sum of numbers of 16 bits: bf16 has 8, 16, 24 bits of it, f16 11 and 22.
template <isa::Element E>
struct SplitFloats {
  static constexpr int terms = E == isa::Element::bf16 ? 3 : 2;

  static QATTN_DEVICE std::uint32_t take(float& lo, float& hi) {
    constexpr bool half = E == isa::Element::f16;
    const std::uint32_t w = half ? isa::pack_f16(lo, hi) : isa::pack_bf16(lo, hi);
    const isa::Pair taken = half ? isa::unpack_f16(w) : isa::unpack_bf16(w);
    lo -= taken.lo, hi -= taken.hi;
    return w;
  }
};

/// K of 16 bits. A warp has 32 keys and all means of the block.
template <isa::Element E, int Means, int Keys>
struct MeanProducts {
  using Params = MeanScoreParams;
  using F = isa::MmaFragment;
  static constexpr int threads = Keys, min_blocks = 3 * 128 / Keys, keys = Keys, warp_keys = 32;
  static constexpr int m_tiles = Means / 16, n_tiles = warp_keys / 8;
  static constexpr int depth = 64, row = tile::padded_row(2 * depth);  ///< channels at a time
  static constexpr int terms = SplitFloats<E>::terms;
  static constexpr int means_at = keys * row, term_bytes = Means * row;
  static constexpr int size_at = means_at + terms * term_bytes;  ///< powers of two, of each mean
  static constexpr int dot_at = size_at + 4 * Means;             ///< its product with K's mean
  static constexpr int shared_bytes = dot_at + 4 * Means;
  static constexpr bool dependent = true;
  using Work = MeanScoreWork<Means, keys>;
  using Sums = float[m_tiles][n_tiles][4];

  /// f16 wants numbers of middle size: the mean's largest becomes one below 2^15.
  static QATTN_DEVICE float size_for(float top) {
    if (E == isa::Element::bf16 || !(top > 0.0f) || !formats::is_finite(top)) return 1.0f;
    const auto exponent = static_cast<int>(formats::bits_of(top) >> 23) - 127;
    const int by = 14 - exponent;
    return formats::float_of(static_cast<std::uint32_t>(127 + (by < 126 ? by : 126)) << 23);
  }

  /// What belongs to a whole mean. A group of lanes has one.
  static QATTN_DEVICE void measure(const Work& w) {
    constexpr int lanes = threads / Means < 8 ? threads / Means : 8;
    const int n = isa::thread() / lanes, first = isa::thread() % lanes;
    float top = 0.0f, dot = 0.0f;
#pragma unroll 8
    for (int c = 4 * first; c < w.p.means.channels; c += 4 * lanes) {
      Words4 x{}, y{};
      if (n < w.means) x = isa::load_global(reinterpret_cast<const Words4*>(w.mean(n) + c));
      if (w.p.k_mean != nullptr) {
        y = isa::load_global(reinterpret_cast<const Words4*>(w.key_mean() + c));
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        top = fmaxf(top, fabsf(formats::float_of(x.w[i])));
        dot = fmaf(formats::float_of(x.w[i]), formats::float_of(y.w[i]), dot);
      }
    }
#pragma unroll
    for (int mask = 1; mask < lanes; mask *= 2) {
      top = fmaxf(top, isa::shuffle_xor(top, mask));
      dot += isa::shuffle_xor(dot, mask);
    }
    if (n < Means && first == 0) {
      isa::store_shared(isa::shared_base() + size_at + 4 * n, size_for(top));
      isa::store_shared(isa::shared_base() + dot_at + 4 * n, dot);
    }
  }

  static QATTN_DEVICE void load_means(const Work& w, int c0) {
#pragma unroll 4
    for (int i = isa::thread(); i < Means * depth / 4; i += threads) {
      const int n = i / (depth / 4), c = i % (depth / 4) * 4;
      Words4 x{};
      if (n < w.means && c0 + c < w.p.means.channels) {
        x = isa::load_global(reinterpret_cast<const Words4*>(w.mean(n) + c0 + c));
      }
      const auto size = isa::load_shared<float>(isa::shared_base() + size_at + 4 * n);
      float f[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) f[j] = formats::float_of(x.w[j]) * size;
      SharedAddress to = isa::shared_base() + means_at + n * row + 2 * c;
#pragma unroll
      for (int t = 0; t < terms; ++t) {
        const std::uint32_t lo = SplitFloats<E>::take(f[0], f[1]);
        isa::store_shared(to, Words2{{lo, SplitFloats<E>::take(f[2], f[3])}});
        to += term_bytes;
      }
    }
  }

  static QATTN_DEVICE void load_keys(const Work& w, tile::RowSource source, int c0) {
    source.base += 2 * c0, source.row_bytes -= 2 * c0;
    tile::copy_rows<2 * depth, keys, threads, true>(isa::shared_base(), source,
                                                    static_cast<int>(w.first_key), w.p.k.error);
    isa::copy_async_commit();
  }

  static QATTN_DEVICE void multiply(Sums& sum) {
    const int lane = isa::lane();
    const SharedAddress k = isa::shared_base() +
                            (isa::warp() * warp_keys + lane % 8 + lane / 16 * 8) * row +
                            lane / 8 % 2 * 16;
    const SharedAddress q = isa::shared_base() + means_at + lane % 16 * row + lane / 16 * 16;
#pragma unroll
    for (int step = 0; step < depth / 16; ++step) {
      std::uint32_t pair[n_tiles / 2][4], b[n_tiles][2];
      SharedAddress b_row[n_tiles / 2], a_row[m_tiles];
#pragma unroll
      for (int n = 0; n < n_tiles / 2; ++n) b_row[n] = k + n * 16 * row + step * 32;
      isa::load_matrix<n_tiles / 2>(pair, b_row);
#pragma unroll
      for (int n = 0; n < n_tiles; ++n) {
        b[n][0] = pair[n / 2][n % 2 * 2], b[n][1] = pair[n / 2][n % 2 * 2 + 1];
      }
#pragma unroll
      for (int t = 0; t < terms; ++t) {
        std::uint32_t a[m_tiles][4];
#pragma unroll
        for (int m = 0; m < m_tiles; ++m) a_row[m] = q + t * term_bytes + m * 16 * row + step * 32;
        isa::load_matrix<m_tiles>(a, a_row);
        isa::mma<E, E, m_tiles, n_tiles>(sum, a, b);
      }
    }
  }

  static QATTN_DEVICE void store(const Work& w, const Sums& sum) {
    const int lane = isa::lane(), first = isa::warp() * warp_keys;
    if (w.first_key + first >= (w.k.length + slot_tile - 1) / slot_tile * slot_tile) return;
    float factor[2], bad = 0.0f;
    w.factors(factor);
#pragma unroll
    for (int m = 0; m < m_tiles; ++m) {
#pragma unroll
      for (int r = 0; r < F::rows; ++r) {
        const int n = m * F::tile_rows + F::row(lane, r);
        if (n >= w.means) continue;
        const float size = 1.0f / isa::load_shared<float>(isa::shared_base() + size_at + 4 * n);
        const auto dot = isa::load_shared<float>(isa::shared_base() + dot_at + 4 * n);
        float* to = w.scores(n) + first + F::lane_column(lane);
#pragma unroll
        for (int j = 0; j < n_tiles; ++j) {
          Words2 pair;
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const float x = fmaf(sum[m][j][F::element(r, e)], size, -dot) * factor[0] * factor[1];
            pair.w[e] = formats::bits_of(Work::checked(x, bad));
          }
          isa::store_global(reinterpret_cast<Words2*>(to + j * F::tile_columns), pair);
        }
      }
    }
    w.flag(first, bad);
  }

  static QATTN_DEVICE void run(const Params& p) {
    isa::grid_dependency_launch();
    isa::grid_dependency_wait();
    Work w{p};
    if (!w.find()) return;
    measure(w);
    const tile::RowSource keys_of = tile::row_source(p.k, w.k, w.b, w.kv_head, 2, p.aligned);
    Sums sum = {};
    for (int c0 = 0; c0 < p.means.channels; c0 += depth) {
      isa::sync_threads();
      load_keys(w, keys_of, c0);
      load_means(w, c0);
      isa::copy_async_wait<0>();
      isa::sync_threads();
      multiply(sum);
    }
    store(w, sum);
  }
};

/// K of 32 bits. A thread has a key and eight means, whose channels come 32 at a time to shared
/// memory.
template <int Keys>
struct MeanScores {
  using Params = MeanScoreParams;
  static constexpr int threads = Keys, min_blocks = 4, keys = Keys, means = 8, depth = 32;
  static constexpr int shared_bytes = 4 * means * depth;  ///< [channel][mean]
  static constexpr bool dependent = true;
  using Work = MeanScoreWork<means, keys>;

  static QATTN_DEVICE void load_means(const Work& w, int c0) {
    for (int i = isa::thread(); i < means * depth; i += threads) {
      const int n = i % means, c = i / means;
      const float x = n < w.means ? isa::load_global(w.mean(n) + c0 + c) : 0.0f;
      isa::store_shared(isa::shared_base() + 4 * i, x);
    }
  }

  template <bool Aligned>
  static QATTN_DEVICE void multiply(const Work& w, int c0, float (&sum)[means]) {
    const std::int64_t token = w.first_key + isa::thread();
    // A page that does not exist has made the key's scale NaN already.
    const std::int64_t at =
        token < w.k.length ? tile::row_offset(w.p.k, w.k, w.b, w.kv_head, token) : -1;
    for (int c = 0; at != -1 && c < depth && c0 + c < w.p.k.channels; c += chunk_channels) {
      Octet<InputKind::f32> octet;
      float x[8];
      octet.template load<Aligned>(w.p.k.data, at + c0 + c, w.p.k.channels - c0 - c);
      octet.unpack(x);
#pragma unroll
      for (int i = 0; i < chunk_channels; ++i) {
        if (w.p.k_mean != nullptr) x[i] -= isa::load_global(w.key_mean() + c0 + c + i);
#pragma unroll
        for (int n = 0; n < means; ++n) {
          const auto mean = isa::load_shared<float>(isa::shared_base() + 4 * ((c + i) * means + n));
          sum[n] = fmaf(mean, x[i], sum[n]);
        }
      }
    }
  }

  static QATTN_DEVICE void run(const Params& p) {
    isa::grid_dependency_launch();
    isa::grid_dependency_wait();
    Work w{p};
    if (!w.find()) return;
    float sum[means] = {};
    for (int c0 = 0; c0 < p.means.channels; c0 += depth) {
      isa::sync_threads();
      load_means(w, c0);
      isa::sync_threads();
      if (p.aligned) {
        multiply<true>(w, c0, sum);
      } else {
        multiply<false>(w, c0, sum);
      }
    }
    float factor[2], bad = 0.0f;
    w.factors(factor);
    if (w.first_key + isa::thread() >= w.k.length) return;
#pragma unroll
    for (int n = 0; n < means; ++n) {
      if (n >= w.means) break;
      const float x = sum[n] * factor[0] * factor[1];
      isa::store_global(w.scores(n) + isa::thread(), Work::checked(x, bad));
    }
    w.flag(isa::thread(), bad);
  }
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
