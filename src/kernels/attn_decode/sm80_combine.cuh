// After Decode: partial results into O and LSE, and what each block of 16 tokens got.
#pragma once

#include "kernels/attn_decode/sm80_prepare.cuh"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

/// A block of the grid is a row of a unit; its warps share the blocks of Decode that had parts of
/// it.
template <int Dv>
struct DecodeCombine {
  using Params = DecodeParams;
  static constexpr int threads = 256, min_blocks = 2;
  static constexpr int warps = threads / 32;
  static constexpr int row_bytes = (Dv + 4) * 4;  ///< of a warp: its sums, base and sum
  static constexpr int shared_bytes = warps * row_bytes;
  static constexpr bool dependent = true;

  /// Did this block of Decode take places of the unit?
  static QATTN_DEVICE bool takes(const Params& p, int block, std::int64_t unit) {
    const auto share = isa::load_global(reinterpret_cast<const isa::Words4*>(p.shares + block));
    const std::int64_t from = share.w[0], to = share.w[2];
    const std::uint32_t begin = unit == from ? share.w[1] : 0;
    const std::uint32_t end = unit < to ? p.places() : share.w[3];
    return unit >= from && unit <= to && end > begin;
  }

  struct Row {
    LaneRow<Dv> out;
    float top = -tile::infinity(), total = 0;

    QATTN_DEVICE void add(float base, float sum, const LaneRow<Dv>& x) {
      if (base == -tile::infinity() && !tile::is_nan(sum)) return;
      const float next = fmaxf(top, base);
      const float keep = top == -tile::infinity() ? 0.0f : isa::exp2(top - next);
      const float weight = isa::exp2(base - next);
      top = next;
      total = fmaf(total, keep, weight * sum);
#pragma unroll
      for (int i = 0; i < LaneRow<Dv>::count; ++i) {
        out.x[i] = fmaf(out.x[i], keep, weight * x.x[i]);
      }
    }
    /// What a block of Decode had of it, if anything; all is on its way before any is looked at.
    QATTN_DEVICE void add_part(const Params& p, int block, std::int64_t unit, int row) {
      const std::int64_t at = (block + unit) * p.unit_rows + row;
      const auto words =
          isa::load_global(reinterpret_cast<const isa::Words2*>(p.partial_sum + at * 2));
      LaneRow<Dv> x;
#pragma unroll
      for (int i = 0; i < LaneRow<Dv>::count; ++i) {
        x.x[i] = isa::load_global(p.partial_out + at * Dv + out.channel(i));
      }
      if (!takes(p, block, unit)) return;
      add(formats::float_of(words.w[0]), formats::float_of(words.w[1]), x);
    }
    QATTN_DEVICE void store(isa::SharedAddress to) const {
#pragma unroll
      for (int i = 0; i < LaneRow<Dv>::count; ++i) {
        isa::store_shared(to + static_cast<isa::SharedAddress>(out.channel(i) * 4), out.x[i]);
      }
      if (isa::lane() == 0) {
        isa::store_shared(to + Dv * 4,
                          isa::Words2{{formats::bits_of(top), formats::bits_of(total)}});
      }
    }
    QATTN_DEVICE void add_stored(isa::SharedAddress from) {
      LaneRow<Dv> x;
#pragma unroll
      for (int i = 0; i < LaneRow<Dv>::count; ++i) {
        x.x[i] =
            isa::load_shared<float>(from + static_cast<isa::SharedAddress>(out.channel(i) * 4));
      }
      const auto words = isa::load_shared<isa::Words2>(from + Dv * 4);
      add(formats::float_of(words.w[0]), formats::float_of(words.w[1]), x);
    }
    QATTN_DEVICE void add_sink(float sink) {
      if (sink == -tile::infinity()) return;
      const float logit = sink * tile::log2_e, next = fmaxf(top, logit);
      const float keep = top == -tile::infinity() ? 0.0f : isa::exp2(top - next);
      top = next;
      total = fmaf(total, keep, isa::exp2(logit - next));
#pragma unroll
      for (int i = 0; i < LaneRow<Dv>::count; ++i) out.x[i] *= keep;
    }
  };

  static QATTN_DEVICE void store_number(void* data, Format format, std::int64_t at, float x) {
    if (format == Format::f32) return isa::store_global(static_cast<float*>(data) + at, x);
    const std::uint32_t bits =
        format == Format::f16 ? isa::pack_f16(x, 0.0f) : isa::pack_bf16(x, 0.0f);
    isa::store_global(static_cast<std::uint16_t*>(data) + at, static_cast<std::uint16_t>(bits));
  }

  static QATTN_DEVICE void write(const Params& p, const DecodePair& pair, std::int64_t unit,
                                 int row, Row& x) {
    const int r = static_cast<int>(unit / p.pairs()) * p.unit_rows + row;
    const std::int64_t head = std::int64_t{pair.head} * p.group + r / p.queries,
                       query = r % p.queries;
    if (p.sinks != nullptr) x.add_sink(isa::load_global(p.sinks + head));
    if (p.cache.rotate != 0) x.out.unrotate();
    const float inverse = x.total > 0 ? formats::reciprocal(x.total) : 0.0f;
    const bool bad = pair.bad || tile::is_nan(x.total);
    float lse = x.total > 0 ? x.top + isa::log2(x.total) : -tile::infinity();
    lse = bad ? tile::quiet_nan() : lse;
    const std::int64_t to = pair.batch * p.out.batch + query * p.out.query + head * p.out.head;
#pragma unroll
    for (int i = 0; i < LaneRow<Dv>::count; ++i) {
      store_number(p.out.data, p.out.format, to + x.out.channel(i),
                   bad ? tile::quiet_nan() : x.out.x[i] * inverse);
    }
    if (isa::lane() != 0) return;
    isa::store_global(p.row_lse + unit * p.unit_rows + row, lse);
    if (p.lse != nullptr) {
      isa::store_global(p.lse + (std::int64_t{pair.batch} * p.heads_q + head) * p.queries + query,
                        lse * tile::ln_2);
    }
  }

  static QATTN_DEVICE void run(const Params& p) {
    isa::grid_dependency_launch();
    isa::grid_dependency_wait();
    const std::int64_t unit = isa::block().x / p.unit_rows;
    const int row = static_cast<int>(isa::block().x % p.unit_rows);
    if (static_cast<int>(unit / p.pairs()) * p.unit_rows + row >= p.rows()) return;
    int first = 0, last = -1;
    if (p.places() > 0) {
      first = isa::load_global(p.first_block + unit);
      last = isa::load_global(p.last_block + unit);
    }
    const DecodePair pair(p, unit % p.pairs());
    Row x;
#pragma unroll
    for (int i = 0; i < LaneRow<Dv>::count; ++i) x.out.x[i] = 0;
    const int warp = isa::warp();
    for (int block = first + warp; block <= last; block += warps) x.add_part(p, block, unit, row);
    const isa::SharedAddress shared = isa::shared_base();
    if (warp > 0) x.store(shared + static_cast<isa::SharedAddress>(warp * row_bytes));
    isa::sync_threads();
    if (warp > 0) return;
    for (int w = 1; w < warps && first + w <= last; ++w) {
      x.add_stored(shared + static_cast<isa::SharedAddress>(w * row_bytes));
    }
    write(p, pair, unit, row, x);
  }
};

/// The probability on each block of 16 tokens, averaged over a head's queries: a thread has one
/// place of the page table, for all heads that read it. DecodePrepare has put zeros everywhere. A
/// block a query head, which walked the whole table and waited for it, took 20 to 50 us (H200).
struct DecodeMass {
  using Params = DecodeParams;
  static constexpr int threads = mass_threads, min_blocks = 2, shared_bytes = 0;
  static constexpr bool dependent = true;

  static QATTN_DEVICE float of_block(const Params& p, const DecodePair& pair, int group_head,
                                     std::int64_t place) {
    float mass = 0;
    for (int query = 0; query < p.queries; ++query) {
      const int r = group_head * p.queries + query;
      const std::int64_t unit =
          std::int64_t{pair.batch} * p.cache.heads_kv + pair.head + r / p.unit_rows * p.pairs();
      const std::int64_t row = unit * p.unit_rows + r % p.unit_rows;
      const float log = isa::load_global(p.mass_log + row * p.mass_row() + place);
      if (log != -tile::infinity()) mass += isa::exp2(log - isa::load_global(p.row_lse + row));
    }
    return mass / static_cast<float>(p.queries);
  }

  static QATTN_DEVICE float* row_of(const Params& p, std::int64_t pair, int group_head) {
    return p.mass + (pair * p.group + group_head) * p.mass_blocks;
  }

  static QATTN_DEVICE void run(const Params& p) {
    isa::grid_dependency_wait();
    const std::int64_t index = isa::block().x / p.mass_parts();
    const std::int64_t place = isa::block().x % p.mass_parts() * threads + isa::thread();
    const DecodePair pair(p, index);
    if (pair.bad) {
      for (int head = 0; head < p.group; ++head) {
        for (std::int64_t i = place; i < p.mass_blocks; i += p.mass_parts() * threads) {
          isa::store_global(row_of(p, index, head) + i, tile::quiet_nan());
        }
      }
      return;
    }
    const int per_page = p.cache.blocks_per_page();
    const std::int64_t i = place / per_page;
    const int block = static_cast<int>(place % per_page);
    if (i >= pair.entries) return;
    const kv::Entry* table = p.cache.table(pair.slot, p.layer, pair.head);
    const kv::Entry e = load_entry(table + i);
    // Entries of one position follow one another; the first adds up for all.
    if (i > 0 && load_entry(table + i - 1).first == e.first) return;
    const std::int64_t at = e.first / formats::kv_block_tokens + block;
    if (at < 0 || at >= p.mass_blocks) return;
    const std::int32_t seen = pair.visible_begin(p, 0);
    const auto of_entry = [&](const kv::Entry& entry, std::int64_t j, int head) {
      const bool counts = valid_entry(p.cache, entry) && reads_block(entry, block, seen);
      return counts ? of_block(p, pair, head, j * per_page + block) : 0.0f;
    };
    const bool alone = i + 1 >= pair.entries || load_entry(table + i + 1).first != e.first;
    for (int head = 0; head < p.group; ++head) {
      float mass = of_entry(e, i, head);
      for (std::int64_t j = i + 1; !alone && j < pair.entries; ++j) {
        const kv::Entry other = load_entry(table + j);
        if (other.first != e.first) break;
        mass += of_entry(other, j, head);
      }
      isa::store_global(row_of(p, index, head) + at, mass);
    }
  }
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
