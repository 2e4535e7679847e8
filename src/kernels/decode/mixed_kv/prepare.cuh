// The kernel before Decode: queries in the form that products read, and lists of blocks by tier.
#pragma once

#include "formats/bits.hpp"
#include "formats/hadamard.hpp"
#include "kernels/attention/common/score.hpp"
#include "kernels/decode/mixed_kv/params.hpp"
#include "kvcache/keys/balance.hpp"

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
  static constexpr int threads = 512, min_blocks = 1;
  static constexpr int warps = threads / 32;
  static constexpr int most_rows = 16 / warps;  ///< of a unit, in a warp
  static constexpr bool dependent = true;

  // ---- Queries --------------------------------------------------------------------------------

  /// Where one 16-bit half of plane `plane` lies, in halves from the unit's first.
  static QATTN_DEVICE std::int64_t half_place(const Params& p, int plane, int row, int c) {
    int step, t, pair, half;
    if (plane >= query_codes) {
      step = c / 16, t = c % 16 / 4, pair = c % 2, half = c % 4 / 2;
    } else {
      step = c / 32 * 2 + c % 8 / 4, t = c % 32 / 8, pair = c % 4 / 2, half = c % 2;
    }
    const int lane = row % 8 * 4 + t;
    const int word = ((step * (p.unit_rows / 8) + row / 8) * 32 + lane) * 2 + pair;
    return (std::int64_t{plane} * p.unit_rows * (D / 2) + word) * 2 + half;
  }

  static QATTN_DEVICE LaneRow<D> load_row(const Params& p, std::int64_t pair, int r) {
    const Quotient place(pair, p.cache.heads_kv);
    const std::int64_t batch = place.quotient,
                       head = std::int64_t{place.remainder} * p.group + r / p.queries;
    const std::int64_t at = batch * p.q.batch + r % p.queries * p.q.query + head * p.q.head;
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

  static QATTN_DEVICE void store_half(const Params& p, std::uint16_t* to, int plane, int row, int c,
                                      std::uint32_t bits) {
    isa::store_global(to + half_place(p, plane, row, c), static_cast<std::uint16_t>(bits));
  }
  /// 16 bits of the window's element and what they leave.
  static QATTN_DEVICE void store_halves(const Params& p, std::uint16_t* to, int row, int c,
                                        float raw) {
    const bool bf16 = p.cache.bf16 != 0;
    const auto narrow = [&](float x) {
      return bf16 ? isa::pack_bf16(x, 0.0f) : isa::pack_f16(x, 0.0f);
    };
    const std::uint32_t high = narrow(raw);
    const float kept = bf16 ? isa::unpack_bf16(high).lo : isa::unpack_f16(high).lo;
    store_half(p, to, query_high, row, c, high);
    store_half(p, to, query_low, row, c, narrow(raw - kept));
  }

  /// A row as it came, as codes of a set take it (balanced, rotated), and its product with the
  /// set's mean of K.
  struct QueryRow {
    LaneRow<D> raw, rotated;
    float dot = 0;

    QATTN_DEVICE void take_set(const Params& p, const DecodePair& pair, int set) {
      rotated = raw;
      dot = 0;
      if (pair.bad) {
        if (p.cache.rotates_k()) rotated.rotate();
        return;
      }
      if (p.cache.smooth_k != 0) {
        const float* mean = p.cache.k_mean(pair.slot, p.layer, pair.head, set);
#pragma unroll
        for (int x = 0; x < LaneRow<D>::count; ++x) {
          dot = fmaf(raw.x[x], isa::load_global(mean + raw.channel(x)), dot);
        }
      }
      if (p.cache.balance_k != 0) {
        const std::uint8_t* shift = p.cache.k_shift(pair.slot, p.layer, pair.head, set);
#pragma unroll
        for (int x = 0; x < LaneRow<D>::count; ++x) {
          rotated.x[x] *= kv::key_factor(isa::load_global(shift + raw.channel(x)));
        }
      }
      if (p.cache.rotates_k()) rotated.rotate();
    }
  };

  static QATTN_DEVICE void store_row(const Params& p, const QueryRow& query, std::int64_t unit,
                                     int set, int row, float factor) {
    const auto& [raw, rotated, dot] = query;
    auto* to = reinterpret_cast<std::uint16_t*>(p.query_words + p.query_plane(unit, 0));
    float sum = 0, square = 0;
#pragma unroll
    for (int i = 0; i < LaneRow<D>::count; ++i) {
      const float x = rotated.x[i] * factor;
      // The codes' plane takes f16 whatever the window has.
      const std::uint32_t code = isa::pack_f16(x, 0.0f);
      store_half(p, to, query_codes + set, row, raw.channel(i), code);
      if (set == 0) store_halves(p, to, row, raw.channel(i), raw.x[i] * factor);
      sum += isa::unpack_f16(code).lo;
      square = fmaf(x, x, square);
    }
    const float offset = warp_sum(dot);
    sum = warp_sum(sum);
    square = warp_sum(square);
    if (isa::lane() == 0) {
      float* facts = p.facts_of(unit, set, row);
      isa::store_global(facts, offset);
      isa::store_global(facts + 1, sum);
      isa::store_global(facts + 2, square);
    }
  }

  /// One power of two for all rows of a unit, and all sets, brings the largest element of Q or of
  /// its rotation to [2^11, 2^12]: rows 2^19 times smaller still have all bits of f16, 1 / 64 of
  /// them included.
  static QATTN_DEVICE void prepare_unit(const Params& p, std::int64_t unit) {
    const Quotient place(unit, p.pairs());
    const std::int64_t pair_index = place.remainder;
    const int first = place.quotient * p.unit_rows, warp = isa::warp();
    // Loads that need not wait for the slot come first.
    QueryRow queries[most_rows];
#pragma unroll
    for (int i = 0; i < most_rows; ++i) {
      if (warp + i * warps < p.unit_rows) {
        queries[i].raw = load_row(p, pair_index, first + warp + i * warps);
      }
    }
    const DecodePair pair(p, pair_index);
    if (pair.bad && p.error != nullptr && isa::thread() == 0) {
      isa::atomic_or_global(p.error, tile::error_sequence);
    }
    const isa::SharedAddress top_at = isa::shared_base();
    if (isa::thread() == 0) isa::store_shared(top_at, 0u);
    isa::sync_threads();
#pragma unroll
    for (int i = 0; i < most_rows; ++i) {
      if (warp + i * warps >= p.unit_rows) continue;
      float top = amax(queries[i].raw);
      for (int set = pair.sets - 1; set >= 0; --set) {  // the first one's stay in registers
        queries[i].take_set(p, pair, set);
        top = fmaxf(top, amax(queries[i].rotated));
      }
      if (isa::lane() == 0) isa::atomic_max_shared(top_at, formats::bits_of(top));
    }
    isa::sync_threads();
    const std::uint32_t exponent = isa::load_shared<std::uint32_t>(top_at) >> 23;
    // 2^(138 - exponent); rows of zeros, and of subnormals, are left small.
    const std::uint32_t bits = exponent < 12 ? 0x7e000000u : (265u - exponent) << 23;
    const float factor = formats::float_of(bits);
    if (isa::thread() == 0) {
      // The combination asks for nothing else of the pair.
      isa::store_global(p.query_scale + unit, pair.bad ? tile::quiet_nan() : factor);
    }
#pragma unroll
    for (int i = 0; i < most_rows; ++i) {
      if (warp + i * warps >= p.unit_rows) continue;
      for (int set = 0; set < pair.sets; ++set) {
        if (set > 0) queries[i].take_set(p, pair, set);
        store_row(p, queries[i], unit, set, warp + i * warps, factor);
      }
    }
  }

  // ---- Lists ----------------------------------------------------------------------------------

  static constexpr std::uint32_t no_tier = 255;
  static_assert(kv::most_tiers == 8, "a tier and its set are in a byte");
  static constexpr int each = part_blocks / threads;  ///< blocks of a thread
  /// [part_blocks] DecodeBlock, [part_blocks] bytes of tiers, [warps] TierCounts.
  static constexpr int tiers_at = part_blocks * 8, sums_at = tiers_at + part_blocks;
  static constexpr int shared_bytes = sums_at + warps * 16;

  /// Eight numbers of 16 bits.
  struct TierCounts {
    std::uint64_t low = 0, high = 0;

    QATTN_DEVICE std::uint32_t of(int tier) const {
      return static_cast<std::uint32_t>((tier < 4 ? low : high) >> (tier & 3) * 16) & 0xffffu;
    }
    QATTN_DEVICE void count(int tier) {
      (tier < 4 ? low : high) += std::uint64_t{1} << (tier & 3) * 16;
    }
    QATTN_DEVICE void add(const TierCounts& x) { low += x.low, high += x.high; }
    /// How many there are of the tiers before each.
    QATTN_DEVICE TierCounts starts() const {
      constexpr std::uint64_t every = 0x0001000100010001u;
      return {low * (every << 16), high * (every << 16) + (low * every >> 48) * every};
    }
  };

  /// Puts what block `i` of the part is into shared memory.
  static QATTN_DEVICE void note_block(const Params& p, const DecodePair& pair, std::int64_t part,
                                      int i, const kv::Entry& e) {
    const int shift = p.page_shift(), block = i & ((1 << shift) - 1);
    const auto index = static_cast<std::uint32_t>(part * p.part_entries() + (i >> shift));
    std::uint32_t tier = no_tier;
    if (static_cast<std::int32_t>(index) < pair.entries) {
      if (!valid_entry(p.cache, pair, e)) {
        if (p.error != nullptr) isa::atomic_or_global(p.error, tile::error_page);
      } else if (reads_block(e, block, pair.visible_begin(p, 0))) {
        tier = e.tier | static_cast<std::uint32_t>(e.set) << 3;
      }
    }
    const std::int32_t first = e.first + block * formats::kv_block_tokens;
    bool whole = (e.live >> (block * formats::kv_block_tokens) & 0xffffu) == 0xffffu &&
                 first >= pair.sure_begin(p) &&
                 first + formats::kv_block_tokens <= pair.sure_end(p);
    if (p.cache.k_by_channel != 0 && tier != no_tier) {
      whole &= (bad_keys(p.cache, e) >> (block * formats::kv_block_tokens) & 0xffffu) == 0;
    }
    const std::uint32_t number =
        (static_cast<std::uint32_t>(e.page) << shift) + static_cast<std::uint32_t>(block);
    const isa::SharedAddress base = isa::shared_base();
    isa::store_shared(base + static_cast<isa::SharedAddress>(i * 8),
                      isa::Words2{{number, index << 3 | static_cast<std::uint32_t>(block) << 1 |
                                               (whole ? 0u : 1u)}});
    isa::store_shared(base + static_cast<isa::SharedAddress>(tiers_at + i),
                      static_cast<std::uint8_t>(tier));
  }

  /// Counts of all tiers: in this thread's blocks, and in those of threads before it; returns those
  /// of all. After a barrier of `mine`.
  static QATTN_DEVICE TierCounts add_up(const TierCounts& mine, TierCounts& before) {
    TierCounts through = mine;
#pragma unroll
    for (int delta = 1; delta < 32; delta *= 2) {
      const TierCounts other{isa::shuffle_up(through.low, delta),
                             isa::shuffle_up(through.high, delta)};
      if (isa::lane() >= delta) through.add(other);
    }
    const isa::SharedAddress sums = isa::shared_base() + sums_at;
    const int warp = isa::warp();
    const auto words = [](std::uint64_t x) {
      return isa::Words2{{static_cast<std::uint32_t>(x), static_cast<std::uint32_t>(x >> 32)}};
    };
    if (isa::lane() == 31) {
      const auto at = sums + static_cast<isa::SharedAddress>(warp * 16);
      isa::store_shared(at, words(through.low));
      isa::store_shared(at + 8, words(through.high));
    }
    isa::sync_threads();
    before = {through.low - mine.low, through.high - mine.high};
    TierCounts all;
    for (int w = 0; w < warps; ++w) {
      const auto at = sums + static_cast<isa::SharedAddress>(w * 16);
      const TierCounts of_warp{isa::load_shared<std::uint64_t>(at),
                               isa::load_shared<std::uint64_t>(at + 8)};
      if (w < warp) before.add(of_warp);
      all.add(of_warp);
    }
    return all;
  }

  static QATTN_DEVICE void prepare_part(const Params& p, std::int64_t index) {
    const Quotient place(index, p.parts());
    const std::int64_t part = place.remainder, pair_index = place.quotient;
    const Quotient pair_place(pair_index, p.cache.heads_kv);
    const int shift = p.page_shift();
    // All entries are on their way before the first is looked at, and before it is known how many
    // the table has.
    kv::Entry entries[each];
    const std::int32_t slot = isa::load_global(p.slots + pair_place.quotient);
    if (slot >= 0 && slot < p.cache.slots) {
      const kv::Entry* table = p.cache.table(slot, p.layer, pair_place.remainder);
#pragma unroll
      for (int i = 0; i < each; ++i) {
        const auto entry = static_cast<std::int32_t>(part * p.part_entries()) +
                           ((isa::thread() + i * threads) >> shift);
        if (entry < p.cache.most_pages) entries[i] = load_entry(table + entry);
      }
    }
    const DecodePair pair(p, pair_index);
#pragma unroll
    for (int i = 0; i < each; ++i) {
      note_block(p, pair, part, isa::thread() + i * threads, entries[i]);
    }
    isa::sync_threads();
    // Thread t has blocks [each t, each (t + 1)) in their order.
    const auto own = static_cast<isa::SharedAddress>(isa::thread() * each);
    const isa::SharedAddress base = isa::shared_base();
    isa::Words2 places{};
    static_assert(each == 4, "two in a word");
    std::uint32_t done = 0, cost = 0;  // of the sets before
    for (int set = 0; set < pair.sets; ++set) {
      const auto tier_of = [&](int i) {
        const int both = isa::load_shared<std::uint8_t>(base + tiers_at + own +
                                                        static_cast<isa::SharedAddress>(i));
        return both != no_tier && both >> 3 == set ? both & 7 : int{no_tier};
      };
      TierCounts mine, before;
      for (int i = 0; i < each; ++i) {
        if (tier_of(i) != no_tier) mine.count(tier_of(i));
      }
      const TierCounts all = add_up(mine, before);
      before.add(all.starts());
#pragma unroll
      for (int i = 0; i < each; ++i) {
        const int tier = tier_of(i);
        if (tier == no_tier) continue;
        const std::uint32_t to = done + before.of(tier);
        before.count(tier);
        isa::store_global(
            reinterpret_cast<isa::Words2*>(p.lists + index * part_blocks + to),
            isa::load_shared<isa::Words2>(base + (own + static_cast<isa::SharedAddress>(i)) * 8));
        places.w[i / 2] |= to << i % 2 * 16;
      }
      if (isa::thread() < kv::most_tiers) {
        isa::store_global(p.counts_of(index, set) + isa::thread(), all.of(isa::thread()));
      }
      for (int t = 0; t < p.cache.pools; ++t) {
        done += all.of(t);
        cost += all.of(t) * block_cost(p.cache.pool[t].layout.block);
      }
      if (set + 1 < pair.sets) isa::sync_threads();  // sums are read
    }
    if (p.mass != nullptr) {
      isa::store_global(reinterpret_cast<isa::Words2*>(p.list_places + index * part_blocks + own),
                        places);
    }
    if (isa::thread() == 0) isa::store_global(p.part_costs + index, cost);
  }

  static QATTN_DEVICE void run(const Params& p) {
    isa::grid_dependency_wait();
    const std::int64_t block = isa::block().x;
    if (block < p.units()) {
      prepare_unit(p, block);
    } else {
      prepare_part(p, block - p.units());
    }
    // Not before: blocks of Decode that come while some of these still run land on multiprocessors
    // out of order, and share_number() wants an early and a late share on each.
    isa::grid_dependency_launch();
  }
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
