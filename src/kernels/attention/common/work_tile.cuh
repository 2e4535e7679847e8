// The part of the problem that a block works on, and how it finds that.
#pragma once

#include "kernels/attention/common/params.hpp"
#include "kernels/operand/copy.hpp"
#include "kernels/operand/visible_keys.hpp"

namespace qattn::kernels {

using isa::Element;
using isa::SharedAddress;

inline namespace QATTN_TARGET {

/// The part of the problem that a block works on.
struct alignas(16) WorkTile {
  int b, head, kv_head, first_row;  ///< `head`: the first of p.pack_gqa
  tile::Span q, k;
  int key_begin, key_end;  ///< that any of the rows can see
  int shift;               ///< Sk - Sq
  int split;               ///< of the keys; negative: the rows are no part, and end in the kernel
  std::int64_t q_slot, k_slot;
};

/// Q and K of sequence `b`, as index tensors have them.
QATTN_DEVICE void locate_sequence(const AttentionParams& p, int b, tile::Span& q, tile::Span& k) {
  q = tile::span_of(p.q, b);
  k = tile::span_of(p.k, b);
  k.bad |= q.length > p.mask_queries || k.length > p.mask_keys;
}

/// What VarlenBlocks found; in order where nothing is packed.
QATTN_DEVICE std::uint32_t verdict_of(const AttentionParams& p) {
  return p.verdict == nullptr ? varlen_in_order : isa::load_global(p.verdict);
}

/// Sequences that share tokens: nobody knows whose they are. All are bad, and packed queries have
/// no rows.
QATTN_DEVICE void heed_verdict(const AttentionParams& p, tile::Span& q, tile::Span& k) {
  if (verdict_of(p) != varlen_in_disorder) return;
  q.bad = k.bad = true;
  if (p.q.cu_seqlens != nullptr) q.rows = q.length = 0;
}

/// Where row `row` of sequence `b` and `head` lies among the rows of all parts, of its first split.
/// Packed heads: rows are those of their tile. `q`: the sequence's.
QATTN_DEVICE std::int64_t part_row(const AttentionParams& p, const tile::Span& q, int b, int head,
                                   int row) {
  const int size = p.parts.tile_rows, block = row / size;
  std::int64_t pack = (std::int64_t{b} * p.q.heads + head) / p.pack_gqa, first = block;
  if (p.q.cu_seqlens != nullptr) {
    pack = head / p.pack_gqa, first += tile::first_block(p.q, q, b, size);
  }
  const std::int64_t part = (pack * p.q_blocks + first - p.whole) * p.splits;
  return part * p.parts.rows + row - block * size;
}

/// Rows from the work's first on that exist, be they more than a block's; negative: none.
QATTN_DEVICE int existing_rows(const AttentionParams& p, const WorkTile& w) {
  return static_cast<int>(w.q.length) * p.pack_gqa - w.first_row;
}

/// Leaves the work its split's share of the keys: as many tiles each as the rows can see in all.
QATTN_DEVICE void take_split(const AttentionParams& p, WorkTile& w) {
  const int keys = w.key_end > w.key_begin ? w.key_end - w.key_begin : 0;
  const int tiles = (keys + split_tile - 1) / split_tile;
  const int share = (tiles + p.splits - 1) / p.splits * split_tile;
  w.key_begin += w.split * share;
  const int end = w.key_begin + share;
  w.key_end = end < w.key_end ? end : w.key_end;
}

/// In a snake (TileScheduler) multiprocessors take each second turn's tiles backwards.
QATTN_DEVICE int snake_index(const AttentionParams& p, int index) {
  if (p.snake == 0) return index;
  const int turn = index / p.snake, first = turn * p.snake;
  const int works = p.work_tiles - first < p.snake ? p.work_tiles - first : p.snake;
  return turn % 2 == 0 ? index : 2 * first + works - 1 - index;
}

/// Work number `index` of p.work_tiles, in blocks of `rows`; tiles of `keys`.
QATTN_DEVICE WorkTile locate_work(const AttentionParams& p, int index, int rows, int keys) {
  WorkTile w;
  int block;
  w.split = -1;
  if (p.parts.out != nullptr && index >= p.whole) {
    const int part = index - p.whole, before = part / p.splits;
    w.split = part - before * p.splits, index = p.whole + before;
  }
  const int heads = p.pack_gqa > 1 ? p.q.heads / p.pack_gqa : p.q.heads;
  const bool packed = p.varlen_blocks != nullptr;
  if (p.heads_per_group > 0) {  // as TileScheduler says
    index = snake_index(p, index);
    const int all = packed ? heads : heads * p.q.batches;
    const int group = index / (p.heads_per_group * p.q_blocks), first = group * p.heads_per_group;
    const int members = all - first < p.heads_per_group ? all - first : p.heads_per_group;
    index -= first * p.q_blocks;
    const int turn = index / members, head = first + index - turn * members;
    block = (group + p.shortest_first) % 2 == 0 ? p.q_blocks - 1 - turn : turn;
    w.b = packed ? 0 : head / heads, w.head = head - w.b * heads;
  } else {  // neighbours share K and V in L2
    block = index % p.q_blocks, index /= p.q_blocks;
    w.head = index % heads, w.b = index / heads;
  }
  w.first_row = block * rows;
  if (packed) {
    const auto place =
        isa::load_global(reinterpret_cast<const isa::Words2*>(p.varlen_blocks) + block);
    w.b = static_cast<int>(place.w[0]), w.first_row = static_cast<int>(place.w[1]);
  }
  w.head *= p.pack_gqa;
  w.kv_head = w.head / p.group;
  locate_sequence(p, w.b, w.q, w.k);
  heed_verdict(p, w.q, w.k);
  w.q_slot = tile::first_slot(p.q, w.q, w.b);
  w.k_slot = tile::first_slot(p.k, w.k, w.b);
  w.shift = static_cast<int>(w.k.length - w.q.length);
  const int length = static_cast<int>(w.k.length);
  const int past = static_cast<int>(w.q.length) < w.first_row + rows ? static_cast<int>(w.q.length)
                                                                     : w.first_row + rows;
  const int end = visible_end(p.window_right, past - 1 + w.shift, length);
  const int begin = visible_begin(p.window_left, w.first_row + w.shift);
  const bool none = past <= w.first_row || w.q.bad || w.k.bad;
  w.key_end = none ? 0 : end;
  // Kernels with other tiles split keys at the same places: one does blocks of another again.
  const int step = p.splits > 1 ? split_tile : keys;
  w.key_begin = begin < 0 ? 0 : begin / step * step;
  if (w.split >= 0) take_split(p, w);
  return w;
}

/// Number of the row of `head` and `slot` among an operand's prepared rows.
QATTN_DEVICE std::int64_t prepared_row(const PreparedRows& x, int head, std::int64_t slot) {
  return head * x.slots + slot;
}

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
