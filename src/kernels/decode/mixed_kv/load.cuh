// Blocks of codes on their way into shared memory.
#pragma once

#include "kernels/decode/mixed_kv/codes.cuh"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

/// Blocks of one tier that a block of the grid takes: `count` places of a list.
struct TierRun {
  int tier, count;
  const DecodeBlock* list;
};

/// Copies of a warp to its ring.
template <DecodeConfig C>
struct DecodeLoad {
  using S = DecodeShape<C>;
  using TileTokens = typename DecodeState<C>::TileTokens;

  const DecodeState<C>& state;

  static QATTN_CONSTEXPR int stage_bytes(int k_bits, int v_bits) {
    const int bytes = tile_layout<C>(k_bits, v_bits, tile_blocks(v_bits)).bytes();
    return (bytes + 127) / 128 * 128;
  }
  /// At most three: another tile on its way did not pay for its share of shared memory.
  static QATTN_CONSTEXPR int stages(int k_bits, int v_bits) {
    const int fit = S::ring_bytes / stage_bytes(k_bits, v_bits);
    return fit > 3 ? 3 : fit;
  }
  static_assert(stages(8, 3) >= 1);  // the largest tiles

  // ---- Lists ----------------------------------------------------------------------------------

  /// Place `place` of the run, or its last.
  static QATTN_DEVICE DecodeBlock load_block(const TierRun& run, int place) {
    const int n = place < run.count ? place : run.count - 1;
    const auto words = isa::load_global(reinterpret_cast<const isa::Words2*>(run.list + n));
    return {words.w[0], words.w[1]};
  }
  /// Of a tile that begins at place `first`: what masks want to know.
  QATTN_DEVICE TileTokens tokens_of(const TierRun& run, int first, int block) const {
    const DecodeBlock found = load_block(run, first + block);
    const DecodePair pair(state.p, Quotient(state.unit, state.p.pairs()).remainder);
    const kv::Entry e =
        load_entry(state.p.cache.table(pair.slot, state.p.layer, pair.head) + (found.where >> 3));
    const int token = static_cast<int>(found.where >> 1 & 3) * formats::kv_block_tokens;
    const auto alive = static_cast<std::uint32_t>(e.live >> token) & 0xffffu;
    std::uint32_t bad = 0;
    if constexpr (C.by_channel) {
      bad = static_cast<std::uint32_t>(bad_keys(state.p.cache, e) >> token) & 0xffffu;
    }
    return {e.first + token, first + block < run.count ? alive : 0, bad, pair};
  }

  // ---- Copies ---------------------------------------------------------------------------------

  /// Starts to copy this lane's chunks of `bytes` bytes, at most `Most`; `flips(i)`: what is XORed
  /// into the address of chunk lane + 32 i beside `to`, which has the lane.
  template <int Most, class Flips>
  QATTN_DEVICE void copy_area(isa::SharedAddress to, const std::uint8_t* from, int bytes,
                              Flips flips) const {
#pragma unroll
    for (int i = 0; i < (Most + 511) / 512; ++i) {
      if (state.lane * 16 < bytes - i * 512) {
        isa::copy_async16((to ^ static_cast<isa::SharedAddress>(flips(i))) +
                              static_cast<isa::SharedAddress>(i * 512),
                          from + i * 512, 16);
      }
    }
  }
  /// Until the oldest of the last `depth` groups of copies is there, of all lanes.
  static QATTN_DEVICE void wait_for_tile(int depth) {
    if (depth == 3) {
      isa::copy_async_wait<2>();
    } else if (depth == 2) {
      isa::copy_async_wait<1>();
    } else {
      isa::copy_async_wait<0>();
    }
    isa::sync_warp();
  }

  /// Copies a block of the window to the ring, and waits for it.
  QATTN_DEVICE void copy_rows(const std::uint8_t* block) const {
    static_assert(S::ring_bytes >= 32 * (C.d + C.dv));
    copy_area<32 * (C.d + C.dv)>(state.ring() + static_cast<isa::SharedAddress>(state.lane * 16),
                                 block + state.lane * 16, 32 * (C.d + C.dv), [](int) { return 0; });
    isa::copy_async_commit();
    wait_for_tile(1);
  }

  /// Starts to copy a tile to `to`; lane l has block l % tile_blocks(V) of it. A block that it
  /// lacks is its last one once more, so that everything there is is defined. `K` 0: `k_bits`.
  template <int K, int V>
  QATTN_DEVICE void copy_tile(const std::uint8_t* pages, const DecodeBlock& mine, int k_bits,
                              isa::SharedAddress to) const {
    constexpr int blocks = tile_blocks(V);
    const formats::KvPage page{
        {C.d, C.dv, K == 0 ? k_bits : K, V}, 1 << state.p.page_shift(), C.by_channel};
    const TileLayout layout = tile_layout<C>(page.block.k_bits, V, blocks);
    constexpr int most_k_bytes = tile_layout<C>(K == 0 ? 8 : K, V, blocks).k_bytes;
    constexpr int v_bytes = tile_layout<C>(8, V, blocks).v_bytes;
    const auto page_of = [&](std::uint32_t number) {
      return pages + std::uint64_t{number >> state.p.page_shift()} *
                         static_cast<std::uint32_t>(page.bytes());
    };
    const auto source = [&](int block) {
      const std::uint32_t number = isa::shuffle(mine.number, block);
      const auto bytes = static_cast<std::uint32_t>(page.block_bytes());
      if constexpr (!C.by_channel) return pages + std::uint64_t{number} * bytes;
      return page_of(number) + (number & ((1u << state.p.page_shift()) - 1)) * bytes;
    };
#pragma unroll
    for (int b = 0; b < blocks; ++b) {
      const std::uint8_t* from = source(b) + state.lane * 16;
      // k_chunk() of chunk lane + 32 i is 32 i on from that of the lane; v_chunk() XORs the chunk's
      // row of dv / 4 besides, which is the lane's and (32 i)'s.
      copy_area<most_k_bytes>(
          to + static_cast<isa::SharedAddress>(layout.k(b) + k_chunk(state.lane, b) * 16), from,
          layout.k_bytes, [](int) { return 0; });
      copy_area<v_bytes>(
          to + static_cast<isa::SharedAddress>(layout.v(b) + v_chunk(state.lane, b, V, C.dv) * 16),
          from + layout.k_bytes, v_bytes,
          [](int i) { return V == 3 ? 0 : (32 * i / (C.dv / 4) & 3) << 5; });
    }
    if constexpr (C.by_channel) {
      copy_channel_scales<blocks>(mine, page, layout, to, source, page_of);
      return;
    }
    const std::uint8_t* scales =
        source(state.lane >> 2) + (state.lane & 3) * 16 + page.block.k_scales();
    if (state.lane < 4 * blocks) {
      isa::copy_async16(to + static_cast<isa::SharedAddress>(layout.scales(0) + state.lane * 16),
                        scales, 16);
    }
  }
  /// V's scales of each block, then its page's of K's channels.
  template <int Blocks, class Source, class PageOf>
  QATTN_DEVICE void copy_channel_scales(const DecodeBlock& mine, const formats::KvPage& page,
                                        const TileLayout& layout, isa::SharedAddress to,
                                        Source source, PageOf page_of) const {
    constexpr int chunks = C.d / 8;
#pragma unroll
    for (int b = 0; b < Blocks; ++b) {
      const isa::SharedAddress scales = to + static_cast<isa::SharedAddress>(layout.scales(b));
      const std::uint8_t* channels =
          page_of(isa::shuffle(mine.number, b)) + page.channel_scales() + state.lane * 16;
      const std::uint8_t* tokens = source(b) + page.v_scales() + (state.lane & 1) * 16;
      if (state.lane < chunks) {
        isa::copy_async16(scales + 32 + static_cast<isa::SharedAddress>(state.lane * 16), channels,
                          16);
      }
      if (state.lane < 2) {
        isa::copy_async16(scales + static_cast<isa::SharedAddress>(state.lane * 16), tokens, 16);
      }
    }
  }
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
