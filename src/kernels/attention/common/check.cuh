// 16-bit Q and K that hold NaN or Inf.
//
// An infinity in Q or K gives scores of +-infinity, and minus infinity looks like a masked key. To
// test every score costs 6 to 10 % on an H200 (D 128, S 4096), so the operands are tested instead:
// each block its own queries, and each tile of K by one of the blocks that read it. What that finds
// is too late for the others; SpoilRows (spoil.cuh) sees to the rows after the kernel.
#pragma once

#include "kernels/attention/common/work_tile.cuh"

namespace qattn::kernels {

/// Keys that one note is about, and numbers in a note: one a warp that tests.
inline constexpr int note_keys = slot_tile, note_warps = 4;

inline namespace QATTN_TARGET {

/// Does any of eight f16 or bf16 numbers have the exponent of NaN and Inf?
template <Element E>
QATTN_DEVICE bool not_finite(const isa::Words4& v) {
  constexpr std::uint32_t exponent = E == Element::f16 ? 0x7c00u : 0x7f80u;
  bool bad = false;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    bad |= (v.w[i] & exponent) == exponent || (v.w[i] >> 16 & exponent) == exponent;
  }
  return bad;
}

/// Which tiles of K a block of `rows` query rows tests. Tiles that every block sees are dealt out
/// in turn, one that causal masks hide from the blocks before is tested by the first that sees it.
struct KeyShare {
  int block, blocks;
  int common;  ///< end of the keys that the first block sees, and so every block
  int before;  ///< end of those that the block before sees

  QATTN_DEVICE KeyShare(const AttentionParams& p, const WorkTile& work, int rows) {
    const int length = static_cast<int>(work.q.length);
    blocks = (length + rows - 1) / rows, block = work.first_row / rows;
    const int last = (length < rows ? length : rows) - 1;  // row of the first block
    common = visible_end(p.window_right, last + work.shift, work.key_end);
    before = visible_end(p.window_right, work.first_row - 1 + work.shift, no_key);
    if (block == 0) before = no_key;
    if (work.head % p.group != 0) common = 0, before = no_key;
  }

  /// The tile from key `tile` on, a multiple of `step` that the block sees?
  QATTN_DEVICE bool has(int tile, int step) const {
    return tile < common ? tile / step % blocks == block : tile >= before;
  }
};

/// Notes the smallest of the warps' `first`, the first key that a thread found bad in the 64 keys
/// from `tile` on. `warp`: among `warps` that test.
QATTN_DEVICE void note_keys_of(const AttentionParams& p, const WorkTile& work, int tile,
                               std::int32_t first, int warp, int warps) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    const std::int32_t other = isa::shuffle_xor(first, step);
    first = other < first ? other : first;
  }
  const std::int64_t index =
      (work.kv_head * tile::slot_count(p.k) + work.k_slot + tile) / note_keys;
  std::int32_t* note = p.bad_keys + index * note_warps;
  const int lane = isa::lane();
  if (lane == 0) isa::store_global(note + warp, first);
  if (warp == 0 && lane >= warps && lane < note_warps) isa::store_global(note + lane, no_key);
}

/// A block's tests of K by `Threads` of its threads, in rows of RowBytes.
template <Element E, int RowBytes, int Threads>
struct KeyCheck {
  static_assert(Threads / 32 <= note_warps);
  const AttentionParams& p;
  const WorkTile& work;
  const tile::RowSource& source;  ///< of K
  int thread;                     ///< among those that test

  /// Reads K once more, from L2: the same test in the loop over the tiles cost registers there, and
  /// 3 to 12 % (H200).
  QATTN_DEVICE void check(int tile) const {
    std::int32_t first = no_key;
    constexpr int chunks = RowBytes / 16;
#pragma unroll 4
    for (int n = thread; n < note_keys * chunks; n += Threads) {
      const int key = tile + n / chunks, c = n % chunks * 16;
      if (key >= source.length || c >= source.row_bytes) continue;
      const auto* at = reinterpret_cast<const isa::Words4*>(source.base + key * source.stride + c);
      if (not_finite<E>(isa::load_global(at)) && key < first) first = key;
    }
    note_keys_of(p, work, tile, first, thread / 32, Threads / 32);
  }

  /// The share of a block of `rows` query rows.
  QATTN_DEVICE void run(int rows) const {
    const KeyShare share(p, work, rows);
    for (int tile = work.key_begin; tile < work.key_end; tile += note_keys) {
      if (share.has(tile, note_keys)) check(tile);
    }
  }
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
