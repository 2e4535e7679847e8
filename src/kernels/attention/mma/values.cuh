// Softmax of the mma.sync prefill kernels: references, P in its format, and its product with V.
#pragma once

#include "formats/lost_share.hpp"
#include "kernels/attention/mma/bad_values.cuh"
#include "kernels/attention/mma/product.cuh"
#include "kernels/attention/rows/row_state.cuh"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

/// Softmax, P and its product with V. `Kernel`: MmaRows.
template <class Kernel>
struct MmaValues {
  using S = typename Kernel::Shape;
  using F = typename S::Fragment;
  using K = typename S::KeyFragment;
  using V = typename S::Values;
  using Scores = typename Kernel::Scores;
  static constexpr int M = Kernel::M, R = Kernel::R;

  Kernel& k;

  /// What a tile's weight is multiplied with to join P V.
  static constexpr float share_unit = S::direct_sums ? u8_share_unit : 1.0f;

  // ---- Softmax and product with V -------------------------------------------------------------

  /// The largest of this lane's numbers of the tile.
  QATTN_DEVICE void lane_maxima(Scores& s, float (&top)[R]) const {
#pragma unroll
    for (int r = 0; r < R; ++r) top[r] = -tile::infinity();
    // In the order in which the products end: a tree of maxima was 2 % slower on an H200.
    tile::each_score<K>(s, [&](int r, int, float& x) { top[r] = fmaxf(top[r], x); });
  }
  /// Of all four lanes that share a row the largest of scale[r] * score.
  QATTN_DEVICE void scaled_maxima(Scores& s, const float (&scale)[R], float (&top)[R]) const {
    lane_maxima(s, top);
#pragma unroll
    for (int r = 0; r < R; ++r) top[r] *= scale[r];
    isa::row_maxima<F>(top);
  }

  /// 16-bit P. The matrix unit sums rows, as a product with a column of ones, or lanes do.
  QATTN_DEVICE void attend_16bit(Scores& s, const float (&scale)[R]) const {
    float top[R], mass[M][1][4] = {};
    lane_maxima(s, top);
    k.state.take_peaks(top, scale, k.output);
    constexpr std::uint32_t two_ones = S::pv == Element::f16 ? 0x3c003c00 : 0x3f803f80;
    const std::uint32_t one = k.map.lane < 4 ? two_ones : 0;  // in column 0, which lane t = 0 sums
    const std::uint32_t ones[1][2] = {{one, one}};
#pragma unroll
    for (int step = 0; step < S::keys / 16; ++step) {
      std::uint32_t a[M][4];
#pragma unroll
      for (int m = 0; m < M; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // register i: row half i % 2, score tile 2 step + i / 2
          const int r = 2 * m + i % 2;
          const float* x = s[m][2 * step + i / 2] + i % 2 * 2;
          const float lo = isa::exp2(fmaf(x[0], scale[r], -k.state.max[r]));
          const float hi = isa::exp2(fmaf(x[1], scale[r], -k.state.max[r]));
          a[m][i] = S::pv == Element::f16 ? isa::pack_f16(lo, hi) : isa::pack_bf16(lo, hi);
          if constexpr (S::lane_sums) add_halves(a[m][i], k.state.sum[r]);
        }
      }
      if constexpr (!S::lane_sums) {
        if (step == 0) {
          isa::mma_zero<S::pv, S::pv, M, 1>(mass, a, ones);
        } else {
          isa::mma<S::pv, S::pv, M, 1>(mass, a, ones);
        }
      }
      multiply_16bit(step, a);
    }
#pragma unroll
    for (int r = 0; !S::lane_sums && r < R; ++r) k.state.sum[r] += mass[r / 2][0][r % 2 * 2];
  }
  QATTN_DEVICE static void add_halves(std::uint32_t pair, float& to) {
    const isa::Pair x = S::pv == Element::f16 ? isa::unpack_f16(pair) : isa::unpack_bf16(pair);
    to += x.lo + x.hi;
  }

  /// out += P V for 16 keys.
  QATTN_DEVICE void multiply_16bit(int step, const std::uint32_t (&a)[M][4]) const {
    constexpr int pairs = S::d_tiles / 2, chunk = pairs % 4 == 0 ? 4 : 3;
    const SharedAddress v =
        V::place(k.at_stage(S::v_at), step * 16 + k.map.lane % 16, k.map.lane / 16 * 16);
#pragma unroll
    for (int first = 0; first < pairs; first += chunk) multiply_channels<chunk>(first, v, a);
  }

  template <int Pairs>
  QATTN_DEVICE void multiply_channels(int first, SharedAddress v,
                                      const std::uint32_t (&a)[M][4]) const {
    std::uint32_t r[Pairs][4], b[2 * Pairs][2];
    SharedAddress row[Pairs];
#pragma unroll
    for (int n = 0; n < Pairs; ++n) row[n] = V::along(v, (first + n) * 32);
    isa::load_matrix_transposed<Pairs>(r, row);
#pragma unroll
    for (int n = 0; n < 2 * Pairs; ++n) {
      b[n][0] = r[n / 2][n % 2 * 2], b[n][1] = r[n / 2][n % 2 * 2 + 1];
    }
    isa::mma_at<S::pv, S::pv, M, 2 * Pairs>(k.output.o, 2 * first, a, b);
  }

  // ---- u8 P -----------------------------------------------------------------------------------

  using Codes = std::uint32_t[S::keys / 32][M][4];

  /// u8 P, relative to its own row's maximum in this tile. `log`: log2 of V's token scales.
  QATTN_DEVICE void attend_u8(Scores& s, const float (&scale)[R]) const {
    const SharedAddress tail = k.at_stage(S::tail_at);
    const int column = k.map.lane % 4 * 2;
    float far[R] = {}, run[R];  // run: the rows' references
    if constexpr (S::general) k.rules.bring_near(k.p, s, far);
#pragma unroll
    for (int n = 0; n < S::n_tiles; ++n) {
      const auto log = isa::load_shared<isa::Words2>(tail + 4 * (8 * n + column));
#pragma unroll
      for (int m = 0; m < M; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float& x = s[m][n][i];
          x = fmaf(x, scale[2 * m + i / 2], __builtin_bit_cast(float, log.w[i % 2]));
        }
      }
    }
    float top[R], share[R], one[R];
#pragma unroll
    for (int r = 0; r < R; ++r) one[r] = 1.0f;
    scaled_maxima(s, one, top);
    if constexpr (S::general) {
      k.state.update_far_max(top, far, run, k.output);
    } else {
      k.state.update_max(top, k.output);
#pragma unroll
      for (int r = 0; r < R; ++r) run[r] = k.state.reference(k.state.max[r]);
    }
#pragma unroll
    for (int r = 0; r < R; ++r) {
      share[r] = isa::exp2(top[r] - run[r]) * (share_unit / 255);
      top[r] = k.state.reference(top[r]) - log2_255;
    }
    Codes a;
    float before[R];
    round_p(s, top, share, a, before);
    std::uint32_t count[R];
    count_codes(a, count);
    const unsigned lossy = find_lossy(count, share, before);
    if (isa::any(lossy != 0)) {
      Codes rest;
      split_codes(s, top, lossy, a, rest);
      float part[R];
#pragma unroll
      for (int r = 0; r < R; ++r) part[r] = share[r] * (1.0f / 255);
      count_codes(rest, count);
      take_count(count, part);
      multiply_bytes(rest, part);
      count_codes(a, count);
    }
    take_count(count, share);
    multiply_bytes(a, share);
  }

  /// Codes of P, of which 255 stands at 2^ref, and the row sums, which take P unrounded. `before`:
  /// this lane's sums of P, in codes, before rounding.
  QATTN_DEVICE void round_p(const Scores& s, const float (&ref)[R], const float (&share)[R],
                            Codes& a, float (&before)[R]) const {
    const SharedAddress inverse = MmaBadValues<Kernel>{k}.weight_address(k.map.lane % 4 * 2);
    float mass[R] = {};
#pragma unroll
    for (int r = 0; r < R; ++r) before[r] = 0.0f;
#pragma unroll
    for (int n = 0; n < S::n_tiles; n += 2) {
      float by[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        by[i] = isa::load_shared<float>(inverse + 4 * (8 * (n + i / 2) + i % 2));
      }
#pragma unroll
      for (int r = 0; r < R; ++r) {
        const float* x[2] = {s[r / 2][n] + r % 2 * 2, s[r / 2][n + 1] + r % 2 * 2};
        float e[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) e[i] = isa::exp2(x[i / 2][i % 2] - ref[r]);
        a[n / 4][r / 2][r % 2 + n / 2 % 2 * 2] = isa::pack_u8(e[0], e[1], e[2], e[3]);
        before[r] += (e[0] + e[1]) + (e[2] + e[3]);
#pragma unroll
        for (int i = 0; i < 4; ++i) mass[r] = fmaf(e[i], by[i], mass[r]);
      }
    }
#pragma unroll
    for (int r = 0; r < R; ++r) {
      k.state.sum[r] = fmaf(mass[r], share[r] * (1.0f / share_unit), k.state.sum[r]);
    }
  }

  /// The rows of this thread whose codes of the tile miss more than formats::kMostLost of those so
  /// far, a bit each. `before`: of this lane, the sum of P before rounding. Lanes that have lost
  /// less than that by themselves spare the others the question.
  QATTN_DEVICE unsigned find_lossy(const std::uint32_t (&count)[R], const float (&share)[R],
                                   const float (&before)[R]) const {
    float lost[R], most[R];
    bool some = false;
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const auto codes = static_cast<std::int32_t>(count[r]);
      lost[r] = before[r] - isa::to_float(codes);
      if constexpr (S::direct_sums) {  // in the units of `excess`
        lost[r] *= 0x1p-75f;
        lost[r] *= share[r] * 0x1p-74f;
        most[r] = fmaf(u8_sum_as_float<S>(codes), share[r], k.state.excess[r]) * formats::kMostLost;
      } else {  // which nothing else needs here
        lost[r] *= share[r];
        k.state.excess[r] = fmaf(isa::to_float(codes), share[r], k.state.excess[r]);
        most[r] = k.state.excess[r] * formats::kMostLost;
      }
      some |= fabsf(lost[r]) > most[r];
    }
    if (!isa::any(some)) return 0;
    isa::add_rows<F>(lost);
    isa::add_rows<F>(most);
    unsigned lossy = 0;
#pragma unroll
    for (int r = 0; r < R; ++r) lossy |= fabsf(lost[r]) > most[r] ? 1u << r : 0u;
    return lossy;
  }

  /// Codes rounded down of the rows in `lossy`, and what they leave, in 1 / 255 of a code.
  QATTN_DEVICE void split_codes(const Scores& s, const float (&ref)[R], unsigned lossy, Codes& a,
                                Codes& rest) const {
#pragma unroll
    for (int n = 0; n < S::n_tiles; n += 2) {
#pragma unroll
      for (int r = 0; r < R; ++r) {
        const float* x[2] = {s[r / 2][n] + r % 2 * 2, s[r / 2][n + 1] + r % 2 * 2};
        float whole[4], left[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          constexpr float round = 0x1.8p23f;  // leaves whole numbers
          const float e = isa::exp2(x[i / 2][i % 2] - ref[r]);
          whole[i] = (e - 0.5f + round) - round;
          left[i] = (e - whole[i]) * 255.0f;
        }
        const bool split = (lossy >> r & 1) != 0;
        std::uint32_t& word = a[n / 4][r / 2][r % 2 + n / 2 % 2 * 2];
        if (split) word = isa::pack_u8(whole[0], whole[1], whole[2], whole[3]);
        rest[n / 4][r / 2][r % 2 + n / 2 % 2 * 2] =
            split ? isa::pack_u8(left[0], left[1], left[2], left[3]) : 0;
      }
    }
  }

  /// Sums of this lane's codes of each row.
  QATTN_DEVICE static void count_codes(const Codes& a, std::uint32_t (&count)[R]) {
#pragma unroll
    for (int r = 0; r < R; ++r) {
      count[r] = 0;
#pragma unroll
      for (int n = 0; n < S::keys / 16; ++n) {
        const std::uint32_t word = a[n / 2][r / 2][r % 2 + n % 2 * 2];
        count[r] = isa::dot4_u8(word, 0x01010101u, count[r]);
      }
    }
  }

  /// What P V has too much, because V's codes are 128 too large: as a sum of its own, or for
  /// multiply_bytes().
  QATTN_DEVICE void take_count(std::uint32_t (&count)[R], const float (&share)[R]) const {
    if constexpr (S::direct_sums) {
      k.state.add_excess(count, share);
    } else {
      isa::add_rows<F>(count);
#pragma unroll
      for (int r = 0; r < R; ++r) {
        k.surplus[r] = static_cast<std::int32_t>(count[r] * value_offset);
      }
    }
  }

  /// e4m3 P, 2^8 times itself relative to the running maximum.
  QATTN_DEVICE void attend_e4m3(Scores& s, const float (&scale)[R]) const {
    float top[R];
    scaled_maxima(s, scale, top);
    k.state.update_max(top, k.output);
    float one[R];
    Codes a;
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int r = 2 * m + h;
        const float offset = S::p_log2 - k.state.reference(k.state.max[r]);
        one[r] = 1.0f;
        const auto pack = [&](const float* x) {
          return std::uint32_t{isa::pack_e4m3(isa::exp2(fmaf(x[0], scale[r], offset)),
                                              isa::exp2(fmaf(x[1], scale[r], offset)))};
        };
#pragma unroll
        for (int n = 0; n < S::n_tiles; n += 2) {
          a[n / 4][m][h + n / 2 % 2 * 2] = pack(s[m][n] + 2 * h) | pack(s[m][n + 1] + 2 * h) << 16;
        }
      }
    }
    add_weights(a);
    if constexpr (S::pv_scaled && !S::general) {
      multiply_in_place([&](int first, Products& acc) { multiply_chunk<false>(a, first, acc); });
    } else {
      multiply_bytes(a, one);
    }
  }

  /// acc = or, if not `Zero`, += the product of 64 keys.
  template <bool Zero, int N>
  QATTN_DEVICE static void multiply_pair(isa::Accumulator<S::pv> (&acc)[M][N][4], const Codes& a,
                                         const std::uint32_t (&b0)[N][2],
                                         const std::uint32_t (&b1)[N][2]) {
    if constexpr (S::pv_scaled) {
      std::uint32_t sa[M], sb[N];
#pragma unroll
      for (int m = 0; m < M; ++m) sa[m] = unit_scales;
#pragma unroll
      for (int n = 0; n < N; ++n) sb[n] = unit_scales;
#pragma unroll
      for (int i = 0; Zero && i < M * N * 4; ++i) acc[i / 4 / N][i / 4 % N][i % 4] = 0;
      isa::mma_scaled<S::pv_product, M, N>(acc, a[0], b0, sa, sb);
      isa::mma_scaled<S::pv_product, M, N>(acc, a[1], b1, sa, sb);
    } else {
      static_assert(Zero);  // see multiply_bytes()
      isa::mma_zero<S::pv, S::pv, M, N>(acc, a[0], b0);
      isa::mma<S::pv, S::pv, M, N>(acc, a[1], b1);
    }
  }

  /// Row sums of the rounded e4m3 P: an extra row of V holds ones.
  QATTN_DEVICE void add_weights(const Codes& a) const {
    std::uint32_t r[1][4];
    const SharedAddress row[1] = {
        V::place(k.at_stage(S::v_at), S::d + k.map.lane % 8, k.map.lane / 8 * 16)};
    isa::load_matrix<1>(r, row);
    isa::Accumulator<S::pv> acc[M][1][4];
    const std::uint32_t b0[1][2] = {{r[0][0], r[0][1]}}, b1[1][2] = {{r[0][2], r[0][3]}};
    multiply_pair<true>(acc, a, b0, b1);
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {  // column 0 lies in lane t = 0, the others hold zeros
        k.state.sum[2 * m + h] += acc[m][0][2 * h] + acc[m][0][2 * h + 1];
      }
    }
  }

  static constexpr int value_chunk = 2;  // channel tiles a step of multiply_bytes
  using Products = isa::Accumulator<S::pv>[M][value_chunk][4];

  /// acc = or, if not `Zero`, += P V of channel tiles [first, first + value_chunk).
  template <bool Zero = true>
  QATTN_DEVICE void multiply_chunk(const Codes& a, int first, Products& acc) const {
    const SharedAddress v = V::place(k.at_stage(S::v_at), k.map.lane % 8, k.map.lane / 8 * 16);
    std::uint32_t r[value_chunk][4], b0[value_chunk][2], b1[value_chunk][2];
    SharedAddress row[value_chunk];
#pragma unroll
    for (int n = 0; n < value_chunk; ++n) row[n] = v + (first + n) * 8 * V::stride;
    isa::load_matrix<value_chunk>(r, row);
#pragma unroll
    for (int n = 0; n < value_chunk; ++n) {
      b0[n][0] = r[n][0], b0[n][1] = r[n][1], b1[n][0] = r[n][2], b1[n][1] = r[n][3];
    }
    multiply_pair<Zero>(acc, a, b0, b1);
  }

  /// out += share * (P V). Inside the tile int32 is exact; e4m3 starts from zero in each, so that
  /// only sums of 64 keys see the matrix unit's accumulator, which is narrow for FP8 (Hopper's
  /// wgmma keeps 13 fraction bits; the same is reported of Ada). The products of the next channels
  /// are under way while these are added.
  QATTN_DEVICE void multiply_bytes(const Codes& a, const float (&share)[R]) const {
    Products acc[2];
    multiply_chunk(a, 0, acc[0]);
#pragma unroll
    for (int first = 0; first < S::d_tiles; first += value_chunk) {
      const int at = first / value_chunk % 2;
      if (first + value_chunk < S::d_tiles) multiply_chunk(a, first + value_chunk, acc[1 - at]);
#pragma unroll
      for (int n = 0; n < value_chunk; ++n) {
        const isa::Pair by = S::general ? channel_scale(8 * (first + n)) : isa::Pair{1.0f, 1.0f};
#pragma unroll
        for (int m = 0; m < M; ++m) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const auto product = acc[at][m][n][i];
            float x;
            if constexpr (S::direct_sums) {
              x = u8_sum_as_float<S>(product);
            } else {
              x = isa::to_float(S::u8 ? product - k.surplus[2 * m + i / 2] : product);
            }
            if constexpr (S::general) x *= i % 2 == 0 ? by.lo : by.hi;
            k.output.o[m][first + n][i] =
                fmaf(x, share[2 * m + i / 2], k.output.o[m][first + n][i]);
          }
        }
      }
    }
  }

  /// out += P V in the matrix unit, whose sums hold 25 bits where there are scales.
  /// multiply(first, acc): acc += P V of channel tiles [first, first + value_chunk).
  template <class Multiply>
  QATTN_DEVICE void multiply_in_place(Multiply multiply) const {
#pragma unroll
    for (int first = 0; first < S::d_tiles; first += value_chunk) {
      float acc[M][value_chunk][4];
#pragma unroll
      for (int i = 0; i < M * value_chunk * 4; ++i) at(acc, 0, i) = at(k.output.o, first, i);
      multiply(first, acc);
#pragma unroll
      for (int i = 0; i < M * value_chunk * 4; ++i) at(k.output.o, first, i) = at(acc, 0, i);
    }
  }
  /// Number i of a chunk of accumulators.
  template <int N>
  QATTN_DEVICE static float& at(float (&x)[M][N][4], int first, int i) {
    return x[i / 4 / value_chunk][first + i / 4 % value_chunk][i % 4];
  }

  /// The scales per channel of a tile of V, where there are any.
  QATTN_DEVICE const float* channel_scales(int tile) const {
    return k.p.v8.channel_scale +
           channel_group(k.p.v8, k.p.k, k.work.k, k.work.b, k.work.kv_head, tile) * k.p.v8.channels;
  }

  /// out *= V's scales, where one a channel serves all tiles.
  QATTN_DEVICE void scale_channels() const {
    k.channels = channel_scales(0);
#pragma unroll
    for (int n = 0; n < S::d_tiles; ++n) {
      const isa::Pair by = channel_scale(8 * n);
#pragma unroll
      for (int m = 0; m < M; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) k.output.o[m][n][i] *= i % 2 == 0 ? by.lo : by.hi;
      }
    }
  }

  /// V's scales of this thread's two channels behind `first`; 1 where scales are per token.
  QATTN_DEVICE isa::Pair channel_scale(int first) const {
    if (k.channels == nullptr) return {1.0f, 1.0f};
    const int c = first + k.map.lane % 4 * 2;
    if (c >= k.p.v8.channels) return {0.0f, 0.0f};
    return {isa::load_global(k.channels + c), isa::load_global(k.channels + c + 1)};
  }
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
