// What the encode kernels share: which tile a block serves, and the small steps on its rows.
#pragma once

#include "formats/int8.hpp"
#include "formats/lost_share.hpp"
#include "formats/scale.hpp"
#include "isa/isa.hpp"
#include "kernels/operand/prepared.hpp"
#include "kernels/operand/row_codes.cuh"
#include "kernels/operand/sequence.hpp"
#include "kernels/quantize/gpu/plain_params.hpp"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

using isa::SharedAddress;

/// 16 bytes of 16-bit channels: what a thread loads of a row.
inline constexpr int chunk_channels = 8;

/// Quotient of numbers below 2^31, which block numbers are: 64-bit divisions are ten times as slow.
QATTN_DEVICE int divide(std::int64_t a, std::int64_t b) {
  return static_cast<int>(static_cast<std::uint32_t>(a) / static_cast<std::uint32_t>(b));
}

/// Sequence of a slot tile where every sequence has the same room.
QATTN_DEVICE int sequence_of_tile(const tile::Rows& r, std::int64_t tile) {
  return divide(tile, (r.max_length + 63) / 64);
}

/// One tile of 64 slots of one head.
struct TilePlace {
  int b = 0, head = 0;
  std::int64_t tile = 0;   ///< among the head's slot tiles
  std::int64_t first = 0;  ///< its first token inside its sequence
  tile::Span span;
  bool used = false;  ///< does any token of it exist?

  QATTN_DEVICE int count() const {
    const std::int64_t left = span.length - first;
    return left < slot_tile ? static_cast<int>(left) : slot_tile;
  }
};

QATTN_DEVICE void place_in_sequence(const tile::Rows& r, int b, TilePlace& p) {
  p.b = b;
  p.span = tile::span_of(r, b);
  p.first = (p.tile - tile::first_slot(r, p.span, b) / slot_tile) * slot_tile;
  p.used = !p.span.bad && p.first < p.span.length;
}

/// Is slot tile `tile` one of packed sequence b?
QATTN_DEVICE bool owns_tile(const tile::Rows& r, int b, std::int64_t tile) {
  return tile::owns_block(r, tile::span_of(r, b), b, tile, slot_tile);
}

/// The packed sequence that entry `index` of a table as of tile::first_block() belongs to, or
/// sequence 0, which then does not have it.
QATTN_DEVICE int sequence_of_block(const tile::Rows& r, std::int64_t index, std::int64_t size) {
  return tile::first_sequence(
      r, [&](const tile::Span& span, int b) { return tile::owns_block(r, span, b, index, size); });
}

/// Called by all threads of the block. Packed sequences are searched one by one, not by bisection,
/// so that a wrong entry of cu_seqlens spoils nobody else's tiles.
QATTN_DEVICE TilePlace find_tile(const tile::Rows& r, std::int64_t tile, int head, int threads,
                                 SharedAddress word) {
  TilePlace p;
  p.tile = tile;
  p.head = head;
  int b = 0;
  if (r.cu_seqlens == nullptr) {
    b = sequence_of_tile(r, tile);
  } else {
    if (isa::thread() == 0) isa::store_shared(word, 0u);
    isa::sync_threads();
    for (int i = isa::thread(); i < r.batches; i += threads) {
      if (owns_tile(r, i, tile)) {
        isa::atomic_max_shared(word, static_cast<std::uint32_t>(r.batches - i));
      }
    }
    isa::sync_threads();
    const auto found = static_cast<int>(isa::load_shared<std::uint32_t>(word));
    if (found == 0) return p;
    b = r.batches - found;
  }
  place_in_sequence(r, b, p);
  return p;
}

/// Element offsets of the tile's rows in paged memory, -1 for pages that do not exist, to 64 words
/// of 8 bytes; divisions are slow, so that no row is looked up twice. Called by all threads.
QATTN_DEVICE void store_row_offsets(const tile::Rows& r, const TilePlace& p, SharedAddress words) {
  if (isa::thread() < slot_tile) {
    const int j = isa::thread();
    const std::int64_t at =
        j < p.count() ? tile::row_offset(r, p.span, p.b, p.head, p.first + j) : -1;
    isa::store_shared(words + 8 * j, at);
    // Kernels that read the codes see no page table.
    if (j < p.count() && at == -1) isa::atomic_or_global(r.error, tile::error_page);
  }
  isa::sync_threads();
}

/// Key of a tile to its position in V's contraction order.
QATTN_DEVICE int p_position(int key) {
  const int k = key % 16;
  return key - k + 4 * (k % 8 / 2) + 2 * (k / 8) + k % 2;
}

/// Low bytes of four words.
QATTN_DEVICE std::uint32_t low_bytes(std::uint32_t a, std::uint32_t b, std::uint32_t c,
                                     std::uint32_t d) {
  return isa::byte_permute(isa::byte_permute(a, b, 0x0040), isa::byte_permute(c, d, 0x0040),
                           0x5410);
}

QATTN_DEVICE std::uint32_t warp_max(std::uint32_t v) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) {
    const std::uint32_t other = isa::shuffle_xor(v, mask);
    v = v > other ? v : other;
  }
  return v;
}
QATTN_DEVICE std::uint64_t warp_max(std::uint64_t v) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) {
    const std::uint32_t low = isa::shuffle_xor(static_cast<std::uint32_t>(v), mask);
    const std::uint32_t high = isa::shuffle_xor(static_cast<std::uint32_t>(v >> 32), mask);
    const std::uint64_t other = std::uint64_t{high} << 32 | low;
    v = v > other ? v : other;
  }
  return v;
}

/// Words between the rows of a table of one word per (row, chunk): rows start in different banks
/// for reads of 16 bytes, too.
constexpr int partial_stride(int chunks) { return chunks / 4 % 2 == 1 ? chunks : chunks + 4; }

/// Bytes between the channel octets of V's image in shared memory: 16 more than they need, so that
/// neighbouring octets lie in different banks.
inline constexpr int image_stride = chunk_channels * slot_tile + 16;

/// Two rows of the tile per lane of the first warp: lane and lane + 32.
struct RowPair {
  bool exists[2];
  bool bad[2];
  float scale[2];
};

/// The maximum of bits over rows with the same (row % 8) / 2, of which lanes hold numbers `lane`
/// and `lane` + 32: lanes that differ in bits 0, 3 and 4.
QATTN_DEVICE std::uint32_t thread_max(std::uint32_t v) {
#pragma unroll
  for (const int mask : {1, 8, 16}) {
    const std::uint32_t other = isa::shuffle_xor(v, mask);
    v = v > other ? v : other;
  }
  return v;
}

/// Maxima of a tile's rows, two a lane, to those that V's per_thread scales are for (join_amax() of
/// rows.cpp). Rows that do not exist have 0.
QATTN_DEVICE void join_maxima(float (&amax)[2], const bool (&bad)[2]) {
  const float a = bad[0] ? 0.0f : amax[0], b = bad[1] ? 0.0f : amax[1];
  const float top = formats::float_of(thread_max(formats::bits_of(a > b ? a : b)));
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (!bad[i]) amax[i] = formats::joint_amax(amax[i], top);
  }
}

/// Scales of a tile's rows, of which a lane has two, from their maxima: 0 of rows that do not
/// exist.
QATTN_DEVICE void find_pair_scales(RowPair& r, float (&amax)[2], SharedScales scales, float qmax) {
  const float both = formats::fold_amax(amax[0], amax[1]);
  if (scales == SharedScales::tile) {
    amax[0] = amax[1] = formats::float_of(warp_max(formats::bits_of(both)));
  } else if (scales == SharedScales::thread) {
    amax[0] = amax[1] = formats::float_of(thread_max(formats::bits_of(both)));
  } else if (scales == SharedScales::joint) {
    const bool bad[2] = {!formats::is_finite(amax[0]), !formats::is_finite(amax[1])};
    join_maxima(amax, bad);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    r.scale[i] = formats::amax_scale(amax[i], qmax);
    r.bad[i] = !formats::is_finite(r.scale[i]);
    if (scales == SharedScales::channel) r.scale[i] = r.bad[i] ? formats::quiet_nan() : 1.0f;
  }
}

/// Slot of a tile's first row.
QATTN_DEVICE std::int64_t slot_of(const PreparedRows& out, const TilePlace& p) {
  return p.head * out.slots + p.tile * slot_tile;
}

/// V's tile.
QATTN_DEVICE std::uint8_t* record_of(const PreparedTiles& out, const TilePlace& p, int channels) {
  return out.tiles + (p.head * (out.slots / slot_tile) + p.tile) * tile_offsets(channels).bytes;
}

/// Attention kernels with tiles of 128 also load what belongs to the 64 slots behind a sequence's
/// last tile, and forget it: scales of tiles without tokens and of the one behind all are zeros, so
/// that nobody reads what nobody wrote. By 64 threads or more.
QATTN_DEVICE void store_no_rows(const PreparedRows& out, const TilePlace& p, bool last) {
  if (isa::thread() >= slot_tile || (p.used && !last)) return;
  const std::int64_t slot = slot_of(out, p) + isa::thread();
  if (!p.used) isa::store_global(out.scale + slot, 0.0f);
  if (!p.used && isa::thread() == 0) isa::store_global(out.flags + slot / slot_tile, 0u);
  if (last) isa::store_global(out.scale + slot + slot_tile, 0.0f);
}
/// The same of V: the rows that weigh P, and the tables. `record` is the tile's.
QATTN_DEVICE void store_no_values(std::uint8_t* record, const TileOffsets& at, const TilePlace& p,
                                  bool last) {
  const int pieces = (at.bytes - at.extra) / 16;
  const bool here[2] = {!p.used, last};
  for (int tile = 0; tile < 2; ++tile, record += at.bytes) {
    for (int n = isa::thread(); here[tile] && n < pieces; n += slot_tile) {
      if (isa::thread() >= slot_tile) break;
      isa::store_global(reinterpret_cast<Words4*>(record + at.extra) + n, Words4{{0, 0, 0, 0}});
    }
  }
}
template <int Channels>
QATTN_DEVICE void store_no_values(const PreparedTiles& out, const TilePlace& p, bool last) {
  store_no_values(record_of(out, p, Channels), tile_offsets(Channels), p, last);
}

/// Scales and flags of 64 rows of Q or K, by one warp.
QATTN_DEVICE void store_row_scales(const PreparedRows& out, const TilePlace& p, const RowPair& r) {
  const std::int64_t slot = slot_of(out, p);
  bool bad = false;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    isa::store_global(out.scale + slot + isa::lane() + 32 * i, r.exists[i] ? r.scale[i] : 0.0f);
    bad |= r.exists[i] && r.bad[i];
  }
  const bool any = isa::any(bad);
  if (isa::lane() == 0) {
    isa::store_global(out.flags + slot / slot_tile, any ? std::uint32_t{tile_has_bad} : 0u);
  }
}

/// How a tile's keys are weighed.
enum class ValueScales : std::int32_t {
  integer_token,    ///< s8 with a scale per token
  integer_channel,  ///< s8 with any other scale
  floating,         ///< 8-bit floats
  floating_token,   ///< with a scale per token, whose logarithm goes to the table
};

/// Everything of a V tile but its codes: tables to global memory, to `extra` (8 x 64 bytes of
/// shared memory) the rows that weigh P, `one` the code of 1, or for store_value_image() the
/// reciprocal of how many tokens are not bad, which it returns, too. By one warp.
QATTN_DEVICE float store_value_tables(std::uint8_t* record, int channels, SharedAddress extra,
                                      const RowPair& r, ValueScales kind, std::uint32_t one) {
  constexpr float smallest = formats::kLeastTokenScale;
  const TileOffsets at = tile_offsets(channels);
  const int lane = isa::lane();
  const bool token = kind == ValueScales::integer_token;
  const bool integer = token || kind == ValueScales::integer_channel;
  isa::store_shared(extra + 16 * lane, Words4{{0, 0, 0, 0}});
  isa::sync_warp();
  int usable = 0;
  bool any_bad = false;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int key = lane + 32 * i;
    const bool bad = r.exists[i] && r.bad[i], good = r.exists[i] && !r.bad[i];
    const float scale = r.scale[i] > smallest ? r.scale[i] : smallest;
    float log = 0.0f, inverse = r.exists[i] ? 1.0f : 0.0f;
    if ((token || kind == ValueScales::floating_token) && good) log = isa::log2(scale);
    if (token && good) inverse = formats::reciprocal(scale);
    if (bad) inverse = formats::quiet_nan();
    isa::store_global(reinterpret_cast<float*>(record + at.log) + key, log);
    isa::store_global(reinterpret_cast<float*>(record + at.inverse) + key, inverse);
    if (!integer && r.exists[i]) {
      isa::store_shared(extra + p_position(key), static_cast<std::uint8_t>(one));
    }
    usable += formats::popcount(isa::ballot(good));
    any_bad |= isa::any(bad);
  }
  // Key 2t stands for the keys that lanes t of a product of Q and K hold.
  const float shared = isa::shuffle(r.scale[0], lane & 6);
  const bool mixed =
      isa::any((r.exists[0] && r.scale[0] != shared) || (r.exists[1] && r.scale[1] != shared));
  const float per_token = usable > 0 ? formats::reciprocal(static_cast<float>(usable)) : 0.0f;
  if (lane == 0) {
    const std::uint32_t flags =
        (any_bad ? std::uint32_t{tile_has_bad} : 0u) | (mixed ? std::uint32_t{tile_is_mixed} : 0u);
    isa::store_global(reinterpret_cast<Words4*>(record + at.flags), Words4{{flags, 0, 0, 0}});
    if (integer) isa::store_shared(extra, formats::bits_of(per_token));
  }
  return per_token;
}

/// The mean of a channel's codes of s8, from their sum.
QATTN_DEVICE std::uint8_t mean_code(std::int32_t sum, float per_token) {
  const float mean = formats::mul_rn(static_cast<float>(sum), per_token);
  return static_cast<std::uint8_t>(formats::S8::encode(mean));
}

/// Four of V's codes as their tile has them: s8 ones with value_offset added.
QATTN_DEVICE std::uint32_t value_word(std::uint32_t codes, bool s8) {
  return codes ^ (s8 ? 0x01010101u * value_offset : 0u);
}

/// The image of a tile's codes from shared memory to its record, with what store_value_tables()
/// left behind it, or means. By all threads.
template <int Channels, int Threads>
QATTN_DEVICE void store_value_image(std::uint8_t* record, SharedAddress image, bool s8) {
  constexpr int pieces = Channels * slot_tile / 16, octet = chunk_channels * slot_tile / 16;
  const SharedAddress extra = image + pieces / octet * image_stride;
  const auto per_token = s8 ? isa::load_shared<float>(extra) : 0.0f;
  static_assert(pieces % Threads == 0 && Threads % 32 == 0);
#pragma unroll
  for (int i = 0; i < pieces / Threads; ++i) {
    const int n = isa::thread() + i * Threads;
    Words4 v = isa::load_shared<Words4>(image + n / octet * image_stride + n % octet * 16);
    std::int32_t sum = 0;
#pragma unroll
    for (std::uint32_t& word : v.w) {
      sum = isa::dot4_s8(word, 0x01010101u, sum);
      word = value_word(word, s8);
    }
    isa::store_global(reinterpret_cast<Words4*>(record) + n, v);
    if (!s8) continue;
    sum += isa::shuffle_xor(sum, 1);
    sum += isa::shuffle_xor(sum, 2);
    if (n % 4 == 0) {
      isa::store_global(record + Channels * slot_tile + n / 4, mean_code(sum, per_token));
    }
  }
  if (!s8 && isa::thread() < 32) {
    isa::store_global(reinterpret_cast<Words4*>(record) + pieces + isa::thread(),
                      isa::load_shared<Words4>(extra + 16 * isa::thread()));
  }
}

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
