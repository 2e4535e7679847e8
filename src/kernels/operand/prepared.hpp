// Operands as GPU attention kernels read them: quantised, and V transposed, in the workspace. The
// encode kernels write this, the attention kernels of every NVIDIA architecture read it.
#pragma once

#include <cstdint>

#include "kernels/operand/sequence.hpp"

namespace qattn::kernels {

/// Tiles of V hold this many keys; slots come in multiples of it.
inline constexpr int slot_tile = 64;
/// V's codes in s8 lie in u8, so much larger.
inline constexpr int value_offset = 128;
/// Bits of PreparedRows::flags and of a V tile's `flags`: what a tile's keys need beyond the plain
/// path.
enum TileFlag : std::uint32_t {
  tile_has_bad = 1,   ///< a token holds NaN or Inf
  tile_is_mixed = 4,  ///< V's scale differs among keys of the same (key % 8) / 2
};

/// Q or K: codes [heads][slots][row_bytes], channels past the head dimension are zero, and so are
/// the slots behind a sequence's end in its last tile of 64. Codes of 4 bits: the lower channel in
/// the low half of a byte.
/// Tiles without tokens, and one behind all tiles, have scales of zero; their codes are unwritten.
/// K with KeyOrder::fp4: codes and group scales lie in the order of fp4_key(), all else in that of
/// the keys.
struct PreparedRows {
  std::uint8_t* codes = nullptr;
  /// [heads][slots]; NaN for a bad token (or its scale's group). Formats with built-in scales: the
  /// second level of nvfp4, of a head and sequence (of codes in pages: a page), or 1, as where all
  /// numbers are zeros; bad tokens have codes and group scales of zero.
  float* scale = nullptr;
  std::uint32_t* flags = nullptr;  ///< [heads][slots / 64]
  /// Q only, where asked for: q . (K's mean) of the unquantised row, [heads][slots].
  float* dot_mean = nullptr;
  std::int64_t slots = 0;
  std::int32_t row_bytes = 0;
  /// Built-in scales: [heads][slots][group_bytes], a code for every 16 (nvfp4) or 32 channels, then
  /// zeros up to a multiple of four bytes. Zeros where the codes are.
  std::uint8_t* group_scale = nullptr;
  std::int32_t group_bytes = 0;
};

/// V in tiles of 64 keys, [heads][slots / 64] records of `tile_bytes`, 16-byte aligned:
///   codes   [channels padded][64] codes: channel-major, keys in the order of the P fragments:
///           position p of a run of 16 holds key p_key(p). Formats with built-in scales beside K in
///           KeyOrder::fp4: in the keys' own order. Codes of 4 bits: the lower position in the low
///           half of a byte. s8 codes are value_offset larger, in u8;
///           codes of bad tokens stand for 0 in all channels, as do those of tokens that no row
///           sees, whose scale is a neighbour's
///   extra   room for eight channels. s8: of each channel the mean of its codes, a signed byte,
///           over the tokens that are not bad, rounded; floats: a channel that weighs P for row
///           sums, codes of 1 for keys that exist, then zeros
///   scales  built-in scales only: [channels padded + 8][64 / group] codes, the last eight those of
///           `extra`, which are 1; then zeros up to 16 bytes
///   log     [64] float: log2 of the token's scale (s8 per token), else 0
///   inverse [64] float: 1 / scale (s8 per token), else 1; 0 behind the end, NaN for a bad token
///   flags   TileFlag
/// Tiles without tokens, and one behind all tiles, have zeros behind their codes.
struct PreparedTiles {
  std::uint8_t* tiles = nullptr;
  /// Scales per channel: [batches][heads][groups][channels padded]; group g holds the keys
  /// [g * channel_block, (g + 1) * channel_block). packed_groups: [heads][groups][channels padded],
  /// those of all sequences as tile::first_block() has them. Null where scales are per token, and
  /// in mxfp8 and mxfp4. nvfp4: its second level, the same number in all channels.
  float* channel_scale = nullptr;
  std::int64_t groups = 0, channel_block = 0;
  bool packed_groups = false;
  std::int64_t slots = 0;
  std::int32_t channels = 0;         ///< padded
  std::int32_t bits = 8, group = 0;  ///< of a code; keys of a built-in scale
};

inline namespace QATTN_TARGET {

/// The group of key `s` of sequence `b`, whose tokens are `span`, among those of channel_scale.
QATTN_DEVICE std::int64_t channel_group(const PreparedTiles& v, const tile::Rows& r,
                                        const tile::Span& span, int b, int head, std::int64_t s) {
  const std::int64_t group = s / v.channel_block;
  if (!v.packed_groups) return (std::int64_t{b} * r.heads + head) * v.groups + group;
  return head * v.groups + tile::first_block(r, span, b, v.channel_block) + group;
}

}  // namespace QATTN_TARGET

/// Q's means (smooth_q), one for `block` tokens of a sequence, tile::first_block():
/// [heads][blocks][channels padded].
struct PreparedMeans {
  float* data = nullptr;
  std::int64_t blocks = 0;
  std::int32_t block = 0, channels = 0;
  /// A mean times K, as it came less its own mean: [heads][most][key_slots], in the slots of K's
  /// keys the means of their sequence, one after the other; keys in their own order. Formats of
  /// groups: in units of the products of codes, so that these begin with them; else times
  /// softmax_scale. Behind the end of the keys: anything.
  float* scores = nullptr;
  std::int64_t most = 0;  ///< means that a sequence can have
  std::int64_t key_slots = 0;
};

/// `bits` of a code, `group` keys of a built-in scale (0: none).
struct TileOffsets {
  int codes, extra, scales, log, inverse, flags, bytes;
};
constexpr TileOffsets tile_offsets(int channels, int bits = 8, int group = 0) {
  const int row = slot_tile * bits / 8, extra = channels * row, scales = extra + 8 * row;
  const int scale_bytes = group > 0 ? (channels + 8) * (slot_tile / group) : 0;
  const int log = scales + (scale_bytes + 15) / 16 * 16;
  const int flags = log + 8 * slot_tile;
  return {0, extra, scales, log, log + 4 * slot_tile, flags, flags + 16};
}

/// What the head dimension of formats with built-in scales is padded to.
constexpr int micro_channels(int channels) {
  return channels <= 64 ? 64 : channels <= 128 ? 128 : 256;
}

/// Key (within 16) at position p of V's contraction order: the order in which the accumulators of
/// Q K^T become the 8-bit A operand of P V without any exchange between lanes.
constexpr int p_key(int p) {
  const int t = p / 4, b = p % 4;
  return 8 * (b / 2) + 2 * t + b % 2;
}

/// In which order K's codes with built-in scales lie. With `fp4`, position p of a run of 32 slots
/// holds key fp4_key(p): the scores of a lane are then eight neighbouring keys of each half of a
/// tile, so that P in 4 bits packs in the keys' own order, and V's groups of 16 keys are those of
/// the public format.
enum class KeyOrder : std::int32_t { natural, fp4 };

/// Key (within 32) at position p of K's rows in KeyOrder::fp4.
constexpr int fp4_key(int p) { return 8 * (p % 8 / 2) + 2 * (p / 8) + p % 2; }
/// The position of a key there: the order is its own inverse.
constexpr int fp4_position(int key) { return fp4_key(key); }

}  // namespace qattn::kernels
