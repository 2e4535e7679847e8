// What decode over codes in rows (kernel.cuh) reads: query rows, page numbers, scales, and
// tiles of K and V by cp.async.
#pragma once

#include "formats/bits.hpp"
#include "kernels/attention/common/work_tile.cuh"
#include "kernels/decode/uniform8/params.hpp"
#include "kernels/operand/copy.hpp"
#include "kernels/operand/row_codes.cuh"

namespace qattn::kernels {

template <Uniform8Config C>
struct Uniform8Shape {
  static constexpr bool u8 = C.pv == Element::u8;
  static constexpr float p_log2 = u8 ? 0.0f : 8.0f;  ///< log2 of what P is scaled by
  static constexpr int d = C.d, keys = coded_tile_keys, rows = uniform8_rows, threads = 32;
  static constexpr int key_tiles = keys / 16, channel_tiles = C.d / 16;
  static constexpr int row = tile::padded_row(C.d), v_at = keys * row;
  static constexpr int scales_at = 2 * keys * row, logs_at = scales_at + 4 * keys;
  static constexpr int inverse_at = logs_at + 4 * keys, shared_bytes = inverse_at + 4 * keys;
};

inline namespace QATTN_TARGET {

/// What a lane knows of the keys `lane` and `lane` + 32 of a tile.
struct Uniform8Keys {
  std::int32_t page[2];  ///< as the table has it; unpaged: 0
  float k_scale[2], v_scale[2];
};

template <Uniform8Config C>
struct Uniform8Load {
  using S = Uniform8Shape<C>;
  static constexpr int R = 2;  ///< query rows of a lane: 2 t and the one behind it
  const Uniform8Params& params;
  const AttentionParams& p;
  const WorkTile& work;
  int lane = isa::lane(), g = lane / 4, t = lane % 4;
  SharedAddress base = isa::shared_base();
  std::uint32_t q[C.d / 32][2];  ///< B of K Q^T: codes
  float row_scale[R];            ///< from a row's products to scores in units of log2

  QATTN_DEVICE Uniform8Load(const Uniform8Params& x, const WorkTile& w)
      : params(x), p(x.call), work(w) {}

  // ---- Rows -----------------------------------------------------------------------------------

  QATTN_DEVICE int query(int row) const {
    row += work.first_row;
    return p.pack_gqa > 1 ? row * p.pack_gqa_inverse >> 16 : row;
  }
  QATTN_DEVICE int head(int row) const {
    return p.pack_gqa > 1 ? work.head + row - query(row) * p.pack_gqa : work.head;
  }

  /// Does every row of the block see every key of the tile?
  QATTN_DEVICE bool whole(int tile) const {
    const int first = query(0) + work.shift, last = query(S::rows - 1) + work.shift;
    return all_visible(p, first, last, tile, tile + S::keys, work.k.length);
  }

  /// Q's codes as prepare() made them.
  QATTN_DEVICE void load_codes(float (&scale)[R]) {
    const auto unit = [&](int row) { return head(row) * p.q8.slots + work.q_slot + query(row); };
    const bool here = query(g) < work.q.length;
    const auto* words =
        reinterpret_cast<const std::uint32_t*>(p.q8.codes + (here ? unit(g) * p.q8.row_bytes : 0));
#pragma unroll
    for (int i = 0; i < C.d / 16; ++i) {
      q[i / 2][i % 2] = here ? isa::load_global(words + 4 * i + t) : 0u;
    }
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const int row = 2 * t + r;
      scale[r] = query(row) < work.q.length ? isa::load_global(p.q8.scale + unit(row)) : 0.0f;
    }
  }

  /// Q's codes from 16 bits, with a scale a row, bit by bit what prepare() makes. Four lanes share
  /// row g; lane t has channels 8 t to 8 t + 7 of every 32.
  template <Element Input>
  QATTN_DEVICE void encode_queries(float (&scale)[R]) {
    using Row = RowCodes<Input>;
    constexpr bool e4m3 = C.qk == Element::e4m3;
    const bool here = query(g) < work.q.length;
    const auto* row = static_cast<const std::uint16_t*>(p.q.data) + work.b * p.q.batch +
                      (work.q.begin + (here ? query(g) : 0)) * p.q.token +
                      (here ? head(g) : 0) * p.q.head;
    Words4 raw[C.d / 32];
    std::uint32_t top = 0;
#pragma unroll
    for (int n = 0; n < C.d / 32; ++n) {
      const int c = 32 * n + 8 * t;
      raw[n] = Words4{};
      if (here && c < p.q.channels) {
        raw[n] = isa::load_global(reinterpret_cast<const Words4*>(row + c));
      }
      const std::uint32_t x = Row::magnitude(raw[n]);
      top = top > x ? top : x;
    }
#pragma unroll
    for (int mask = 1; mask < 4; mask *= 2) {
      const std::uint32_t other = isa::shuffle_xor(top, mask);
      top = top > other ? top : other;
    }
    const float own =
        formats::amax_scale(formats::float_of(top), e4m3 ? formats::E4m3::max : formats::S8::max);
    const float factor = code_factor(here, own);
    const int from = (lane & ~3) + t / 2;
#pragma unroll
    for (int n = 0; n < C.d / 32; ++n) {
      const Words2 code = Row::template encoded<e4m3>(raw[n], factor);
#pragma unroll
      for (int i = 0; i < 2; ++i) {  // channels 32 n + 16 i + 4 t and the three behind it
        const std::uint32_t even = isa::shuffle(code.w[0], from + 2 * i);
        const std::uint32_t odd = isa::shuffle(code.w[1], from + 2 * i);
        q[n][i] = t % 2 == 0 ? even : odd;
      }
    }
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const float s = isa::shuffle(own, 4 * (2 * t + r));
      scale[r] = query(2 * t + r) < work.q.length ? s : 0.0f;
    }
  }

  /// Waits for the kernel that makes Q's codes, if there is one.
  QATTN_DEVICE void load_queries() {
    isa::grid_dependency_wait();
    float scale[R];
    if (params.fused_q_quant == Format::f16) {
      encode_queries<Element::f16>(scale);
    } else if (params.fused_q_quant == Format::bf16) {
      encode_queries<Element::bf16>(scale);
    } else {
      load_codes(scale);
    }
    // NaN of a bad row makes all its scores NaN.
#pragma unroll
    for (int r = 0; r < R; ++r) row_scale[r] = scale[r] * p.scale * tile::log2_e;
  }

  // ---- Loads ----------------------------------------------------------------------------------

  QATTN_DEVICE bool exists(int token) const { return token < work.k.length; }

  /// Only loads: nobody asks what came before the next tile.
  QATTN_DEVICE void load_pages(int tile, Uniform8Keys& keys) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int token = tile + lane + 32 * i;
      keys.page[i] = 0;
      if (p.k.page_table != nullptr && token >= 0 && exists(token)) {
        keys.page[i] =
            isa::load_global(p.k.page_table + work.b * p.k.page_table_stride + page_of(token));
      }
    }
  }
  /// The page of a token in its sequence. A division takes 20 instructions, a shift one.
  QATTN_DEVICE std::uint32_t page_of(int token) const {
    const auto s = static_cast<std::uint32_t>(token);
    return params.page_shift >= 0 ? s >> params.page_shift : s / page_size();
  }
  QATTN_DEVICE std::uint32_t page_size() const { return static_cast<std::uint32_t>(p.k.page_size); }
  QATTN_DEVICE bool is_page(std::int32_t page) const {
    return p.k.page_table == nullptr || (page >= 0 && page < p.k.total);
  }
  /// Where a token is: in its page, or in its sequence.
  QATTN_DEVICE int place_of(int token) const {
    if (p.k.page_table == nullptr) return token;
    const auto s = static_cast<std::uint32_t>(token);
    return static_cast<int>(params.page_shift >= 0 ? s & (page_size() - 1) : s % page_size());
  }

  QATTN_DEVICE void load_scales(int tile, Uniform8Keys& keys) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int token = tile + lane + 32 * i, place = place_of(token);
      const bool paged = p.k.page_table != nullptr, known = is_page(keys.page[i]);
      const std::int64_t outer = paged ? keys.page[i] : work.b;
      const auto load = [&](const Uniform8Scales& x) {
        const std::int64_t at = outer * x.outer + work.kv_head * x.head + place * x.token;
        const bool there = known && (x.tokens < 0 || place < x.tokens);
        return there ? isa::load_global(x.data + at) : tile::quiet_nan();
      };
      keys.k_scale[i] = keys.v_scale[i] = 0.0f;
      if (!exists(token)) continue;
      keys.k_scale[i] = load(params.k_scale);
      if (S::u8 && by_token()) keys.v_scale[i] = load(params.v_scale);
      if (!known) isa::atomic_or_global(p.error, tile::error_page);
    }
  }

  /// 0 is a scale, too: that of a token that does not exist.
  static QATTN_DEVICE float scale_or_nan(float x) {
    return formats::bits_of(x) < formats::kInfBits ? x : tile::quiet_nan();
  }

  /// Has every token of V a scale of its own? They go into P.
  QATTN_DEVICE bool by_token() const { return params.v_scale.tokens >= 0; }

  /// Scales of the tile to shared memory, where lanes find those of their keys: NaN where they are
  /// negative or no numbers.
  QATTN_DEVICE void store_scales(const Uniform8Keys& keys) const {
    const auto at = base + static_cast<SharedAddress>(4 * lane);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      isa::store_shared(at + S::scales_at + 128 * i, scale_or_nan(keys.k_scale[i]));
    }
    if (!S::u8 || !by_token()) return;
    float v[2], largest = 0.0f;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      v[i] = scale_or_nan(keys.v_scale[i]);
      largest = fmaxf(largest, v[i]);
    }
#pragma unroll
    for (int mask = 1; mask < 32; mask *= 2) {
      largest = fmaxf(largest, isa::shuffle_xor(largest, mask));
    }
    // Far smaller ones, zeros above all, count as this: the codes of their P are zeros anyway, and
    // 1 / scale times what P may be stays a number, as P times the scale does.
    const float least = fmaxf(largest * 0x1p-40f, 0x1p-80f);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float some = fmaxf(v[i], least);
      isa::store_shared(at + S::logs_at + 128 * i, tile::is_nan(v[i]) ? v[i] : isa::log2(some));
      isa::store_shared(at + S::inverse_at + 128 * i, isa::reciprocal(some));
    }
  }
  QATTN_DEVICE float fact(int at, int key) const {
    return isa::load_shared<float>(base + static_cast<SharedAddress>(at + 4 * key));
  }

  /// Offset in bytes of a token's row of `x`, of this KV head.
  QATTN_DEVICE std::int64_t offset_of(const tile::Rows& x, std::int32_t page, int token) const {
    const std::int64_t of_head = work.kv_head * x.head;
    if (x.page_table != nullptr) return page * x.batch + place_of(token) * x.token + of_head;
    return work.b * x.batch + (work.k.begin + token) * x.token + of_head;
  }

  /// Starts copying 16 rows at even distances, `offset` bytes from the first of all. `count` of
  /// them exist; the others, and channels that do not exist, become zeros.
  template <bool Whole>
  QATTN_DEVICE void start_run(const tile::Rows& x, std::int64_t offset, int count,
                              SharedAddress to) const {
    constexpr int chunks = C.d / 16, step = 32 / chunks;
    const int chunk = lane % chunks * 16, left = x.channels - chunk, row = lane / chunks;
    const int bytes = Whole || left > 16 ? 16 : left < 0 ? 0 : left;
    const auto* from = static_cast<const std::byte*>(x.data) + offset + row * x.token + chunk;
    to += static_cast<SharedAddress>(row * S::row + chunk);
#pragma unroll
    for (int first = 0; first < 16; first += step) {
      if constexpr (Whole) {
        isa::copy_async16(to + first * S::row, from, 16);
      } else {
        const bool here = first + row < count && bytes > 0;
        isa::copy_async16(to + first * S::row, here ? from : x.data, here ? bytes : 0);
      }
      from += step * x.token;
    }
  }

  /// Any rows, at any address, one by one.
  QATTN_DEVICE void copy_scattered(const tile::Rows& x, std::int64_t offset, std::uint32_t there,
                                   SharedAddress to) const {
    constexpr int chunks = C.d / 16;
#pragma unroll 1
    for (int n = lane; n < 32 * chunks; n += 32) {
      const int row = n / chunks, chunk = n % chunks * 16, left = x.channels - chunk;
      const std::int64_t at = isa::shuffle(offset, row);
      const bool here = (there >> row & 1) != 0 && left > 0;
      const auto* from = static_cast<const std::byte*>(x.data) + at + chunk;
      isa::store_shared(to + static_cast<SharedAddress>(row * S::row + chunk),
                        here ? tile::gather16(from, left > 16 ? 16 : left) : isa::Words4{});
    }
  }

  /// Rows of 16 keys lie in a row: in one page, or dense.
  QATTN_DEVICE bool in_runs(const tile::Rows& x, bool vectors) const {
    return vectors && (x.page_table == nullptr || x.page_size % 16 == 0);
  }

  /// Starts copying one operand of a tile.
  QATTN_DEVICE void start_tile(const tile::Rows& x, bool vectors, int tile,
                               const Uniform8Keys& keys, SharedAddress to) const {
    const bool runs = in_runs(x, vectors);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int token = tile + lane + 32 * i;
      const bool there = exists(token) && is_page(keys.page[i]);
      const std::uint32_t rows = isa::ballot(there);
      const std::int64_t offset = there ? offset_of(x, keys.page[i], token) : 0;
      const SharedAddress at = to + 32 * i * S::row;
      if (runs && rows == ~0u && x.channels == C.d) {
        start_run<true>(x, isa::shuffle(offset, 0), 16, at);
        start_run<true>(x, isa::shuffle(offset, 16), 16, at + 16 * S::row);
      } else if (runs) {
#pragma unroll 1
        for (int run = 0; run < 32; run += 16) {
          const int left = static_cast<int>(work.k.length) - (tile + 32 * i + run);
          start_run<false>(x, isa::shuffle(offset, run), (rows >> run & 1) != 0 ? left : 0,
                           at + static_cast<SharedAddress>(run * S::row));
        }
      } else {
        copy_scattered(x, offset, rows, at);
      }
    }
  }
  QATTN_DEVICE void start_keys(int tile, const Uniform8Keys& keys) const {
    start_tile(p.k, p.k_vectors, tile, keys, base);
  }
  QATTN_DEVICE void start_values(int tile, const Uniform8Keys& keys) const {
    start_tile(p.v, p.v_vectors, tile, keys, base + S::v_at);
  }
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
