// The probability on each block of 16 tokens, averaged over a head's queries.
#pragma once

#include "kernels/decode/mixed_kv/prepare.cuh"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

/// Did this block of Decode take places of the unit?
QATTN_DEVICE bool takes_part(const DecodeParams& p, int block, std::int64_t unit) {
  const auto share = isa::load_global(reinterpret_cast<const isa::Words4*>(p.shares + block));
  const std::int64_t from = share.w[0], to = share.w[2];
  const std::uint32_t begin = unit == from ? share.w[1] : 0;
  const std::uint32_t end = unit < to ? p.places() : share.w[3];
  return unit >= from && unit <= to && end > begin;
}

/// What a row's parts add up to: the sum of 2^(score - top).
struct RowSum {
  float top = -tile::infinity(), total = 0;

  /// Factors of what was there and of what came.
  struct Weights {
    float keep, weight;
  };
  QATTN_DEVICE Weights add(float base, float sum) {
    if (base == -tile::infinity() && !tile::is_nan(sum)) return {1, 0};
    const float next = fmaxf(top, base);
    const float keep = top == -tile::infinity() ? 0.0f : isa::exp2(top - next);
    const float weight = isa::exp2(base - next);
    top = next;
    total = fmaf(total, keep, weight * sum);
    return {keep, weight};
  }
  /// In units of log2; NaN where the sum is.
  QATTN_DEVICE float lse() const {
    return total > 0 || tile::is_nan(total) ? top + isa::log2(total) : -tile::infinity();
  }
};

/// Blocks of DecodeCombine: mass_parts() for a (sequence, KV head). A thread has one place of its
/// page table, for all heads that read it. Rows' LSE they find themselves: as a kernel behind the
/// combination this took 10 us of a call (H200).
struct DecodeMass {
  static constexpr int threads = combine_threads;

  const DecodeParams& p;
  const std::int64_t index;  ///< of the pair
  const std::int64_t place;  ///< of the page table
  const DecodePair pair;
  const int per_page;
  const std::int32_t entry;
  const int block;
  const kv::Entry* const table;
  kv::Entry own{};  ///< this thread's entry
  /// `first` of those beside it, and of the table's last.
  std::int32_t before_first = 0, after_first = 0, last_first = 0;

  /// Tables are as they were before this call began, so all of this may come before Decode's end.
  QATTN_DEVICE DecodeMass(const DecodeParams& params, std::int64_t part)
      : p(params),
        index(Quotient(part, p.mass_parts()).quotient),
        place((part - index * p.mass_parts()) * threads + isa::thread()),
        pair(p, index),
        per_page(p.cache.blocks_per_page()),
        entry(static_cast<std::int32_t>(place >> p.page_shift())),
        block(static_cast<int>(place & (per_page - 1))),
        table(pair.bad ? nullptr : p.cache.table(pair.slot, p.layer, pair.head)) {
    if (pair.entries > 0) last_first = isa::load_global(&table[pair.entries - 1].first);
    if (entry >= pair.entries) return;
    own = load_entry(table + entry);
    if (entry > 0) before_first = isa::load_global(&table[entry - 1].first);
    if (entry + 1 < pair.entries) after_first = isa::load_global(&table[entry + 1].first);
  }

  QATTN_DEVICE void store(int head, std::int64_t at, float x) const {
    isa::store_global(p.mass + (index * p.group + head) * p.mass_blocks + at, x);
  }
  /// This thread's share of blocks [begin, end) of the mass of all heads; `first` of `step`.
  QATTN_DEVICE void fill(std::int64_t begin, std::int64_t end, std::int64_t first,
                         std::int64_t step, float x) const {
    for (int head = 0; head < p.group; ++head) {
      for (std::int64_t at = begin + first; at < end; at += step) store(head, at, x);
    }
  }
  /// Tables are written on the device: a wild position must not become a wild address.
  static QATTN_DEVICE std::int64_t block_at(std::int32_t first) {
    return (first > 0 ? first : 0) / formats::kv_block_tokens;
  }

  // ---- LSE ------------------------------------------------------------------------------------

  /// Of the pair's rows from `begin` on, at most as many as threads, in units of log2, to shared
  /// memory. Some threads share each row's blocks of Decode.
  QATTN_DEVICE void find_lse(int begin, int end) const {
    int lanes = 32;
    while (lanes * (end - begin) > threads) lanes /= 2;
    const int r = begin + isa::thread() / lanes, lane = isa::thread() % lanes;
    RowSum row;
    if (r < end) {
      const std::int64_t unit = index + p.chunk_of(r) * p.pairs();
      const int last = isa::load_global(p.last_block + unit);
      for (int n = isa::load_global(p.first_block + unit) + lane; n <= last; n += lanes) {
        const std::int64_t at = (n + unit) * p.unit_rows + (r & (p.unit_rows - 1));
        const auto words =
            isa::load_global(reinterpret_cast<const isa::Words2*>(p.partial_sum + at * 2));
        if (!takes_part(p, n, unit)) continue;
        row.add(formats::float_of(words.w[0]), formats::float_of(words.w[1]));
      }
    }
    for (int mask = 1; mask < lanes; mask *= 2) {
      const float other_top = isa::shuffle_xor(row.top, mask);
      row.add(other_top, isa::shuffle_xor(row.total, mask));
    }
    if (r >= end || lane != 0) return;
    if (p.sinks != nullptr) {
      const int head = pair.head * p.group + r / p.queries;
      row.add(isa::load_global(p.sinks + head) * tile::log2_e, 1.0f);
    }
    isa::store_shared(lse_at(r - begin), row.lse());
  }
  static QATTN_DEVICE isa::SharedAddress lse_at(int r) {
    return isa::shared_base() + static_cast<isa::SharedAddress>(r * 4);
  }

  // ---- Mass -----------------------------------------------------------------------------------

  /// Where the lists have this thread's block of entry `n`; negative: nobody reads it.
  QATTN_DEVICE std::int64_t place_of(const kv::Entry& e, std::int32_t n) const {
    const bool valid = valid_entry(p.cache, pair, e);
    if (!valid || !reads_block(e, block, pair.visible_begin(p, 0))) return -1;
    const std::int64_t in_table = index * p.parts() * part_blocks + n * per_page + block;
    return in_table / part_blocks * part_blocks + isa::load_global(p.list_places + in_table);
  }

  static constexpr int heads = 4;  ///< at a time: their loads do not wait for one another

  /// What one query of heads from `first` on, before `end`, gave to the block at place `at` of the
  /// lists, as logarithms.
  QATTN_DEVICE void load_logs(float (&log)[heads], int first, int end, int query,
                              std::int64_t at) const {
#pragma unroll
    for (int k = 0; k < heads; ++k) {
      const int r = (first + k) * p.queries + query;
      log[k] = -tile::infinity();
      if (at >= 0 && first + k < end) {
        log[k] = isa::load_global(p.mass_log + (p.chunk_of(r) * p.mass_chunk + at) * p.unit_rows +
                                  (r & (p.unit_rows - 1)));
      }
    }
  }
  QATTN_DEVICE void add_logs(float (&mass)[heads], const float (&log)[heads], int first, int query,
                             int begin) const {
#pragma unroll
    for (int k = 0; k < heads; ++k) {
      if (log[k] == -tile::infinity()) continue;
      const int r = (first + k) * p.queries + query;
      mass[k] += isa::exp2(log[k] - isa::load_shared<float>(lse_at(r - begin)));
    }
  }

  /// Zeros for positions that have no page, between two entries and behind the last.
  QATTN_DEVICE void fill_gaps() const {
    std::int64_t begin = 0, end = 0;
    if (entry < pair.entries && block == 0) {
      begin = entry > 0 ? block_at(before_first) + per_page : 0;
      end = block_at(own.first) < p.mass_blocks ? block_at(own.first) : p.mass_blocks;
    }
    std::uint32_t left = isa::ballot(begin < end);
    for (int lane = 0; left != 0; ++lane, left >>= 1) {
      if ((left & 1) == 0) continue;
      fill(isa::shuffle(begin, lane), isa::shuffle(end, lane), isa::lane(), 32, 0.0f);
    }
    fill(pair.entries > 0 ? block_at(last_first) + per_page : 0, p.mass_blocks, place,
         p.mass_parts() * threads, 0.0f);
  }

  QATTN_DEVICE void run() const {
    isa::grid_dependency_wait();
    if (pair.bad) {
      return fill(0, p.mass_blocks, place, p.mass_parts() * threads, tile::quiet_nan());
    }
    // Entries of one position follow one another; the first adds up for all.
    const std::int64_t at = block_at(own.first) + block;
    const bool adds =
        entry < pair.entries && at < p.mass_blocks && !(entry > 0 && before_first == own.first);
    const bool any = (place - isa::thread()) >> p.page_shift() < pair.entries;  // of the threads
    const std::int64_t own_at = entry < pair.entries ? place_of(own, entry) : -1;
    const int together = threads / p.queries;  // heads whose rows have a thread each
    for (int first = 0; first < p.group; first += together) {
      const int end = first + together < p.group ? first + together : p.group;
      if (first > 0) isa::sync_threads();
      if (any) {
        find_lse(first * p.queries, end * p.queries);
        isa::sync_threads();
      }
      if (first == 0) fill_gaps();
      if (adds) add_heads(first, end, own_at, at);
    }
  }

  /// This thread's block, `own_at` in the lists, for heads [begin, end): to place `at` of the mass.
  QATTN_DEVICE void add_heads(int begin, int end, std::int64_t own_at, std::int64_t at) const {
    const bool alone = entry + 1 >= pair.entries || after_first != own.first;
    for (int head = begin; head < end; head += heads) {
      float mass[heads] = {};
      std::int64_t list_at = own_at;
      for (std::int32_t n = entry;;) {
        for (int query = 0; query < p.queries; ++query) {
          float log[heads];
          load_logs(log, head, end, query, list_at);
          add_logs(mass, log, head, query, begin * p.queries);
        }
        if (alone || ++n >= pair.entries) break;
        const kv::Entry e = load_entry(table + n);
        if (e.first != own.first) break;
        list_at = place_of(e, n);
      }
#pragma unroll
      for (int k = 0; k < heads; ++k) {
        if (head + k < end) store(head + k, at, mass[k] / static_cast<float>(p.queries));
      }
    }
  }

  static QATTN_DEVICE void run(const DecodeParams& p, std::int64_t part) {
    DecodeMass(p, part).run();
  }
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
