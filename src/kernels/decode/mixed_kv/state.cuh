// What a warp of Decode holds, and its softmax.
//
// Scores are transposed, S^T = K Q^T, sixteen tokens by eight query rows an mma, and so is the
// output, O^T = V^T P^T: a group of four or eight query heads fills half of the tensor work that
// rows as M would need. Accumulators of a lane (g = lane / 4, t = lane % 4): S^T[m][n][i] is token
// g + 8 (i / 2) of block row m, query row 8 n + 2 t + i % 2; O^T the same with channels.
//
// Which token a row of S^T is depends on V's bits, so that P^T, transposed by movmatrix, meets the
// four tokens that each word of V holds: row g of m is quad place(m, g / 2), tokens 2 (g % 2) and,
// in row g + 8, 2 (g % 2) + 1 of it.
//
//   V bits   blocks a tile   block of (m, h)    quad of (m, h)      word of V in lane t
//   8, 16    1               0                  h                   quad t
//   4        2               h / 2              h % 2 + 2 m         block t / 2, quads t % 2 (+ 2)
//   2, 3     4               h                  m                   block t, all quads
//
// P is 2^(s - base) with base at most 14 below the row's maximum so far, 2^8 at the time that base
// was chosen: O is rescaled when a row outgrows f16, not at every tile. P carries V's scale,
// relative to a power of two, `v_unit`, that no scale so far exceeds; so P fits into f16.
#pragma once

#include "formats/bits.hpp"
#include "isa/fragment.hpp"
#include "kernels/attention/common/score.hpp"
#include "kernels/decode/mixed_kv/params.hpp"

namespace qattn::kernels {

inline namespace QATTN_TARGET {

/// Blocks in a tile: 1, 2 or 4.
QATTN_CONSTEXPR int tile_shift(int v_bits) { return v_bits >= 8 ? 0 : v_bits == 4 ? 1 : 2; }
QATTN_CONSTEXPR int tile_blocks(int v_bits) { return 1 << tile_shift(v_bits); }

/// What codes of plane `i` are worth in an f16 register, in units of 2^-24, as a power of two:
/// codes are masked, not shifted, and subnormal f16 are 2^-24 times their bits.
QATTN_CONSTEXPR int plane_shift(int bits, int i) {
  return bits >= 8 ? 0 : bits == 4 ? 4 * i : bits == 3 ? i / 2 * 4 : 2 * i;
}

template <DecodeConfig C>
struct DecodeState {
  using S = DecodeShape<C>;
  using F = isa::MmaTransposedFragment;
  static constexpr int N = C.n;
  static constexpr float headroom = 14.0f, start = 8.0f;  ///< of P in f16, as powers of two

  const DecodeParams& p;
  int lane = isa::lane(), g = lane >> 2, t = lane & 3;
  const int warp = isa::warp();
  const isa::SharedAddress shared = isa::shared_base();
  int unit, first_row;
  const std::uint32_t* set_queries = nullptr;  ///< of the set, where not in shared memory

  float o[S::groups][2][N][4];
  float ones[1][N][4];          ///< sums of P, by a row of codes that are 1
  float base[N][2], sum[N][2];  ///< sum: of this lane's tokens
  float rows_factor;            ///< from products with rows to units of log2
  float v_unit = 1, v_inverse = 0;

  QATTN_DEVICE DecodeState(const DecodeParams& params, std::int64_t the_unit)
      : p(params), unit(static_cast<int>(the_unit)) {
    first_row = unit / static_cast<int>(p.pairs()) * p.unit_rows;
    const float to_log2 = p.softmax_scale * tile::log2_e;
    rows_factor = to_log2 * formats::reciprocal(isa::load_global(p.query_scale + unit));
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        base[n][c] = -tile::infinity();
        sum[n][c] = 0;
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        ones[0][n][i] = 0;
#pragma unroll
        for (int m = 0; m < 2 * S::groups; ++m) o[m / 2][m % 2][n][i] = 0;
      }
    }
  }

  QATTN_DEVICE isa::SharedAddress at(int place) const {
    return shared + static_cast<isa::SharedAddress>(place);
  }
  QATTN_DEVICE isa::SharedAddress ring() const { return at(S::ring + warp * S::ring_bytes); }

  /// At the start of a tile. Compilers would keep every lane's addresses of every pair of bits
  /// through the loop over tiles, in local memory.
  QATTN_DEVICE void forget_lane() {
    lane = isa::opaque(isa::lane()) & 31;
    g = lane >> 2;
    t = lane & 3;
  }

  /// Row of the unit of accumulator column c.
  QATTN_DEVICE int row(int n, int c) const { return F::tile_rows * n + F::row(lane, c); }

  /// Block and first token of what this lane holds in row m of tiles; V's bits.
  template <int V>
  QATTN_DEVICE int block_of() const {
    const int h = g >> 1;
    return V >= 8 ? 0 : V == 4 ? h >> 1 : h;
  }
  template <int V>
  QATTN_DEVICE int quad_of(int m) const {
    const int h = g >> 1;
    return V >= 8 ? h : V == 4 ? (h & 1) + 2 * m : m;
  }

  /// What rows are to have: softmax scale * q.mean in units of log2 (which = 0), -2^-24 times the
  /// sum of Q's f16 values (1), and what K's noise is multiplied with (2;
  /// DecodeCodes::add_noise()). In shared memory: registers are short.
  QATTN_DEVICE isa::SharedAddress fact(int n, int column, int which) const {
    return isa::shared_base() +
           static_cast<isa::SharedAddress>(S::facts + (n * 4 + column) * 24 + which * 8);
  }
  QATTN_DEVICE isa::Pair load_facts(int n, int which) const {
    const auto words = isa::load_shared<isa::Words2>(fact(n, t, which));
    return {formats::float_of(words.w[0]), formats::float_of(words.w[1])};
  }
  QATTN_DEVICE void store_facts(int set) const {
    for (int r = isa::thread(); r < 8 * N; r += S::threads) {
      const float* facts = p.facts_of(unit, set, r);
      const auto at = static_cast<isa::SharedAddress>(r % 2 * 4);
      isa::store_shared(fact(r / 8, r % 8 / 2, 0) + at,
                        isa::load_global(facts) * (p.softmax_scale * tile::log2_e));
      isa::store_shared(fact(r / 8, r % 8 / 2, 1) + at, isa::load_global(facts + 1) * -0x1p-24f);
      isa::store_shared(fact(r / 8, r % 8 / 2, 2) + at,
                        isa::load_global(facts + 2) * (0.5f * tile::ln_2 * 0x1p-48f));
    }
  }

  // ---- Masks ----------------------------------------------------------------------------------

  /// Where the blocks of a tile begin and which tokens live, for tiles that need a mask. Blocks
  /// that the tile lacks have none.
  struct TileTokens {
    std::int32_t first;   ///< position of the lane's block
    std::uint32_t alive;  ///< its tokens
    std::uint32_t bad;    ///< those whose K is bad
    DecodePair pair;      ///< loaded here: few tiles ask, and a unit would begin with its loads
  };

  QATTN_DEVICE bool visible(const TileTokens& tokens, int token, int n, int c) const {
    if ((tokens.alive >> token & 1) == 0) return false;
    const int query = (first_row + row(n, c)) % p.queries;
    const std::int32_t at = tokens.first + token;
    if (at < tokens.pair.visible_begin(p, query) || at >= tokens.pair.visible_end(p, query))
      return false;
    const std::int32_t newest = at - tokens.pair.position(p, 0);
    if (p.tree == nullptr || newest < 0) return true;
    return isa::load_global(p.tree + std::int64_t{tokens.pair.batch} * p.tree_stride[0] +
                            query * p.tree_stride[1] + newest * p.tree_stride[2]) != 0;
  }

  /// Bit (m N + n) 4 + i: accumulator i of (m, n) is a token that its row sees. One loop: it
  /// divides. `alive`: bits of the lane's two tokens in row m; bits 2 and 3: their K is bad.
  template <int V, int M>
  QATTN_DEVICE std::uint32_t look(const TileTokens& tokens, std::uint32_t (&alive)[M]) const {
    std::uint32_t seen = 0;
#pragma unroll 1
    for (int bit = 0; bit < 4 * M * N; ++bit) {
      const int m = bit / (4 * N), n = bit / 4 % N, i = bit % 4;
      const int token = 4 * quad_of<V>(m) + 2 * (g & 1) + i / 2;
      if (visible(tokens, token, n, i % 2)) seen |= 1u << bit;
    }
#pragma unroll
    for (int m = 0; m < M; ++m) {
      const int first = 4 * quad_of<V>(m) + 2 * (g & 1);
      alive[m] = tokens.alive >> first & 3;
      if constexpr (C.by_channel) alive[m] |= (tokens.bad >> first & 3) << 2;
    }
    return seen;
  }

  // ---- Softmax --------------------------------------------------------------------------------

  static QATTN_DEVICE std::int32_t signed_bits(float x) {
    return static_cast<std::int32_t>(formats::bits_of(x));
  }

  /// Multiplies O, its sums of P, and the row sums.
  QATTN_DEVICE void rescale(const float (&alpha)[N][2], float v_factor) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) sum[n][c] *= alpha[n][c];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float factor = alpha[n][i % 2] * v_factor;
        ones[0][n][i] *= factor;
#pragma unroll
        for (int m = 0; m < 2 * S::groups; ++m) o[m / 2][m % 2][n][i] *= factor;
      }
    }
  }

  /// V's scales of another tier may be far from those so far: the next tile chooses v_unit anew.
  QATTN_DEVICE void forget_unit() { v_inverse = tile::infinity(); }

  /// Masks, new bases and a new unit where they are needed. In: s in units of log2. Out: -inf where
  /// a row may not look.
  template <int M>
  QATTN_DEVICE void settle(float (&s)[M][N][4], const float (&v_scale)[M][2],
                           const std::uint32_t (&alive)[M]) {
    float top_scale = 0;
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        // fmaxf leaves NaN out.
        if ((alive[m] >> h & 1) != 0) top_scale = fmaxf(top_scale, v_scale[m][h]);
      }
    }
    float alpha[N][2];
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float top = -tile::infinity();
#pragma unroll
        for (int m = 0; m < M; ++m) top = fmaxf(top, fmaxf(s[m][n][c], s[m][n][c + 2]));
        top = isa::join_row<F>(top, [](float a, float b) { return fmaxf(a, b); });
        const bool higher = top > base[n][c] + headroom;  // any number is above -inf
        const float next = higher ? top - start : base[n][c];
        alpha[n][c] = higher ? isa::exp2(base[n][c] - next) : 1.0f;
        base[n][c] = next;
      }
    }
    top_scale = isa::join_row<F>(top_scale, [](float a, float b) { return fmaxf(a, b); });
    const bool fresh = v_inverse == tile::infinity();
    float factor = 1.0f;
    if (fresh || top_scale * v_inverse > 1.0f) {
      // The next power of two; scales are f16 or 2^-24, so never beyond float32's normal numbers.
      const std::uint32_t up = (formats::bits_of(top_scale) + 0x7fffffu) & 0x7f800000u;
      const float next = up == 0 ? v_unit : formats::float_of(up);
      factor = v_unit * formats::float_of(0x7f000000u - formats::bits_of(next));
      v_unit = next;
      v_inverse = formats::float_of(0x7f000000u - formats::bits_of(next));
    }
    rescale(alpha, factor);
  }

  /// Scores of a tile whose tokens are not all there, not all seen, or beyond the reference, which
  /// moves. Returns bits (m N + n) 4 + i: P is 0 even where V's scale is NaN.
  template <int V, int M, class TokensOf>
  QATTN_DEVICE std::uint32_t scores_again(const float (&acc)[M][N][4], const float (&k)[M][2],
                                          const float (&added)[N][2], const float (&v_scale)[M][2],
                                          bool special, TokensOf tokens_of, float (&s)[M][N][4],
                                          float (&v)[M][2]) {
    std::uint32_t hidden = 0;
    std::uint32_t seen = ~0u, alive[M];
    if (special) {
      seen = look<V, M>(tokens_of(block_of<V>()), alive);
    } else {
#pragma unroll
      for (int m = 0; m < M; ++m) alive[m] = 3;
    }
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
      for (int n = 0; n < N; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float score = fmaf(acc[m][n][i], k[m][i / 2], added[n][i % 2]);
          const bool bad = C.by_channel && (alive[m] >> (2 + i / 2) & 1) != 0;
          s[m][n][i] = (seen >> ((m * N + n) * 4 + i) & 1) == 0 ? -tile::infinity()
                       : bad                                    ? tile::quiet_nan()
                                                                : score;
        }
      }
    }
    settle(s, v_scale, alive);
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
      for (int n = 0; n < N; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float b = base[n][i % 2];
          s[m][n][i] = b == -tile::infinity() && !tile::is_nan(s[m][n][i]) ? -tile::infinity()
                                                                           : s[m][n][i] - b;
          hidden |= s[m][n][i] == -tile::infinity() ? 1u << ((m * N + n) * 4 + i) : 0u;
        }
      }
      v[m][0] = v_scale[m][0] * v_inverse, v[m][1] = v_scale[m][1] * v_inverse;
    }
    return hidden;
  }

  /// From scores less their reference to P times V's scales and the tile's sums of P.
  template <int V, int M>
  QATTN_DEVICE void exponentiate(float (&s)[M][N][4], const float (&v)[M][2], std::uint32_t hidden,
                                 float (&mass)[N][2]) {
#pragma unroll
    for (int n = 0; n < N; ++n) mass[n][0] = mass[n][1] = 0;
#pragma unroll
    for (int m = 0; m < M; ++m) {
      const float plane = 1.0f / static_cast<float>(1 << plane_shift(V, m));
      const float v_plane[2] = {v[m][0] * plane, v[m][1] * plane};
#pragma unroll
      for (int n = 0; n < N; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float e = isa::exp2(s[m][n][i]);
          mass[n][i % 2] += e;
          s[m][n][i] = e * v_plane[i / 2];
        }
      }
    }
    if (hidden != 0) {
#pragma unroll
      for (int m = 0; m < M; ++m) {
#pragma unroll
        for (int n = 0; n < N; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            if ((hidden >> ((m * N + n) * 4 + i) & 1) != 0) s[m][n][i] = 0;
          }
        }
      }
    }
  }

  /// From scores to P^T as B's fragments: x[m][n][2]. `acc` times k_factor plus `added` is a score
  /// in units of log2. `special`: some token is not there or some row does not see it.
  template <int V, int M, bool Codes, class TokensOf>
  QATTN_DEVICE void softmax(float (&acc)[M][N][4], const float (&k_factor)[M][2],
                            const float (&v_scale)[M][2], bool special, TokensOf tokens_of,
                            std::uint32_t (&x)[M][N][2], float (&mass)[N][2]) {
    float k[M][2], added[N][2];
#pragma unroll
    for (int m = 0; m < M; ++m) k[m][0] = k_factor[m][0], k[m][1] = k_factor[m][1];
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const isa::Pair offset = Codes ? load_facts(n, 0) : isa::Pair{0, 0};
      added[n][0] = offset.lo, added[n][1] = offset.hi;
    }
    if (p.softcap > 0) cap(acc, k, added);
    float s[M][N][4], v[M][2];
    // Bits of floats from 0 on have their order as integers, and NaN is the largest: one
    // instruction compares three of them, where a chain of comparisons would wait for each other's
    // predicates.
    std::int32_t top = 0, top_scale = 0;
#pragma unroll
    for (int m = 0; m < M; ++m) {
      v[m][0] = v_scale[m][0] * v_inverse, v[m][1] = v_scale[m][1] * v_inverse;
      top_scale = isa::max3(top_scale, signed_bits(v[m][0]), signed_bits(v[m][1]));
#pragma unroll
      for (int n = 0; n < N; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          s[m][n][i] = fmaf(acc[m][n][i], k[m][i / 2], added[n][i % 2] - base[n][i % 2]);
        }
        top = isa::max3(top, signed_bits(s[m][n][0]), signed_bits(s[m][n][1]));
        top = isa::max3(top, signed_bits(s[m][n][2]), signed_bits(s[m][n][3]));
      }
    }
    const bool careful =
        !isa::all(!special && top <= signed_bits(headroom) && top_scale <= signed_bits(1.0f));
    const std::uint32_t hidden =
        careful ? scores_again<V>(acc, k, added, v_scale, special, tokens_of, s, v) : 0;
    exponentiate<V>(s, v, hidden, mass);
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
      for (int n = 0; n < N; ++n) {
        x[m][n][0] = isa::transpose_matrix(isa::pack_f16(s[m][n][0], s[m][n][1]));
        x[m][n][1] = isa::transpose_matrix(isa::pack_f16(s[m][n][2], s[m][n][3]));
      }
    }
#pragma unroll
    for (int n = 0; n < N; ++n) {
      sum[n][0] += mass[n][0];
      sum[n][1] += mass[n][1];
    }
  }

  /// Puts capped scores in the place of products.
  template <int M>
  QATTN_DEVICE void cap(float (&acc)[M][N][4], float (&k)[M][2], float (&added)[N][2]) {
    const float most = p.softcap * tile::log2_e, inverse = formats::reciprocal(most);
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
      for (int n = 0; n < N; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          acc[m][n][i] =
              tile::soft_cap(fmaf(acc[m][n][i], k[m][i / 2], added[n][i % 2]), most, inverse);
        }
      }
      k[m][0] = k[m][1] = 1.0f;
    }
#pragma unroll
    for (int n = 0; n < N; ++n) added[n][0] = added[n][1] = 0;
  }

  /// Notes what each row gave to the tile's blocks; `at` the block's place in p.lists, or negative.
  template <int V>
  QATTN_DEVICE void note_mass(const float (&mass)[N][2], std::int64_t at) {
    // The lanes that share a block: g / 2 / (blocks of a tile) apart. The first step leaves each
    // lane one of its two rows.
    constexpr int lanes = V >= 8 ? 32 : V == 4 ? 16 : 8;
    const bool odd = (lane & 4) != 0;
    const std::int64_t block = p.chunk_of(first_row) * p.mass_chunk + at;
#pragma unroll
    for (int n = 0; n < N; ++n) {
      float total = odd ? mass[n][1] : mass[n][0];
      total += isa::shuffle_xor(odd ? mass[n][0] : mass[n][1], 4);
#pragma unroll
      for (int mask = 8; mask < lanes; mask *= 2) total += isa::shuffle_xor(total, mask);
      const float own_base = odd ? base[n][1] : base[n][0];
      if (at >= 0 && lane % lanes < 8) {
        // log2(0) is -inf, also beside a base of -inf
        isa::store_global(p.mass_log + block * p.unit_rows + 8 * n + 2 * t + (lane >> 2 & 1),
                          total == 0 ? -tile::infinity() : isa::log2(total) + own_base);
      }
    }
  }

  /// Codes lie on a grid about `centre`: takes its part out of O, at the end of a tier.
  QATTN_DEVICE void take_centre(float centre) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float part = centre * ones[0][n][i];
        ones[0][n][i] = 0;
#pragma unroll
        for (int m = 0; m < 2 * S::groups; ++m) o[m / 2][m % 2][n][i] -= part;
      }
    }
  }
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
