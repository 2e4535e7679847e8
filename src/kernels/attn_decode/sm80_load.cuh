// The list of a pass's blocks by tier, and their way into shared memory.
#pragma once

#include "kernels/attn_decode/sm80_rows.cuh"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

/// A tile of codes: blocks [first, first + count) of the list in their order.
struct TileWork {
  int tier, first, count;
};

template <DecodeConfig C>
struct DecodeLoad : DecodeRowTiles<C> {
  using S = DecodeShape<C>;
  using Base = DecodeRowTiles<C>;
  using Base::Base, Base::lane, Base::p, Base::pair;
  using typename Base::TileTokens;

  static constexpr std::uint32_t no_tier = 255;
  const int warp = isa::warp();
  const isa::SharedAddress shared = isa::shared_base();

  QATTN_DEVICE isa::SharedAddress at(int place) const {
    return shared + static_cast<isa::SharedAddress>(place);
  }
  QATTN_DEVICE isa::SharedAddress stage(int n) const {
    return at(S::ring + warp * S::ring_bytes + n * S::stage_bytes);
  }

  /// All rows see what is alive from here on ...
  QATTN_DEVICE std::int32_t sure_begin() const { return pair.visible_begin(p, p.queries - 1); }
  /// ... to here: of the newest tokens a tree may hide any.
  QATTN_DEVICE std::int32_t sure_end() const {
    return p.tree != nullptr ? pair.position(p, 0) : pair.visible_end(p, 0);
  }

  // ---- The list -------------------------------------------------------------------------------

  /// Blocks of entries [begin, end), at most list_blocks of them: place k of the list is block
  /// k % blocks_per_page of its entry.
  QATTN_DEVICE void note_blocks(int begin, int end) {
    const int per_page = p.cache.blocks_per_page();
    const kv::Entry* table = p.cache.table(pair.slot, p.layer, pair.head);
    const std::int32_t seen = pair.visible_begin(p, 0);
    if (isa::thread() == 0) isa::store_shared(at(S::pass), begin);
    for (int k = isa::thread(); k < (end - begin) * per_page; k += S::threads) {
      const int block = k % per_page;
      const kv::Entry e = load_entry(table + begin + k / per_page);
      const bool read = valid_entry(p.cache, e) && reads_block(e, block, seen);
      isa::store_shared(at(S::number + k * 4),
                        static_cast<std::uint32_t>(e.page) * static_cast<std::uint32_t>(per_page) +
                            static_cast<std::uint32_t>(block));
      isa::store_shared(at(S::place + k * 4), e.first + block * formats::kv_block_tokens);
      isa::store_shared(at(S::live + k * 2),
                        static_cast<std::uint16_t>(e.live >> (block * formats::kv_block_tokens)));
      isa::store_shared(at(S::tier + k), static_cast<std::uint8_t>(read ? e.tier : no_tier));
    }
  }

  /// Warp w puts the blocks of tier w in order. Between two barriers.
  QATTN_DEVICE void sort_blocks(int blocks) {
    const auto is_mine = [&](int k) {
      return k < blocks && isa::load_shared<std::uint8_t>(at(S::tier + k)) == warp;
    };
    int mine = 0;
    for (int k = 0; k < blocks; k += 32) {
      mine += __builtin_popcount(isa::ballot(is_mine(k + lane)));
    }
    if (lane == 0) isa::store_shared(at(S::counts + warp * 4), mine);
    isa::sync_threads();
    int to = 0;
    for (int tier = 0; tier < warp; ++tier) {
      to += isa::load_shared<std::int32_t>(at(S::counts + tier * 4));
    }
    if (lane == 0) {
      isa::store_shared(at(S::starts + warp * 4), to);
      if (warp == S::warps - 1) isa::store_shared(at(S::starts + S::warps * 4), to + mine);
    }
    for (int k = 0; k < blocks; k += 32) {
      const bool take = is_mine(k + lane);
      const std::uint32_t all = isa::ballot(take);
      const int before = __builtin_popcount(all & ((1u << lane) - 1));
      if (take) {
        isa::store_shared(at(S::order + (to + before) * 2), static_cast<std::uint16_t>(k + lane));
      }
      to += __builtin_popcount(all);
    }
  }

  QATTN_DEVICE int first_block(int tier) const {
    return isa::load_shared<std::int32_t>(at(S::starts + tier * 4));
  }
  QATTN_DEVICE int blocks_of(int tier) const { return first_block(tier + 1) - first_block(tier); }

  // ---- Tiles ----------------------------------------------------------------------------------

  /// Place in the list of a tile's block; where the tile lacks it, of its last.
  QATTN_DEVICE int list_place(const TileWork& tile, int block) const {
    const int n = block < tile.count ? block : tile.count - 1;
    return isa::load_shared<std::uint16_t>(at(S::order + (tile.first + n) * 2));
  }
  QATTN_DEVICE TileTokens tokens_of(const TileWork& tile, int block) const {
    const int k = list_place(tile, block);
    const std::uint32_t live = isa::load_shared<std::uint16_t>(at(S::live + k * 2));
    return {isa::load_shared<std::int32_t>(at(S::place + k * 4)), block < tile.count ? live : 0};
  }
  QATTN_DEVICE bool is_special(const TileTokens& tokens) const {
    return tokens.alive != 0xffffu || tokens.first < sure_begin() ||
           tokens.first + formats::kv_block_tokens > sure_end();
  }
  QATTN_DEVICE const std::uint8_t* address(int tier, int k) const {
    const kv::DevicePool& pool = p.cache.pool[tier];
    const std::uint32_t number = isa::load_shared<std::uint32_t>(at(S::number + k * 4));
    return pool.pages + static_cast<std::int64_t>(number) * pool.block.bytes();
  }

  /// Starts to copy this lane's chunks of `Bytes` bytes; `flips(i)`: what is XORed into the address
  /// of chunk lane + 32 i beside `to`, which has the lane.
  template <int Bytes, class Flips>
  QATTN_DEVICE void copy_area(isa::SharedAddress to, const std::uint8_t* from, Flips flips) const {
#pragma unroll
    for (int i = 0; i < (Bytes + 511) / 512; ++i) {
      if ((i + 1) * 512 <= Bytes || lane * 16 < Bytes - i * 512) {
        isa::copy_async16((to ^ static_cast<isa::SharedAddress>(flips(i))) +
                              static_cast<isa::SharedAddress>(i * 512),
                          from + i * 512, 16);
      }
    }
  }

  /// K's codes of block b to `to`: k_chunk() of chunk lane + 32 i is 32 i on from that of the lane.
  QATTN_DEVICE void copy_keys(int k_bits, isa::SharedAddress to, const std::uint8_t* from,
                              int b) const {
    const isa::SharedAddress at = to + static_cast<isa::SharedAddress>(k_chunk(lane, b) * 16);
    const auto none = [](int) { return 0; };
    switch (k_bits) {
      case 8:
        return copy_area<16 * C.d>(at, from, none);
      case 4:
        return copy_area<8 * C.d>(at, from, none);
      case 3:
        return copy_area<6 * C.d>(at, from, none);
      default:
        return copy_area<4 * C.d>(at, from, none);
    }
  }
  /// V's: v_chunk() XORs the chunk's row of dv / 4 besides, which is the lane's and (32 i)'s.
  template <int V>
  QATTN_DEVICE void copy_values(isa::SharedAddress to, const std::uint8_t* from, int b) const {
    const isa::SharedAddress at =
        to + static_cast<isa::SharedAddress>(v_chunk(lane, b, V, C.dv) * 16);
    copy_area<2 * C.dv * V>(at, from,
                            [](int i) { return V == 3 ? 0 : (32 * i / (C.dv / 4) & 3) << 5; });
  }

  template <int V>
  QATTN_DEVICE void copy_tile(int k_bits, isa::SharedAddress to, std::uint64_t mine) const {
    constexpr int blocks = tile_blocks(V);
    const TileLayout layout = tile_layout(C.d, C.dv, k_bits, V, blocks);
    const auto source = [&](int i, int offset_in) {
      return reinterpret_cast<const std::uint8_t*>(
                 static_cast<std::uintptr_t>(isa::shuffle(mine, i))) +
             offset_in;
    };
#pragma unroll 1
    for (int b = 0; b < blocks; ++b) {
      const std::uint8_t* from = source(b, lane * 16);
      copy_keys(k_bits, to + static_cast<isa::SharedAddress>(layout.k(b)), from, b);
      copy_values<V>(to + static_cast<isa::SharedAddress>(layout.v(b)), from + layout.k_bytes, b);
    }
    const std::uint8_t* scales =
        source(lane >> 2, (lane & 3) * 16 + layout.k_bytes + layout.v_bytes);
    if (lane < 4 * blocks) {
      isa::copy_async16(to + static_cast<isa::SharedAddress>(layout.scales(0) + lane * 16), scales,
                        16);
    }
  }

  /// Starts to copy a tile; returns whether it needs masks. A block that it lacks is its last one
  /// once more, so that everything there is is defined.
  QATTN_DEVICE bool start_tile(const TileWork& tile, int to_stage) const {
    const formats::KvBlock block = p.cache.pool[tile.tier].block;
    const isa::SharedAddress to = stage(to_stage);
    const int one = lane & 3;  // every lane knows one block, four lanes all of them
    const auto from = reinterpret_cast<std::uintptr_t>(address(tile.tier, list_place(tile, one)));
    const bool special =
        isa::any(one < tile_blocks(block.v_bits) && is_special(tokens_of(tile, one)));
    switch (block.v_bits) {
      case 8:
        copy_tile<8>(block.k_bits, to, from);
        break;
      case 4:
        copy_tile<4>(block.k_bits, to, from);
        break;
      case 3:
        copy_tile<3>(block.k_bits, to, from);
        break;
      default:
        copy_tile<2>(block.k_bits, to, from);
        break;
    }
    return special;
  }
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
