// Operands as GPU attention kernels read them: quantised, and V transposed, in the workspace. The
// encode kernels write this, the attention kernels of every NVIDIA architecture read it.
#pragma once

#include <cstdint>

#include "tile/sequence.hpp"

namespace qattn::kernels {

/// Tiles of V hold this many keys; slots come in multiples of it.
inline constexpr int slot_tile = 64;
/// V's codes in s8 lie in u8, so much larger.
inline constexpr int value_offset = 128;
/// What uneven_tiles() may return: none of it a TileFlag.
inline constexpr std::uint32_t uneven_bits = 0x80008000u;

/// Bits of PreparedRows::flags and of a V tile's `flags`: what a tile's keys need beyond the plain
/// path.
enum TileFlag : std::uint32_t {
  tile_has_bad = 1,    ///< a token holds NaN or Inf
  tile_has_plain = 2,  ///< a token of V joins the sum unrounded (docs/NUMERICS.md)
  tile_is_mixed = 4,   ///< V's scale differs among keys of the same (key % 8) / 2
};
static_assert((uneven_bits & (tile_has_bad | tile_has_plain | tile_is_mixed)) == 0);

/// Q or K: codes [heads][slots][row_bytes], channels past the head dimension are zero, and so are
/// the slots behind a sequence's end in its last tile of 64.
/// Tiles without tokens, and one behind all tiles, have scales of zero; their codes are unwritten.
struct PreparedRows {
  std::uint8_t* codes = nullptr;
  float* scale = nullptr;          ///< [heads][slots]; NaN for a bad token (or its scale's group)
  std::uint32_t* flags = nullptr;  ///< [heads][slots / 64]
  /// Q only, where asked for: q . (K's mean) of the unquantised row, [heads][slots].
  float* dot_mean = nullptr;
  std::int64_t slots = 0;
  std::int32_t row_bytes = 0;
};

/// V in tiles of 64 keys, [heads][slots / 64] records of `tile_bytes`, 16-byte aligned:
///   codes   [channels padded + 8][64] bytes: channel-major, keys in the order of the P fragments:
///           position p of a run of 16 holds key p_key(p). The 8 extra rows weigh P for row sums:
///             s8:   row 0 and row 1 hold high and low byte of w = round(2^8 * 127 / f * 1 / scale)
///                   with w = 256 * high + low, |low| <= 128, f such that the largest w of the tile
///                   is 127 * 256; 0 for bad and for plain tokens and behind the end
///             e4m3: row 0 is 1 for keys that exist, else 0
///           s8 codes of channels, not of the extra rows, are value_offset larger, in u8
///           codes of bad tokens stand for 0 in all channels
///   log     [64] float: log2 of the token's scale (s8 per token), else 0
///   plain   [64] float: 0 normally, 1 for a token that joins the sum unrounded, NaN for a bad one
///   unit    float: 1 / scale = w * unit
///   largest float, of s8 per token: the largest scale of tokens that are not bad
///   flags   TileFlag
///   range   what uneven_tiles() reads, of s8 per token. Upper half: that of a float, the largest
///           scale, rounded up. Lower half: 0x7fff less the upper half of another, the smallest
///           scale of tokens that are neither bad nor plain / kRoundedShare, or Inf without any
/// Tiles without tokens, and one behind all tiles, have zeros behind their codes.
struct PreparedTiles {
  std::uint8_t* tiles = nullptr;
  /// Scales per channel: [batches][heads][groups][channels padded]; group g holds the keys
  /// [g * channel_block, (g + 1) * channel_block). packed_groups: [heads][groups][channels padded],
  /// those of all sequences as tile::first_block() has them. Null where scales are per token.
  float* channel_scale = nullptr;
  std::int64_t groups = 0, channel_block = 0;
  bool packed_groups = false;
  std::int64_t slots = 0;
  std::int32_t channels = 0;  ///< padded
};

inline namespace QATTN_TARGET {

/// Of two tiles of V that a tile of P spans, from their `range`: not 0 where one has scales below
/// kRoundedShare of the other's largest, or up to 1.6 % above.
// Two comparisons of floats took ptxas 5 to 12 instructions of a tile's 700.
QATTN_DEVICE std::uint32_t uneven_tiles(std::uint32_t first, std::uint32_t second) {
  return (first + (second << 16 | second >> 16)) & uneven_bits;
}

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
};

// What the kernels are told that encode without detours: 16-bit rows in 16-byte pieces to s8 or
// e4m3 with a scale per token or per tile of 64, V in s8 per token and in e4m3 per channel, K less
// its mean.

/// Which tokens of a tile share a scale.
enum class SharedScales : std::int32_t {
  none,
  tile,     ///< all of them
  thread,   ///< those of the same (key % 8) / 2: K's per_thread
  joint,    ///< the same but for tokens that are far smaller: V's per_thread
  channel,  ///< V in e4m3: PreparedTiles::channel_scale; the tokens have none
};

struct PlainRows {
  tile::Rows rows;
  PreparedRows out;
  const float* mean = nullptr;  ///< [batches][heads][padded]: K: subtracted; Q: for dot_mean
  std::int32_t heads_per_mean = 1;
  SharedScales shared = SharedScales::none;
};

struct PlainParams {
  PlainRows row[2];  ///< Q, K
  tile::Rows v;
  PreparedTiles v_out;
  SharedScales v_shared = SharedScales::none;
  std::int32_t blocks[3] = {};  ///< slot tiles of all heads, of Q, K, V
  std::int32_t lead = 0;        ///< of the blocks of Q and V, how many come before the others
  bool e4m3 = false;            ///< codes of Q and K
  isa::Element input = isa::Element::bf16;
  /// The first of two passes: no codes, but what FinishMeans reads.
  bool first_pass = false;
  float* sums[3] = {};  ///< of K's rows; of V maxima: [heads][slot tiles][Channels]

  QATTN_CONSTEXPR const tile::Rows& rows(int role) const { return role == 2 ? v : row[role].rows; }
};

struct TileOffsets {
  int codes, log, plain, unit, largest, flags, range, bytes;
};
constexpr TileOffsets tile_offsets(int channels) {
  const int log = (channels + 8) * slot_tile;
  const int unit = log + 8 * slot_tile;
  return {0, log, log + 4 * slot_tile, unit, unit + 4, unit + 8, unit + 12, unit + 16};
}

/// Key (within 16) at position p of V's contraction order: the order in which the accumulators of
/// Q K^T become the 8-bit A operand of P V without any exchange between lanes.
constexpr int p_key(int p) {
  const int t = p / 4, b = p % 4;
  return 8 * (b / 2) + 2 * t + b % 2;
}

}  // namespace qattn::kernels
