// Which keys some row of the call sees, as the encode kernels read it.
#pragma once

#include "kernels/quantize/gpu/encode/common.cuh"

namespace qattn::kernels {

/// What FindSeen leaves. The heads are KV heads, or one that stands for all of them.
struct SeenKeys {
  /// [heads][slots / 64][4]: of a tile's keys, a bit each, the low half first: two words of those
  /// that are seen at all, two of those that are seen more than faintly (Seen). Tiles without
  /// tokens have none. Null: every key is seen.
  std::uint32_t* bits = nullptr;
  std::uint32_t* counts = nullptr;  ///< [heads][batches][2]: how many keys of a sequence are
  std::int64_t tiles = 0;           ///< of a head
  std::int32_t heads = 1, batches = 0;
};

/// Of them, keys seen slightly, which SeenKeys has as faint ones until SettleSeen. Null: such keys
/// are seen.
struct SlightKeys {
  std::uint32_t* bits = nullptr;    ///< [heads][slots / 64][2], likewise
  std::uint32_t* counts = nullptr;  ///< [heads][batches]
};

inline namespace QATTN_TARGET {

/// The keys of a tile.
struct TileSight {
  std::uint32_t seen[2], plainly[2];

  static QATTN_DEVICE bool bit(const std::uint32_t (&words)[2], int key) {
    return ((key < 32 ? words[0] : words[1]) >> key % 32 & 1) != 0;
  }
  /// Its values have no influence.
  QATTN_DEVICE bool hidden(int key) const { return !bit(seen, key); }
  /// Has the key a part in means and in scales of several keys?
  QATTN_DEVICE bool shares(int key) const { return bit(plainly, key); }
};

QATTN_DEVICE std::int64_t seen_unit(const SeenKeys& s, int b, int head) {
  return std::int64_t{s.heads > 1 ? head : 0} * s.batches + b;
}

/// Is a key of the sequence seen more than faintly? Where none is, those that are seen share.
QATTN_DEVICE bool any_plainly(const SeenKeys& s, int b, int head) {
  return isa::load_global(s.counts + 2 * seen_unit(s, b, head) + 1) != 0;
}

/// How many keys of a sequence share.
QATTN_DEVICE std::int64_t sharing_keys(const SeenKeys& s, int b, int head) {
  return isa::load_global(s.counts + 2 * seen_unit(s, b, head) + (any_plainly(s, b, head) ? 1 : 0));
}

/// Number of a head's tile among the tiles of all heads.
QATTN_DEVICE std::int64_t seen_tile(const SeenKeys& s, int head, std::int64_t tile) {
  return std::int64_t{s.heads > 1 ? head : 0} * s.tiles + tile;
}

/// Of slot tile `tile` of the head, which belongs to sequence b.
QATTN_DEVICE TileSight sight_of(const SeenKeys& s, int b, int head, std::int64_t tile) {
  TileSight sight{{~0u, ~0u}, {~0u, ~0u}};
  if (s.bits == nullptr) return sight;
  const Words4 w =
      isa::load_global(reinterpret_cast<const Words4*>(s.bits) + seen_tile(s, head, tile));
  const int from = any_plainly(s, b, head) ? 2 : 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    sight.seen[i] = w.w[i];
    sight.plainly[i] = from == 2 ? w.w[2 + i] : w.w[i];
  }
  return sight;
}
QATTN_DEVICE TileSight sight_of(const SeenKeys& s, const TilePlace& p) {
  return sight_of(s, p.b, p.head, p.tile);
}

/// Does a key of [begin, end) of the place's sequence share, of those that `among` has bits of in
/// each 64?
QATTN_DEVICE bool some_share(const SeenKeys& s, const TilePlace& p, std::int64_t begin,
                             std::int64_t end, std::uint64_t among) {
  if (end > p.span.length) end = p.span.length;
  const std::int64_t first_tile = p.tile - p.first / slot_tile;
  for (std::int64_t at = begin / slot_tile * slot_tile; at < end; at += slot_tile) {
    const TileSight sight = sight_of(s, p.b, p.head, first_tile + at / slot_tile);
    std::uint64_t keys = std::uint64_t{sight.plainly[1]} << 32 | sight.plainly[0];
    if (at < begin) keys = keys >> (begin - at) << (begin - at);
    if (end < at + slot_tile) keys &= (std::uint64_t{1} << (end - at)) - 1;
    if ((keys & among) != 0) return true;
  }
  return false;
}

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
