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
  using typename Base::TileTokens;
  using Base::Base, Base::lane, Base::p, Base::pair;

  static constexpr std::uint32_t no_tier = 255;
  const int warp = isa::warp();
  const isa::SharedAddress shared = isa::shared_base();
  int pass_begin = 0;               ///< its first entry
  std::int32_t sure_begin, sure_end;  ///< all rows see what is alive between
  int first_of[kv::most_tiers + 1];   ///< in the list's order

  QATTN_DEVICE isa::SharedAddress at(int place) const {
    return shared + static_cast<isa::SharedAddress>(place);
  }
  QATTN_DEVICE isa::SharedAddress stage(int n) const {
    return at(S::ring + warp * S::ring_bytes + n * S::stage_bytes);
  }

  QATTN_DEVICE void set_bounds() {
    sure_begin = pair.visible_begin(p, p.queries - 1);
    // Of the newest tokens a tree may hide any.
    sure_end = p.tree != nullptr ? pair.position(p, 0) : pair.visible_end(p, 0);
  }

  // ---- The list -------------------------------------------------------------------------------

  /// Blocks of entries [begin, end), at most list_blocks of them: place k of the list is block
  /// k % blocks_per_page of its entry.
  QATTN_DEVICE void note_blocks(int begin, int end) {
    const int per_page = p.cache.blocks_per_page();
    const kv::Entry* table = p.cache.table(pair.slot, p.layer, pair.head);
    const std::int32_t seen = pair.visible_begin(p, 0);
    pass_begin = begin;
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
    first_of[0] = 0;
#pragma unroll
    for (int tier = 0; tier < kv::most_tiers; ++tier) {
      first_of[tier + 1] =
          first_of[tier] + isa::load_shared<std::int32_t>(at(S::counts + tier * 4));
    }
    int to = 0;
#pragma unroll
    for (int tier = 0; tier < kv::most_tiers; ++tier) to = tier == warp ? first_of[tier] : to;
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
    int first = 0;
#pragma unroll
    for (int i = 1; i <= kv::most_tiers; ++i) first = i == tier ? first_of[i] : first;
    return first;
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
    return tokens.alive != 0xffffu || tokens.first < sure_begin ||
           tokens.first + formats::kv_block_tokens > sure_end;
  }
  QATTN_DEVICE const std::uint8_t* address(int tier, int k) const {
    const kv::DevicePool& pool = p.cache.pool[tier];
    const std::uint32_t number = isa::load_shared<std::uint32_t>(at(S::number + k * 4));
    return pool.pages + static_cast<std::int64_t>(number) * pool.block.bytes();
  }

  /// Starts to copy a tile; returns whether it needs masks. A block that it lacks is its last one
  /// once more, so that everything there is is defined.
  QATTN_DEVICE bool start_tile(const TileWork& tile, int to_stage) const {
    const formats::KvBlock block = p.cache.pool[tile.tier].block;
    const int blocks = tile_blocks(block.v_bits);
    const TileLayout layout =
        tile_layout(C.d, C.dv, block.k_bits, block.v_bits, blocks);
    const isa::SharedAddress to = stage(to_stage);
    const int mine = lane & 3;  // every lane knows one block, four lanes all of them
    const auto from = reinterpret_cast<std::uintptr_t>(address(tile.tier, list_place(tile, mine)));
    const bool special = isa::any(mine < blocks && is_special(tokens_of(tile, mine)));
    const auto source = [&](int i) {
      return reinterpret_cast<const std::uint8_t*>(
          static_cast<std::uintptr_t>(isa::shuffle(static_cast<std::uint64_t>(from), i)));
    };
    for (int b = 0; b < blocks; ++b) {
      const std::uint8_t* codes = source(b);
      const auto k = to + static_cast<isa::SharedAddress>(layout.k(b));
      for (int chunk = lane; chunk < layout.k_bytes / 16; chunk += 32) {
        isa::copy_async16(k + static_cast<isa::SharedAddress>(k_chunk(chunk, b) * 16),
                          codes + chunk * 16, 16);
      }
      codes += layout.k_bytes;
      const auto v = to + static_cast<isa::SharedAddress>(layout.v(b));
      for (int chunk = lane; chunk < layout.v_bytes / 16; chunk += 32) {
        isa::copy_async16(
            v + static_cast<isa::SharedAddress>(v_chunk(chunk, b, block.v_bits, C.dv) * 16),
            codes + chunk * 16, 16);
      }
    }
    const std::uint8_t* scales = source(lane / 4) + layout.k_bytes + layout.v_bytes;
    if (lane < 4 * blocks) {
      isa::copy_async16(to + static_cast<isa::SharedAddress>(layout.scales(0) + lane * 16),
                        scales + lane % 4 * 16, 16);
    }
    return special;
  }
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
