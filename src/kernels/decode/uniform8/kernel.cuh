// Decode attention over K and V that come as 8-bit codes in rows: the uniform caches of serving
// libraries, dense, packed or in pages, read once and where they lie. For every NVIDIA GPU from
// sm_80 on.
//
// A block is one warp with up to 8 query rows (the heads of a KV head, times a few queries) and a
// share of the keys; CombineSplits adds up the shares. It holds one tile of 64 keys: the next K
// arrives under softmax and product with V, the next V under the product with K and softmax; page
// numbers are read two tiles ahead, scales one, so that no load waits for another. Nothing is
// shared between warps: what hides latency are the other blocks, as many as shared memory holds.
//
// Products are those of mma.sync with keys, then channels, as the 16 rows and the query rows as the
// 8 columns: S^T = K Q^T and O^T = V^T P^T. K's rows are the left operand as they lie. V is
// transposed by ldmatrix in pairs of channels, and a byte permutation parts the two: even channels
// are the upper eight rows, odd ones the lower. P changes lanes by movmatrix, in 16 bits. Of FP8
// both operands become f16, in which codes and their products are exact: two instructions a word on
// sm_89 and later, and sums in float32.
//
// u8 P is relative to the largest P of its own tile and row, with V's scales of tokens in it; e4m3
// P relative to the running maximum (docs/NUMERICS.md).
//
// On an H200 (one query of 16 sequences of 32768 tokens, heads 32/8, D 128, pages of 16; the kernel
// alone) s8 takes 299 us and e4m3 297, of 230 that a plain read takes. With two tiles a block it
// had 6 blocks a multiprocessor instead of 11 and took 475; with 64-bit divisions in the addresses
// of scales 722.
#pragma once

#include "kernels/decode/uniform8/bytes.cuh"
#include "kernels/decode/uniform8/load.cuh"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

template <Uniform8Config C>
struct Uniform8Decode {
  using Params = Uniform8Params;
  using S = Uniform8Shape<C>;
  static constexpr int R = Uniform8Load<C>::R;
  static constexpr int threads = S::threads, shared_bytes = S::shared_bytes;
  static constexpr int min_blocks = uniform8_blocks(C.d);
  static constexpr bool dependent = true;
  static constexpr bool fp8_qk = C.qk == Element::e4m3;
  static constexpr isa::Target target{fp8_qk ? uniform8_fp8_architecture : 80};
  using F = isa::MmaTransposedFragment;
  using Scores = float[1][S::key_tiles][F::elements];

  Uniform8Load<C> input;
  /// Channel 16 j + 2 g + i / 2, row 2 t + i % 2.
  float out[1][S::channel_tiles][4] = {};
  float max[R], sum[R] = {};
  float code_sum[R] = {};  ///< of u8 P so far, of this lane
  /// Some V that a row sees holds NaN (e4m3): which rows see it must be found out.
  bool careful = false;

  QATTN_DEVICE Uniform8Decode(const Uniform8Params& x, const WorkTile& w) : input(x, w) {
    max[0] = max[1] = -tile::infinity();
  }

  // ---- Integers -------------------------------------------------------------------------------

  /// Integers that are added to its bits need no conversion (at a quarter of the rate of additions)
  /// while they are below 2^22: 128 products of bytes are.
  static constexpr float whole_numbers = formats::whole_numbers;
  static constexpr bool converts = C.d > 128;
  static constexpr std::int32_t first_sum = converts ? 0 : 0x4b400000;

  static QATTN_DEVICE float number(std::int32_t x) {
    return converts ? isa::to_float(x)
                    : formats::float_of(static_cast<std::uint32_t>(x)) - whole_numbers;
  }
  static QATTN_DEVICE float number(float x) { return x; }

  // ---- Scores ---------------------------------------------------------------------------------

  static QATTN_DEVICE std::uint32_t low_codes(std::uint32_t x) {
    return isa::unpack_e4m3(static_cast<std::uint16_t>(x));
  }
  static QATTN_DEVICE std::uint32_t high_codes(std::uint32_t x) {
    return isa::unpack_e4m3(static_cast<std::uint16_t>(x >> 16));
  }

  QATTN_DEVICE void multiply_queries(Scores& s) const {
    using Acc = isa::Accumulator<fp8_qk ? Element::f16 : C.qk>;
    Acc acc[S::key_tiles][1][4];
#pragma unroll
    for (int m = 0; m < S::key_tiles; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[m][0][i] = fp8_qk ? 0 : first_sum;
    }
    const SharedAddress k =
        input.base + static_cast<SharedAddress>(input.lane % 16 * S::row + input.lane / 16 * 16);
#pragma unroll
    for (int step = 0; step < C.d / 32; ++step) {
      std::uint32_t a[S::key_tiles][4];
      SharedAddress row[S::key_tiles];
#pragma unroll
      for (int m = 0; m < S::key_tiles; ++m) row[m] = k + m * 16 * S::row + step * 32;
      isa::load_matrix<S::key_tiles>(a, row);
      if constexpr (!fp8_qk) {
        const std::uint32_t b[1][2] = {{input.q[step][0], input.q[step][1]}};
        isa::mma<C.qk, C.qk, S::key_tiles, 1>(acc, a, b);
      } else {
        // Channels in another order, the same on both sides: a word's first two and last two.
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const std::uint32_t b[1][2] = {
              {low_codes(input.q[step][i]), high_codes(input.q[step][i])}};
          std::uint32_t wide[S::key_tiles][4];
#pragma unroll
          for (int m = 0; m < S::key_tiles; ++m) {
            const std::uint32_t x = a[m][2 * i], y = a[m][2 * i + 1];
            wide[m][0] = low_codes(x), wide[m][1] = low_codes(y);
            wide[m][2] = high_codes(x), wide[m][3] = high_codes(y);
          }
          isa::mma<Element::f16, Element::f16, S::key_tiles, 1>(acc, wide, b);
        }
      }
    }
#pragma unroll
    for (int m = 0; m < S::key_tiles; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s[0][m][i] = number(acc[m][0][i]);
    }
  }

  /// Leaves units of log2. `bad`: bits of the keys whose V is not finite.
  QATTN_DEVICE void finish_scores(Scores& s, int tile, std::uint64_t bad) const {
    tile::each_score<F>(s, [&](int r, int key, float& x) {
      x *= input.row_scale[r] * input.fact(S::scales_at, key);
    });
    if (input.p.softcap > 0) {
      const float inverse = 1.0f / input.p.softcap;
      tile::each_score<F>(s, [&](int, int, float& x) {
        x = tile::soft_cap(x * tile::ln_2, input.p.softcap, inverse) * tile::log2_e;
      });
    }
    if (input.whole(tile) && bad == 0) return;
    int begin[R], end[R];
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const int diagonal = input.query(F::row(input.lane, r)) + input.work.shift;
      begin[r] = visible_begin(input.p.window_left, diagonal);
      end[r] = visible_end(input.p.window_right, diagonal, static_cast<int>(input.work.k.length));
    }
    tile::each_score<F>(s, [&](int r, int key, float& x) {
      const bool sees = tile + key >= begin[r] && tile + key < end[r];
      if (!sees) x = -tile::infinity();
      if (sees && (bad >> key & 1) != 0) x = tile::quiet_nan();
    });
  }

  // ---- Softmax and product with V -------------------------------------------------------------

  QATTN_DEVICE void find_maxima(Scores& s, float (&top)[R]) const {
    top[0] = top[1] = -tile::infinity();
    tile::each_score<F>(s, [&](int r, int, float& x) { top[r] = fmaxf(top[r], x); });
    isa::row_maxima<F>(top);
  }

  /// Takes the tile's maxima into the references. With u8 P, relative to its own tile, any
  /// reference serves that keeps exponentials in range: it moves only when a maximum is far above
  /// it.
  QATTN_DEVICE void update_max(const float (&top)[R]) {
    constexpr float slack = S::u8 ? 32.0f : 0.0f;
    float rescale[R];
    bool changed = false;
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const float next = top[r] > max[r] + slack ? top[r] : max[r];
      rescale[r] = max[r] == -tile::infinity() ? 0.0f : isa::exp2(max[r] - next);
      changed |= next != max[r];
      max[r] = next;
      sum[r] *= rescale[r];
      code_sum[r] *= rescale[r];
    }
    if (!isa::any(changed)) return;
#pragma unroll
    for (int j = 0; j < S::channel_tiles; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) out[0][j][i] *= rescale[i % 2];
    }
  }

  QATTN_DEVICE static float reference(float top) { return top == -tile::infinity() ? 0.0f : top; }

  QATTN_DEVICE static void wait_for_values() {
    isa::copy_async_wait<1>();
    isa::sync_warp();
  }

  /// V's words of 16 channels and 32 keys from `key` on: word m has keys 8 m + 2 t and the one
  /// behind it, each with channels 2 g and 2 g + 1.
  QATTN_DEVICE void load_values(int key, int j, std::uint32_t (&r)[1][4]) const {
    const SharedAddress row[1] = {input.base + S::v_at +
                                  static_cast<SharedAddress>((key + input.lane) * S::row + j * 16)};
    isa::load_matrix_transposed<1>(r, row);
  }

  using Bytes = Uniform8Bytes<S::keys>;
  using Codes = typename Bytes::Codes;

  QATTN_DEVICE void attend_u8(Scores& s) {
    const bool scaled = input.by_token();
    if (scaled) {
      tile::each_score<F>(s, [&](int, int key, float& x) {
        x = x == -tile::infinity() ? x : x + input.fact(S::logs_at, key);
      });
    }
    float top[R], share[R], ref[R], mass[R] = {}, exact[R] = {}, whole[R] = {}, inverse = 1.0f;
    find_maxima(s, top);
    update_max(top);
#pragma unroll
    for (int r = 0; r < R; ++r) {
      ref[r] = reference(top[r]);
      share[r] = isa::exp2(top[r] - reference(max[r])) * (1.0f / 255);
    }
    Codes b, rest = {};
    Bytes::pack(
        s, ref, b,
        [&](int n) { inverse = scaled ? input.fact(S::inverse_at, 8 * n + input.g) : 1.0f; },
        [&](float y, int r) {
          const float z = y + whole_numbers;
          mass[r] = fmaf(y, inverse, mass[r]);  // unrounded
          exact[r] += y;
          whole[r] += z - whole_numbers;
          return z;
        });
    float lost[R];
#pragma unroll
    for (int r = 0; r < R; ++r) {
      sum[r] = fmaf(mass[r], share[r], sum[r]);
      lost[r] = (exact[r] - whole[r]) * share[r];
      code_sum[r] = fmaf(whole[r], share[r], code_sum[r]);
    }
    const unsigned lossy = Bytes::find_lossy(lost, code_sum);
    const bool twice = isa::any(lossy != 0);
    if (twice) Bytes::split(s, ref, lossy, b, rest);
    wait_for_values();
#pragma unroll
    for (int j = 0; j < S::channel_tiles; ++j) {
      multiply_codes(j, b, share);
      if (twice) {
        const float part[R] = {share[0] * (1.0f / 255), share[1] * (1.0f / 255)};
        multiply_codes(j, rest, part);
      }
    }
  }

  /// out += share * (P V) of 16 channels.
  QATTN_DEVICE void multiply_codes(int j, const Codes& b, const float (&share)[R]) {
    std::int32_t acc[1][1][4] = {{{first_sum, first_sum, first_sum, first_sum}}};
#pragma unroll
    for (int step = 0; step < S::keys / 32; ++step) {
      std::uint32_t v[1][4];
      load_values(32 * step, j, v);
      const std::uint32_t a[1][4] = {{isa::byte_permute(v[0][0], v[0][1], 0x6420),
                                      isa::byte_permute(v[0][0], v[0][1], 0x7531),
                                      isa::byte_permute(v[0][2], v[0][3], 0x6420),
                                      isa::byte_permute(v[0][2], v[0][3], 0x7531)}};
      isa::mma<Element::s8, Element::u8, 1, 1>(acc, a, b[step]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      out[0][j][i] = fmaf(number(acc[0][0][i]), share[i % 2], out[0][j][i]);
    }
  }

  QATTN_DEVICE void attend_e4m3(Scores& s) {
    float top[R], offset[R];
    find_maxima(s, top);
    update_max(top);
#pragma unroll
    for (int r = 0; r < R; ++r) offset[r] = S::p_log2 - reference(max[r]);
    std::uint32_t b[S::key_tiles][1][2];
#pragma unroll
    for (int n = 0; n < S::keys / 8; ++n) {  // keys 8 n + g
      const float* x = s[0][n / 2] + n % 2 * 2;
      const std::uint32_t codes = isa::unpack_e4m3(
          isa::pack_e4m3(isa::exp2(x[0] + offset[0]), isa::exp2(x[1] + offset[1])));
      const isa::Pair rounded = isa::unpack_f16(codes);
      sum[0] += rounded.lo, sum[1] += rounded.hi;
      b[n / 2][0][n % 2] = isa::transpose_matrix(codes);
    }
    wait_for_values();
#pragma unroll
    for (int j = 0; j < S::channel_tiles; ++j) {
#pragma unroll
      for (int step = 0; step < S::keys / 32; ++step) {
        std::uint32_t v[1][4];
        load_values(32 * step, j, v);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          // The even channel's two keys below, the odd one's above.
          const std::uint32_t x = isa::byte_permute(v[0][2 * half], 0u, 0x3120);
          const std::uint32_t y = isa::byte_permute(v[0][2 * half + 1], 0u, 0x3120);
          const std::uint32_t a[1][4] = {
              {low_codes(x), high_codes(x), low_codes(y), high_codes(y)}};
          isa::mma_at<Element::f16, Element::f16, 1, 1>(out, j, a, b[2 * step + half]);
        }
      }
    }
  }

  // ---- Values that are not numbers ------------------------------------------------------------

  /// e4m3: zeros in the place of tokens of V that hold NaN; their bits.
  QATTN_DEVICE std::uint64_t clean_values() const {
    std::uint64_t bad = 0;
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {
      const SharedAddress row =
          input.base + S::v_at + static_cast<SharedAddress>((input.lane + 32 * i) * S::row);
      std::uint32_t any = 0;
#pragma unroll 1
      for (int c = 0; c < C.d; c += 16) {
        const auto v = isa::load_shared<isa::Words4>(row + c);
        for (int w = 0; w < 4; ++w) any |= (v.w[w] & 0x7f7f7f7fu) + 0x01010101u;
      }
      const bool found = (any & 0x80808080u) != 0;
      bad |= std::uint64_t{isa::ballot(found)} << 32 * i;
#pragma unroll 1
      for (int c = 0; found && c < C.d; c += 16) isa::store_shared(row + c, isa::Words4{});
    }
    isa::sync_warp();
    return bad;
  }

  QATTN_DEVICE bool all_finite() const {
    float poison = 0.0f;
#pragma unroll
    for (int j = 0; j < S::channel_tiles; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) poison = fmaf(out[0][j][i], 0.0f, poison);
    }
    return isa::all(poison == 0.0f);
  }

  // ---- The tiles ------------------------------------------------------------------------------

  QATTN_DEVICE int last_tile() const {
    return input.work.key_end > input.work.key_begin ? (input.work.key_end - 1) / S::keys * S::keys
                                                     : -1;
  }

  /// From the last to the first. K and V are inputs, which no kernel of the chain writes: the first
  /// copies do not wait for Q.
  QATTN_DEVICE void run_tiles() {
    const int last = last_tile();
    Uniform8Keys keys, next;
    input.load_pages(last, next);
    // The round before the last tile only starts copies: they have one place in the code.
    for (int tile = last + S::keys; tile >= input.work.key_begin; tile -= S::keys) {
      const int ahead = tile - S::keys;
      const bool works = tile <= last, more = ahead >= input.work.key_begin;
      Scores s;
      if (works) {
        input.store_scales(keys);
        isa::copy_async_wait<1>();
        isa::sync_warp();
        multiply_queries(s);
        isa::sync_warp();  // nobody reads K any more
      }
      if (more) input.start_keys(ahead, next);
      isa::copy_async_commit();
      if (more) {
        keys = next;
        input.load_scales(ahead, keys);
        input.load_pages(ahead - S::keys, next);
      }
      if (works) {
        std::uint64_t bad = 0;
        if (careful) {
          wait_for_values();
          bad = clean_values();
        }
        finish_scores(s, tile, bad);
        if constexpr (S::u8) {
          attend_u8(s);
        } else {
          attend_e4m3(s);
        }
        isa::sync_warp();  // nor V
      } else if (!careful) {
        input.load_queries();
      }
      if (more) input.start_values(ahead, keys);
      isa::copy_async_commit();
    }
    isa::copy_async_wait<0>();
  }

  QATTN_DEVICE void forget() {
#pragma unroll
    for (int r = 0; r < R; ++r) max[r] = -tile::infinity(), sum[r] = code_sum[r] = 0.0f;
#pragma unroll
    for (int j = 0; j < S::channel_tiles; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) out[0][j][i] = 0.0f;
    }
  }

  // ---- The end of the rows --------------------------------------------------------------------

  /// V's scales that P does not have.
  QATTN_DEVICE void scale_channels() {
    if (S::u8 && input.by_token()) return;
    const Uniform8Scales& x = input.params.v_scale;
    const float* scale = x.data + (input.p.k.page_table == nullptr ? input.work.b : 0) * x.outer +
                         input.work.kv_head * x.head;
#pragma unroll
    for (int j = 0; j < S::channel_tiles; ++j) {
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const int c = 16 * j + 2 * input.g + odd;
        const float by = input.scale_or_nan(
            c < input.p.v.channels ? isa::load_global(scale + c * x.channel) : 0.0f);
        out[0][j][2 * odd] *= by;
        out[0][j][2 * odd + 1] *= by;
      }
    }
  }

  /// Leaves the rows to CombineSplits.
  QATTN_DEVICE void write_part() {
    const PartsView& parts = input.p.parts;
    const std::int64_t first =
        part_row(input.p, input.work.q, input.work.b, input.work.head, input.work.first_row) +
        std::int64_t{input.work.split} * parts.rows;
    isa::add_rows<F>(sum);
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const int local = F::row(input.lane, r);
      if (input.query(local) >= input.work.q.length) continue;
      const std::int64_t row = first + local;
      const float top = max[r] - S::p_log2;
      if (isa::leads_row<F>(input.lane)) {
        isa::store_global(reinterpret_cast<isa::Words2*>(parts.state + 2 * row),
                          isa::Words2{{formats::bits_of(top), formats::bits_of(sum[r])}});
      }
      float* to = parts.out + row * parts.channels + 2 * input.g;
#pragma unroll
      for (int j = 0; j < S::channel_tiles; ++j) {
        isa::store_global(
            reinterpret_cast<isa::Words2*>(to + 16 * j),
            isa::Words2{{formats::bits_of(out[0][j][r]), formats::bits_of(out[0][j][2 + r])}});
      }
    }
  }

  static QATTN_DEVICE void run(const Uniform8Params& x) {
    if constexpr (!fp8_qk || isa::target_architecture >= uniform8_fp8_architecture) run_block(x);
  }

  static QATTN_DEVICE void run_block(const Uniform8Params& x) {
    isa::grid_dependency_launch();
    if (x.call.verdict != nullptr) isa::grid_dependency_wait();  // for schedule/varlen.cuh
    const WorkTile work = locate_work(x.call, isa::block().x, S::rows, S::keys);
    if ((work.q.bad || work.k.bad) && isa::lane() == 0) {
      isa::atomic_or_global(x.call.error, tile::error_sequence);
    }
    Uniform8Decode self(x, work);
    const bool any = work.first_row < work.q.rows && self.last_tile() >= 0;
    if (!any) isa::grid_dependency_wait();
    if (work.first_row >= work.q.rows) return;
    if (any) {
      while (true) {
        self.run_tiles();
        if (S::u8 || self.careful || self.all_finite()) break;
        self.careful = true;
        self.forget();
      }
      self.scale_channels();
    }
    self.write_part();
  }
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
