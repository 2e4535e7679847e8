// Decode attention over a paged mixed-precision KV cache, for every NVIDIA GPU from sm_80 on: all
// tiers and the 16-bit window in one launch, then one combination (sm80_combine.cuh).
//
// A fixed grid of blocks of eight warps. A block takes a share of all bytes (sm80_params.hpp): some
// units, or a part of one, in passes of at most 640 blocks of 16 tokens. A pass reads its entries
// of the page table once and sorts them by tier into a list in shared memory; warps take tiles of
// it in turn, each on its own: two stages of a private ring filled by cp.async, no barrier of the
// block until the pass ends. A tile has one tier and about 4 KiB (one block in 8 bits, two in 4,
// four in 3 and 2), so that what a tile costs beside its bytes is the same for all, and so that
// each word of V holds what one lane's mma wants (sm80_state.cuh). K's and V's bits are switched at
// run time.
//
// Bytes on their way at any moment: 16 warps of 4 KiB, 64 KiB a multiprocessor.
//
// Warp instructions of a block of 16 tokens, D = 128, 8 rows (SASS of sm_90a, bits fixed at compile
// time, all that a tile costs included), beside what the four schedulers of an H200 issue while its
// bytes come at 85 % (2 and 3 bits: 72 %) of 4.3 TB/s: 8 bits 326 of 1053, 4 bits 269 of 534,
// 3 bits 302 of 477, 2 bits 210 of 325.
#pragma once

#include "kernels/attn_decode/sm80_load.cuh"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

/// The first segment that begins at or behind `bytes`, in the order of units; (units, 0): none.
/// Called by all threads of a block; `scratch`: 64 bytes of shared memory, free on return.
template <int Threads>
struct FindSegment {
  const DecodeParams& p;
  isa::SharedAddress scratch;
  std::int64_t count, each;
  std::uint64_t total = 0, before = 0;  ///< bytes of all parts; of those before this thread's

  QATTN_DEVICE FindSegment(const DecodeParams& params, isa::SharedAddress at)
      : p(params), scratch(at) {
    count = p.units() * p.parts();
    each = (count + Threads - 1) / Threads;
    std::uint64_t mine = 0;
    for (std::int64_t i = first(); i < last(); ++i) mine += bytes(i);
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
    isa::sync_threads();
  }
  QATTN_DEVICE std::int64_t first() const { return isa::thread() * each; }
  QATTN_DEVICE std::int64_t last() const { return first() + each < count ? first() + each : count; }
  /// Chunks of rows share their pair's table.
  QATTN_DEVICE std::uint64_t bytes(std::int64_t i) const {
    return isa::load_global(p.part_bytes + i % (p.pairs() * p.parts()));
  }

  QATTN_DEVICE void find(std::uint64_t target, std::uint32_t& unit, std::uint32_t& segment) const {
    // The last part that begins before the target, if any: one more than its number.
    if (isa::thread() == 0) isa::store_shared(scratch, 0u);
    isa::sync_threads();
    std::uint64_t begin = before;
    std::uint32_t found = 0;
    for (std::int64_t i = first(); i < last(); ++i) {
      if (begin < target) found = static_cast<std::uint32_t>(i + 1);
      begin += bytes(i);
    }
    if (found != 0) isa::atomic_max_shared(scratch, found);
    isa::sync_threads();
    const std::uint32_t part = isa::load_shared<std::uint32_t>(scratch);
    isa::sync_threads();
    if (part == 0) {
      unit = segment = 0;
      return;
    }
    // Its begin from the thread that has it; then its first segment at or behind the target.
    begin = before;
    for (std::int64_t i = first(); i < last(); ++i) {
      if (i + 1 == part) isa::store_shared(scratch, begin);
      begin += bytes(i);
    }
    if (isa::thread() == 0) isa::store_shared(scratch + 8, 0u);
    isa::sync_threads();
    begin = isa::load_shared<std::uint64_t>(scratch);
    const std::int64_t index = part - 1;
    const std::int64_t of_pair = index % (p.pairs() * p.parts());
    if (isa::thread() < part_segments) {
      const std::uint32_t start =
          isa::load_global(p.segment_start + of_pair * part_segments + isa::thread());
      // Starts do not fall, so what begins before the target is a prefix.
      if (begin + start < target) isa::atomic_add_shared(scratch + 8, 1u);
    }
    isa::sync_threads();
    const std::uint32_t skipped = isa::load_shared<std::uint32_t>(scratch + 8);
    isa::sync_threads();
    unit = static_cast<std::uint32_t>(index / p.parts());
    segment = static_cast<std::uint32_t>(index % p.parts()) * part_segments + skipped;
  }
};

template <DecodeConfig C>
struct DecodeUnit : DecodeLoad<C> {
  using S = DecodeShape<C>;
  using Base = DecodeLoad<C>;
  using Base::Base, Base::N, Base::p, Base::pair, Base::lane, Base::warp, Base::at, Base::o,
      Base::sum, Base::base, Base::g, Base::t, Base::unit;

  // ---- Tiles of a pass ------------------------------------------------------------------------

  QATTN_DEVICE int tiles_of(int tier) const {
    const int shift = tile_shift(p.cache.pool[tier].block.v_bits);
    return (this->blocks_of(tier) + (1 << shift) - 1) >> shift;
  }
  /// Tile `index`, counted from the first of `tier`; tier == pools: there is none.
  QATTN_DEVICE TileWork locate(int tier, int& index) const {
    while (tier < p.cache.pools && index >= tiles_of(tier)) index -= tiles_of(tier++);
    if (tier == p.cache.pools) return {tier, 0, 0};
    const int each = tile_blocks(p.cache.pool[tier].block.v_bits);
    const int left = this->blocks_of(tier) - index * each;
    return {tier, this->first_block(tier) + index * each, left < each ? left : each};
  }
  /// Does it take both stages?
  QATTN_DEVICE bool is_large(const TileWork& tile) const {
    const formats::KvBlock b = p.cache.pool[tile.tier].block;
    return tile_layout(C.d, C.dv, b.k_bits, b.v_bits, tile_blocks(b.v_bits)).bytes() >
           S::stage_bytes;
  }

  template <int V>
  QATTN_DEVICE void note(const TileWork& tile, const float (&mass)[N][2]) {
    if (p.mass == nullptr) return;
    const int block = this->template block_of<V>();
    const std::int64_t place =
        std::int64_t{isa::load_shared<std::int32_t>(at(S::pass))} * p.cache.blocks_per_page() +
        this->list_place(tile, block);
    this->template note_mass<V>(mass, block < tile.count ? place : -1);
  }

  template <int V>
  QATTN_DEVICE void run_tile(const TileWork& tile, int k_bits, int stage, bool special) {
    float mass[N][2];
    this->template run_codes<V>(
        k_bits, this->stage(stage), special,
        [&](int block) { return this->tokens_of(tile, block); }, mass);
    note<V>(tile, mass);
  }
  QATTN_DEVICE void run_codes_tile(const TileWork& tile, int stage, bool special) {
    const formats::KvBlock block = p.cache.pool[tile.tier].block;
    switch (block.v_bits) {
      case 8:
        return run_tile<8>(tile, block.k_bits, stage, special);
      case 4:
        return run_tile<4>(tile, block.k_bits, stage, special);
      case 3:
        return run_tile<3>(tile, block.k_bits, stage, special);
      default:
        return run_tile<2>(tile, block.k_bits, stage, special);
    }
  }

  QATTN_DEVICE void end_tier(int tier) {
    if (tier == 0) return;
    const int v_bits = p.cache.pool[tier].block.v_bits;
    this->take_centre(0.5f * static_cast<float>((1 << v_bits) - 1));
  }

  /// This warp's tiles of all tiers but the window's.
  QATTN_DEVICE void run_codes_tiles(int index) {
    TileWork tile = locate(1, index);
    if (tile.tier == p.cache.pools) return;
    int stage = 0;
    bool special = this->start_tile(tile, stage);
    isa::copy_async_commit();
    this->forget_unit();
    while (tile.tier < p.cache.pools) {
      this->forget_lane();
      index += S::warps;
      const TileWork next = locate(tile.tier, index);
      const bool more = next.tier < p.cache.pools;
      const bool ahead = more && !is_large(tile) && !is_large(next);
      bool next_special = false;
      if (ahead) {
        next_special = this->start_tile(next, stage ^ 1);
        isa::copy_async_commit();
        isa::copy_async_wait<1>();
      } else {
        isa::copy_async_wait<0>();
      }
      isa::sync_warp();  // what other lanes copied is there
      run_codes_tile(tile, stage, special);
      isa::sync_warp();  // nobody reads this stage any more
      if (next.tier != tile.tier) {
        end_tier(tile.tier);
        this->forget_unit();
      }
      if (more && !ahead) {
        stage = 1;
        next_special = this->start_tile(next, 0);
        isa::copy_async_commit();
      }
      stage ^= 1;
      tile = next;
      special = next_special;
    }
  }

  /// This warp's blocks of the window.
  QATTN_DEVICE void run_rows_tiles() {
    const int blocks = this->blocks_of(0);
    if (warp >= blocks) return;
    this->unrotate();
    this->forget_unit();
    for (int i = warp; i < blocks; i += S::warps) {
      this->forget_lane();
      const TileWork tile{0, i, 1};
      const std::uint8_t* block = this->address(0, this->list_place(tile, 0));
      const bool special = this->is_special(this->tokens_of(tile, 0));
      const auto tokens_of = [&](int) { return this->tokens_of(tile, 0); };
      float mass[N][2];
      if (p.cache.bf16 != 0) {
        this->template run_rows<isa::Element::bf16>(block, special, tokens_of, mass);
      } else {
        this->template run_rows<isa::Element::f16>(block, special, tokens_of, mass);
      }
      note<16>(tile, mass);
    }
    this->rotate();
  }

  QATTN_DEVICE void run_pass(int begin, int end) {
    isa::sync_threads();  // nobody reads the last list any more
    this->note_blocks(begin, end);
    isa::sync_threads();
    this->sort_blocks((end - begin) * p.cache.blocks_per_page());
    isa::sync_threads();
    run_rows_tiles();
    // The warps that had no window's block begin.
    run_codes_tiles((warp + S::warps - this->blocks_of(0) % S::warps) % S::warps);
  }

  // ---- The unit -------------------------------------------------------------------------------

  QATTN_DEVICE void load_queries() const {
    const std::uint32_t* from =
        p.query_words + std::int64_t{unit} * query_planes * p.unit_rows * (C.d / 2);
    for (int i = isa::thread(); i < S::k_steps * N * 16; i += S::threads) {
      isa::store_shared(at(S::queries + i * 16),
                        isa::load_global(reinterpret_cast<const isa::Words4*>(from) + i));
    }
  }

  /// Warps' results into one, each through its own ring: [row][dv + 4], the last base and sum.
  QATTN_DEVICE void merge() {
    const std::int64_t slot = std::int64_t{isa::block().x} + unit;
    constexpr int row_bytes = (C.dv + 4) * 4;
    const float back = this->v_unit * 0x1p24f;  // from products with codes in place
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float total = sum[n][c];
#pragma unroll
        for (int mask = 4; mask < 32; mask *= 2) total += isa::shuffle_xor(total, mask);
        const isa::SharedAddress row =
            this->stage(0) + static_cast<isa::SharedAddress>(this->row(n, c) * row_bytes);
#pragma unroll
        for (int group = 0; group < S::groups; ++group) {
          const auto word = [&](int i) {
            return formats::bits_of(o[group][i / 2][n][i % 2 * 2 + c] * back);
          };
          isa::store_shared(row + static_cast<isa::SharedAddress>((32 * group + 4 * g) * 4),
                            isa::Words4{{word(0), word(1), word(2), word(3)}});
        }
        if (g == 0) {
          isa::store_shared(row + C.dv * 4,
                            isa::Words2{{formats::bits_of(base[n][c]), formats::bits_of(total)}});
        }
      }
    }
    isa::sync_threads();
    for (int i = isa::thread(); i < 8 * N * (C.dv / 4); i += S::threads) {
      const int row = i / (C.dv / 4), channel = i % (C.dv / 4) * 4;
      const auto of_warp = [&](int w) { return at(S::ring + w * S::ring_bytes + row * row_bytes); };
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
      isa::store_global(reinterpret_cast<isa::Words4*>(p.partial_out +
                                                       (slot * p.unit_rows + row) * C.dv + channel),
                        words);
      if (channel == 0) {
        isa::store_global(
            reinterpret_cast<isa::Words2*>(p.partial_sum + (slot * p.unit_rows + row) * 2),
            isa::Words2{{formats::bits_of(top), formats::bits_of(total)}});
      }
    }
    isa::sync_threads();  // the rings are free again
  }

  /// Entries [begin, end) of the unit.
  QATTN_DEVICE void run(int begin, int end) {
    load_queries();
    this->store_facts();
    const int step = S::list_blocks / p.cache.blocks_per_page();
    for (int from = begin; from < end; from += step) {
      run_pass(from, from + step < end ? from + step : end);
    }
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
    const FindSegment<threads> segments(p, isa::shared_base() + S::scratch);
    const auto block = static_cast<std::uint64_t>(isa::block().x);
    const auto blocks = static_cast<std::uint64_t>(p.blocks);
    DecodeShare share{};
    if (block > 0) {
      segments.find((block * segments.total + blocks - 1) / blocks, share.unit, share.segment);
    }
    share.end_unit = static_cast<std::uint32_t>(p.units());
    if (block + 1 < blocks) {
      segments.find(((block + 1) * segments.total + blocks - 1) / blocks, share.end_unit,
                    share.end_segment);
    }
    if (isa::thread() == 0) {
      const isa::Words4 words{{share.unit, share.segment, share.end_unit, share.end_segment}};
      isa::store_global(reinterpret_cast<isa::Words4*>(p.shares + block), words);
      isa::store_shared(to, words);
    }
    isa::sync_threads();
  }

  /// What of a unit this block takes.
  static QATTN_DEVICE void run_unit(const Params& p, std::uint32_t unit, const isa::Words4& share) {
    const DecodePair pair(p, unit % p.pairs());
    const std::int32_t all = pair.segments(p);
    const std::int32_t begin = unit == share.w[0] ? static_cast<std::int32_t>(share.w[1]) : 0;
    const auto limit = static_cast<std::int32_t>(share.w[3]);
    const std::int32_t end = unit < share.w[2] || limit > all ? all : limit;
    if (end <= begin) return;
    if (isa::thread() == 0) {
      if (begin == 0) isa::store_global(p.first_block + unit, isa::block().x);
      if (end == all) isa::store_global(p.last_block + unit, isa::block().x);
    }
    const std::int32_t each = p.segment_entries();
    const std::int32_t last = end * each < pair.entries ? end * each : pair.entries;
    DecodeUnit<C>(p, pair, unit).run(begin * each, last);
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
