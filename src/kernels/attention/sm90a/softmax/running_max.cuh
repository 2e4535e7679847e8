// Softmax of the Hopper prefill kernel for P in e4m3 or 16 bits: relative to the running maximum of
// its row.
#pragma once

#include "kernels/attention/sm90a/softmax/edges.cuh"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

/// P, and what a tile's products need, of RunningMaxSoftmax.
template <class S>
struct RunningMaxWeights {
  static constexpr int R = 2;
  static constexpr int step_keys = S::pv_16bit ? 16 : 32;  ///< of one wgmma

  std::uint32_t codes[S::keys / step_keys][4];  ///< P: A fragments of the products with V
  float rescale[R];  ///< what O is multiplied with before P V of this tile joins it

  QATTN_DEVICE RunningMaxWeights() { settle(); }
  /// The output has all P V: what joins it next is zero.
  QATTN_DEVICE void settle() {
#pragma unroll
    for (int r = 0; r < R; ++r) rescale[r] = 1.0f;
  }

  /// K's scales as far as a thread needs them: the same for all keys with the same (key % 8) / 2 in
  /// 64, and those are the keys that the thread's accumulators belong to.
  struct Scales {
    float k[S::halves];
    std::uint32_t flags;  ///< TileFlags of e4m3 V; the same in all lanes
  };
  struct Unmasked {
    Scales x;
    float scale[S::halves][R];  ///< of scores, in units of log2
    float top[R];               ///< maximum of the scores, in units of log2
    float offset[R];
    float rescale[R];  ///< the tile's, S::p_in_smem: P V of the tile before is still to join
  };
};

/// `Kernel`: Sm90Consumer.
template <class Kernel>
struct RunningMaxSoftmax {
  using S = typename Kernel::S;
  using F = typename S::Fragment;
  using Scores = typename Kernel::Scores;
  using Products = typename Kernel::Products;
  using Edges = Sm90Edges<Kernel>;
  static constexpr int R = Kernel::R, half_tiles = slot_tile / 8;
  using Weights = RunningMaxWeights<S>;
  using Scales = typename Weights::Scales;
  using Unmasked = typename Weights::Unmasked;

  Kernel& k;

  QATTN_DEVICE Scales load_scales(SharedAddress stage) const {
    Scales x;
    x.flags = 0;
#pragma unroll
    for (int h = 0; h < S::halves; ++h) {
      x.k[h] = 1.0f;
      if constexpr (!S::qk_16bit) {
        const int key = h * slot_tile + k.map.lane % 4 * 2;
        x.k[h] = isa::load_shared<float>(stage + S::scale_at + 4 * key);
      }
      if constexpr (S::e4m3_pv) {
        x.flags |=
            isa::load_shared<std::uint32_t>(stage + S::tail_at + h * S::tail_bytes + S::flags_at);
      }
    }
    x.flags &= tile_has_bad;
    return x;
  }

  /// Does every row see every key, and can V be multiplied as it is? The same answer in the whole
  /// warpgroup.
  QATTN_DEVICE bool is_unmasked(int tile, const Scales& x) const {
    return x.flags == 0 && Edges{k}.sees_whole(tile);
  }

  /// Is the tile plain but for the bounds of what its rows see? Forgets the tables of keys behind
  /// the end, which hold anything, and of a half that the block mask forbids.
  QATTN_DEVICE bool is_edge(int tile, SharedAddress stage, Scales& x) const {
    std::uint32_t flags = 0;
    bool bad = false;
#pragma unroll
    for (int h = 0; h < S::halves; ++h) {
      const bool exists = Edges{k}.has_half(h, x.flags, tile);
      if constexpr (!S::qk_16bit) {
        x.k[h] = exists ? x.k[h] : 0.0f;
        bad |= tile::is_nan(x.k[h]);
      }
      if constexpr (S::e4m3_pv) {
        const SharedAddress tail = stage + S::tail_at + h * S::tail_bytes;
        if (exists) flags |= isa::load_shared<std::uint32_t>(tail + S::flags_at) & tile_has_bad;
      }
    }
    return flags == 0 && !k.params.general && !isa::any(bad);
  }

  // ---- The plain tile -------------------------------------------------------------------------

  /// Takes the maxima of the keys of half `h`. Scales are positive or NaN.
  QATTN_DEVICE void take_maxima(const Products& s, int h, Unmasked& t) const {
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const auto* first = s + 4 * half_tiles * h + 2 * r;
      const auto largest = Edges::largest_of(first);
      t.scale[h][r] = k.rules.row_scale[r] * t.x.k[h];
      const float top = isa::to_float(largest) * t.scale[h][r];
      t.top[r] = h == 0 ? top : fmaxf(t.top[r], top);
    }
  }

  /// Moves the references to the tile's maxima.
  QATTN_DEVICE void begin_unmasked(Unmasked& t) {
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const float next = fmaxf(k.state.max[r], t.top[r]);
      t.rescale[r] = isa::exp2(k.state.max[r] - next);
      if constexpr (S::pv_16bit || !S::p_in_smem) k.weights.rescale[r] = t.rescale[r];
      k.state.max[r] = next;
      t.offset[r] = S::p_log2 - next;
      if constexpr (S::pv_16bit) k.state.sum[r] *= k.weights.rescale[r];
    }
  }

  /// P of the keys of half `h`.
  template <class Meanwhile>
  QATTN_DEVICE void attend_unmasked(const Products& s, int h, Unmasked& t, Meanwhile meanwhile) {
    exponentiate(
        h,
        [&](int n, int i) {
          return fmaf(isa::to_float(s[4 * n + i]), t.scale[h][i / 2], t.offset[i / 2]);
        },
        meanwhile);
  }

  QATTN_DEVICE void end_unmasked(const Unmasked& t) {
    if constexpr (!S::pv_16bit && S::p_in_smem) {
#pragma unroll
      for (int r = 0; r < R; ++r) k.weights.rescale[r] = t.rescale[r];
    }
  }

  /// P of the keys of half `h` from their exponents, in groups of four scores of one row, from two
  /// neighbouring score tiles. Calls meanwhile(g, Edges::no_sign()) after each group g of
  /// S::n_tiles.
  template <class Exponent, class Meanwhile>
  QATTN_DEVICE void exponentiate(int h, Exponent exponent, Meanwhile meanwhile) {
    float e[half_tiles][4];
    const auto start = [&](int g) {
      const int r = Edges::row_of(g), n = h * half_tiles + Edges::tile_of(g);
#pragma unroll
      for (int i = 0; i < 4; ++i) e[g][i] = exponent(n + i / 2, 2 * r + i % 2);
    };
    start(0);
#pragma unroll
    for (int g = 0; g < half_tiles; ++g) {
      if (g + 1 < half_tiles) start(g + 1);
#pragma unroll
      for (int i = 0; i < 4; ++i) e[g][i] = isa::exp2(e[g][i]);
      if (g > 0) pack(h * half_tiles + g - 1, e[g - 1]);
      meanwhile(h * half_tiles + g, Edges::no_sign(e[g][3], e[g > 0 ? g - 1 : 0][3]));
    }
    pack(h * half_tiles + half_tiles - 1, e[half_tiles - 1]);
  }

  /// Rounds group `g` of P; 16 bits: adds up what that gives.
  QATTN_DEVICE void pack(int g, const float (&e)[4]) {
    const int r = Edges::row_of(g), n = Edges::tile_of(g);
    if constexpr (S::pv_16bit) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        std::uint32_t& word = k.weights.codes[n / 2][r + 2 * i];
        constexpr bool half = S::pv == isa::Element::f16;
        word =
            half ? isa::pack_f16(e[2 * i], e[2 * i + 1]) : isa::pack_bf16(e[2 * i], e[2 * i + 1]);
        const isa::Pair rounded = half ? isa::unpack_f16(word) : isa::unpack_bf16(word);
        if constexpr (S::tuning.serial_sums) {
          k.state.sum[r] += rounded.lo;
          k.state.sum[r] += rounded.hi;
        } else {
          k.state.sum[r] += rounded.lo + rounded.hi;
        }
      }
    } else {
      k.weights.codes[n / 4][r + n / 2 % 2 * 2] = std::uint32_t{isa::pack_e4m3(e[0], e[1])} |
                                                  std::uint32_t{isa::pack_e4m3(e[2], e[3])} << 16;
    }
  }

  // ---- Other tiles ----------------------------------------------------------------------------

  /// P from scores, of which `scale` makes such in units of log2; -infinity where a row does not
  /// see the key.
  QATTN_DEVICE void attend_scores(Scores& y, const float (&scale)[S::halves][R]) {
    float top[R], most[R], offset[R];
#pragma unroll
    for (int r = 0; r < R; ++r) {
#pragma unroll
      for (int h = 0; h < S::halves; ++h) {
        const float largest = Edges::largest_of(&y[0][half_tiles * h][2 * r]);
        const float score = largest * scale[h][r];
        top[r] = h == 0 ? score : fmaxf(top[r], score);
        most[r] = h == 0 ? largest : fmaxf(most[r], largest);
      }
    }
    isa::row_maxima<F>(top);
    Edges{k}.spoil_overflow(most, top);
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const float next = fmaxf(k.state.max[r], top[r]), ref = k.state.reference(next);
      k.weights.rescale[r] =
          k.state.max[r] == -tile::infinity() ? 0.0f : isa::exp2(k.state.max[r] - ref);
      k.state.max[r] = next;
      offset[r] = S::p_log2 - ref;
      if constexpr (S::pv_16bit) k.state.sum[r] *= k.weights.rescale[r];
    }
#pragma unroll
    for (int h = 0; h < S::halves; ++h) {
      exponentiate(
          h, [&](int n, int i) { return fmaf(y[0][n][i], scale[h][i / 2], offset[i / 2]); },
          [](int, std::uint32_t) {});
    }
  }

  /// A tile that is plain but for bounds.
  QATTN_DEVICE void attend_edge(const Products& s, const Scales& x, int tile) {
    Scores y;
    float scale[S::halves][R];
    Edges{k}.edge_products(s, Edges{k}.edge_bounds(x.flags, tile), y);
#pragma unroll
    for (int r = 0; r < R; ++r) {
#pragma unroll
      for (int h = 0; h < S::halves; ++h) scale[h][r] = Edges{k}.edge_scale(r, x.k[h]);
    }
    attend_scores(y, scale);
  }

  /// Masks, biases, tokens of V that are not numbers.
  QATTN_DEVICE void attend_special(const Products& products, const Scales& facts, int tile,
                                   SharedAddress stage) {
    Scores s;
#pragma unroll
    for (int n = 0; n < S::n_tiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s[0][n][i] = isa::to_float(products[4 * n + i]);
    }
    const auto key_scale = [&](int key) {
      return S::qk_16bit ? 1.0f : isa::load_shared<float>(stage + S::scale_at + 4 * key);
    };
    const auto bad_value = [&](int key) {
      if constexpr (S::pv_16bit) return false;  // such rows are looked at in the end
      return tile::is_nan(isa::load_shared<float>(stage + S::tail_at +
                                                  key / slot_tile * S::tail_bytes + S::inverse_at +
                                                  4 * (key % slot_tile)));
    };
    k.rules.finish_scores(k.map, s, tile, key_scale, [](Scores&) {}, bad_value);
    Edges::hide_half(s, facts.flags);
    float one[S::halves][R];
#pragma unroll
    for (int h = 0; h < S::halves; ++h) one[h][0] = one[h][1] = 1.0f;
    attend_scores(s, one);
  }

  /// V's scales, of which there is one a channel.
  template <int N>
  using ChannelScales = float[N][2];
  /// Those of N tiles from `first` on.
  template <int N>
  QATTN_DEVICE void load_channel_scales(int first, float (&scale)[N][2]) const {
    const std::int64_t head = k.work.b * k.p.k.heads + k.work.kv_head;
    const float* table = k.p.v8.channel_scale + head * k.p.v8.groups * k.p.v8.channels;
    Epilogue<S>::load_channels(k.map, table, k.p.v8.channels, first, scale);
  }
  template <int N>
  QATTN_DEVICE void scale_channels(int first, const float (&by)[N][2]) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) k.output.o[0][first + n][i] *= by[n][i % 2];
    }
  }
  /// A few at a time: all at once have no room beside the output.
  QATTN_DEVICE void scale_all_channels() {
    constexpr int together = 8;
#pragma unroll
    for (int first = 0; first < S::d_tiles; first += together) {
      ChannelScales<together> scale;
      load_channel_scales(first, scale);
      scale_channels(first, scale);
    }
  }
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
