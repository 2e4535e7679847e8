// Tiles of the 16-bit window: one block, in the warp's ring as it lies. There are a dozen of them
// beside thousands of tiles of codes, but one whose loads wait for each other takes an H200 10 us.
#pragma once

#include "formats/hadamard.hpp"
#include "kernels/decode/mixed_kv/codes.cuh"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

/// Tiles of the window: a part that works on its unit's state.
template <DecodeConfig C>
struct DecodeRowTiles {
  using S = DecodeShape<C>;
  using F = typename DecodeState<C>::F;
  using enum isa::Element;
  static constexpr int N = C.n;

  DecodeState<C>& state;

  // ---- Rotation -------------------------------------------------------------------------------

  /// Channel of accumulator i of tile row x of a group.
  QATTN_DEVICE int channel(int group, int x, int i) const {
    return 32 * group + 4 * state.g + 2 * x + i / 2;
  }

  QATTN_DEVICE void multiply_signs() {
#pragma unroll
    for (int group = 0; group < S::groups; ++group) {
#pragma unroll
      for (int x = 0; x < 2; ++x) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float sign = formats::rotation_sign(channel(group, x, i));
#pragma unroll
          for (int n = 0; n < N; ++n) state.o[group][x][n][i] *= sign;
        }
      }
    }
  }

  /// The Hadamard matrix over the channels of O^T: bits of a channel are, from the lowest, i / 2,
  /// x, three of the lane, and the group.
  QATTN_DEVICE void hadamard() {
    const auto butterfly = [](float& a, float& b) {
      const float x = a;
      a = x + b;
      b = x - b;
    };
    const float norm = formats::rotation_norm(C.dv);
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int column = 0; column < 2; ++column) {
#pragma unroll
        for (int group = 0; group < S::groups; ++group) {
          auto& tile = state.o[group];
          butterfly(tile[0][n][column], tile[0][n][column + 2]);
          butterfly(tile[1][n][column], tile[1][n][column + 2]);
          butterfly(tile[0][n][column], tile[1][n][column]);
          butterfly(tile[0][n][column + 2], tile[1][n][column + 2]);
        }
#pragma unroll
        for (int distance = 1; distance < S::groups; distance *= 2) {
#pragma unroll
          for (int group = 0; group < S::groups; ++group) {
            if ((group & distance) != 0) continue;
#pragma unroll
            for (int x = 0; x < 4; ++x) {
              butterfly(state.o[group][x / 2][n][x % 2 * 2 + column],
                        state.o[group + distance][x / 2][n][x % 2 * 2 + column]);
            }
          }
        }
      }
#pragma unroll
      for (int k = 0; k < 8 * S::groups; ++k) {
        float& v = state.o[k / 8][k / 4 % 2][n][k % 4];
#pragma unroll
        for (int mask = 4; mask < 32; mask *= 2) {
          const float other = isa::shuffle_xor(v, mask);
          v = (state.lane & mask) != 0 ? other - v : v + other;
        }
        v *= norm;
      }
    }
  }

  /// O so far is of rotated V; rows are not. They differ by this.
  QATTN_DEVICE void unrotate() {
    if (state.p.cache.rotate == 0) return;
    state.forget_lane();  // signs and all
    hadamard();
    multiply_signs();
  }
  QATTN_DEVICE void rotate() {
    if (state.p.cache.rotate == 0) return;
    state.forget_lane();
    multiply_signs();
    hadamard();
  }

  /// V of codes may lack its set's mean, rows have it; O so far is of the one or of the other. The
  /// combination adds the first set's mean to what is as of codes.
  QATTN_DEVICE void move_by_mean(int set, float sign) {
    if (state.p.cache.smooth_v == 0) return;
    const DecodePair pair(state.p, Quotient(state.unit, state.p.pairs()).remainder);
    if (pair.bad) return;
    state.forget_lane();
    const float* mean =
        state.p.cache.v_mean(pair.slot, state.p.layer, pair.head, set) + 4 * state.g;
    // O is in units of v_unit * 2^24.
    const float factor =
        sign * 0x1p-24f * formats::float_of(0x7f000000u - formats::bits_of(state.v_unit));
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float total = state.sum[n][c] * factor;
        total = isa::row_sum<F>(total);
#pragma unroll
        for (int group = 0; group < S::groups; ++group) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            float& x = state.o[group][i / 2][n][i % 2 * 2 + c];
            x = fmaf(total, isa::load_global(mean + 32 * group + i), x);
          }
        }
      }
    }
  }

  // ---- Products -------------------------------------------------------------------------------

  template <isa::Element E>
  QATTN_DEVICE void multiply_row_keys(isa::SharedAddress keys, float (&acc)[1][N][4]) const {
    const std::uint32_t* queries =
        state.p.query_words + state.p.query_plane(state.unit, query_high);
    const std::int64_t to_low = std::int64_t{state.p.unit_rows} * (C.d / 2);
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[0][n][i] = 0;
    }
#pragma unroll 2
    for (int steps = 0; steps < S::k_steps / 2; ++steps) {
      isa::Words4 w[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        w[h] = isa::load_shared<isa::Words4>(
            keys + static_cast<isa::SharedAddress>(
                       ((2 * state.g + h) * C.d + 32 * steps + 8 * state.t) * 2));
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const std::uint32_t a[1][4] = {
            {w[0].w[2 * half], w[1].w[2 * half], w[0].w[2 * half + 1], w[1].w[2 * half + 1]}};
#pragma unroll
        for (int part = 0; part < 2; ++part) {
          std::uint32_t b[N][2];
#pragma unroll
          for (int n = 0; n < N; ++n) {
            const auto words = isa::load_global(reinterpret_cast<const isa::Words2*>(
                queries + part * to_low + (((2 * steps + half) * N + n) * 32 + state.lane) * 2));
            b[n][0] = words.w[0], b[n][1] = words.w[1];
          }
          isa::mma<E, E, 1, N>(acc, a, b);
        }
      }
    }
  }

  /// Bits of the tokens, of this lane's four, whose V is not finite here.
  template <isa::Element E>
  static QATTN_DEVICE std::uint32_t bad_rows(const isa::Words2 (&w)[S::groups][4]) {
    constexpr std::uint32_t exponent = E == f16 ? 0x7c00u : 0x7f80u;
    std::uint32_t bad = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int k = 0; k < 2 * S::groups; ++k) {
        const std::uint32_t word = w[k / 2][i].w[k % 2];
        const bool wild = (word & exponent) == exponent || (word >> 16 & exponent) == exponent;
        bad |= wild ? 1u << i : 0u;
      }
    }
    return bad;
  }

  /// The four tokens' rows of V at this lane's channels, zeros where a row has NaN or Inf. Returns
  /// those tokens as bits of the block.
  template <isa::Element E>
  QATTN_DEVICE std::uint32_t load_row_values(isa::SharedAddress values,
                                             isa::Words2 (&w)[S::groups][4]) const {
#pragma unroll
    for (int group = 0; group < S::groups; ++group) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        w[group][i] = isa::load_shared<isa::Words2>(
            values + static_cast<isa::SharedAddress>(
                         ((4 * state.t + i) * C.dv + 32 * group + 4 * state.g) * 2));
      }
    }
    std::uint32_t bad = bad_rows<E>(w);
    if (!isa::any(bad != 0)) return 0;
    bad = isa::join_row<F>(bad, [](std::uint32_t a, std::uint32_t b) { return a | b; });
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int k = 0; k < 2 * S::groups; ++k) {
        if ((bad >> i & 1) != 0) w[k / 2][i].w[k % 2] = 0;
      }
    }
    std::uint32_t all = bad << 4 * state.t;
    all |= isa::shuffle_xor(all, 1);
    return all | isa::shuffle_xor(all, 2);
  }

  template <isa::Element E>
  QATTN_DEVICE void multiply_row_values(const isa::Words2 (&w)[S::groups][4],
                                        const std::uint32_t (&x)[N][2]) {
#pragma unroll
    for (int group = 0; group < S::groups; ++group) {
      std::uint32_t a[2][4];
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        // Channels 4 g + 2 k and + 1 of tokens {0, 2} and {1, 3}.
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          const std::uint32_t first = w[group][odd].w[k], second = w[group][odd + 2].w[k];
          a[k][2 * odd] = isa::byte_permute(first, second, 0x5410u);
          a[k][2 * odd + 1] = isa::byte_permute(first, second, 0x7632u);
        }
      }
      isa::mma<E, E, 2, N>(state.o[group], a, x);
    }
  }

  /// P in bf16 would be too coarse: its pairs in f16 become two bf16 of 8 bits each.
  static QATTN_DEVICE void split(const std::uint32_t (&x)[N][2], std::uint32_t (&high)[N][2],
                                 std::uint32_t (&low)[N][2]) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const isa::Pair f = isa::unpack_f16(x[n][i]);
        high[n][i] = isa::pack_bf16(f.lo, f.hi);
        const isa::Pair kept = isa::unpack_bf16(high[n][i]);
        low[n][i] = isa::pack_bf16(f.lo - kept.lo, f.hi - kept.hi);
      }
    }
  }

  template <isa::Element E, class TokensOf>
  QATTN_DEVICE void run_rows(isa::SharedAddress block, bool special, TokensOf tokens_of,
                             float (&mass)[N][2]) {
    float acc[1][N][4];
    multiply_row_keys<E>(block, acc);
    DecodeCodes<C>::template spoil_infinite<1>(acc);
    isa::Words2 w[S::groups][4];
    const std::uint32_t bad = load_row_values<E>(block + 2 * formats::kv_block_tokens * C.d, w);
    // In units of the codes' products, whose scale for rows is 2^-24.
    const float k[1][2] = {{state.rows_factor, state.rows_factor}};
    float v[1][2];
#pragma unroll
    for (int h = 0; h < 2; ++h)
      v[0][h] = (bad >> (2 * state.g + h) & 1) != 0 ? tile::quiet_nan() : 0x1p-24f;
    std::uint32_t x[1][N][2];
    state.template softmax<16, 1, false>(acc, k, v, special, tokens_of, x, mass);
    if constexpr (E == f16) {
      multiply_row_values<E>(w, x[0]);
    } else {
      std::uint32_t high[N][2], low[N][2];
      split(x[0], high, low);
      multiply_row_values<E>(w, high);
      multiply_row_values<E>(w, low);
    }
  }
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
