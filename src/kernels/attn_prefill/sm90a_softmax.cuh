// Softmax of the Hopper prefill kernel: from a tile's integer scores to u8 P, relative to the
// maximum of its own row and tile.
#pragma once

#include "formats/rounded_share.hpp"
#include "kernels/attn_prefill/sm90a_rows.cuh"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

template <Sm90Config C>
struct Sm90Softmax : Sm90Rows<C> {
  using S = Sm90Shape<C>;
  using Base = Sm90Rows<C>;
  using Base::R, Base::lane, Base::max, Base::out, Base::p, Base::sum, Base::work;
  using typename Base::Scores;
  /// S as wgmma leaves it: element 4n + i is element i of score tile n.
  using Products = std::int32_t[S::keys / 2];
  static constexpr int half_tiles = slot_tile / 8;  ///< score tiles in 64 keys

  std::uint32_t codes[S::keys / 32][4];  ///< P: A fragments of the products with V
  float share[R];       ///< weight of the tile for each unit of P, times Base::share_unit
  float poison = 0.0f;  ///< NaN once a scale of K was

  QATTN_DEVICE Sm90Softmax(const Sm90Params& a, const PrefillWork& w, const WorkFacts& facts,
                           int row_warp, int buffer)
      : Base(a, w, facts, row_warp, buffer) {}
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
    std::uint32_t flags;  ///< TileFlags of V and uneven_tiles(); the same in all lanes
  };
  QATTN_DEVICE Scales load_scales(SharedAddress stage) const {
    Scales x;
    std::uint32_t range[S::halves];
    x.flags = 0;
#pragma unroll
    for (int h = 0; h < S::halves; ++h) {
      const SharedAddress tail = stage + S::tail_at + h * S::tail_bytes;
      const int key = lane % 4 * 2;
      x.k[h] = isa::load_shared<float>(stage + S::scale_at + 4 * (h * slot_tile + key));
      x.v_log[h] = isa::load_shared<float>(tail + S::log_at + 4 * key);
      const auto facts = isa::load_shared<isa::Words2>(tail + S::flags_at);
      x.flags |= facts.w[0], range[h] = facts.w[1];
    }
    if constexpr (S::halves > 1) x.flags |= uneven_tiles(range[0], range[1]);
    return x;
  }

  /// Does every row see every key, with constant scales? The same answer in the whole warpgroup.
  QATTN_DEVICE bool is_plain(int tile, const Scales& x) const {
    return x.flags == 0 && this->sees_whole(tile);
  }

  /// Is the tile plain but for the bounds of what its rows see? Forgets the tables of keys behind
  /// the end, which hold anything, and of a half that the block mask forbids.
  QATTN_DEVICE bool is_edge(int tile, SharedAddress stage, Scales& x) const {
    std::uint32_t flags = x.flags & uneven_bits;
    bool bad = false;
#pragma unroll
    for (int h = 0; h < S::halves; ++h) {
      const bool exists = this->has_half(h, x.flags, tile);
      if (!exists) flags &= ~uneven_bits;
      x.k[h] = exists ? x.k[h] : 0.0f;
      x.v_log[h] = exists ? x.v_log[h] : 0.0f;
      const SharedAddress tail = stage + S::tail_at + h * S::tail_bytes;
      if (exists) flags |= isa::load_shared<std::uint32_t>(tail + S::flags_at);
      bad |= tile::is_nan(x.k[h]);
    }
    return flags == 0 && !this->params.general && !isa::any(bad);
  }

  // ---- The plain tile -------------------------------------------------------------------------

  /// A tile that needs one factor for all keys of a half that a thread holds.
  struct Plain {
    Scales x;
    float scale[S::halves][R];          ///< of scores, in units of log2
    float top[R];                       ///< maximum of score + log of V's scale, in units of log2
    std::uint32_t count[S::halves][R];  ///< sums of P
  };

  /// Takes the maxima of the keys of half `h`.
  QATTN_DEVICE void take_maxima(const Products& s, int h, Plain& t) const {
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const std::int32_t* first = s + 4 * half_tiles * h + 2 * r;
      const std::int32_t largest = this->largest_of(first);
      t.scale[h][r] = this->row_scale[r] * t.x.k[h];
      const float top = fmaf(isa::to_float(largest), t.scale[h][r], t.x.v_log[h]);
      t.top[r] = h == 0 ? top : fmaxf(t.top[r], top);
    }
  }

  /// P of the keys of half `h`.
  template <class Meanwhile>
  QATTN_DEVICE void attend_plain(const Products& s, int h, Plain& t, Meanwhile meanwhile) {
    float offset[R];
#pragma unroll
    for (int r = 0; r < R; ++r) offset[r] = log2_255 - t.top[r] + t.x.v_log[h];
    const auto exponent = [&](int n, int i) {
      return fmaf(isa::to_float(s[4 * n + i]), t.scale[h][i / 2], offset[i / 2]);
    };
    exponentiate(h, exponent, t.count[h], meanwhile);
  }

  /// The tile's weight, and its part of the row sums.
  QATTN_DEVICE void end_plain(const Plain& t) {
    // D 128 is as fast without it (H200), D 64 was not measured.
    if constexpr (!S::shared_p) isa::sync_warp();
    raise(t.top);
#pragma unroll
    for (int r = 0; r < R; ++r) {
      share[r] = isa::exp2(t.top[r] - max[r]) * (Base::share_unit / 255);
    }
    add_sums(t.x, t.count);
  }

  /// P of the keys of half `h` from their exponents. Calls meanwhile(g, no_sign()) among the
  /// exponentials, after each group g of S::n_tiles of four scores that make a word of P: of one
  /// row, from two neighbouring score tiles.
  template <class Exponent, class Meanwhile>
  QATTN_DEVICE void exponentiate(int h, Exponent exponent, std::uint32_t (&count)[R],
                                 Meanwhile meanwhile) {
    float e[half_tiles][4];
#pragma unroll
    for (int r = 0; r < R; ++r) count[r] = 0;
    const auto start = [&](int g) {
      const int r = this->row_of(g), n = h * half_tiles + this->tile_of(g);
#pragma unroll
      for (int i = 0; i < 4; ++i) e[g][i] = exponent(n + i / 2, 2 * r + i % 2);
    };
    const auto pack = [&](int g) {
      const int r = this->row_of(g), n = h * half_tiles + this->tile_of(g);
      std::uint32_t& word = codes[n / 4][r + n / 2 % 2 * 2];
      word = isa::pack_u8(e[g][0], e[g][1], e[g][2], e[g][3]);
      count[r] = isa::dot4_u8(word, 0x01010101u, count[r]);
    };
    start(0);
#pragma unroll
    for (int g = 0; g < half_tiles; ++g) {
      if (g + 1 < half_tiles) start(g + 1);
#pragma unroll
      for (int i = 0; i < 4; ++i) e[g][i] = isa::exp2(e[g][i]);
      if (g > 0) pack(g - 1);
      meanwhile(h * half_tiles + g, this->no_sign(e[g][3], e[g > 0 ? g - 1 : 0][3]));
    }
    pack(half_tiles - 1);
  }

  /// The reference moves only when a maximum is far above it, which is rare.
  QATTN_DEVICE void raise(const float (&top)[R]) {
    bool far = false;
#pragma unroll
    for (int r = 0; r < R; ++r) far |= top[r] > max[r] + Base::slack;
    if (isa::any(far)) this->raise_maxima(top);
  }

  /// A tile's part of the row sums.
  QATTN_DEVICE void add_sums(const Scales& x, const std::uint32_t (&count)[S::halves][R]) {
#pragma unroll
    for (int h = 0; h < S::halves; ++h) {
      const float weight = isa::exp2(-x.v_log[h]);
#pragma unroll
      for (int r = 0; r < R; ++r) {
        const float weighed = isa::to_float(static_cast<std::int32_t>(count[h][r])) * weight;
        sum[r] = fmaf(weighed, share[r] * (1.0f / Base::share_unit), sum[r]);
      }
      poison = fmaf(x.k[h], 0.0f, poison);
    }
    std::uint32_t all[R];
#pragma unroll
    for (int r = 0; r < R; ++r) {
      all[r] = count[0][r];
      if constexpr (S::halves > 1) all[r] += count[1][r];
    }
    this->add_excess(all, share);
  }

  // ---- The edge tile --------------------------------------------------------------------------

  /// A tile that is plain but for bounds. Half the rows of a causal one see nothing of its second
  /// half: without its exponentials causal calls are 1 to 2 % faster (H100, D 128, S 1024 to
  /// 16384). With its maxima behind a branch, too, ptxas spills 500 bytes and they are 9 to 16 %
  /// slower. e4m3 P gained nothing.
  QATTN_DEVICE void attend_edge(const Products& s, const Scales& x, int tile) {
    const auto bounds = this->edge_bounds(x.flags, tile);
    Scores y;
    float scale[S::halves][R], top[R], most[R];
    this->edge_products(s, bounds, y);
#pragma unroll
    for (int r = 0; r < R; ++r) {
#pragma unroll
      for (int h = 0; h < S::halves; ++h) {
        scale[h][r] = this->edge_scale(r, x.k[h]);
        const float largest = this->largest_of(&y[0][half_tiles * h][2 * r]);
        const float score = fmaf(largest, scale[h][r], x.v_log[h]);
        top[r] = h == 0 ? score : fmaxf(top[r], score);
        most[r] = h == 0 ? largest : fmaxf(most[r], largest);
      }
    }
    this->row_maxima(top);
    this->spoil_overflow(most, top);
    raise(top);
    float ref[R];
#pragma unroll
    for (int r = 0; r < R; ++r) {
      share[r] = isa::exp2(top[r] - this->reference(max[r])) * (Base::share_unit / 255);
      ref[r] = log2_255 - this->reference(top[r]);
    }
    std::uint32_t count[S::halves][R] = {};
#pragma unroll
    for (int h = 0; h < S::halves; ++h) {
      if (h > 0 && !bounds.upper) {
        clear_codes(h);
        break;
      }
      const float offset[R] = {ref[0] + x.v_log[h], ref[1] + x.v_log[h]};
      exponentiate(
          h, [&](int n, int i) { return fmaf(y[0][n][i], scale[h][i / 2], offset[i / 2]); },
          count[h], [](int, std::uint32_t) {});
    }
    add_sums(x, count);
  }

  /// P of half `h` is zero.
  QATTN_DEVICE void clear_codes(int h) {
#pragma unroll
    for (int n = 2 * h; n < 2 * h + 2; ++n) {
#pragma unroll
      for (std::uint32_t& word : codes[n]) word = 0;
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
    this->finish_scores(s, tile, key_scale, [](Scores&) {}, [](int) { return false; });
    this->hide_half(s, facts.flags);
    float far[R] = {}, run[R];  // run: the rows' references
    this->bring_near(s, far);
    tile::each_score(s, [&](int, int key, float& x) {
      if (x != -tile::infinity()) x += table(S::log_at, key);
    });
    float top[R];
#pragma unroll
    for (int r = 0; r < R; ++r) top[r] = -tile::infinity();
    tile::each_score(s, [&](int r, int, float& x) { top[r] = fmaxf(top[r], x); });
    this->row_maxima(top);
    this->raise_far_maxima(top, far, run);
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const float ref = this->reference(top[r]) - log2_255;
      share[r] = isa::exp2(top[r] - run[r]) * (Base::share_unit / 255);
#pragma unroll
      for (int n = 0; n < S::n_tiles; n += 2) {
        const float *a = s[0][n] + 2 * r, *b = s[0][n + 1] + 2 * r;
        codes[n / 4][r + n / 2 % 2 * 2] =
            isa::pack_u8(isa::exp2(a[0] - ref), isa::exp2(a[1] - ref), isa::exp2(b[0] - ref),
                         isa::exp2(b[1] - ref));
      }
    }
    const int length = static_cast<int>(work.k.length) - tile;
    add_weights(tails, length);
    float log_from = -tile::infinity();
    if constexpr (S::halves > 1) {
      const auto fact = [&](int at, int h) {
        return isa::load_shared<std::uint32_t>(tails + h * S::tail_bytes + at);
      };
      constexpr int range = S::flags_at + 4;
      if (length > slot_tile && uneven_tiles(fact(range, 0), fact(range, 1)) != 0) {
        const float largest = fmaxf(formats::float_of(fact(S::largest_at, 0)),
                                    formats::float_of(fact(S::largest_at, 1)));
        log_from = isa::log2(largest * formats::kRoundedShare);
      }
    }
    add_unrounded(s, table, run, log_from);
  }

  /// What add_weights() leaves out of the sums of rows: tokens whose V is far smaller than their
  /// half's largest, with their unrounded P, and bad ones, which make the rows that see them NaN.
  /// Those whose log is below `log_from` are so beside the other half: their rounded P leaves
  /// again.
  template <class Table>
  QATTN_DEVICE void add_unrounded(const Scores& s, Table table, const float (&run)[R],
                                  float log_from) {
#pragma unroll
    for (int n = 0; n < S::n_tiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int r = i / 2, key = 8 * n + lane % 4 * 2 + i % 2;
        const float x = s[0][n][i];
        if (x == -tile::infinity()) continue;
        const float plain = table(S::plain_at, key), log = table(S::log_at, key);
        if (!tile::is_nan(x) && plain == 0.0f && log >= log_from) continue;
        const float mass = isa::exp2(x - log - run[r]);
        const std::uint32_t word = codes[n / 4][r + n / 2 % 2 * 2];
        const auto code = static_cast<std::int32_t>(word >> (16 * (n % 2) + 8 * (i % 2)) & 0xff);
        const float rounded = isa::to_float(code) * isa::exp2(-log);
        sum[r] +=
            plain == 0.0f ? mass - rounded * (share[r] * (1.0f / Base::share_unit)) : plain * mass;
      }
    }
  }

  /// Sums of the rounded P, those of rows and what the output has too much. For rows two more of V
  /// hold the high and low byte of each key's weight, in the order of P's fragments. `length`: keys
  /// of the tile that exist.
  QATTN_DEVICE void add_weights(SharedAddress tails, int length) {
    std::uint32_t all[R] = {};
#pragma unroll
    for (int h = 0; h < S::halves; ++h) {
#pragma unroll
      for (int b = 0; b < slot_tile / 16; ++b) {
#pragma unroll
        for (int r = 0; r < R; ++r) {
          all[r] = isa::dot4_u8(codes[2 * h + b / 2][r + b % 2 * 2], 0x01010101u, all[r]);
        }
      }
      if (h * slot_tile >= length) continue;  // there are no tables
      const SharedAddress tail = tails + h * S::tail_bytes;
      std::int32_t high[R] = {}, low[R] = {};
#pragma unroll
      for (int b = 0; b < slot_tile / 16; ++b) {  // 16 keys: a lane holds four of them
        const SharedAddress at = tail + S::weights_at + 16 * b + lane % 4 * 4;
        const auto w_high = isa::load_shared<std::uint32_t>(at);
        const auto w_low = isa::load_shared<std::uint32_t>(at + slot_tile);
#pragma unroll
        for (int r = 0; r < R; ++r) {
          const std::uint32_t word = codes[2 * h + b / 2][r + b % 2 * 2];
          high[r] = dot4_mixed(word, w_high, high[r]);
          low[r] = dot4_mixed(word, w_low, low[r]);
        }
      }
      const float unit = isa::load_shared<float>(tail + S::unit_at);
#pragma unroll
      for (int r = 0; r < R; ++r) {
        const float by = share[r] * (1.0f / Base::share_unit);
        sum[r] += isa::to_float(256 * high[r] + low[r]) * unit * by;
      }
    }
    this->add_excess(all, share);
  }

  /// c + the sum of four products of an unsigned and a signed byte.
  QATTN_DEVICE static std::int32_t dot4_mixed(std::uint32_t a, std::uint32_t b, std::int32_t c) {
    // a = 128 + (a ^ 0x80) as signed bytes.
    return isa::dot4_s8(a ^ 0x80808080u, b, c) + 128 * isa::dot4_s8(0x01010101u, b, 0);
  }
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
