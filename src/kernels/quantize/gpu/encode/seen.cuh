// Finds the keys that some row of the call sees (SeenKeys), as cpu/seen.cpp does.
#pragma once

#include "kernels/operand/mask_params.hpp"
#include "kernels/operand/numbers.hpp"
#include "kernels/operand/seen.hpp"
#include "kernels/operand/visible_keys.hpp"
#include "kernels/quantize/gpu/seen_keys.cuh"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

struct SeenParams : MaskParams {
  tile::Rows q, k;
  SeenKeys out;
  SlightKeys slight;
  std::int32_t heads = 1;  ///< that masks tell apart: those of `out`, or one for all of them
  std::int32_t group = 1;  ///< query heads of each of these, where masks tell them apart
};

/// One block a tile of 64 keys and head. Windows let a run of rows see a key; of masks that do not
/// depend on the row one number is read a key, of others rows until one has seen every key: those
/// at the diagonal, which see most, first.
struct FindSeen {
  using Params = SeenParams;
  static constexpr int row_lanes = 4, threads = slot_tile * row_lanes, min_blocks = 5;
  static constexpr int rows_at_once = 8;  ///< of a thread: loads in flight
  static constexpr int votes_at = 16, shared_bytes = votes_at + threads / 32 * 8;
  static constexpr bool dependent = true;
  static constexpr int no = static_cast<int>(Seen::no), faintly = static_cast<int>(Seen::faintly),
                       slightly = static_cast<int>(Seen::slightly),
                       yes = static_cast<int>(Seen::yes);

  /// A thread's key and which rows of a head windows let see it: [low, high].
  struct Key {
    std::int64_t j = 0, low = 0, high = -1;
    int b = 0;
  };

  static QATTN_DEVICE std::int64_t lowest_row(const SeenParams& p, std::int64_t j,
                                              std::int64_t shift) {
    const std::int64_t low = first_query(std::int64_t{p.window_right}, j, shift);
    return low > 0 ? low : 0;
  }
  static QATTN_DEVICE std::int64_t highest_row(const SeenParams& p, std::int64_t j,
                                               std::int64_t shift, std::int64_t queries) {
    return last_query(std::int64_t{p.window_left}, j, shift, queries);
  }

  /// What the mask lets a row see of a key.
  static QATTN_DEVICE int look(const SeenParams& p, int b, int head, std::int64_t i,
                               std::int64_t j) {
    const BroadcastView& m = p.mask;
    if (m.data == nullptr) return yes;
    const std::int64_t at =
        b * m.stride[0] + head * m.stride[1] + i * m.stride[2] + j * m.stride[3];
    const auto* bytes = static_cast<const std::uint8_t*>(m.data);
    if (m.format == Format::b8) return isa::load_global(bytes + at) != 0 ? yes : no;
    if (m.format == Format::b1) {
      return (isa::load_global(bytes + (at >> 3)) >> (j & 7) & 1) != 0 ? yes : no;
    }
    const int sight = static_cast<int>(sight_under(tile::load_number(m.data, m.format, at)));
    return sight == slightly && p.slight.bits == nullptr ? yes : sight;
  }

  static QATTN_DEVICE bool block_visible(const MaskParams& p, int b, int head, std::int64_t block,
                                         std::int64_t j) {
    const BroadcastView& m = p.block_mask;
    const std::int64_t at = b * m.stride[0] + head * m.stride[1] + block * m.stride[2] +
                            tile::block_of(j, p.block_mask_k) * m.stride[3];
    return isa::load_global(static_cast<const std::uint8_t*>(m.data) + at) != 0;
  }

  /// Where the mask's rows are the same, or there is none.
  static QATTN_DEVICE int look_once(const SeenParams& p, const Key& key, int first_head) {
    int best = no;
    for (int h = first_head; h < first_head + p.group && key.low <= key.high; ++h) {
      const int now = look(p, key.b, h, 0, key.j);
      if (now <= best) continue;
      bool visible = p.block_mask_q == 0;
      if (!visible) {
        const std::int64_t last = tile::block_of(key.high, p.block_mask_q);
        for (auto n = tile::block_of(key.low, p.block_mask_q); n <= last && !visible; ++n) {
          visible = block_visible(p, key.b, h, n, key.j);
        }
      }
      if (visible) best = now;
    }
    return best;
  }

  /// What all threads have found, from `least` on; true where all keys are seen. By all threads.
  static QATTN_DEVICE bool vote(int best, int least, std::uint32_t low_keys,
                                std::uint32_t high_keys, SharedAddress votes, TileSight& found) {
    const std::uint32_t any = isa::ballot(best >= least), plainly = isa::ballot(best == yes);
    const int mine = isa::warp();
    if (isa::lane() == 0) isa::store_shared(votes + 8 * mine, Words2{{any, plainly}});
    isa::sync_threads();
    found = TileSight{};
#pragma unroll
    for (int warp = 0; warp < threads / 32; ++warp) {
      const auto w = isa::load_shared<Words2>(votes + 8 * warp);
      found.seen[warp % 2] |= w.w[0];
      found.plainly[warp % 2] |= w.w[1];
    }
    isa::sync_threads();
    return found.plainly[0] == low_keys && found.plainly[1] == high_keys;
  }

  static QATTN_DEVICE std::uint32_t first_bits(int count) {
    return count >= 32 ? ~0u : count <= 0 ? 0u : (1u << count) - 1;
  }

  /// What the thread has seen of its key.
  static QATTN_DEVICE int find(const SeenParams& p, const TilePlace& place, SharedAddress votes,
                               TileSight& found) {
    const tile::Span q = tile::span_of(p.q, place.b);
    const std::int64_t length = place.span.length, shift = length - q.length;
    const int n = isa::thread() % slot_tile, lane = isa::thread() / slot_tile;
    const int count = place.count(), first_head = p.heads > 1 ? place.head * p.group : 0;
    const std::uint32_t low_keys = first_bits(count), high_keys = first_bits(count - 32);
    // Of what index tensors say wrongly all rows are NaN, and masks have no such places.
    const bool wrong = q.bad || q.length > p.mask_queries || length > p.mask_keys;
    Key key;
    key.b = place.b, key.j = place.first + n;
    key.low = lowest_row(p, key.j, shift), key.high = highest_row(p, key.j, shift, q.length);
    if (n >= count) key.high = -1;
    if (wrong || p.mask.data == nullptr || p.mask.stride[2] == 0) {
      const int best = n >= count ? no : wrong ? yes : look_once(p, key, first_head);
      vote(best, faintly, low_keys, high_keys, votes, found);
      return best;
    }
    const std::int64_t last = place.first + count - 1, low = lowest_row(p, place.first, shift);
    const std::int64_t rows = highest_row(p, last, shift, q.length) - low + 1;
    std::int64_t start = last - shift - low;
    start = start >= rows ? rows - 1 : start > 0 ? start : 0;
    int best = no;
    found = TileSight{};
    for (int h = first_head; h < first_head + p.group; ++h) {
      for (std::int64_t done = 0; done < rows; done += rows_at_once * row_lanes) {
#pragma unroll
        for (int u = 0; u < rows_at_once; ++u) {
          const std::int64_t m = done + u * row_lanes + lane;
          std::int64_t i = start + m;
          i = low + (i < rows ? i : i - rows);
          if (m >= rows || i < key.low || i > key.high) continue;
          const bool visible = p.block_mask_q == 0 ||
                               block_visible(p, key.b, h, tile::block_of(i, p.block_mask_q), key.j);
          const int now = visible ? look(p, key.b, h, i, key.j) : no;
          best = best > now ? best : now;
        }
        if (vote(best, faintly, low_keys, high_keys, votes, found)) return best;
      }
    }
    return best;
  }

  static QATTN_DEVICE void run(const Params& p) {
    isa::grid_dependency_launch();
    isa::grid_dependency_wait();
    const SharedAddress shared = isa::shared_base();
    const int tile = divide(isa::block().x, p.heads), head = isa::block().x - tile * p.heads;
    const TilePlace place = find_tile(p.k, tile, head, threads, shared);
    if (!place.used) return;
    TileSight found, slight;
    const int best = find(p, place, shared + votes_at, found);
    if (p.slight.bits != nullptr) {
      vote(best, slightly, 0, 0, shared + votes_at, slight);
      for (int n = 0; n < 2; ++n) slight.seen[n] &= ~slight.plainly[n];
    }
    const int copies = p.out.heads / p.heads;  // one where masks tell the heads apart
    for (int n = isa::thread(); n < copies; n += threads) {
      const std::int64_t at = seen_tile(p.out, head + n, place.tile);
      const std::int64_t unit = seen_unit(p.out, place.b, head + n);
      isa::store_global(reinterpret_cast<Words4*>(p.out.bits) + at,
                        Words4{{found.seen[0], found.seen[1], found.plainly[0], found.plainly[1]}});
      isa::atomic_add_global(p.out.counts + 2 * unit, set_bits(found.seen));
      isa::atomic_add_global(p.out.counts + 2 * unit + 1, set_bits(found.plainly));
      if (p.slight.bits == nullptr) continue;
      isa::store_global(reinterpret_cast<Words2*>(p.slight.bits) + at,
                        Words2{{slight.seen[0], slight.seen[1]}});
      isa::atomic_add_global(p.slight.counts + unit, set_bits(slight.seen));
    }
  }

  static QATTN_DEVICE std::uint32_t set_bits(const std::uint32_t (&words)[2]) {
    return static_cast<std::uint32_t>(formats::popcount(words[0]) + formats::popcount(words[1]));
  }
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
