// Products with packed codes as a stage of shared memory holds them.
//
// A code stays where its word has it: masked with 0x000f000f << 4 i, a word gives a pair of f16
// that are subnormal, 2^-24 times code * 2^(4 i), exactly, and tensor cores take subnormal
// operands as they are (tests/isa/conformance_sm80.hpp asks them). So a pair costs one LOP3,
// without the bias of 1024 that 0x6400 brings, nor a subtraction; Q's fragments for plane i are
// 2^(-4 i) times smaller, and for V P is. 3-bit codes take a LOP3 more for each pair of planes;
// bytes, which hold one code each, one PRMT.
//
// Where K has a scale a channel, codes become values: with 0x6400 above them they are 1024 + code *
// 2^(4 i), one FMA in f16 leaves the grid's lower neighbour, exactly, and another times the scale
// with half of it added gives the value, rounded once (half of a subnormal scale is rounded, too).
//
// Chunks of 16 bytes are permuted inside lines of 128 bytes so that no load has a bank conflict:
// see k_chunk() and v_chunk().
#pragma once

#include "formats/kv/quantize.hpp"
#include "kernels/decode/mixed_kv/state.cuh"

namespace qattn::kernels {

/// A tile in its stage: K codes of all blocks, V codes of all, scales of all: of a block K's and
/// then V's 16 or, where K's are a channel's, V's 16 and K's D. Blocks' channels so begin 8 banks
/// apart.
struct TileLayout {
  int blocks, k_bytes, v_bytes, scale_bytes;  ///< bytes: of a block

  QATTN_CONSTEXPR int k(int block) const { return block * k_bytes; }
  QATTN_CONSTEXPR int v(int block) const { return blocks * k_bytes + block * v_bytes; }
  QATTN_CONSTEXPR int scales(int block) const {
    return blocks * (k_bytes + v_bytes) + block * scale_bytes;
  }
  QATTN_CONSTEXPR int bytes() const { return scales(blocks); }
};
/// `blocks`: tile_blocks(v_bits).
template <DecodeConfig C>
QATTN_CONSTEXPR TileLayout tile_layout(int k_bits, int v_bits, int blocks) {
  return {blocks, 2 * C.d * k_bits, 2 * C.dv * v_bits, C.by_channel ? 32 + 2 * C.d : 64};
}

/// Where a chunk of a block's K codes goes: 8-byte loads take, in half a warp, two quads of one
/// block (V in 4 or 8 bits) or one quad of two blocks, of four rows of 64 bytes.
QATTN_HD int k_chunk(int chunk, int block) { return chunk ^ (chunk >> 2 & 2) ^ (block & 1); }
/// And of its V codes: 16-byte loads take, in a quarter of a warp, two chunks of four rows, which
/// are of one block, two or four.
QATTN_HD int v_chunk(int chunk, int block, int v_bits, int dv) {
  const int row = v_bits == 3 ? 0 : chunk / (dv / 4);
  return chunk ^ ((block * (v_bits >> 1) ^ row) & 3) << 1;
}

inline namespace QATTN_TARGET {

/// State with products of tiles of codes. The state is its base, not a part: with a reference nvcc
/// 13.0 compiles head dimension 64 for more than a quarter of an hour.
template <DecodeConfig C>
struct DecodeCodes : DecodeState<C> {
  using S = DecodeShape<C>;
  using Base = DecodeState<C>;
  using Base::Base;
  using Base::N, Base::g, Base::lane, Base::o, Base::ones, Base::t, Base::set_queries;
  using enum isa::Element;

  template <int Bits>
  static constexpr int planes = Bits == 8   ? 1
                                : Bits == 4 ? 2
                                            : 4;

  /// Q's fragment of a k step, for K's codes in place.
  template <int K>
  QATTN_DEVICE void load_query(std::uint32_t (&b)[N][2], int step) const {
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const int at = ((step * N + n) * 32 + lane) * 2;
      isa::Words2 words;
      if constexpr (S::has_queries) {
        words = isa::load_shared<isa::Words2>(isa::shared_base() + S::queries_of(K) +
                                              static_cast<isa::SharedAddress>(at * 4));
      } else {
        words = isa::load_global(reinterpret_cast<const isa::Words2*>(set_queries + at));
      }
      b[n][0] = words.w[0], b[n][1] = words.w[1];
    }
  }
  /// The unit's queries for a set, to where products find them.
  QATTN_DEVICE void store_queries(int set) {
    const std::uint32_t* from =
        this->p.query_words + this->p.query_plane(this->unit, query_codes + set);
    if constexpr (S::has_queries) {
      copy_queries(from);
    } else {
      set_queries = from;
    }
  }
  /// As they are for bytes, and divided by what codes in place are worth for 3 and 4 bits, whose
  /// later half of k steps is of planes 4 bits up, and for 2.
  QATTN_DEVICE void copy_queries(const std::uint32_t* from) const {
    for (int i = isa::thread(); i < S::k_steps * N * 16; i += S::threads) {
      const auto words = isa::load_global(reinterpret_cast<const isa::Words4*>(from) + i);
      const int step = i / (16 * N);
      const auto store = [&](int bits, int shift) {
        const std::uint32_t factor = static_cast<std::uint32_t>(15 - shift) << 10;
        isa::Words4 scaled;
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          scaled.w[w] = isa::multiply_f16(words.w[w], factor | factor << 16);
        }
        isa::store_shared(
            isa::shared_base() + S::queries_of(bits) + static_cast<isa::SharedAddress>(i * 16),
            scaled);
      };
      store(8, 0);
      store(4, plane_shift(4, step / (S::k_steps / planes<4>)));
      store(2, plane_shift(2, step / (S::k_steps / planes<2>)));
    }
  }

  /// Words of codes as planes are masked out of them. 3 bits: a plane's two low bits and its high
  /// bit become three side by side, of planes 0 and 2 in `a` and of 1 and 3 in `b`, with one LOP3
  /// for a pair of planes.
  struct Packed {
    std::uint32_t a, b;
  };
  /// 3 bits: `high` has plane i's high bit at bit 2 i + `at` of every byte, at 0 or 1.
  template <int Bits>
  static QATTN_DEVICE Packed merge_bits(std::uint32_t word, std::uint32_t high, int at) {
    if constexpr (Bits == 3) {
      constexpr std::uint32_t low = 0x33333333u;
      return {(word & low) | (high << (2 - at) & ~low), (word >> 2 & low) | (high >> at & ~low)};
    } else {
      return {word, word};
    }
  }

  /// Two registers of a fragment, elements {0, 2} and {1, 3} of a word of codes, in plane `Plane`.
  template <int Bits, int Plane>
  static QATTN_DEVICE void unpack(const Packed& x, std::uint32_t& even, std::uint32_t& odd) {
    if constexpr (Bits == 8) {
      even = isa::byte_permute(x.a, 0u, 0x4240u);
      odd = isa::byte_permute(x.a, 0u, 0x4341u);
    } else {
      constexpr std::uint32_t one = Bits == 4 ? 0x000f000fu : Bits == 3 ? 0x00070007u : 0x00030003u;
      constexpr std::uint32_t mask = one << plane_shift(Bits, Plane);
      const std::uint32_t word = Bits == 3 && Plane % 2 == 1 ? x.b : x.a;
      even = word & mask;
      odd = word >> 8 & mask;
    }
  }

  /// Channels {0, 2} and {1, 3} of a k step of this lane: their scales, and half of them.
  struct ChannelScales {
    std::uint32_t even, odd, half_even, half_odd;
  };
  static QATTN_DEVICE ChannelScales load_channel_scales(isa::SharedAddress at) {
    constexpr std::uint32_t half = 0x38003800u;
    const auto words = isa::load_shared<isa::Words2>(at);
    const std::uint32_t even = isa::byte_permute(words.w[0], words.w[1], 0x5410u);
    const std::uint32_t odd = isa::byte_permute(words.w[0], words.w[1], 0x7632u);
    return {even, odd, isa::multiply_f16(even, half), isa::multiply_f16(odd, half)};
  }

  /// As unpack(), but values.
  template <int Bits, int Plane>
  static QATTN_DEVICE void unpack_values(const Packed& x, const ChannelScales& scales,
                                         std::uint32_t& even, std::uint32_t& odd) {
    constexpr int shift = plane_shift(Bits, Plane);
    // In f16: 2^-shift, and -(2^(10 - shift) + 2^(Bits - 1)).
    constexpr std::uint32_t back = static_cast<std::uint32_t>(15 - shift) << 10;
    constexpr std::uint32_t offset =
        0x8000u | static_cast<std::uint32_t>(25 - shift) << 10 | 1u << (Bits - 1 + shift);
    const auto value = [](std::uint32_t codes, std::uint32_t scale, std::uint32_t half) {
      return isa::fma_f16(isa::fma_f16(codes, back | back << 16, offset | offset << 16), scale,
                          half);
    };
    constexpr std::uint32_t thousand = 0x64006400u;
    if constexpr (Bits == 8) {
      even = isa::byte_permute(x.a, thousand, 0x5250u);
      odd = isa::byte_permute(x.a, thousand, 0x5351u);
    } else {
      unpack<Bits, Plane>(x, even, odd);
      even |= thousand;
      odd |= thousand;
    }
    even = value(even, scales.even, scales.half_even);
    odd = value(odd, scales.odd, scales.half_odd);
  }

  /// Where this lane's two tokens of every block row are, in row `row` of K's panel. Four rows on
  /// are 256 bytes on: k_chunk() leaves the chunk's higher bits alone.
  template <int V, int M>
  QATTN_DEVICE void locate_keys(isa::SharedAddress stage, const TileLayout& layout, int row,
                                isa::SharedAddress (&at)[M]) const {
#pragma unroll
    for (int m = 0; m < M; ++m) {
      const int block = this->template block_of<V>();
      const int chunk = k_chunk(row * 4 + this->template quad_of<V>(m), block);
      at[m] = stage + static_cast<isa::SharedAddress>(layout.k(block) + chunk * 16 + (g & 1) * 8);
    }
  }
  template <int M>
  static QATTN_DEVICE void load_keys(const isa::SharedAddress (&at)[M], int rows_on,
                                     std::uint32_t (&w)[M][2]) {
#pragma unroll
    for (int m = 0; m < M; ++m) {
      const auto words =
          isa::load_shared<isa::Words2>(at[m] + static_cast<isa::SharedAddress>(rows_on * 64));
      w[m][0] = words.w[0], w[m][1] = words.w[1];
    }
  }

  /// `channels`: where this lane's first four channels have their scales, if they have any.
  template <int K, int M, int Plane>
  QATTN_DEVICE void multiply_plane(const Packed (&w)[M][2], isa::SharedAddress channels, int step,
                                   float (&acc)[M][N][4]) const {
    std::uint32_t b[N][2], a[M][4];
    if constexpr (C.by_channel) {
      const ChannelScales scales =
          load_channel_scales(channels + static_cast<isa::SharedAddress>(step * 32));
      load_query<8>(b, step);
#pragma unroll
      for (int m = 0; m < M; ++m) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          unpack_values<K, Plane>(w[m][i], scales, a[m][i], a[m][i + 2]);
        }
      }
    } else {
      load_query<K>(b, step);
#pragma unroll
      for (int m = 0; m < M; ++m) {
#pragma unroll
        for (int i = 0; i < 2; ++i) unpack<K, Plane>(w[m][i], a[m][i], a[m][i + 2]);
      }
    }
    isa::mma<f16, f16, M, N>(acc, a, b);
  }

  /// S^T of a tile without its scales; with them where they are K's channels'.
  template <int K, int V, int M>
  QATTN_DEVICE void multiply_keys(isa::SharedAddress stage, const TileLayout& layout,
                                  float (&acc)[M][N][4]) const {
    // Products of one block would wait for each other: two sums of every other step.
    constexpr int chains = M == 1 ? 2 : 1;
    float other[M][N][4] = {};
    constexpr float centre = 0.5f * static_cast<float>((1 << K) - 1);
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const isa::Pair sums = C.by_channel ? isa::Pair{0, 0} : this->load_facts(n, 1);
#pragma unroll
      for (int m = 0; m < M; ++m) {
        acc[m][n][0] = acc[m][n][2] = centre * sums.lo;
        acc[m][n][1] = acc[m][n][3] = centre * sums.hi;
      }
    }
    constexpr int rows = S::k_steps / planes<K>;  // of four words, in a quarter of the panel
    // Bit i of row r of the plane of high bits is that of channels 4 (r + D / 32 i) and on.
    constexpr int high_rows = C.d >= 128 ? C.d / 128 : 1, low_rows = C.d / 16;
    std::uint32_t high[high_rows][M][2] = {};
    const isa::SharedAddress channels =
        stage +
        static_cast<isa::SharedAddress>(layout.scales(this->template block_of<V>()) + 32 + 8 * t);
    isa::SharedAddress keys[M];
    locate_keys<V>(stage, layout, t, keys);
    if constexpr (K == 3) {
      isa::SharedAddress high_keys[M];
      if constexpr (C.d == 64) locate_keys<V>(stage, layout, low_rows + (t & 1), high_keys);
#pragma unroll
      for (int j = 0; j < high_rows; ++j) {
        if constexpr (C.d == 64) {
          load_keys(high_keys, 0, high[j]);
        } else {
          load_keys(keys, low_rows + 4 * j, high[j]);
        }
      }
    }
#pragma unroll
    for (int j = 0; j < rows; ++j) {
      std::uint32_t w[M][2];
      Packed x[M][2];
      load_keys(keys, 4 * j, w);
      const int at = C.d == 64 ? t >> 1 : j / high_rows;
#pragma unroll
      for (int m = 0; m < M; ++m) {
#pragma unroll
        for (int i = 0; i < 2; ++i) x[m][i] = merge_bits<K>(w[m][i], high[j % high_rows][m][i], at);
      }
      multiply_plane<K, M, 0>(x, channels, j, j % chains == 0 ? acc : other);
      if constexpr (planes < K >> 1) multiply_plane<K, M, 1>(x, channels, j + rows, acc);
      if constexpr (planes < K >> 2) {
        multiply_plane<K, M, 2>(x, channels, j + 2 * rows, acc);
        multiply_plane<K, M, 3>(x, channels, j + 3 * rows, acc);
      }
    }
    if constexpr (chains > 1) {
#pragma unroll
      for (int n = 0; n < N; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[0][n][i] += other[0][n][i];
      }
    }
  }

  /// Which row of V's panels this lane reads, and of which block.
  template <int V>
  QATTN_DEVICE int value_block() const {
    return V == 8 ? 0 : V == 4 ? t >> 1 : t;
  }

  /// Where this lane's chunk is, of the first 32 channels of row `row`. Eight chunks on are 128
  /// bytes on: v_chunk() leaves the chunk's higher bits alone.
  template <int V>
  QATTN_DEVICE isa::SharedAddress locate_values(isa::SharedAddress stage, const TileLayout& layout,
                                                int row) const {
    const int block = value_block<V>(), chunk = v_chunk(row * (C.dv / 4) + g, block, V, C.dv);
    return stage + static_cast<isa::SharedAddress>(layout.v(block) + chunk * 16);
  }

  template <int V, int Plane, int M>
  QATTN_DEVICE void multiply_values_plane(const Packed (&w)[4], int group,
                                          const std::uint32_t (&x)[M][N][2]) {
    std::uint32_t a[2][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) unpack<V, Plane>(w[i], a[i / 2][i % 2], a[i / 2][i % 2 + 2]);
    isa::mma<f16, f16, 2, N>(o[group], a, x[Plane]);
  }

  /// O^T += V^T P^T, and the sums of P.
  template <int V, int M>
  QATTN_DEVICE void multiply_values(isa::SharedAddress stage, const TileLayout& layout,
                                    const std::uint32_t (&x)[M][N][2]) {
    static_assert(planes<V> == M, "a k step takes one plane of every word");
#pragma unroll
    for (int m = 0; m < M; ++m) {
      const std::uint32_t one = 0x00010001u << plane_shift(V, m);
      const std::uint32_t a[1][4] = {{one, one, one, one}};
      isa::mma<f16, f16, 1, N>(ones, a, x[m]);
    }
    const isa::SharedAddress values = locate_values<V>(stage, layout,
                                                       V == 8   ? t
                                                       : V == 4 ? t & 1
                                                                : 0);
    std::uint32_t high[S::groups / 2][4] = {};
    if constexpr (V == 3) {
      // Bit i of word w of the plane of high bits: channel w + dv / 2 (i % 2), quad i / 2.
#pragma unroll
      for (int j = 0; j < S::groups / 2; ++j) {
        const auto words = isa::load_shared<isa::Words4>(values + (C.dv / 4 + j * 8) * 16);
#pragma unroll
        for (int i = 0; i < 4; ++i) high[j][i] = words.w[i];
      }
    }
#pragma unroll
    for (int group = 0; group < S::groups; ++group) {
      const auto w = isa::load_shared<isa::Words4>(values + group * 128);
      Packed packed[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        packed[i] =
            merge_bits<V>(w.w[i], high[group % (S::groups / 2)][i], group < S::groups / 2 ? 0 : 1);
      }
      multiply_values_plane<V, 0>(packed, group, x);
      if constexpr (M > 1) multiply_values_plane<V, 1>(packed, group, x);
      if constexpr (M > 2) {
        multiply_values_plane<V, 2>(packed, group, x);
        multiply_values_plane<V, 3>(packed, group, x);
      }
    }
  }

  /// Scales of this lane's tokens: K's times the factor to units of log2, and V's. Where K's are
  /// its channels' products have them.
  template <int V, int M>
  QATTN_DEVICE void load_scales(isa::SharedAddress stage, const TileLayout& layout,
                                float (&k)[M][2], float (&v)[M][2]) const {
    const float factor = C.by_channel ? this->rows_factor : this->rows_factor * 0x1p24f;
#pragma unroll
    for (int m = 0; m < M; ++m) {
      const int block = this->template block_of<V>();
      const int token = 4 * this->template quad_of<V>(m) + 2 * (g & 1);
      const isa::SharedAddress at =
          stage + static_cast<isa::SharedAddress>(layout.scales(block) + token * 2);
      k[m][0] = k[m][1] = factor;
      if constexpr (!C.by_channel) {
        const isa::Pair keys = isa::unpack_f16(isa::load_shared<std::uint32_t>(at));
        k[m][0] *= keys.lo, k[m][1] *= keys.hi;
      }
      const isa::Pair values =
          isa::unpack_f16(isa::load_shared<std::uint32_t>(at + (C.by_channel ? 0 : 32)));
      v[m][0] = values.lo, v[m][1] = values.hi;
    }
  }

  /// `debias`: half the variance that rounding K left in a score, (softmax_scale s |q|)^2 noise / 2
  /// for K's scale s. In units of products that is `k`, which has s, times a fact of the row.
  template <int M>
  QATTN_DEVICE void add_noise(int k_bits, const float (&k)[M][2], float (&acc)[M][N][4]) const {
    const float noise = formats::kv_noise(k_bits);
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const isa::Pair half = this->load_facts(n, 2);
      const float row[2] = {half.lo * noise, half.hi * noise};
#pragma unroll
      for (int m = 0; m < M; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          acc[m][n][i] = fmaf(k[m][i / 2], row[i % 2], acc[m][n][i]);
        }
      }
    }
  }

  /// Inf in K spoils who sees it, also where the product is -Inf: of the window's rows, and of
  /// values beyond f16, which a window in bf16 or a mean that is subtracted may bring.
  template <int M>
  static QATTN_DEVICE void spoil_infinite(float (&acc)[M][N][4]) {
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
      for (int n = 0; n < N; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (!tile::is_finite(acc[m][n][i])) acc[m][n][i] = tile::quiet_nan();
        }
      }
    }
  }

  /// S^T of a tile whose K has `k_bits`, not V's.
  template <int V, int M>
  QATTN_DEVICE void multiply_keys_of(int k_bits, isa::SharedAddress stage, const TileLayout& layout,
                                     float (&acc)[M][N][4]) const {
    if (V != 8 && k_bits == 8) {
      multiply_keys<8, V, M>(stage, layout, acc);
    } else if (V != 4 && k_bits == 4) {
      multiply_keys<4, V, M>(stage, layout, acc);
    } else if (V != 3 && (V == 2 || k_bits == 3)) {
      multiply_keys<3, V, M>(stage, layout, acc);
    } else {
      multiply_keys<2, V, M>(stage, layout, acc);
    }
  }

  /// `K` 0: see multiply_keys_of().
  template <int K, int V, class TokensOf>
  QATTN_DEVICE void run_codes(isa::SharedAddress stage, int k_bits, bool special,
                              TokensOf tokens_of, float (&mass)[N][2]) {
    constexpr int M = tile_blocks(V);
    const TileLayout layout = tile_layout<C>(K == 0 ? k_bits : K, V, M);
    float acc[M][N][4], k[M][2], v[M][2];
    if constexpr (K == 0) {
      multiply_keys_of<V, M>(k_bits, stage, layout, acc);
    } else {
      multiply_keys<K, V, M>(stage, layout, acc);
    }
    if constexpr (C.by_channel) spoil_infinite<M>(acc);
    load_scales<V, M>(stage, layout, k, v);
    if constexpr (K != 8 && !C.by_channel) {
      if (this->p.debias != 0) add_noise(K == 0 ? k_bits : K, k, acc);
    }
    std::uint32_t x[M][N][2];
    this->template softmax<V, M, true>(acc, k, v, special, tokens_of, x, mass);
    multiply_values<V, M>(stage, layout, x);
  }
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
