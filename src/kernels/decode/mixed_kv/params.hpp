// What the portable decode kernels are told, and where they keep what between them.
//
// A unit is up to 16 query rows of one (sequence, KV head), row r being query r % queries of head r
// / queries of its group; chunks of more rows follow one another. DecodePrepare sorts the blocks of
// 16 tokens of every part of a page table (32768 tokens) by tier into a list, and counts them;
// block c of Decode takes the places of all lists whose cost lies in its share, about [c T / G, (c
// + 1) T / G) (FindPlace::find() moves the bounds a little). So nothing that the host does depends
// on lengths or tiers, a captured launch balances what it finds, and warps stay in the code of one
// tier: with tiers as they come (in passes of 640 blocks, each sorted for itself) an H200 spent 43
// % of a mixed cache's time on instructions that were not in its instruction cache.
#pragma once

#include <cstdint>

#include "isa/isa.hpp"
#include "kvcache/device_view.hpp"
#include "qattn/format.hpp"

namespace qattn::kernels {

inline constexpr int combine_threads = 256;
inline constexpr int part_blocks = 2048;  ///< of 16 tokens, in one block of DecodePrepare

/// One kernel: D, Dv, query rows of a unit / 8; K in tiers has a scale a channel; `small`: its
/// rings hold just the largest tile, for GPUs whose blocks may have 99 KiB.
struct DecodeConfig {
  int d, dv, n;
  bool by_channel, small;
  constexpr bool operator==(const DecodeConfig&) const = default;
};

/// Shared memory of a block, in bytes.
template <DecodeConfig C>
struct DecodeShape {
  static constexpr int warps = 8, threads = 32 * warps;
  static constexpr int k_steps = C.d / 16, n = C.n;
  static constexpr int groups = C.dv / 32;  ///< of channels: two rows of tiles of O^T
  /// Of one warp: three tiles of equal bits of K and V, but two of 3 bits; with K's scales a
  /// channel two (three at D 64 in 8 bits), but one of 3 bits. Small: two, but one of 3 bits.
  static constexpr int ring_bytes =
      C.small ? (C.by_channel ? 49 : 45) * (C.d + C.dv) : 48 * (C.d + C.dv) + 768;
  /// Blocks on a multiprocessor that registers allow; of small ones 100 KiB hold no more.
  static constexpr int min_blocks = C.d + C.dv > 256 || C.n > 1 || C.small ? 1 : 2;

  /// Are queries in shared memory? Small rings of tiles with K's scales a channel leave no room:
  /// products read the workspace, of which L1 can hold a unit's 2 KiB.
  static constexpr bool has_queries = !(C.small && C.by_channel);
  static constexpr int queries = 0;
  /// For K of that many bits: see DecodeCodes::store_queries().
  static constexpr int queries_of(int k_bits) {
    return queries + (k_bits == 8 ? 0 : k_bits > 2 ? 1 : 2) * k_steps * n * 256;
  }
  /// [n][4] x {offset, offset, sum, sum, noise, noise}
  static constexpr int facts = queries + (has_queries ? 3 * k_steps * n * 256 : 0);
  static constexpr int share = facts + n * 96;  ///< DecodeShare
  static constexpr int scratch = share + 16;
  static constexpr int unit_sets = scratch + 64;  ///< the set whose queries these are, how many
  static constexpr int ring = (scratch + 128 + 127) / 128 * 128;
  static constexpr int shared_bytes = ring + warps * ring_bytes;
  static_assert(ring_bytes % 128 == 0);
  /// The merge of warps goes through the rings.
  static_assert(ring_bytes >= 8 * n * (C.dv + 4) * 4);
};

/// Rows of Q or O. Strides in elements.
struct DecodeRows {
  void* data = nullptr;
  Format format = Format::none;
  std::int64_t batch = 0, query = 0, head = 0;
};

/// What a block of Decode takes: places from (unit, place) up to, not with, (unit, place). Place k
/// of a unit is place k % part_blocks in the list of part k / part_blocks.
struct alignas(16) DecodeShare {
  std::uint32_t unit, place, end_unit, end_place;
};

/// A block of 16 tokens in a list.
struct alignas(8) DecodeBlock {
  std::uint32_t number;  ///< of its pool, in blocks
  std::uint32_t where;   ///< entry << 3 | block of the page << 1 | some row does not see all of it
};

/// What a block of 16 tokens costs, in clocks of a multiprocessor: measured on an H200 where K has
/// a scale a token.
QATTN_HD std::uint32_t block_cost(const formats::KvBlock& b) {
  if (b.window()) return 400;
  const int odd = (b.k_bits == 3 ? 1 : 0) + (b.v_bits == 3 ? 1 : 0);
  return static_cast<std::uint32_t>(40 + 10 * (b.k_bits + b.v_bits) + 6 * odd);
}

/// One of so many equal shares, for products instead of 64-bit divisions. A little more than that:
/// a share that begins where a unit does must not begin before it, or its block has two units.
inline double share_of(std::int32_t blocks) { return (1 + 0x1p-50) / blocks; }

/// Forms of Q that products read, as fragments of the B operand of mma.m16n8k16:
/// [k step][8 rows][lane][2 words].
///   codes   f16, as K of a set is: balanced, rotated. k step j of lane t holds channels 16 j + 4 t
///   + {0, 2} and + {1, 3} high    of the window's element, as it came: channels 32 (j / 2) + 8 t +
///   4 (j % 2) + {0, 1}
///           and + {2, 3}
///   low     what `high` left
/// Planes from query_codes on are of one set each.
enum QueryPlane { query_high, query_low, query_codes };

/// What products need of a row: q.mean, and of Q times its scale the sum of its f16 codes and
/// |q|^2.
inline constexpr int query_fact_count = 3;

struct DecodeParams {
  kv::DeviceCache cache;
  const std::int32_t* slots = nullptr;  ///< [batch]: which sequences of the cache
  std::int32_t layer = 0, batch = 0;
  std::int32_t heads_q = 0, group = 0, queries = 0;
  std::int32_t unit_rows = 8;  ///< 8 or 16
  std::int32_t chunks = 1;     ///< units of one (sequence, KV head)
  DecodeRows q, out;
  float* lse = nullptr;          ///< optional [batch][heads_q][queries]
  const float* sinks = nullptr;  ///< optional [heads_q]
  const std::uint8_t* tree = nullptr;
  std::int64_t tree_stride[3] = {0, 0, 0};
  float* mass = nullptr;         ///< optional [batch][heads_q][mass_blocks]
  std::int64_t mass_blocks = 0;  ///< blocks behind it are left out
  float softmax_scale = 0, softcap = 0;
  std::int32_t causal = 1, debias = 0;
  std::int32_t window_left = -1;   ///< -1: no window
  std::int32_t blocks = 0;         ///< the grid of Decode
  double share = 0;                ///< share_of(blocks)
  std::uint32_t* error = nullptr;  ///< the device's sticky error word; may be null

  // The workspace.
  std::uint32_t* query_words = nullptr;  ///< [units][query_planes()][unit_rows * d / 2]: QueryPlane
  float* query_facts = nullptr;          ///< [units][sets][unit_rows][query_fact_count]
  float* query_scale = nullptr;          ///< [units]: what Q was multiplied by, a power of two;
                                         ///< NaN where its sequence is bad
  DecodeBlock* lists = nullptr;          ///< [pairs][parts][part_blocks], by set and tier
  std::uint32_t* part_counts = nullptr;  ///< [pairs][parts][sets][most_tiers] blocks of a tier
  std::uint32_t* part_costs = nullptr;   ///< [pairs][parts]
  DecodeShare* shares = nullptr;         ///< [blocks]
  std::int32_t* first_block = nullptr;   ///< [units] of Decode that takes places of it
  std::int32_t* last_block = nullptr;    ///< [units]
  float* partial_out = nullptr;          ///< [blocks + units][unit_rows][dv], rotated
  float* partial_sum = nullptr;          ///< [blocks + units][unit_rows][2]: base, sum
  std::uint16_t* list_places = nullptr;  ///< [pairs][parts][part_blocks]: where its part's list has
                                         ///< a place of the page table; for mass
  float* mass_log = nullptr;             ///< [chunks], as lists, [unit_rows]
  std::int64_t mass_chunk = 0;           ///< list_blocks(), which takes a while

  /// The cost that lies before share `n`.
  QATTN_HD std::uint64_t share_begin(std::uint64_t total, int n) const {
    return static_cast<std::uint64_t>(static_cast<double>(total) * share * n);
  }
  QATTN_HD std::int32_t rows() const { return group * queries; }
  QATTN_HD std::int64_t query_planes() const { return query_codes + std::int64_t{cache.sets}; }
  /// Words from the workspace's first to a plane of a unit.
  QATTN_HD std::int64_t query_plane(std::int64_t unit, int plane) const {
    return (unit * query_planes() + plane) * unit_rows * (cache.d / 2);
  }
  QATTN_HD float* facts_of(std::int64_t unit, int set, int row) const {
    return query_facts + ((unit * cache.sets + set) * unit_rows + row) * query_fact_count;
  }
  QATTN_HD std::uint32_t* counts_of(std::int64_t list, int set) const {
    return part_counts + (list * cache.sets + set) * kv::most_tiers;
  }
  /// Which of its pair's units has row `r`.
  QATTN_HD std::int64_t chunk_of(std::int32_t r) const { return unit_rows == 8 ? r >> 3 : r >> 4; }
  QATTN_HD std::int64_t pairs() const { return std::int64_t{batch} * cache.heads_kv; }
  QATTN_HD std::int64_t units() const { return pairs() * chunks; }
  /// Of 1, 2 or 4 blocks: no divisions.
  QATTN_HD std::int32_t page_shift() const { return cache.blocks_per_page() >> 1; }
  QATTN_HD std::int32_t part_entries() const { return part_blocks >> page_shift(); }
  QATTN_HD std::int64_t parts() const {
    static_assert(part_blocks == 1 << 11);
    return (std::int64_t{cache.most_pages} + part_entries() - 1) >> (11 - page_shift());
  }
  /// Of a unit.
  QATTN_HD std::uint32_t places() const {
    return static_cast<std::uint32_t>(parts()) * part_blocks;
  }
  /// Of the lists of all pairs.
  QATTN_HD std::int64_t list_blocks() const { return pairs() * parts() * part_blocks; }
  /// Blocks of DecodeCombine for the mass of a (sequence, KV head): a thread a place.
  QATTN_HD std::int64_t mass_parts() const {
    const std::int64_t table = std::int64_t{cache.most_pages} * cache.blocks_per_page();
    return mass == nullptr ? 0 : (table + combine_threads - 1) / combine_threads;
  }
  QATTN_HD std::int64_t combine_blocks() const { return pairs() * rows() + pairs() * mass_parts(); }
};

/// Where the workspace keeps what; offsets in bytes.
struct DecodeWorkspace {
  std::size_t query_words, query_facts, query_scale, lists, part_counts, part_costs, shares,
      first_block, last_block, partial_out, partial_sum, list_places, mass_log, bytes;
};
inline DecodeWorkspace decode_workspace(const DecodeParams& p) {
  DecodeWorkspace w{};
  std::size_t end = 0;
  const auto take = [&](std::int64_t count, std::size_t size) {
    const std::size_t at = end;
    end += (static_cast<std::size_t>(count) * size + 255) / 256 * 256;
    return at;
  };
  const std::int64_t rows = p.units() * p.unit_rows, slots = p.blocks + p.units();
  w.query_words = take(rows * p.cache.d / 2 * p.query_planes(), 4);
  w.query_facts = take(rows * p.cache.sets * query_fact_count, 4);
  w.query_scale = take(p.units(), 4);
  w.lists = take(p.list_blocks(), sizeof(DecodeBlock));
  w.part_counts = take(p.pairs() * p.parts() * p.cache.sets * kv::most_tiers, 4);
  w.part_costs = take(p.pairs() * p.parts(), 4);
  w.shares = take(p.blocks, sizeof(DecodeShare));
  w.first_block = take(p.units(), 4);
  w.last_block = take(p.units(), 4);
  w.partial_out = take(slots * p.unit_rows * p.cache.dv, 4);
  w.partial_sum = take(slots * p.unit_rows * 2, 4);
  w.list_places = take(p.mass != nullptr ? p.list_blocks() : 0, 2);
  w.mass_log = take(p.mass != nullptr ? p.chunks * p.list_blocks() * p.unit_rows : 0, 4);
  w.bytes = end;
  return w;
}

inline namespace QATTN_TARGET {

/// Quotient and remainder of two numbers below 2^31, as all that supports() lets through: a
/// division of 64 bits is a hundred instructions, which no cache has when a call begins.
struct Quotient {
  std::int32_t quotient, remainder;

  QATTN_DEVICE Quotient(std::int64_t a, std::int64_t b) {
    const auto x = static_cast<std::uint32_t>(a), y = static_cast<std::uint32_t>(b);
    quotient = static_cast<std::int32_t>(x / y);
    remainder = static_cast<std::int32_t>(x % y);
  }
};

/// One (sequence, KV head), as the device finds it.
struct DecodePair {
  std::int32_t batch = 0, head = 0, slot = 0, length = 0, entries = 0;
  std::int32_t sets = 1;  ///< of means and powers of two, at least one
  bool bad = false;       ///< no such sequence, one in error, or fewer tokens than queries

  QATTN_DEVICE DecodePair(const DecodeParams& p, std::int64_t pair) {
    const Quotient place(pair, p.cache.heads_kv);
    batch = place.quotient;
    head = place.remainder;
    slot = isa::load_global(p.slots + batch);
    bad = slot < 0 || slot >= p.cache.slots;
    if (bad) return;
    // All are on their way before one is looked at.
    length = isa::load_global(p.cache.lengths + p.cache.layer_index(slot, p.layer));
    entries = isa::load_global(p.cache.counts + p.cache.head_index(slot, p.layer, head));
    if (p.cache.sets > 1) {
      sets = isa::load_global(p.cache.set_counts + p.cache.layer_index(slot, p.layer));
    }
    bad = p.cache.errors != nullptr && isa::load_global(p.cache.errors + slot) != 0;
    bad = bad || length < p.queries || entries < 0 || entries > p.cache.most_pages;
    if (bad) length = entries = 0;
    sets = sets < 1 ? 1 : sets < p.cache.sets ? sets : p.cache.sets;
  }
  QATTN_DEVICE std::int32_t position(const DecodeParams& p, int query) const {
    return length - p.queries + query;
  }
  /// Tokens [begin, end) that a query may see, the tree apart.
  QATTN_DEVICE std::int32_t visible_begin(const DecodeParams& p, int query) const {
    const std::int32_t at = position(p, query);
    return p.window_left < 0 || at < p.window_left ? 0 : at - p.window_left;
  }
  QATTN_DEVICE std::int32_t visible_end(const DecodeParams& p, int query) const {
    return p.causal != 0 ? position(p, query) + 1 : length;
  }
  /// All rows see what is alive from here on ...
  QATTN_DEVICE std::int32_t sure_begin(const DecodeParams& p) const {
    return visible_begin(p, p.queries - 1);
  }
  /// ... to here: of the newest tokens a tree may hide any.
  QATTN_DEVICE std::int32_t sure_end(const DecodeParams& p) const {
    return p.tree != nullptr ? position(p, 0) : visible_end(p, 0);
  }
};

/// A page table's entry in three loads.
QATTN_DEVICE kv::Entry load_entry(const kv::Entry* from) {
  const auto* words = reinterpret_cast<const isa::Words2*>(from);
  const isa::Words2 place = isa::load_global(words), live = isa::load_global(words + 1);
  const isa::Words2 rest = isa::load_global(words + 2);
  kv::Entry e;
  e.page = static_cast<std::int32_t>(place.w[0]);
  e.first = static_cast<std::int32_t>(place.w[1]);
  e.live = live.w[0] | static_cast<std::uint64_t>(live.w[1]) << 32;
  e.tier = static_cast<std::uint8_t>(rest.w[1]);
  e.set = static_cast<std::uint8_t>(rest.w[1] >> 24);
  return e;
}

/// Does any row look at this block of an entry? `begin`: the first token that query 0 may see.
QATTN_DEVICE bool reads_block(const kv::Entry& e, int block, std::int32_t begin) {
  constexpr int tokens = formats::kv_block_tokens;
  return (e.live >> (block * tokens) & 0xffffu) != 0 && e.first + (block + 1) * tokens > begin;
}

/// Tokens of an entry's page whose K is bad though its channels have scales.
QATTN_DEVICE std::uint64_t bad_keys(const kv::DeviceCache& c, const kv::Entry& e) {
  const kv::DevicePool& pool = c.pool[e.tier];
  if (!pool.layout.k_by_channel) return 0;
  return isa::load_global(pool.bad_tokens(e.page));
}

/// Are the entry's page and set such that exist? Tables are written on the device; a wild page must
/// not become a wild address.
QATTN_DEVICE bool valid_entry(const kv::DeviceCache& c, const DecodePair& pair,
                              const kv::Entry& e) {
  return e.set < pair.sets && e.tier < c.pools && e.page >= 0 && e.page < c.pool[e.tier].capacity;
}

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
