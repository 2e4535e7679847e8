// The Hopper prefill kernel's producer: one thread that keeps TMA busy.
#pragma once

#include <cstring>

#include "kernels/attention/common/ring.hpp"
#include "kernels/attention/common/work_tile.cuh"
#include "kernels/attention/sm90a/params.hpp"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

/// The tiles of a work item, from the last to the first. Producer and consumers walk the same.
struct TileWalk {
  int tile;             ///< first key of the tile; negative: none is left
  int begin, end;       ///< of the keys that are visible
  int mask_keys;        ///< keys of a block of the block mask
  unsigned hidden = 0;  ///< bit h: the block mask forbids half h of the tile
  std::int64_t mask_stride;
  const std::uint8_t* mask = nullptr;  ///< the block mask's row; null: none

  QATTN_DEVICE TileWalk(const AttentionParams& p, const WorkTile& work, int keys)
      : tile(-1),
        begin(work.key_begin),
        end(work.key_end),
        mask_keys(p.block_mask_k),
        mask_stride(0) {
    if (work.key_end <= work.key_begin) return;
    if (p.block_mask.data != nullptr) {
      mask = static_cast<const std::uint8_t*>(p.block_mask.data) + work.b * p.block_mask.stride[0] +
             work.head * p.block_mask.stride[1] +
             work.first_row / p.block_mask_q * p.block_mask.stride[2];
      mask_stride = p.block_mask.stride[3];
    }
    tile = (work.key_end - 1) / keys * keys;
    skip(keys);
  }
  QATTN_DEVICE void advance(int keys) {
    tile -= keys;
    skip(keys);
  }

 private:
  QATTN_DEVICE void skip(int keys) {
    if (mask != nullptr) {
      while (tile >= begin) {
        const int block = tile / mask_keys, upper = tile + keys / 2;
        const std::uint8_t* at = mask + block * mask_stride;
        hidden = isa::load_global(at) == 0 ? 1 : 0;
        // The mask may end before the second half, which nobody sees then.
        if (upper < end && upper - block * mask_keys >= mask_keys) at += mask_stride;
        const bool forbidden = isa::load_global(at) == 0;
        if (forbidden || upper >= end) hidden |= 2;
        if (hidden != 3) break;
        tile -= keys;
      }
    }
    if (tile < begin) tile = -1;
  }
};

/// Calls stage(tile, before) for every stage of the ring that a work item fills: with K of `tile`
/// and V of `before`, the tile before; negative: none.
template <class Stage>
QATTN_DEVICE void each_stage(const AttentionParams& p, const WorkTile& work, int keys,
                             Stage stage) {
  TileWalk walk(p, work, keys);
  int before = -1;
  while (walk.tile >= 0 || before >= 0) {
    stage(walk.tile, before);
    before = walk.tile;
    if (walk.tile >= 0) walk.advance(keys);
  }
}

/// May 16-bit V of a tile hold rows behind the sequence's end that are in memory? What they hold
/// must not meet P, even though that is zero there. TMA itself fills rows behind the tensor's end.
QATTN_DEVICE bool needs_cleaning(const AttentionParams& p, const WorkTile& work, int tile,
                                 int keys) {
  return tile + keys > work.k.length &&
         (p.v.cu_seqlens != nullptr || work.k.length < p.v.max_length);
}

/// One thread: does the portable kernel have to do work `index` again?
QATTN_DEVICE void flag_fallback(const AttentionParams& p, int index, int who, bool needs_fallback) {
  std::uint32_t* flags = p.fallback_flags + index * std::int64_t{fallback_stride};
  isa::store_global(flags + who, needs_fallback ? 1u : 0u);
}

template <class T>
QATTN_DEVICE void put_shared(SharedAddress to, const T& x) {
  isa::Words4 words[sizeof x / 16];
  std::memcpy(words, &x, sizeof x);
#pragma unroll
  for (unsigned n = 0; n < sizeof x / 16; ++n) isa::store_shared(to + 16 * n, words[n]);
}
template <class T>
QATTN_DEVICE T take_shared(SharedAddress from) {
  T x;
  isa::Words4 words[sizeof x / 16];
#pragma unroll
  for (unsigned n = 0; n < sizeof x / 16; ++n) {
    words[n] = isa::load_shared<isa::Words4>(from + 16 * n);
  }
  std::memcpy(&x, words, sizeof x);
  return x;
}

/// What follows from a work, which is told with it.
struct alignas(16) TileRange {
  static constexpr int no_tile = 0x40000000;  ///< behind all that there can be, 2^30 at most

  int unmasked_first;  ///< the first tile that every row sees whole
  int unmasked_span;   ///< how far behind it the last is
  int exist;           ///< existing_rows()
  int unused;

  /// Blocks of `rows`, tiles of `keys`. `general`: no tile is plain.
  static QATTN_DEVICE TileRange of(const AttentionParams& p, const WorkTile& work, int rows,
                                   int keys, bool general) {
    const int first = work.first_row + work.shift, length = static_cast<int>(work.k.length);
    const int end = visible_end(p.window_right, first, length);
    const int left = visible_begin(p.window_left, first + rows - 1);
    const int from = left < 0 ? 0 : left;  // negative tiles are none
    const int last = general ? -1 : end - keys;
    TileRange facts{};
    facts.unmasked_first = last < from ? no_tile : from;
    facts.unmasked_span = last < from ? 0 : last - from;
    facts.exist = existing_rows(p, work);
    return facts;
  }
};

/// Panel `n` of rows of 16 bits in place: `token` counts from the sequence's first.
QATTN_DEVICE void load_panel(SharedAddress to, const isa::TensorMap& map, const tile::Rows& rows,
                             const WorkTile& work, const tile::Span& span, int head, int token,
                             int n, SharedAddress full) {
  const int b = rows.cu_seqlens != nullptr ? 0 : work.b;
  isa::tma_load<4>(to, map, {n * sm90_panel / 2, static_cast<int>(span.begin) + token, head, b},
                   full);
}

template <Sm90Config C>
struct Sm90Producer {
  using S = Sm90Shape<C>;

  const Sm90Params& p;
  SharedAddress base = isa::shared_base();
  RingPlace<S::stages> place{};
  RingPlace<S::q_stages> q_place{};
  bool bad_page = false;  ///< a page of this work's does not exist
  int coded_unit = -1;    ///< whose codes are there

  /// K or V of `tile` in 16 bits, so many panels of them, which are alike.
  template <int Panels>
  QATTN_DEVICE void load_tokens(SharedAddress to, const isa::TensorMap& map, const tile::Rows& rows,
                                const WorkTile& work, int tile, SharedAddress full) {
    static_assert(!S::qk_16bit || S::k_panel_bytes == S::v_bytes);
    if (rows.page_table == nullptr) {
      for (int n = 0; n < Panels; ++n) {
        load_panel(to + n * S::v_bytes, map, rows, work, work.k, work.kv_head, tile, n, full);
      }
      return;
    }
    load_pages<Panels>(to, map, rows, work, tile, full);
  }
  template <int Panels>
  QATTN_DEVICE void load_pages(SharedAddress to, const isa::TensorMap& map, const tile::Rows& rows,
                               const WorkTile& work, int tile, SharedAddress full) {
    const int box = rows.page_size < S::keys ? rows.page_size : S::keys;
    const int first = tile / rows.page_size, start = tile - first * rows.page_size;
    const std::int32_t* table = rows.page_table + work.b * rows.page_table_stride + first;
    const auto wanted = [&](int n) { return n * box < S::keys && tile + n * box < work.k.length; };
    // All are on their way before any is used.
    constexpr int most = S::keys / sm90_least_page;
    std::int32_t pages[most];
#pragma unroll
    for (int n = 0; n < most; ++n) pages[n] = wanted(n) ? isa::load_global(table + n) : -1;
#pragma unroll
    for (int n = 0; n < most; ++n) {
      if (n * box >= S::keys) break;
      // A page number of -1 gives zeros: behind the end and, until the portable kernel has looked
      // at the block, where a page does not exist.
      const bool exists = pages[n] >= 0 && pages[n] < rows.total;
      bad_page |= wanted(n) && !exists;
      for (int panel = 0; panel < Panels; ++panel) {
        isa::tma_load<4>(to + panel * S::v_bytes + n * box * sm90_panel, map,
                         {panel * sm90_panel / 2, start, work.kv_head, exists ? pages[n] : -1},
                         full);
      }
    }
  }

  /// K of `tile`, with what else softmax reads; negative: none.
  QATTN_DEVICE void load_keys(const WorkTile& work, int tile, SharedAddress stage,
                              SharedAddress full) {
    if (tile < 0) return;
    const std::int64_t slot = work.k_slot + tile, row = work.kv_head * p.k8.slots + slot;
    if constexpr (S::qk_16bit) {
      load_tokens<S::qk_panels>(stage + S::k_at, p.k_map, p.k, work, tile, full);
    } else {
      for (int n = 0; n < S::qk_panels; ++n) {
        isa::tma_load<2>(stage + S::k_at + n * S::k_panel_bytes, p.k_map,
                         {n * sm90_panel, static_cast<int>(row)}, full);
      }
      isa::bulk_load(stage + S::scale_at, p.k8.scale + row, S::scale_bytes, full);
    }
    if constexpr (!S::pv_16bit) {
      const int bytes = tile_offsets(p.v8.channels).bytes;
      const std::uint8_t* tail = p.v8.tiles + row / slot_tile * bytes + bytes - S::tail_bytes;
      for (int h = 0; h < S::halves; ++h) {
        isa::bulk_load(stage + S::tail_at + h * S::tail_bytes, tail + h * bytes, S::tail_bytes,
                       full);
      }
    }
  }
  QATTN_DEVICE void load_values(const WorkTile& work, int tile, SharedAddress stage,
                                SharedAddress full) {
    if (tile < 0) return;
    const SharedAddress to = stage + S::v_at;
    if constexpr (S::pv_16bit) {
      load_tokens<S::v_panels>(to, p.v_map, p.v, work, tile, full);
    } else {
      const std::int64_t row = work.kv_head * p.v8.slots + work.k_slot + tile;
      for (int h = 0; h < S::halves; ++h) {
        // Nobody writes the record of keys that do not exist; behind the tensor TMA gives zeros.
        const bool exists = tile + h * slot_tile < work.k.length;
        const int record = exists ? static_cast<int>(row / slot_tile) + h : -1;
        isa::tma_load<3>(to + h * S::v_bytes, p.v_map, {0, 0, record}, full);
        if constexpr (S::e4m3_pv) {
          isa::tma_load<3>(to + h * S::v_bytes + S::dv * slot_tile, p.weight_map,
                           {0, p.v8.channels, record}, full);
        }
      }
    }
  }

  /// 64 rows of Q from row `first` of the work's on.
  QATTN_DEVICE void load_queries(const WorkTile& work, int first, SharedAddress to,
                                 SharedAddress full) {
    const int query = p.pack_gqa > 1 ? first / p.pack_gqa : first;
    const auto slot = static_cast<int>(work.q_slot) + query;
    if constexpr (S::qk_16bit) {
      const int b = p.q.cu_seqlens != nullptr ? 0 : work.b;
      const int token = static_cast<int>(work.q.begin) + query;
      for (int n = 0; n < S::qk_panels; ++n) {
        const SharedAddress panel = to + n * S::q_panel_bytes;
        if (p.pack_gqa > 1) {
          isa::tma_load<4>(panel, p.q_map, {n * sm90_panel / 2, work.head, token, b}, full);
        } else {
          load_panel(panel, p.q_map, p.q, work, work.q, work.head, query, n, full);
        }
      }
    } else {
      const auto row = static_cast<int>(work.head * p.q8.slots + slot);
      for (int n = 0; n < S::qk_panels; ++n) {
        const SharedAddress panel = to + n * S::q_panel_bytes;
        if (p.pack_gqa > 1) {
          isa::tma_load<3>(panel, p.q_map, {n * sm90_panel, work.head, slot}, full);
        } else {
          isa::tma_load<2>(panel, p.q_map, {n * sm90_panel, row}, full);
        }
      }
    }
  }

  /// Work for the consumers, with its Q if it has tiles. Q in 16 bits is the encoders'.
  // They located it between two blocks of rows, which took 1000 clocks of 23700 at S = 1024 (H200,
  // int8_full, D 128).
  QATTN_DEVICE void hand_out(const WorkTile& work, bool has_tiles) {
    const std::int64_t row = work.head * p.q8.slots + work.q_slot + work.first_row;
    for (int w = 0; w < S::consumers; ++w) {
      const int buffer = q_place.stage * S::consumers + w;
      const SharedAddress full = base + S::q_full + 8 * buffer;
      const SharedAddress to = base + S::q_at + buffer * S::q_bytes;
      isa::mbarrier_wait(base + S::q_empty + 8 * buffer, q_place.parity ^ 1);
      const SharedAddress slot = base + S::work_at + buffer * S::work_bytes;
      put_shared(slot, work);
      put_shared(slot + static_cast<int>(sizeof work),
                 TileRange::of(p, work, S::rows, S::keys, p.general));
      if (!has_tiles || S::fused_q_quant) {
        isa::mbarrier_arrive(full);
        continue;
      }
      // Tables end with the slots; TMA knows that of the codes. Those of packed heads lie apart.
      const bool tables =
          !S::qk_16bit && p.pack_gqa == 1 && work.first_row + 64 * w < work.q.length;
      const bool dots = tables && p.q8.dot_mean != nullptr;
      isa::mbarrier_arrive_expect(full, S::q_bytes + 64 * 4 * (tables + dots));
      const SharedAddress facts = base + S::facts_at + buffer * S::fact_bytes;
      if (tables) isa::bulk_load(facts, p.q8.scale + row + 64 * w, 64 * 4, full);
      if (dots) isa::bulk_load(facts + S::dots_at, p.q8.dot_mean + row + 64 * w, 64 * 4, full);
      load_queries(work, work.first_row + 64 * w, to, full);
    }
    q_place.advance();
  }

  QATTN_DEVICE void load(const WorkTile& work) {
    hand_out(work, TileWalk(p, work, S::keys).tile >= 0);
    each_stage(p, work, S::keys, [&](int tile, int before) {
      const SharedAddress stage = base + S::ring_at + place.stage * S::stage_bytes;
      const SharedAddress full = base + S::full + 8 * place.stage;
      isa::mbarrier_wait(base + S::empty + 8 * place.stage, place.parity ^ 1);
      const int key_bytes = tile < 0 ? 0 : S::key_bytes;
      const int value_bytes = before < 0 ? 0 : S::v_panels * S::v_bytes;
      SharedAddress v_full = full;
      if (S::pv_16bit && before >= 0 && needs_cleaning(p, work, before, S::keys)) {
        v_full = base + S::unclean + 8 * place.stage;
        isa::mbarrier_arrive_expect(v_full, value_bytes);
        isa::mbarrier_expect(full, key_bytes);  // who cleans V arrives
      } else {
        isa::mbarrier_arrive_expect(full, key_bytes + value_bytes);
      }
      load_keys(work, tile, stage, full);
      load_values(work, before, stage, v_full);
      place.advance();
    });
  }

  /// Until the codes of the work's unit are there.
  QATTN_DEVICE void await_codes(const WorkTile& work) {
    const int unit = work.b * p.k.heads + work.kv_head;
    if (unit == coded_unit) return;
    isa::wait_global(p.awaited.there + std::int64_t{unit} * AwaitedCodes::words_of_unit,
                     p.awaited.codes);
    isa::fence_async_global();
    coded_unit = unit;
  }

  /// Works in turn, or where codes are still being made, by blocks that come and go, as they are
  /// free.
  QATTN_DEVICE void run() {
    const bool awaits = p.awaited.works != nullptr;
    const auto take = [&] { return static_cast<int>(isa::atomic_add_global(p.awaited.works, 1u)); };
    int index = S::tuning.dynamic_scheduler && awaits ? take() : isa::block().x;
    while (index < p.work_tiles) {
      bad_page = false;
      const WorkTile work = locate_work(p, index, S::rows, S::keys);
      if (work.q.bad || work.k.bad) isa::atomic_or_global(p.error, tile::error_sequence);
      if (S::tuning.dynamic_scheduler && awaits) await_codes(work);
      load(work);
      if constexpr (S::pv_16bit) flag_fallback(p, index, fallback_producer, bad_page);
      index = S::tuning.dynamic_scheduler && awaits ? take() : index + isa::grid().x;
    }
    if constexpr (S::tuning.dynamic_scheduler) {
      WorkTile none{};
      none.b = -1;
      hand_out(none, false);
    }
  }
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
