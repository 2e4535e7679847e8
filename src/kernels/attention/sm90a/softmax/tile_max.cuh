// Softmax of the Hopper prefill kernel: from a tile's integer scores to u8 P, relative to the
// maximum of its own row and tile.
#pragma once

#include "formats/lost_share.hpp"
#include "kernels/attention/sm90a/softmax/edges.cuh"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

/// P, and what a tile's products need, of TileMaxSoftmax.
template <class S>
struct TileMaxWeights {
  static constexpr int R = 2;

  std::uint32_t codes[S::keys / 32][4];  ///< P: A fragments of the products with V
  float share[R];       ///< weight of the tile for each unit of P, times u8_share_unit
  float poison = 0.0f;  ///< NaN once a scale of K was

  /// The output has all P V: what joins it next is zero.
  QATTN_DEVICE void settle() {
#pragma unroll
    for (int r = 0; r < R; ++r) share[r] = 0.0f;
  }

  /// What a thread needs of a tile's scales, unless that is special: K's and V's are the same for
  /// all keys with the same (key % 8) / 2 in 64, and those are the keys that the thread's
  /// accumulators belong to.
  struct Scales {
    float k[S::halves], v_log[S::halves];
    std::uint32_t flags;  ///< TileFlags of V; the same in all lanes
  };
  /// P of 64 keys that this lane has, row by row.
  struct Sums {
    std::uint32_t codes[R];  ///< after rounding
    float exact[R];          ///< and before
  };

  /// A tile that needs one factor for all keys of a half that a thread holds.
  struct Unmasked {
    Scales x;
    float scale[S::halves][R];  ///< of scores, in units of log2
    float top[R];               ///< maximum of score + log of V's scale, in units of log2
    Sums sums[S::halves];
  };
};

/// `Kernel`: Sm90Consumer.
template <class Kernel>
struct TileMaxSoftmax {
  using S = typename Kernel::S;
  using F = typename S::Fragment;
  using Scores = typename Kernel::Scores;
  using Products = typename Kernel::Products;
  using Edges = Sm90Edges<Kernel>;
  static constexpr int R = Kernel::R, half_tiles = slot_tile / 8;
  using Weights = TileMaxWeights<S>;
  using Scales = typename Weights::Scales;
  using Sums = typename Weights::Sums;
  using Unmasked = typename Weights::Unmasked;

  Kernel& k;

  QATTN_DEVICE Scales load_scales(SharedAddress stage) const {
    Scales x;
    x.flags = 0;
#pragma unroll
    for (int h = 0; h < S::halves; ++h) {
      const SharedAddress tail = stage + S::tail_at + h * S::tail_bytes;
      const int key = k.map.lane % 4 * 2;
      x.k[h] = isa::load_shared<float>(stage + S::scale_at + 4 * (h * slot_tile + key));
      x.v_log[h] = isa::load_shared<float>(tail + S::log_at + 4 * key);
      x.flags |= isa::load_shared<std::uint32_t>(tail + S::flags_at);
    }
    return x;
  }

  /// Does every row see every key, with constant scales? The same answer in the whole warpgroup.
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
      x.k[h] = exists ? x.k[h] : 0.0f;
      x.v_log[h] = exists ? x.v_log[h] : 0.0f;
      const SharedAddress tail = stage + S::tail_at + h * S::tail_bytes;
      if (exists) flags |= isa::load_shared<std::uint32_t>(tail + S::flags_at);
      bad |= tile::is_nan(x.k[h]);
    }
    return flags == 0 && !k.params.general && !isa::any(bad);
  }

  // ---- The plain tile -------------------------------------------------------------------------

  /// Takes the maxima of the keys of half `h`.
  QATTN_DEVICE void take_maxima(const Products& s, int h, Unmasked& t) const {
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const std::int32_t* first = s + 4 * half_tiles * h + 2 * r;
      const std::int32_t largest = Edges::largest_of(first);
      t.scale[h][r] = k.rules.row_scale[r] * t.x.k[h];
      const float top = fmaf(isa::to_float(largest), t.scale[h][r], t.x.v_log[h]);
      t.top[r] = h == 0 ? top : fmaxf(t.top[r], top);
    }
  }

  /// P of the keys of half `h`.
  template <class Meanwhile>
  QATTN_DEVICE void attend_unmasked(const Products& s, int h, Unmasked& t, Meanwhile meanwhile) {
    float offset[R];
#pragma unroll
    for (int r = 0; r < R; ++r) offset[r] = log2_255 - t.top[r] + t.x.v_log[h];
    const auto exponent = [&](int n, int i) {
      return fmaf(isa::to_float(s[4 * n + i]), t.scale[h][i / 2], offset[i / 2]);
    };
    exponentiate(h, exponent, t.sums[h], meanwhile);
  }

  /// The tile's weight, and its part of the row sums.
  QATTN_DEVICE void end_unmasked(const Unmasked& t) {
    // D 128 is as fast without it (H200), D 64 was not measured.
    if constexpr (!S::p_in_smem) isa::sync_warp();
    raise(t.top);
    weigh(t.top);
    add_sums(t.x, t.sums);
  }

  /// P of the keys of half `h` from their exponents. Calls meanwhile(g, Edges::no_sign()) among the
  /// exponentials, after each group g of S::n_tiles of four scores that make a word of P: of one
  /// row, from two neighbouring score tiles.
  template <class Exponent, class Meanwhile>
  QATTN_DEVICE void exponentiate(int h, Exponent exponent, Sums& sums, Meanwhile meanwhile) {
    float e[half_tiles][4];
#pragma unroll
    for (int r = 0; r < R; ++r) sums.codes[r] = 0, sums.exact[r] = 0.0f;
    const auto start = [&](int g) {
      const int r = Edges::row_of(g), n = h * half_tiles + Edges::tile_of(g);
#pragma unroll
      for (int i = 0; i < 4; ++i) e[g][i] = exponent(n + i / 2, 2 * r + i % 2);
    };
    const auto pack = [&](int g) {
      const int r = Edges::row_of(g), n = h * half_tiles + Edges::tile_of(g);
      std::uint32_t& word = k.weights.codes[n / 4][r + n / 2 % 2 * 2];
      word = isa::pack_u8(e[g][0], e[g][1], e[g][2], e[g][3]);
      sums.codes[r] = isa::dot4_u8(word, 0x01010101u, sums.codes[r]);
      // Number by number: sums of pairs first are 5 % slower (H100).
#pragma unroll
      for (const float x : e[g]) sums.exact[r] += x;
    };
    start(0);
#pragma unroll
    for (int g = 0; g < half_tiles; ++g) {
      if (g + 1 < half_tiles) start(g + 1);
#pragma unroll
      for (int i = 0; i < 4; ++i) e[g][i] = isa::exp2(e[g][i]);
      if (g > 0) pack(g - 1);
      meanwhile(h * half_tiles + g, Edges::no_sign(e[g][3], e[g > 0 ? g - 1 : 0][3]));
    }
    pack(half_tiles - 1);
  }

  // ---- What a tile adds -----------------------------------------------------------------------

  /// The reference moves only when a maximum is far above it, which is rare.
  QATTN_DEVICE void raise(const float (&top)[R]) {
    bool far = false;
#pragma unroll
    for (int r = 0; r < R; ++r) far |= top[r] > k.state.max[r] + k.state.slack;
    if (isa::any(far)) k.state.update_max(top, k.output);
  }
  QATTN_DEVICE void weigh(const float (&top)[R]) {
#pragma unroll
    for (int r = 0; r < R; ++r) {
      k.weights.share[r] =
          isa::exp2(top[r] - k.state.reference(k.state.max[r])) * (u8_share_unit / 255);
    }
  }

  /// A tile's part of the row sums, which take P unrounded.
  QATTN_DEVICE void add_sums(const Scales& x, const Sums (&sums)[S::halves]) {
    float mass[R];
#pragma unroll
    for (int h = 0; h < S::halves; ++h) {
      const float weight = isa::exp2(-x.v_log[h]);
#pragma unroll
      for (int r = 0; r < R; ++r) {
        mass[r] = fmaf(sums[h].exact[r], weight, h == 0 ? 0.0f : mass[r]);
      }
      k.weights.poison = fmaf(x.k[h], 0.0f, k.weights.poison);
    }
#pragma unroll
    for (int r = 0; r < R; ++r)
      k.state.sum[r] = fmaf(mass[r], k.weights.share[r] * (1.0f / u8_share_unit), k.state.sum[r]);
    add_codes(sums);
  }
  /// And of the sums of codes, after and before rounding.
  QATTN_DEVICE void add_codes(const Sums (&sums)[S::halves]) {
    std::uint32_t all[R];
#pragma unroll
    for (int r = 0; r < R; ++r) {
      all[r] = sums[0].codes[r];
      float before = sums[0].exact[r];
      if constexpr (S::halves > 1) all[r] += sums[1].codes[r], before += sums[1].exact[r];
      k.state.exact[r] =
          fmaf(before, k.weights.share[r] * (1.0f / u8_share_unit), k.state.exact[r]);
    }
    k.state.add_excess(all, k.weights.share);
  }

  // ---- Lost mass ------------------------------------------------------------------------------

  /// Rows whose codes miss too much of P get the mean of V's codes of four tiles for it. A second
  /// byte of P would want a second product of the whole warpgroup.
  QATTN_DEVICE void replace_lost() {
    float lost[R], most[R];
    bool some = false;
#pragma unroll
    for (int r = 0; r < R; ++r) {
      lost[r] =
          fmaf(k.state.exact[r], 1.0f / u8_value_unit, -k.state.excess[r]);  // in units of excess
      most[r] = k.state.excess[r];
    }
    isa::add_rows<F>(lost);
    isa::add_rows<F>(most);
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const bool lossy = fabsf(lost[r]) > most[r] * formats::kMostReplaced;
      lost[r] = lossy ? lost[r] : 0.0f;
      some |= lossy;
    }
    if (!isa::any(some)) return;
    constexpr int words = (S::dv + 127) / 128;  // of four channels, a lane
    std::int32_t total[words][4] = {};
    load_means(total);
#pragma unroll
    for (int n = 0; n < S::d_tiles; ++n) {
      // Channels 8 n + 2 t and the next: halves of a word of lane 2 n + t / 2.
      const int w = n / 16, from = (2 * n + k.map.lane % 4 / 2) % 32;
      const std::uint32_t low = isa::byte_permute(total[w][0], total[w][1], 0x5410);
      const std::uint32_t high = isa::byte_permute(total[w][2], total[w][3], 0x5410);
      const std::uint32_t even = isa::shuffle(low, from), odd = isa::shuffle(high, from);
      const std::uint32_t pair = k.map.lane % 2 == 0 ? even : odd;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const auto mean = static_cast<std::int16_t>(pair >> 16 * (i % 2));
        k.output.o[0][n][i] =
            fmaf(lost[i / 2], static_cast<float>(mean) * 0.25f, k.output.o[0][n][i]);
      }
    }
  }
  /// Sums of the means of four tiles, spread over those of the sequence.
  template <int Words>
  QATTN_DEVICE void load_means(std::int32_t (&total)[Words][4]) const {
    const TileOffsets at = tile_offsets(k.p.v8.channels);
    const int tiles = static_cast<int>((k.work.k.length + slot_tile - 1) / slot_tile);
    const std::uint8_t* first =
        k.p.v8.tiles + (k.work.kv_head * k.p.v8.slots + k.work.k_slot) / slot_tile * at.bytes +
        at.extra;
    std::uint32_t means[4][Words];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const std::uint8_t* from = first + std::int64_t{i * tiles / 4} * at.bytes + 4 * k.map.lane;
#pragma unroll
      for (int w = 0; w < Words; ++w) {
        means[i][w] = isa::load_global(reinterpret_cast<const std::uint32_t*>(from) + 32 * w);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int w = 0; w < Words; ++w) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          total[w][c] = isa::dot4_s8(means[i][w], 1u << 8 * c, total[w][c]);
        }
      }
    }
  }

  // ---- The edge tile --------------------------------------------------------------------------

  /// A tile that is plain but for bounds. Half the rows of a causal one see nothing of its second
  /// half: without its exponentials causal calls are 1 to 2 % faster (H100, D 128, S 1024 to
  /// 16384). With its maxima behind a branch, too, ptxas spills 500 bytes and they are 9 to 16 %
  /// slower. e4m3 P gained nothing.
  QATTN_DEVICE void attend_edge(const Products& s, const Scales& x, int tile) {
    const auto bounds = Edges{k}.edge_bounds(x.flags, tile);
    Scores y;
    float scale[S::halves][R], top[R], most[R];
    Edges{k}.edge_products(s, bounds, y);
#pragma unroll
    for (int r = 0; r < R; ++r) {
#pragma unroll
      for (int h = 0; h < S::halves; ++h) {
        scale[h][r] = Edges{k}.edge_scale(r, x.k[h]);
        const float largest = Edges::largest_of(&y[0][half_tiles * h][2 * r]);
        const float score = fmaf(largest, scale[h][r], x.v_log[h]);
        top[r] = h == 0 ? score : fmaxf(top[r], score);
        most[r] = h == 0 ? largest : fmaxf(most[r], largest);
      }
    }
    isa::row_maxima<F>(top);
    Edges{k}.spoil_overflow(most, top);
    raise(top);
    weigh(top);
    float ref[R];
#pragma unroll
    for (int r = 0; r < R; ++r) ref[r] = log2_255 - k.state.reference(top[r]);
    Sums sums[S::halves] = {};
#pragma unroll
    for (int h = 0; h < S::halves; ++h) {
      if (h > 0 && !bounds.upper) {
        clear_codes(h);
        break;
      }
      const float offset[R] = {ref[0] + x.v_log[h], ref[1] + x.v_log[h]};
      exponentiate(
          h, [&](int n, int i) { return fmaf(y[0][n][i], scale[h][i / 2], offset[i / 2]); },
          sums[h], [](int, std::uint32_t) {});
    }
    add_sums(x, sums);
  }

  /// P of half `h` is zero.
  QATTN_DEVICE void clear_codes(int h) {
#pragma unroll
    for (int n = 2 * h; n < 2 * h + 2; ++n) {
#pragma unroll
      for (std::uint32_t& word : k.weights.codes[n]) word = 0;
    }
  }

  // ---- Any tile -------------------------------------------------------------------------------

  /// Masks, biases, keys that are not numbers, V scales of single tokens.
  QATTN_DEVICE void attend_special(const Products& products, const Scales& facts, int tile,
                                   SharedAddress stage) {
    const SharedAddress tails = stage + S::tail_at;
    const auto table = [&](int at, int key) {
      return isa::load_shared<float>(tails + key / slot_tile * S::tail_bytes + at +
                                     4 * (key % slot_tile));
    };
    Scores s;
#pragma unroll
    for (int n = 0; n < S::n_tiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s[0][n][i] = isa::to_float(products[4 * n + i]);
    }
    // Tables hold nothing behind the last tile of a sequence: the bounds come after them.
    const auto key_scale = [&](int key) {
      return isa::load_shared<float>(stage + S::scale_at + 4 * key);
    };
    const auto bad_value = [&](int key) { return tile::is_nan(table(S::inverse_at, key)); };
    k.rules.finish_scores(k.map, s, tile, key_scale, [](Scores&) {}, bad_value);
    Edges::hide_half(s, facts.flags);
    float far[R] = {}, run[R];  // run: the rows' references
    k.rules.bring_near(k.p, s, far);
    tile::each_score<F>(s, [&](int, int key, float& x) {
      if (x != -tile::infinity()) x += table(S::log_at, key);
    });
    float top[R];
#pragma unroll
    for (int r = 0; r < R; ++r) top[r] = -tile::infinity();
    tile::each_score<F>(s, [&](int r, int, float& x) { top[r] = fmaxf(top[r], x); });
    isa::row_maxima<F>(top);
    k.state.update_far_max(top, far, run, k.output);
    Sums sums[S::halves] = {};
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const float ref = k.state.reference(top[r]) - log2_255;
      k.weights.share[r] = isa::exp2(top[r] - run[r]) * (u8_share_unit / 255);
      float mass = 0.0f;
#pragma unroll
      for (int n = 0; n < S::n_tiles; n += 2) {
        Sums& half = sums[n / half_tiles];
        float e[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float x = s[0][n + i / 2][2 * r + i % 2];
          e[i] = isa::exp2(x - ref);
          half.exact[r] += e[i];
          const int key = 8 * (n + i / 2) + k.map.lane % 4 * 2 + i % 2;
          if (x != -tile::infinity()) mass = fmaf(e[i], table(S::inverse_at, key), mass);
        }
        std::uint32_t& word = k.weights.codes[n / 4][r + n / 2 % 2 * 2];
        word = isa::pack_u8(e[0], e[1], e[2], e[3]);
        half.codes[r] = isa::dot4_u8(word, 0x01010101u, half.codes[r]);
      }
      k.state.sum[r] = fmaf(mass, k.weights.share[r] * (1.0f / u8_share_unit), k.state.sum[r]);
    }
    add_codes(sums);
  }
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
