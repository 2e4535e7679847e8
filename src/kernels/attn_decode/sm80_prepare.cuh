// The kernel before Decode: queries in the form that products read, and the bytes of segments.
#pragma once

#include "formats/bits.hpp"
#include "formats/hadamard.hpp"
#include "kernels/attn_decode/sm80_params.hpp"
#include "tile/score.hpp"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

/// A row of D channels over the lanes of a warp, channel D / 32 lane + i in place i.
template <int D>
struct LaneRow {
  static constexpr int count = D / 32;
  float x[count];

  QATTN_DEVICE int channel(int i) const { return isa::lane() * count + i; }

  /// The Hadamard matrix of the row's power of two, which is D itself here.
  QATTN_DEVICE void hadamard() {
    static_assert((D & (D - 1)) == 0);
#pragma unroll
    for (int distance = 1; distance < count; distance *= 2) {
#pragma unroll
      for (int i = 0; i < count; ++i) {
        if ((i & distance) != 0) continue;
        const float a = x[i], b = x[i + distance];
        x[i] = a + b;
        x[i + distance] = a - b;
      }
    }
#pragma unroll
    for (int mask = 1; mask < 32; mask *= 2) {
#pragma unroll
      for (int i = 0; i < count; ++i) {
        const float other = isa::shuffle_xor(x[i], mask);
        x[i] = (isa::lane() & mask) != 0 ? other - x[i] : x[i] + other;
      }
    }
    const float norm = formats::rotation_norm(D);
#pragma unroll
    for (int i = 0; i < count; ++i) x[i] *= norm;
  }
  QATTN_DEVICE void signs() {
#pragma unroll
    for (int i = 0; i < count; ++i) x[i] *= formats::rotation_sign(channel(i));
  }
  QATTN_DEVICE void rotate() {
    signs();
    hadamard();
  }
  QATTN_DEVICE void unrotate() {
    hadamard();
    signs();
  }
};

QATTN_DEVICE float warp_sum(float x) {
#pragma unroll
  for (int mask = 1; mask < 32; mask *= 2) x += isa::shuffle_xor(x, mask);
  return x;
}
/// Of numbers that are at least 0.
QATTN_DEVICE float warp_max(float x) {
#pragma unroll
  for (int mask = 1; mask < 32; mask *= 2) x = fmaxf(x, isa::shuffle_xor(x, mask));
  return x;
}

/// The first units() blocks take queries, the others a part of a table each.
template <int D>
struct DecodePrepare {
  using Params = DecodeParams;
  static constexpr int threads = 256, min_blocks = 2;
  static constexpr int warps = threads / 32;
  static constexpr int shared_bytes = 256;
  static constexpr bool dependent = true;

  // ---- Queries --------------------------------------------------------------------------------

  /// Where one 16-bit half of plane `plane` lies, in halves from the unit's first.
  static QATTN_DEVICE std::int64_t half_place(const Params& p, int plane, int row, int c) {
    int step, t, pair, half;
    if (plane == query_codes) {
      step = c / 16, t = c % 16 / 4, pair = c % 2, half = c % 4 / 2;
    } else {
      step = c / 32 * 2 + c % 8 / 4, t = c % 32 / 8, pair = c % 4 / 2, half = c % 2;
    }
    const int lane = row % 8 * 4 + t;
    const int word = ((step * (p.unit_rows / 8) + row / 8) * 32 + lane) * 2 + pair;
    return (std::int64_t{plane} * p.unit_rows * (D / 2) + word) * 2 + half;
  }

  static QATTN_DEVICE LaneRow<D> load_row(const Params& p, const DecodePair& pair, int r) {
    const std::int64_t head = std::int64_t{pair.head} * p.group + r / p.queries;
    const std::int64_t at = pair.batch * p.q.batch + r % p.queries * p.q.query + head * p.q.head;
    LaneRow<D> row;
#pragma unroll
    for (int i = 0; i < LaneRow<D>::count; ++i) {
      row.x[i] = r < p.rows() ? tile::load_number(p.q.data, p.q.format, at + row.channel(i)) : 0.0f;
    }
    return row;
  }

  static QATTN_DEVICE float amax(const LaneRow<D>& row) {
    float top = 0;
#pragma unroll
    for (int i = 0; i < LaneRow<D>::count; ++i) {
      top = tile::is_finite(row.x[i]) ? fmaxf(top, fabsf(row.x[i])) : top;
    }
    return warp_max(top);
  }

  /// 16 bits and what they leave; the codes' plane takes f16 whatever the window has.
  static QATTN_DEVICE void store_halves(const Params& p, std::uint16_t* to, int row, int c,
                                        float rotated, float raw) {
    const bool bf16 = p.cache.bf16 != 0;
    const auto narrow = [&](float x) {
      return bf16 ? isa::pack_bf16(x, 0.0f) : isa::pack_f16(x, 0.0f);
    };
    const std::uint32_t high = narrow(raw);
    const float kept = bf16 ? isa::unpack_bf16(high).lo : isa::unpack_f16(high).lo;
    const auto put = [&](int plane, std::uint32_t bits) {
      isa::store_global(to + half_place(p, plane, row, c), static_cast<std::uint16_t>(bits));
    };
    put(query_codes, isa::pack_f16(rotated, 0.0f));
    put(query_high, high);
    put(query_low, narrow(raw - kept));
  }

  static QATTN_DEVICE void prepare_row(const Params& p, const DecodePair& pair, std::int64_t unit,
                                       int row, float factor) {
    const int r = static_cast<int>(unit / p.pairs()) * p.unit_rows + row;
    LaneRow<D> raw = load_row(p, pair, r);
    float dot = 0;
    if (p.cache.smooth_k != 0 && !pair.bad) {
      const float* mean = p.cache.k_mean(pair.slot, p.layer, pair.head);
#pragma unroll
      for (int i = 0; i < LaneRow<D>::count; ++i) {
        dot = fmaf(raw.x[i], isa::load_global(mean + raw.channel(i)), dot);
      }
    }
    LaneRow<D> rotated = raw;
    if (p.cache.rotate != 0) rotated.rotate();
    auto* to = reinterpret_cast<std::uint16_t*>(p.query_words +
                                                unit * query_planes * p.unit_rows * (D / 2));
    float sum = 0;
#pragma unroll
    for (int i = 0; i < LaneRow<D>::count; ++i) {
      const float x = rotated.x[i] * factor;
      store_halves(p, to, row, raw.channel(i), x, raw.x[i] * factor);
      sum += isa::unpack_f16(isa::pack_f16(x, 0.0f)).lo;
    }
    dot = warp_sum(dot);
    sum = warp_sum(sum);
    if (isa::lane() == 0) {
      float* facts = p.query_facts + (unit * p.unit_rows + row) * 2;
      isa::store_global(facts, dot);
      isa::store_global(facts + 1, sum);
    }
  }

  /// One power of two for all rows of a unit brings the largest element of Q or of its rotation
  /// to [2^11, 2^12]: rows 2^19 times smaller still have all bits of f16, 1 / 64 of them included.
  static QATTN_DEVICE void prepare_unit(const Params& p, std::int64_t unit) {
    const DecodePair pair(p, unit % p.pairs());
    if (pair.bad && p.error != nullptr && isa::thread() == 0) {
      isa::atomic_or_global(p.error, tile::error_sequence);
    }
    const isa::SharedAddress top_at = isa::shared_base();
    if (isa::thread() == 0) isa::store_shared(top_at, 0u);
    isa::sync_threads();
    const int first = static_cast<int>(unit / p.pairs()) * p.unit_rows;
    for (int row = isa::warp(); row < p.unit_rows; row += warps) {
      LaneRow<D> x = load_row(p, pair, first + row);
      float top = amax(x);
      if (p.cache.rotate != 0) {
        x.rotate();
        top = fmaxf(top, amax(x));
      }
      if (isa::lane() == 0) isa::atomic_max_shared(top_at, formats::bits_of(top));
    }
    isa::sync_threads();
    const std::uint32_t exponent = isa::load_shared<std::uint32_t>(top_at) >> 23;
    // 2^(138 - exponent); rows of zeros, and of subnormals, are left small.
    const std::uint32_t bits = exponent < 12 ? 0x7e000000u : (265u - exponent) << 23;
    const float factor = formats::float_of(bits);
    if (isa::thread() == 0) isa::store_global(p.query_scale + unit, factor);
    for (int row = isa::warp(); row < p.unit_rows; row += warps) {
      prepare_row(p, pair, unit, row, factor);
    }
  }

  // ---- Bytes ----------------------------------------------------------------------------------

  static QATTN_DEVICE std::uint32_t entry_bytes(const Params& p, const DecodePair& pair,
                                                std::int32_t index) {
    if (index >= pair.entries) return 0;
    const kv::Entry e = load_entry(p.cache.table(pair.slot, p.layer, pair.head) + index);
    if (!valid_entry(p.cache, e)) {
      if (p.error != nullptr) isa::atomic_or_global(p.error, tile::error_page);
      return 0;
    }
    const std::int32_t begin = pair.visible_begin(p, 0);
    std::uint32_t blocks = 0;
    for (int i = 0; i < p.cache.blocks_per_page(); ++i) blocks += reads_block(e, i, begin) ? 1 : 0;
    return blocks * static_cast<std::uint32_t>(p.cache.pool[e.tier].block.bytes());
  }

  static QATTN_DEVICE void prepare_part(const Params& p, std::int64_t index) {
    const std::int64_t pair_index = index / p.parts(), part = index % p.parts();
    const DecodePair pair(p, pair_index);
    constexpr int lanes = threads / part_segments;  // of a segment
    const int each = p.segment_entries() / lanes;
    const auto first = static_cast<std::int32_t>(part * p.part_entries()) + isa::thread() * each;
    std::uint32_t bytes = 0;
    for (int i = 0; i < each; ++i) bytes += entry_bytes(p, pair, first + i);
#pragma unroll
    for (int mask = 1; mask < lanes; mask *= 2) bytes += isa::shuffle_xor(bytes, mask);
    // Sums of the segments before: in the warp, then of whole warps.
    std::uint32_t through = bytes;
#pragma unroll
    for (int delta = lanes; delta < 32; delta *= 2) {
      const std::uint32_t before = isa::shuffle_up(through, delta);
      through += isa::lane() >= delta ? before : 0;
    }
    const isa::SharedAddress sums = isa::shared_base();
    const int warp = isa::warp();
    if (isa::lane() == 31) isa::store_shared(sums + warp * 4, through);
    isa::sync_threads();
    for (int w = 0; w < warp; ++w) through += isa::load_shared<std::uint32_t>(sums + w * 4);
    if (isa::lane() % lanes == 0) {
      isa::store_global(p.segment_start + index * part_segments + isa::thread() / lanes,
                        through - bytes);
    }
    if (isa::thread() == threads - 1) isa::store_global(p.part_bytes + index, through);
  }

  static QATTN_DEVICE void run(const Params& p) {
    isa::grid_dependency_launch();
    isa::grid_dependency_wait();
    const std::int64_t block = isa::block().x;
    if (block < p.units()) {
      prepare_unit(p, block);
    } else {
      prepare_part(p, block - p.units());
    }
  }
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
