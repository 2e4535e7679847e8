// Decode attention over K and V that come as 8-bit codes in rows: the uniform caches of serving
// libraries, dense, packed or in pages, read once and where they lie. For every NVIDIA GPU from
// sm_80 on.
//
// A block is one warp with up to 16 query rows (the heads of a KV head, times a few queries) and a
// share of the keys; PrefillCombine adds up the shares. Its two stages of 64 keys are filled by
// cp.async; page numbers are read two tiles ahead, scales one, so that no load waits for another.
// Nothing here is shared between warps: what hides latency are the other blocks, as many as shared
// memory holds.
//
// K's rows are what mma.sync wants of its right operand. V's are transposed by ldmatrix in pairs of
// channels, and a byte permutation parts the two: the even channels of 16 make one accumulator, the
// odd ones the other, until the rows end. Of FP8 both operands become f16, in which codes and their
// products are exact: two instructions a word on sm_89 and later, and sums in float32.
//
// u8 P is relative to the largest P of its own tile and row, with V's scales of tokens in it; e4m3
// P relative to the running maximum (docs/NUMERICS.md).
#pragma once

#include "kernels/attn_decode/sm80_coded.hpp"
#include "kernels/attn_prefill/rows_out.cuh"

namespace qattn::kernels {

template <CodedConfig C>
struct CodedShape {
  static constexpr bool wide_qk = false, wide_pv = false;
  static constexpr bool two_row_ends = false, staged_rows = false;
  static constexpr bool u8 = C.pv == Element::u8;
  static constexpr float p_log2 = u8 ? 0.0f : 8.0f;  ///< log2 of what P is scaled by
  /// At D 256 the output fills half of the registers.
  static constexpr int d = C.d, keys = coded_tile_keys(C.d);
  static constexpr int rows = coded_rows, m_tiles = 1, warp_rows = rows;
  static constexpr int threads = 32, n_tiles = keys / 8, d_tiles = C.d / 8;

  static constexpr int row = tile::padded_row(C.d), v_at = keys * row, stage = 2 * keys * row;
  static constexpr int stages = 2, scales_at = stages * stage;
  static constexpr int logs_at = scales_at + 4 * keys, inverse_at = logs_at + 4 * keys;
  static constexpr int shared_bytes = inverse_at + 4 * keys;
  static constexpr int out_channels = 0, out_row = 0;  // rows leave as parts alone
};

inline namespace QATTN_TARGET {

/// What a lane knows of the keys `lane` + 32 i of a tile.
template <int N>
struct CodedKeys {
  std::int64_t page[N];  ///< -1: none; unpaged: 0
  float k_scale[N], v_scale[N];
};

template <CodedConfig C>
struct CodedDecode : PrefillOutput<CodedShape<C>> {
  using Params = CodedParams;
  using S = CodedShape<C>;
  using Base = PrefillOutput<S>;
  using Base::R, Base::lane, Base::max, Base::out, Base::p, Base::row_scale, Base::sum, Base::unit,
      Base::work;
  using typename Base::Scores;
  static constexpr int threads = S::threads, shared_bytes = S::shared_bytes, min_blocks = 1;
  static constexpr bool dependent = true;
  static constexpr bool fp8_qk = C.qk == Element::e4m3;

  static constexpr int held = S::keys / 32;
  using Keys = CodedKeys<held>;

  const CodedParams& params;
  SharedAddress base = isa::shared_base();
  std::uint32_t q[C.d / 32][4];  ///< A of Q K^T: codes
  /// Some V seen by a row holds NaN (e4m3): which rows see it must be found out.
  bool careful = false;

  QATTN_DEVICE CodedDecode(const CodedParams& x, const PrefillWork& w)
      : Base(x.call, w, 0), params(x) {}

  // ---- Loads ----------------------------------------------------------------------------------

  QATTN_DEVICE bool exists(int token) const { return token < work.k.length; }

  QATTN_DEVICE void load_pages(int tile, Keys& keys) const {
#pragma unroll
    for (int i = 0; i < held; ++i) {
      const int token = tile + lane + 32 * i;
      keys.page[i] = 0;
      if (p.k.page_table == nullptr || !exists(token) || tile < 0) continue;
      const std::int64_t page =
          isa::load_global(p.k.page_table + work.b * p.k.page_table_stride + token / p.k.page_size);
      keys.page[i] = page < 0 || page >= p.k.total ? -1 : page;
    }
  }

  /// NaN where the number is not finite, or where the page does not exist.
  QATTN_DEVICE float scale_of(const Grouping& g, const tile::Rows& rows, int token,
                              std::int64_t page) const {
    const float x =
        page < 0 ? tile::quiet_nan() : g.given_scale(rows, work.b, work.kv_head, token, 0);
    return tile::is_finite(x) ? x : tile::quiet_nan();
  }

  QATTN_DEVICE void load_scales(int tile, Keys& keys) const {
#pragma unroll
    for (int i = 0; i < held; ++i) {
      const int token = tile + lane + 32 * i;
      keys.k_scale[i] = keys.v_scale[i] = 0.0f;
      if (!exists(token)) continue;
      keys.k_scale[i] = scale_of(params.k_scale, p.k, token, keys.page[i]);
      if (S::u8 && by_token()) keys.v_scale[i] = scale_of(params.v_scale, p.v, token, keys.page[i]);
      if (keys.page[i] < 0) isa::atomic_or_global(p.error, tile::error_page);
    }
  }

  /// Has every token of V a scale of its own? They go into P.
  QATTN_DEVICE bool by_token() const { return params.v_scale.by_token(); }

  /// Scales of the tile to shared memory, where lanes find those of their columns.
  QATTN_DEVICE void store_scales(const Keys& keys) const {
    const auto at = base + S::scales_at + static_cast<SharedAddress>(4 * lane);
#pragma unroll
    for (int i = 0; i < held; ++i) {
      isa::store_shared(at + 128 * i, keys.k_scale[i]);
      if (!S::u8 || !by_token()) continue;
      const float v = keys.v_scale[i];
      isa::store_shared(at + 4 * S::keys + 128 * i,
                        tile::is_nan(v) ? v : isa::log2(fmaxf(v, 0x1p-126f)));
      isa::store_shared(at + 8 * S::keys + 128 * i, 1.0f / fmaxf(v, 0x1p-126f));
    }
  }

  /// Offset in bytes of a token's row of `x`, of this KV head.
  QATTN_DEVICE std::int64_t offset_of(const tile::Rows& x, std::int64_t page, int token) const {
    const std::int64_t head = work.kv_head * x.head;
    if (x.page_table != nullptr) {
      return page * x.batch + token % x.page_size * x.token + head;
    }
    return work.b * x.batch + (work.k.begin + token) * x.token + head;
  }

  /// Starts copying 32 rows of one operand; tokens and channels that do not exist become zeros.
  /// `offset`: of this lane's row; `there`: bits of the rows that exist.
  QATTN_DEVICE void start_rows(const tile::Rows& x, bool vectors, std::int64_t offset,
                               std::uint32_t there, SharedAddress to) const {
    constexpr int chunks = C.d / 16, step = 32 / chunks;
    const int chunk = lane % chunks * 16, left = x.channels - chunk;
    const int bytes = left < 0 ? 0 : left > 16 ? 16 : left;
    const auto* from = static_cast<const std::byte*>(x.data) + chunk;
    const int row = lane / chunks;
    to += static_cast<SharedAddress>(row * S::row + chunk);
    if (vectors) {
#pragma unroll
      for (int first = 0; first < 32; first += step) {
        const bool here = (there >> (first + row) & 1) != 0 && bytes > 0;
        const std::int64_t at = isa::shuffle(offset, first + row);
        isa::copy_async16(to + first * S::row, here ? from + at : x.data, here ? bytes : 0);
      }
    } else {
#pragma unroll 1
      for (int first = 0; first < 32; first += step) {
        const bool here = (there >> (first + row) & 1) != 0 && bytes > 0;
        const std::int64_t at = isa::shuffle(offset, first + row);
        isa::store_shared(to + static_cast<SharedAddress>(first * S::row),
                          here ? tile::gather16(from + at, bytes) : isa::Words4{});
      }
    }
  }

  QATTN_DEVICE void start_tile(int tile, const Keys& keys, int stage) const {
    SharedAddress to = base + static_cast<SharedAddress>(stage * S::stage);
#pragma unroll 1
    for (int i = 0; i < held; ++i) {
      const int token = tile + lane + 32 * i;
      const std::int64_t page = i == 0 ? keys.page[0] : keys.page[held - 1];
      const bool there = exists(token) && page >= 0;
      const std::uint32_t rows = isa::ballot(there);
      start_rows(p.k, p.k_vectors, there ? offset_of(p.k, page, token) : 0, rows, to);
      start_rows(p.v, p.v_vectors, there ? offset_of(p.v, page, token) : 0, rows, to + S::v_at);
      to += 32 * S::row;
    }
  }

  /// Q's codes, as mma wants them.
  QATTN_DEVICE void load_queries() {
    isa::grid_dependency_wait();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const bool here = this->query(h) < work.q.length;
      const auto* row =
          reinterpret_cast<const std::uint32_t*>(
              p.q8.codes +
              (here ? unit(p.q8, this->head(h), work.q_slot + this->query(h)) * p.q8.row_bytes
                    : 0)) +
          lane % 4;
#pragma unroll
      for (int step = 0; step < C.d / 32; ++step) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          q[step][h + 2 * i] = here ? isa::load_global(row + step * 8 + 4 * i) : 0u;
        }
      }
    }
#pragma unroll
    for (int r = 0; r < R; ++r) row_scale[r] = this->query_scale(r) * p.scale * tile::log2_e;
  }

  // ---- Scores ---------------------------------------------------------------------------------

  static QATTN_DEVICE std::uint32_t low_codes(std::uint32_t x) {
    return isa::unpack_e4m3(static_cast<std::uint16_t>(x));
  }
  static QATTN_DEVICE std::uint32_t high_codes(std::uint32_t x) {
    return isa::unpack_e4m3(static_cast<std::uint16_t>(x >> 16));
  }

  QATTN_DEVICE void multiply_queries(SharedAddress stage, Scores& s) const {
    using Acc = isa::Accumulator<fp8_qk ? Element::f16 : C.qk>;
    Acc acc[1][S::n_tiles][4] = {};
    const SharedAddress k =
        stage + static_cast<SharedAddress>((lane % 8 + lane / 16 * 8) * S::row + lane / 8 % 2 * 16);
#pragma unroll
    for (int step = 0; step < C.d / 32; ++step) {
      std::uint32_t pair[S::n_tiles / 2][4];
      SharedAddress row[S::n_tiles / 2];
#pragma unroll
      for (int n = 0; n < S::n_tiles / 2; ++n) row[n] = k + n * 16 * S::row + step * 32;
      isa::load_matrix<S::n_tiles / 2>(pair, row);
      // Word i of an n tile: channels 32 step + 16 i + 4 t and the three behind it.
      const auto word = [&](int n, int i) { return pair[n / 2][n % 2 * 2 + i]; };
      if constexpr (!fp8_qk) {
        std::uint32_t a[1][4], b[S::n_tiles][2];
#pragma unroll
        for (int i = 0; i < 4; ++i) a[0][i] = q[step][i];
#pragma unroll
        for (int n = 0; n < S::n_tiles; ++n) b[n][0] = word(n, 0), b[n][1] = word(n, 1);
        isa::mma<C.qk, C.qk, 1, S::n_tiles>(acc, a, b);
      } else {
        // Channels in another order, the same on both sides: a word's first two and last two.
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const std::uint32_t g0 = q[step][2 * i], g8 = q[step][2 * i + 1];
          const std::uint32_t a[1][4] = {
              {low_codes(g0), low_codes(g8), high_codes(g0), high_codes(g8)}};
          std::uint32_t b[S::n_tiles][2];
#pragma unroll
          for (int n = 0; n < S::n_tiles; ++n) {
            b[n][0] = low_codes(word(n, i)), b[n][1] = high_codes(word(n, i));
          }
          isa::mma<Element::f16, Element::f16, 1, S::n_tiles>(acc, a, b);
        }
      }
    }
#pragma unroll
    for (int n = 0; n < S::n_tiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s[0][n][i] = static_cast<float>(acc[0][n][i]);
    }
  }

  /// A number of this lane's columns 8 n + 2 t + e.
  QATTN_DEVICE float fact(int at, int key) const {
    return isa::load_shared<float>(base + static_cast<SharedAddress>(at + 4 * key));
  }

  /// Leaves units of log2. `bad`: bits of the keys whose V is not finite.
  QATTN_DEVICE void finish_scores(Scores& s, int tile, std::uint64_t bad) {
    tile::each_score(
        s, [&](int r, int key, float& x) { x *= row_scale[r] * fact(S::scales_at, key); });
    if (p.softcap > 0) {
      const float inverse = 1.0f / p.softcap;
      tile::each_score(s, [&](int, int, float& x) {
        x = tile::soft_cap(x * tile::ln_2, p.softcap, inverse) * tile::log2_e;
      });
    }
    if (this->whole(tile) && bad == 0) return;
    tile::ScoreRow rows[R];
#pragma unroll
    for (int r = 0; r < R; ++r) rows[r] = this->score_row(r);
    tile::each_score(s, [&](int r, int key, float& x) {
      const bool sees = tile + key >= rows[r].begin && tile + key < rows[r].end;
      if (!sees) x = -tile::infinity();
      if (sees && (bad >> key & 1) != 0) x = tile::quiet_nan();
    });
  }

  // ---- Softmax and product with V -------------------------------------------------------------

  QATTN_DEVICE void maxima(Scores& s, float (&top)[R]) const {
#pragma unroll
    for (int r = 0; r < R; ++r) top[r] = -tile::infinity();
    tile::each_score(s, [&](int r, int, float& x) { top[r] = fmaxf(top[r], x); });
    this->row_maxima(top);
  }

  /// V's words of 16 channels and 32 keys from `key` on: keys 8 m + 2 t and the one behind it, each
  /// with channels 2 g and 2 g + 1.
  QATTN_DEVICE void load_values(SharedAddress stage, int key, int pair,
                                std::uint32_t (&r)[1][4]) const {
    const SharedAddress row[1] = {stage + S::v_at +
                                  static_cast<SharedAddress>((key + lane) * S::row + pair * 16)};
    isa::load_matrix_transposed<1>(r, row);
  }

  QATTN_DEVICE void attend_u8(Scores& s, SharedAddress stage, float largest) {
    const bool scaled = by_token();
    if (scaled) {
      tile::each_score(s, [&](int, int key, float& x) {
        x = x == -tile::infinity() ? x : x + fact(S::logs_at, key);
      });
    }
    float top[R], share[R], ref[R], mass[R] = {};
    maxima(s, top);
    this->raise_maxima(top);
#pragma unroll
    for (int r = 0; r < R; ++r) {
      ref[r] = this->reference(top[r]) - log2_255;
      share[r] = isa::exp2(top[r] - this->reference(max[r])) * (1.0f / 255);
    }
    // A token whose V is far smaller than the tile's largest would round to nothing and take its
    // probability along: its mass stays unrounded.
    const float least = scaled ? largest * (1.0f / 64) : 0.0f;
    constexpr float whole = 12582912.0f;  // 1.5 * 2^23: a sum's low byte is the nearest integer
    std::uint32_t bits[S::n_tiles][4];
#pragma unroll
    for (int n = 0; n < S::n_tiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int key = 8 * n + lane % 4 * 2 + i % 2;
        const float y = isa::exp2(s[0][n][i] - ref[i / 2]), z = y + whole;
        const float inverse = scaled ? fact(S::inverse_at, key) : 1.0f;
        const bool plain = inverse * least > 1.0f;
        mass[i / 2] = fmaf(plain ? y : z - whole, inverse, mass[i / 2]);
        bits[n][i] = __builtin_bit_cast(std::uint32_t, z);
      }
    }
#pragma unroll
    for (int r = 0; r < R; ++r) sum[r] = fmaf(mass[r], share[r], sum[r]);
    std::uint32_t a[S::keys / 32][1][4];
#pragma unroll
    for (int n = 0; n < S::n_tiles; n += 2) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const auto two = [&](int tile) {
          return isa::byte_permute(bits[tile][2 * h], bits[tile][2 * h + 1], 0x0040);
        };
        a[n / 4][0][h + n / 2 % 2 * 2] = isa::byte_permute(two(n), two(n + 1), 0x5410);
      }
    }
#pragma unroll
    for (int pair = 0; pair < C.d / 16; ++pair) {
      std::int32_t acc[1][2][4] = {};
#pragma unroll
      for (int step = 0; step < S::keys / 32; ++step) {
        std::uint32_t v[1][4];
        load_values(stage, 32 * step, pair, v);
        const std::uint32_t b[2][2] = {{isa::byte_permute(v[0][0], v[0][1], 0x6420),
                                        isa::byte_permute(v[0][2], v[0][3], 0x6420)},
                                       {isa::byte_permute(v[0][0], v[0][1], 0x7531),
                                        isa::byte_permute(v[0][2], v[0][3], 0x7531)}};
        isa::mma<Element::u8, Element::s8, 1, 2>(acc, a[step], b);
      }
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float& x = out[0][2 * pair + n][i];
          x = fmaf(static_cast<float>(acc[0][n][i]), share[i / 2], x);
        }
      }
    }
  }

  QATTN_DEVICE void attend_e4m3(Scores& s, SharedAddress stage) {
    float top[R], offset[R];
    maxima(s, top);
    this->raise_maxima(top);
#pragma unroll
    for (int r = 0; r < R; ++r) offset[r] = S::p_log2 - this->reference(max[r]);
#pragma unroll
    for (int step = 0; step < S::keys / 32; ++step) {
      std::uint32_t a[2][1][4];
#pragma unroll
      for (int i = 0; i < 8; ++i) {  // word i % 4 of run i / 4: row half i % 2, n tile i / 2 % 2
        const float* x = s[0][4 * step + i / 2] + i % 2 * 2;
        const std::uint32_t codes = isa::unpack_e4m3(
            isa::pack_e4m3(isa::exp2(x[0] + offset[i % 2]), isa::exp2(x[1] + offset[i % 2])));
        const isa::Pair rounded = isa::unpack_f16(codes);
        sum[i % 2] += rounded.lo + rounded.hi;
        a[i / 4][0][i % 4] = codes;
      }
#pragma unroll
      for (int pair = 0; pair < C.d / 16; ++pair) {
        std::uint32_t v[1][4];
        load_values(stage, 32 * step, pair, v);
#pragma unroll
        for (int run = 0; run < 2; ++run) {
          // An even channel's two keys below, the odd one's above.
          const std::uint32_t x = isa::byte_permute(v[0][2 * run], 0u, 0x3120);
          const std::uint32_t y = isa::byte_permute(v[0][2 * run + 1], 0u, 0x3120);
          const std::uint32_t b[2][2] = {{low_codes(x), low_codes(y)},
                                         {high_codes(x), high_codes(y)}};
          isa::mma_at<Element::f16, Element::f16, 1, 2>(out, 2 * pair, a[run], b);
        }
      }
    }
  }

  // ---- Values that are not numbers ------------------------------------------------------------

  /// e4m3: zeros in the place of tokens of V that hold NaN; their bits.
  QATTN_DEVICE std::uint64_t clean_values(SharedAddress stage) const {
    std::uint64_t bad = 0;
#pragma unroll 1
    for (int i = 0; i < held; ++i) {
      const SharedAddress row =
          stage + S::v_at + static_cast<SharedAddress>((lane + 32 * i) * S::row);
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
    for (int n = 0; n < S::d_tiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) poison = fmaf(out[0][n][i], 0.0f, poison);
    }
    return isa::all(poison == 0.0f);
  }

  // ---- The tiles ------------------------------------------------------------------------------

  QATTN_DEVICE void attend(int tile, SharedAddress stage, float v_scale) {
    Scores s;
    multiply_queries(stage, s);
    finish_scores(s, tile, careful ? clean_values(stage) : 0);
    if constexpr (S::u8) {
      if (by_token()) {
#pragma unroll
        for (int mask = 1; mask < 32; mask *= 2) {
          v_scale = fmaxf(v_scale, isa::shuffle_xor(v_scale, mask));
        }
      }
      attend_u8(s, stage, v_scale);
    } else {
      attend_e4m3(s, stage);
    }
  }

  QATTN_DEVICE int last_tile() const {
    return work.key_end > work.key_begin ? (work.key_end - 1) / S::keys * S::keys : -1;
  }

  /// From the last to the first. K and V are inputs, which no kernel of the chain writes: the first
  /// copies do not wait for Q.
  QATTN_DEVICE void run_tiles() {
    int tile = last_tile(), ahead = tile, put = 0, get = 0;
    Keys keys{}, next;
    load_pages(ahead, next);
    while (tile >= work.key_begin) {
      // One place of the source starts copies, the first ones too: half of the code.
      const bool more = ahead >= work.key_begin, first = ahead == tile;
      if (more) start_tile(ahead, next, put);
      isa::copy_async_commit();
      if (!first) store_scales(keys);
      float v_scale = 0.0f;  // the largest of the tile; of those that are NaN nobody asks
#pragma unroll
      for (int i = 0; i < held; ++i) v_scale = fmaxf(v_scale, keys.v_scale[i]);
      if (more) {
        keys = next;
        load_scales(ahead, keys);
        load_pages(ahead - S::keys, next);
      }
      put ^= 1, ahead -= S::keys;
      if (first) {
        if (!careful) load_queries();
        continue;
      }
      isa::copy_async_wait<1>();
      isa::sync_warp();
      attend(tile, base + static_cast<SharedAddress>(get * S::stage), v_scale);
      isa::sync_warp();  // nobody reads this stage any more
      get ^= 1, tile -= S::keys;
    }
    isa::copy_async_wait<0>();
  }

  QATTN_DEVICE void forget() {
#pragma unroll
    for (int r = 0; r < R; ++r) max[r] = -tile::infinity(), sum[r] = 0.0f;
#pragma unroll
    for (int n = 0; n < S::d_tiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) out[0][n][i] = 0.0f;
    }
  }

  // ---- The end of the rows --------------------------------------------------------------------

  /// V's scales that P does not have.
  QATTN_DEVICE void scale_channels() {
    if (by_token()) return;
#pragma unroll
    for (int n = 0; n < S::d_tiles; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int c = 8 * n + lane % 4 * 2 + e;
        const float by = c < p.v.channels ? params.v_scale.given_scale(p.v, work.b, work.kv_head,
                                                                       work.key_begin, c)
                                          : 0.0f;
        out[0][n][e] *= by;
        out[0][n][2 + e] *= by;
      }
    }
  }

  /// From even and odd channels to accumulators as mma leaves them. A lane has channels 4 t to
  /// 4 t + 3 of 16, and is to have 2 t, 2 t + 1, 8 + 2 t and 9 + 2 t.
  QATTN_DEVICE void order_channels() {
    const int from = (lane & ~3) + lane % 4 / 2;
    const bool second = lane % 2 != 0;
#pragma unroll
    for (int n = 0; n < S::d_tiles; n += 2) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float x[2][2][2];  // which eight, which channel, from which half of the other lane
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          x[i / 4][i / 2 % 2][i % 2] =
              isa::shuffle(out[0][n + i / 2 % 2][2 * h + i % 2], from + i / 4 * 2);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          out[0][n + i / 2][2 * h + i % 2] = second ? x[i / 2][i % 2][1] : x[i / 2][i % 2][0];
        }
      }
    }
  }

  static QATTN_DEVICE void run(const CodedParams& x) {
    if constexpr (!fp8_qk || isa::target_architecture >= coded_fp8_architecture) run_block(x);
  }

  static QATTN_DEVICE void run_block(const CodedParams& x) {
    const PrefillWork work = locate_work(x.call, isa::block().x, S::rows, S::keys);
    if ((work.q.bad || work.k.bad) && isa::lane() == 0) {
      isa::atomic_or_global(x.call.error, tile::error_sequence);
    }
    CodedDecode self(x, work);
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
      self.order_channels();
      self.scale_channels();
    }
    self.write_part();
  }
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
