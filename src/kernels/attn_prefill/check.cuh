// 16-bit Q and K that hold NaN or Inf.
//
// An infinity in Q or K gives scores of +-infinity, and minus infinity looks like a masked key. To
// test every score costs 6 to 10 % on an H200 (D 128, S 4096), so the operands are tested instead:
// each block its own queries, and each tile of K by one of the blocks that read it. What that finds
// is too late for the others; SpoilRows (sm80_spoil.cuh) sees to the rows after the kernel.
#pragma once

#include "kernels/attn_prefill/rows.cuh"

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

/// A block's tests of K by `Threads` of its threads, in rows of RowBytes.
template <Element E, int RowBytes, int Threads>
struct KeyCheck {
  static_assert(Threads / 32 <= note_warps);
  const PrefillParams& p;
  const PrefillWork& work;
  const tile::RowSource& source;  ///< of K
  int thread;                     ///< among those that test

  /// Notes the first key of a tile that is not finite. Reads K once more, from L2: the same test in
  /// the loop over the tiles cost registers there, and 3 to 12 % (portable kernel, H200).
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
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      const std::int32_t other = isa::shuffle_xor(first, step);
      first = other < first ? other : first;
    }
    const std::int64_t index =
        (work.kv_head * tile::slot_count(p.k) + work.k_slot + tile) / note_keys;
    std::int32_t* note = p.bad_keys + index * note_warps;
    const int warp = thread / 32, lane = thread % 32;
    if (lane == 0) isa::store_global(note + warp, first);
    if (warp == 0 && lane >= Threads / 32 && lane < note_warps) {
      isa::store_global(note + lane, no_key);
    }
  }

  /// The share of a block of `rows` query rows. Tiles that every block sees are dealt out in turn,
  /// one that causal masks hide from the blocks before is tested by the first that sees it.
  QATTN_DEVICE void run(int rows) const {
    if (work.head % p.group != 0) return;
    const int length = static_cast<int>(work.q.length), blocks = (length + rows - 1) / rows;
    const int block = work.first_row / rows;
    int common = work.key_end;  // seen by the first block, so by all
    if (p.window_right >= 0) {
      const int end = (length < rows ? length : rows) + work.shift + p.window_right;
      common = end < common ? end : common;
    }
    for (int tile = block * note_keys; tile < common; tile += blocks * note_keys) check(tile);
    if (p.window_right < 0 || block == 0) return;
    const int before = work.first_row + work.shift + p.window_right;  // seen by the block before
    const int first = before < 0 ? 0 : (before + note_keys - 1) / note_keys * note_keys;
    for (int tile = first; tile < work.key_end; tile += note_keys) check(tile);
  }
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
