// Decode attention over a paged mixed-precision KV cache, for every NVIDIA GPU from sm_80 on: all
// tiers and the 16-bit window in one launch, then one combination (combine.cuh).
//
// A fixed grid of blocks of eight warps. A block takes a share of the cost of all lists
// (params.hpp): some units, or a part of one. Within a run of places of one tier its warps
// take tiles in turn, each on its own: up to three stages of a private ring filled by cp.async, no
// barrier of the block until the unit ends. A tile is about 4 KiB (one block in 8 bits, two in 4,
// four in 3 and 2), so that what a tile costs beside its bytes is the same for all, and so that
// each word of V holds what one lane's mma wants (state.cuh). A loop over tiles has its bits
// fixed at compile time where K and V have the same: with all of them switched at each tile, an
// 8-bit block took 493 warp instructions, 250 now. K of other bits than V is switched at each tile:
// that takes 4 % of the time of 4/2 bits, and saves a third of the code.
//
// Bytes on their way at any moment: 16 warps of 8 KiB, 128 KiB a multiprocessor.
//
// Warp instructions of a block of 16 tokens, D = 128, 8 rows, all that a tile costs included (ncu
// on an H200, 8192 tokens): 8 bits 257, 4 bits 215, 3 bits 255, 2 bits 187. What bounds an H200: 8
// bits memory, at 94 % of a plain read as tokens are added; 2 and 3 bits, at 70 %, the pipe of
// LOP3, two clocks each, and fixed latencies, with 4 warps a scheduler. A call takes 26 us (8 bits)
// to 50 us (mixed) beyond its slope in tokens. Traced (one sequence of 131072, 8 bits): shares are
// found 4 us after the kernel's begin, queries are there at 6.5, a warp's first tile is done at 16,
// of which its data take 6 to 8 also where all code is in caches; the merge takes 3, the kernel
// before 8 and the combination 6. Code that no cache has when a call begins counts: divisions of 32
// bits instead of 64 made calls 2 to 10 % faster.
#pragma once

#include "kernels/decode/mixed_kv/load.cuh"
#include "kernels/decode/mixed_kv/rows.cuh"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

/// Where shares of the cost of all lists begin. All threads of a block construct it and find().
template <int Threads>
struct FindPlace {
  const DecodeParams& p;
  std::int64_t count, each;
  std::uint64_t total = 0, before = 0;  ///< cost of all parts; of those before this thread's

  /// `scratch`: 8 bytes a warp of shared memory.
  QATTN_DEVICE FindPlace(const DecodeParams& params, isa::SharedAddress scratch) : p(params) {
    count = p.units() * p.parts();
    each = (count + Threads - 1) / Threads;
    std::uint64_t mine = 0;
    for (std::int64_t i = first(); i < last(); ++i) mine += cost(i);
    std::uint64_t through = mine;
#pragma unroll
    for (int delta = 1; delta < 32; delta *= 2) {
      const std::uint64_t other = isa::shuffle_up(through, delta);
      through += isa::lane() >= delta ? other : 0;
    }
    const int warp = isa::warp();
    if (isa::lane() == 31) isa::store_shared(scratch + warp * 8, through);
    isa::sync_threads();
    for (int w = 0; w < Threads / 32; ++w) {
      const auto of_warp = isa::load_shared<std::uint64_t>(scratch + w * 8);
      before += w < warp ? of_warp : 0;
      total += of_warp;
    }
    before += through - mine;
  }
  QATTN_DEVICE std::int64_t first() const { return isa::thread() * each; }
  QATTN_DEVICE std::int64_t last() const { return first() + each < count ? first() + each : count; }
  /// Chunks of rows share their pair's lists.
  QATTN_DEVICE std::int64_t of_pair(std::int64_t i) const {
    return Quotient(i, p.pairs() * p.parts()).remainder;
  }
  QATTN_DEVICE std::uint64_t cost(std::int64_t i) const {
    return isa::load_global(p.part_costs + of_pair(i));
  }

  /// Unit and place where share n of p.blocks begins, to shared memory: the thread that has its
  /// part writes them. Nobody does where all shares before have everything. A unit that begins or
  /// ends within a sixteenth of a share is not cut (where its last part has tokens): another unit
  /// costs a block more than some tiles.
  QATTN_DEVICE void find(int n, isa::SharedAddress to) const {
    const std::uint64_t target = p.share_begin(total, n), near = p.share_begin(total, 1) / 16;
    const std::int64_t parts = p.parts();
    std::uint64_t begin = before;
    for (std::int64_t i = first(); i < last() && begin <= target; ++i) {
      const std::uint64_t end = begin + cost(i);
      if (target < end) {
        const Quotient at(i, parts);
        auto unit = static_cast<std::uint32_t>(at.quotient);
        std::uint32_t place = 0;
        if (at.remainder == parts - 1 && end - target <= near) {
          ++unit;
        } else if (at.remainder != 0 || target - begin > near) {
          place = static_cast<std::uint32_t>(at.remainder) * part_blocks +
                  place_at(i, static_cast<std::uint32_t>(target - begin));
        }
        isa::store_shared(to, isa::Words2{{unit, place}});
      }
      begin = end;
    }
  }

  /// The last place in list `i`, from its tier's first on a multiple of every tile's blocks, with a
  /// cost of at most `left` before it.
  QATTN_DEVICE std::uint32_t place_at(std::int64_t i, std::uint32_t left) const {
    std::uint32_t start = 0;
    const std::int64_t list = of_pair(i);
    const int sets = DecodePair(p, Quotient(list, p.parts()).quotient).sets;
    for (int set = 0; set < sets; ++set) {
      const auto* counts = reinterpret_cast<const isa::Words4*>(p.counts_of(list, set));
      const isa::Words4 low = isa::load_global(counts), high = isa::load_global(counts + 1);
      for (int tier = 0; tier < p.cache.pools; ++tier) {
        std::uint32_t blocks = 0;
#pragma unroll
        for (int t = 0; t < kv::most_tiers; ++t) {
          if (t == tier) blocks = t < 4 ? low.w[t & 3] : high.w[t & 3];
        }
        const std::uint32_t one = block_cost(p.cache.pool[tier].layout.block);
        if (left < blocks * one) return start + left / one / 4 * 4;
        left -= blocks * one;
        start += blocks;
      }
    }
    return start;
  }
};

/// Which share this block takes. Even shares come before odd ones, so that a multiprocessor's two
/// blocks are an early part of a unit's lists, in more bits, and a late one: one waits for memory
/// where the other computes.
QATTN_DEVICE int share_number(const DecodeParams& p) {
  const int block = isa::block().x, half = (p.blocks + 1) / 2;
  return block < half ? 2 * block : 2 * (block - half) + 1;
}

template <DecodeConfig C>
struct DecodeUnit {
  using S = DecodeShape<C>;
  using F = typename DecodeState<C>::F;
  using Load = DecodeLoad<C>;
  static constexpr int N = C.n;

  DecodeCodes<C> state;
  bool coded = false;  ///< this warp's O has parts of codes

  QATTN_DEVICE DecodeUnit(const DecodeParams& params, std::int64_t unit) : state(params, unit) {}

  QATTN_DEVICE Load load() const { return {state}; }
  QATTN_DEVICE DecodeRowTiles<C> rows() { return {state}; }

  // ---- Tiles ----------------------------------------------------------------------------------

  template <int V>
  QATTN_DEVICE void note(const TierRun& run, int first, const float (&mass)[N][2]) {
    if (state.p.mass == nullptr) return;
    const int place = first + state.template block_of<V>();
    state.template note_mass<V>(mass, place < run.count ? run.list - state.p.lists + place : -1);
  }

  /// Tiles `index`, `index` + 8 and so on of a run of codes. Each warp has a ring of its own,
  /// filled by cp.async; what is to be copied is read from the list one tile earlier. `K` 0: K has
  /// `k_bits`, other than V; with loops of their own for these the kernel was half as large again.
  template <int K, int V>
  QATTN_DEVICE void run_codes_tiles(const TierRun& run, int k_bits, int index) {
    constexpr int M = tile_blocks(V);
    if constexpr (K != 0) k_bits = K;
    const int tiles = (run.count + M - 1) / M;
    if (index >= tiles) return;
    state.forget_lane();
    state.forget_unit();
    coded = true;
    const int bytes = Load::stage_bytes(k_bits, V), depth = Load::stages(k_bits, V);
    const std::uint8_t* pages = state.p.cache.pool[run.tier].pages;
    const isa::SharedAddress ring = state.ring();
    int ahead = index, put = 0, get = 0, begun = 0;
    std::uint32_t special = 0;  // bit i: the tile i rounds on wants masks
    DecodeBlock next = load().load_block(run, ahead * M + (state.lane & (M - 1)));
    while (index < tiles) {
      if (ahead < tiles) {
        load().template copy_tile<K, V>(pages, next, k_bits,
                                        ring + static_cast<isa::SharedAddress>(put * bytes));
        const bool masked = (next.where & 1) != 0 || ahead * M + M > run.count;
        special |= isa::any(masked) ? 1u << (depth - 1) : 0u;
        ahead += S::warps;
        next = load().load_block(run, ahead * M + (state.lane & (M - 1)));
        put = put + 1 == depth ? 0 : put + 1;
      }
      isa::copy_async_commit();
      // One place of the source starts copies, the first ones too: what no cache has yet costs a
      // call more than this branch.
      if (++begun >= depth) {
        load().wait_for_tile(depth);
        float mass[N][2];
        state.template run_codes<K, V>(
            ring + static_cast<isa::SharedAddress>(get * bytes), k_bits, (special & 1) != 0,
            [&](int block) { return load().tokens_of(run, index * M, block); }, mass);
        note<V>(run, index * M, mass);
        isa::sync_warp();  // nobody reads this stage any more
        get = get + 1 == depth ? 0 : get + 1;
        index += S::warps;
      }
      special >>= 1;
    }
    state.take_centre(0.5f * static_cast<float>((1 << V) - 1));
  }

  template <int V>
  QATTN_DEVICE void run_codes_tiles(const TierRun& run, int k_bits, int index) {
    if (k_bits == V) {
      run_codes_tiles<V, V>(run, V, index);
    } else {
      run_codes_tiles<0, V>(run, k_bits, index);
    }
  }

  /// Blocks `index`, `index` + 8 and so on of a run of the window.
  QATTN_DEVICE void run_rows_tiles(const TierRun& run, int index) {
    if (index >= run.count) return;
    if (coded) {
      rows().unrotate();
      rows().move_by_mean(0, 1.0f);
    }
    state.forget_unit();
    const kv::DevicePool& pool = state.p.cache.pool[0];
    for (; index < run.count; index += S::warps) {
      state.forget_lane();
      const DecodeBlock found = load().load_block(run, index);
      const auto bytes = static_cast<std::uint32_t>(pool.layout.block.bytes());
      load().copy_rows(pool.pages + std::uint64_t{found.number} * bytes);
      const bool special = (found.where & 1) != 0;
      const auto tokens_of = [&](int) { return load().tokens_of(run, index, 0); };
      float mass[N][2];
      if (state.p.cache.bf16 != 0) {
        rows().template run_rows<isa::Element::bf16>(state.ring(), special, tokens_of, mass);
      } else {
        rows().template run_rows<isa::Element::f16>(state.ring(), special, tokens_of, mass);
      }
      isa::sync_warp();  // nobody reads the ring any more
      note<16>(run, index, mass);
    }
    rows().move_by_mean(0, -1.0f);
    rows().rotate();
    coded = true;
  }

  /// `turn`: which warp takes the first tile; returns the one after the last.
  QATTN_DEVICE int run_tier(const TierRun& run, int turn) {
    const formats::KvBlock block = state.p.cache.pool[run.tier].layout.block;
    const int index = (state.warp - turn) & (S::warps - 1), k_bits = block.k_bits;
    switch (run.tier == 0 ? formats::kv_window_bits : block.v_bits) {
      case formats::kv_window_bits:
        run_rows_tiles(run, index);
        break;
      case 8:
        run_codes_tiles<8>(run, k_bits, index);
        break;
      case 4:
        run_codes_tiles<4>(run, k_bits, index);
        break;
      case 3:
        run_codes_tiles<3>(run, k_bits, index);
        break;
      default:
        run_codes_tiles<2>(run, k_bits, index);
        break;
    }
    const int shift = tile_shift(block.v_bits);
    return turn + ((run.count + (1 << shift) - 1) >> shift);
  }

  // ---- The unit -------------------------------------------------------------------------------

  /// Warps' results into one, each through its own ring: [row][dv + 4], the last base and sum.
  QATTN_DEVICE void merge() {
    const std::int64_t slot = std::int64_t{share_number(state.p)} + state.unit;
    constexpr int row_bytes = (C.dv + 4) * 4;
    const float back = state.v_unit * 0x1p24f;  // from products with codes in place
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float total = state.sum[n][c];
        total = isa::row_sum<F>(total);
        const isa::SharedAddress row =
            state.ring() + static_cast<isa::SharedAddress>(state.row(n, c) * row_bytes);
#pragma unroll
        for (int group = 0; group < S::groups; ++group) {
          const auto word = [&](int i) {
            return formats::bits_of(state.o[group][i / 2][n][i % 2 * 2 + c] * back);
          };
          isa::store_shared(row + static_cast<isa::SharedAddress>((32 * group + 4 * state.g) * 4),
                            isa::Words4{{word(0), word(1), word(2), word(3)}});
        }
        if (state.g == 0) {
          isa::store_shared(row + C.dv * 4, isa::Words2{{formats::bits_of(state.base[n][c]),
                                                         formats::bits_of(total)}});
        }
      }
    }
    isa::sync_threads();
    for (int i = isa::thread(); i < 8 * N * (C.dv / 4); i += S::threads) {
      const int row = i / (C.dv / 4), channel = i % (C.dv / 4) * 4;
      const auto of_warp = [&](int w) {
        return state.at(S::ring + w * S::ring_bytes + row * row_bytes);
      };
      float bases[S::warps], sums[S::warps], top = -tile::infinity();
#pragma unroll
      for (int w = 0; w < S::warps; ++w) {
        const auto words = isa::load_shared<isa::Words2>(of_warp(w) + C.dv * 4);
        bases[w] = formats::float_of(words.w[0]), sums[w] = formats::float_of(words.w[1]);
        top = fmaxf(top, bases[w]);
      }
      float out[4] = {}, total = 0;
#pragma unroll
      for (int w = 0; w < S::warps; ++w) {
        if (bases[w] == -tile::infinity() && !tile::is_nan(sums[w])) continue;
        const float weight = isa::exp2(bases[w] - top);
        total = fmaf(weight, sums[w], total);
        const auto words = isa::load_shared<isa::Words4>(
            of_warp(w) + static_cast<isa::SharedAddress>(channel * 4));
#pragma unroll
        for (int k = 0; k < 4; ++k) out[k] = fmaf(weight, formats::float_of(words.w[k]), out[k]);
      }
      isa::Words4 words;
#pragma unroll
      for (int k = 0; k < 4; ++k) words.w[k] = formats::bits_of(out[k]);
      isa::store_global(
          reinterpret_cast<isa::Words4*>(state.p.partial_out +
                                         (slot * state.p.unit_rows + row) * C.dv + channel),
          words);
      if (channel == 0) {
        isa::store_global(reinterpret_cast<isa::Words2*>(state.p.partial_sum +
                                                         (slot * state.p.unit_rows + row) * 2),
                          isa::Words2{{formats::bits_of(top), formats::bits_of(total)}});
      }
    }
    isa::sync_threads();  // the rings are free again
  }

  /// To pages of another set: other queries; and O so far lacks one set's mean of V, and is to lack
  /// the other's. Which set it was is in shared memory: registers are short.
  QATTN_DEVICE void take_set(int set) {
    const isa::SharedAddress place = state.at(S::unit_sets);
    const auto before = isa::load_shared<std::uint32_t>(place);
    if (coded && state.p.cache.smooth_v != 0) {
      rows().unrotate();
      rows().move_by_mean(static_cast<int>(before), 1.0f);
      rows().move_by_mean(set, -1.0f);
      rows().rotate();
    }
    isa::sync_threads();  // nobody reads the queries, nor the word, any more
    if (isa::thread() == 0) isa::store_shared(place, static_cast<std::uint32_t>(set));
    state.store_queries(set);
    state.store_facts(set);
    isa::sync_threads();
  }
  QATTN_DEVICE std::uint32_t current_set() const {
    return isa::load_shared<std::uint32_t>(state.at(S::unit_sets));
  }

  /// Places [begin, end) of the unit.
  QATTN_DEVICE void run(std::uint32_t begin, std::uint32_t end) {
    const std::int64_t first_list =
        Quotient(state.unit, state.p.pairs()).remainder * state.p.parts();
    const auto load_counts = [&](std::uint32_t part, int set) {
      return isa::load_global(state.p.counts_of(first_list + part, set) + (isa::lane() & 7));
    };
    std::uint32_t counts = load_counts(begin / part_blocks, 0);  // on its way with the queries
    if (isa::thread() == 0) {
      const int sets = DecodePair(state.p, Quotient(state.unit, state.p.pairs()).remainder).sets;
      isa::store_shared(state.at(S::unit_sets),
                        isa::Words2{{0u, static_cast<std::uint32_t>(sets)}});
    }
    state.store_queries(0);
    state.store_facts(0);
    isa::sync_threads();
    int turn = 0;
    for (std::uint32_t part = begin / part_blocks; part * part_blocks < end; ++part) {
      const std::int64_t list = first_list + part;
      const std::uint32_t from = part * part_blocks < begin ? begin % part_blocks : 0;
      const std::uint32_t to =
          end - part * part_blocks < part_blocks ? end - part * part_blocks : part_blocks;
      std::uint32_t tier_begin = 0;
      int n = 0;  // a set and a tier
      while (true) {
        const int tier = n & (kv::most_tiers - 1), set = n / kv::most_tiers;
        if (tier == 0 && (set > 0 || part > begin / part_blocks)) counts = load_counts(part, set);
        const std::uint32_t tier_end = tier_begin + isa::shuffle(counts, tier);
        const std::uint32_t first = tier_begin > from ? tier_begin : from;
        const std::uint32_t last = tier_end < to ? tier_end : to;
        if (first < last) {
          if (current_set() != static_cast<std::uint32_t>(set)) take_set(set);
          const TierRun run{tier, static_cast<int>(last - first),
                            state.p.lists + list * part_blocks + first};
          turn = run_tier(run, turn);
        }
        tier_begin = tier_end;
        if (tier + 1 < state.p.cache.pools) {
          ++n;
          continue;
        }
        n = (set + 1) * kv::most_tiers;
        if (static_cast<std::uint32_t>(set + 1) >=
            isa::load_shared<std::uint32_t>(state.at(S::unit_sets + 4))) {
          break;
        }
      }
    }
    if (current_set() != 0) take_set(0);
    merge();
  }
};

template <DecodeConfig C>
struct Decode {
  using Params = DecodeParams;
  using S = DecodeShape<C>;
  static constexpr int threads = S::threads, shared_bytes = S::shared_bytes;
  static constexpr int min_blocks = S::min_blocks;
  static constexpr bool dependent = true;

  /// To shared memory: registers are short where units run.
  static QATTN_DEVICE void find_share(const Params& p, isa::SharedAddress to) {
    const int block = share_number(p);
    const auto units = static_cast<std::uint32_t>(p.units());
    if (isa::thread() == 0) {
      isa::store_shared(to, isa::Words4{{block == 0 ? 0 : units, 0u, units, 0u}});
    }
    const FindPlace<threads> places(p, isa::shared_base() + S::scratch);
    if (block > 0) places.find(block, to);
    if (block + 1 < p.blocks) places.find(block + 1, to + 8);
    isa::sync_threads();
    if (isa::thread() == 0) {
      isa::store_global(reinterpret_cast<isa::Words4*>(p.shares + block),
                        isa::load_shared<isa::Words4>(to));
    }
  }

  /// What of a unit this block takes.
  static QATTN_DEVICE void run_unit(const Params& p, std::uint32_t unit, const isa::Words4& share) {
    const std::uint32_t begin = unit == share.w[0] ? share.w[1] : 0;
    const std::uint32_t end = unit < share.w[2] ? p.places() : share.w[3];
    if (end <= begin) return;
    if (isa::thread() == 0) {
      if (begin == 0) isa::store_global(p.first_block + unit, share_number(p));
      if (end == p.places()) isa::store_global(p.last_block + unit, share_number(p));
    }
    DecodeUnit<C>(p, unit).run(begin, end);
  }

  static QATTN_DEVICE void run(const Params& p) {
    isa::grid_dependency_launch();
    isa::grid_dependency_wait();
    const isa::SharedAddress share = isa::shared_base() + S::share;
    find_share(p, share);
    std::uint32_t unit = isa::load_shared<isa::Words4>(share).w[0];
    for (; unit < p.units(); ++unit) {
      const auto words = isa::load_shared<isa::Words4>(share);
      if (unit > words.w[2]) return;
      run_unit(p, unit, words);
    }
  }
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
