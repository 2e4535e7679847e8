// Where the KV cache keeps what: the index maps that the CPU's and the GPU's kernels share.
//
// A block is 16 consecutive tokens of one (sequence, layer, KV head), all in one tier:
//
//   | K codes: 2 D k_bits bytes | V codes: 2 Dv v_bits | K scales: 16 f16 | V scales: 16 f16 |
//
// or, in the 16-bit window, | K: [16][D] | V: [16][Dv] |. A page is page_size / 16 blocks, one
// behind the other; a pool is an array of pages of one tier, so that a page's number says where it
// is. D and Dv are multiples of 32: K's and V's codes take multiples of 64 bytes.
//
// With K's scales per channel (KvPage::k_by_channel) a block lacks K's scales, and behind its last
// block a page has | K scales: D f16 | bad tokens of K: 64 bits | 64 bits of zeros |. Bit i of the
// bad tokens: K of the page's token i held NaN or Inf, or what f16 has no scale for.
//
// Codes lie in panels, which is what a product with sixteen keys (K) or channels (V) side by side
// and four elements of the contraction in each lane reads:
//
//   K  place(token, c) = (c / 4 * 16 + token) * 4 + c % 4         [D / 4][16 tokens][4 channels]
//   V  place(token, c) = (token / 4 * Dv + c) * 4 + token % 4     [4][Dv][4 tokens]
//
// A panel of n codes is packed in planes: byte y of 4-bit codes holds places y (low) and y + n / 2,
// byte y of 2-bit codes places y + i n / 4 at bit 2 i; 3-bit codes are their low two bits like
// that, then a plane of n / 8 bytes with the high bit of place y + i n / 8 at bit i. So a vector
// unpacks with one shift and one AND, in order, whatever its width.
//
// On a tensor core. A 32-bit word of K holds four channels of one token in each plane. `(w >> i) &
// 0x000f000f | 0x64006400` is a pair of f16 channels (c, c + 2) of that token: two of the four
// elements of the contraction that a lane of mma.m16n8k16 holds for its key. The order of channels
// along the contraction is free if Q's fragment uses the same, and that of keys if V's does. A word
// of V holds four tokens of one channel in each plane, i.e. pairs along its contraction. Scales per
// token: K's multiplies a column of scores, V's the probability before P is rounded.
#pragma once

#include <cstdint>

#include "formats/hd.hpp"

namespace qattn::formats {

inline constexpr int kv_block_tokens = 16;
/// Blocks that `tokens` tokens from the first on lie in.
QATTN_HD std::int64_t kv_blocks(std::int64_t tokens) {
  return (tokens + kv_block_tokens - 1) / kv_block_tokens;
}
inline constexpr int kv_window_bits = 16;  ///< "bits" of the tier that keeps rows as they came

/// Element of a K panel that holds channel c of a block's token.
QATTN_HD int kv_place_k(int token, int c) { return (c / 4 * kv_block_tokens + token) * 4 + c % 4; }
/// Element of a V panel.
QATTN_HD int kv_place_v(int dv, int token, int c) { return (token / 4 * dv + c) * 4 + token % 4; }

/// Bytes that n packed codes take.
QATTN_HD int kv_code_bytes(int n, int bits) { return n / 8 * bits; }

/// Where the bits of place `x` of n lie: `width` bits from `shift` on in byte `byte`.
struct KvBits {
  int byte, shift, width;
};
/// The low two bits of a 3-bit code, the whole code otherwise.
QATTN_HD KvBits kv_bits(int n, int bits, int x) {
  const int width = bits == 3 ? 2 : bits;
  const int plane = n / 8 * width;
  return {x % plane, x / plane * width, width};
}
/// The high bit of a 3-bit code.
QATTN_HD KvBits kv_high_bit(int n, int x) {
  const int plane = n / 8;
  return {n / 4 + x % plane, x / plane, 1};
}

/// A panel of n codes, one a byte, to kv_code_bytes() bytes; n is a multiple of 64. Plane by plane:
/// what kv_bits() and kv_high_bit() say of every place.
QATTN_HD void kv_pack(const std::uint8_t* panel, int n, int bits, std::uint8_t* packed) {
  const int width = bits == 3 ? 2 : bits;
  const int plane = n / 8 * width;
  for (int y = 0; y < kv_code_bytes(n, bits); ++y) packed[y] = 0;
  for (int i = 0; i < 8 / width; ++i) {
    for (int y = 0; y < plane; ++y) {
      const int part = panel[i * plane + y] & ((1 << width) - 1);
      packed[y] = static_cast<std::uint8_t>(packed[y] | part << (i * width));
    }
  }
  for (int i = 0; bits == 3 && i < 8; ++i) {
    for (int y = 0; y < n / 8; ++y) {
      std::uint8_t& byte = packed[n / 4 + y];
      byte = static_cast<std::uint8_t>(byte | (panel[i * (n / 8) + y] >> 2 & 1) << i);
    }
  }
}

/// The inverse for one place.
QATTN_HD std::uint8_t kv_code_at(const std::uint8_t* packed, int n, int bits, int x) {
  const KvBits low = kv_bits(n, bits, x);
  int code = packed[low.byte] >> low.shift & ((1 << low.width) - 1);
  if (bits == 3) {
    const KvBits high = kv_high_bit(n, x);
    code |= (packed[high.byte] >> high.shift & 1) << 2;
  }
  return static_cast<std::uint8_t>(code);
}

/// Offsets in bytes inside a block.
struct KvBlock {
  int d, dv, k_bits, v_bits;  ///< k_bits = v_bits = kv_window_bits: rows of 16 bits, no scales

  QATTN_HD bool window() const { return k_bits == kv_window_bits; }
  QATTN_HD int k_codes() const { return 0; }
  QATTN_HD int v_codes() const { return kv_code_bytes(kv_block_tokens * d, k_bits); }
  QATTN_HD int k_scales() const { return v_codes() + kv_code_bytes(kv_block_tokens * dv, v_bits); }
  QATTN_HD int v_scales() const { return k_scales() + kv_block_tokens * 2; }
  QATTN_HD int bytes() const { return window() ? k_scales() : v_scales() + kv_block_tokens * 2; }
  QATTN_HD int code_bytes() const { return k_scales(); }
  QATTN_HD int scale_bytes() const { return bytes() - k_scales(); }
};

/// Offsets in bytes inside a page, and inside its blocks where they depend on where scales are.
struct KvPage {
  KvBlock block;
  int blocks;
  bool k_by_channel;  ///< never with rows of 16 bits

  QATTN_HD int block_bytes() const {
    return block.bytes() - (k_by_channel ? kv_block_tokens * 2 : 0);
  }
  /// In a block.
  QATTN_HD int v_scales() const { return k_by_channel ? block.k_scales() : block.v_scales(); }
  /// In a page whose K has a scale a channel; the bad tokens, padded to 16 bytes, are its last.
  QATTN_HD int channel_scales() const { return blocks * block_bytes(); }
  QATTN_HD int bad_tokens() const { return channel_scales() + block.d * 2; }
  QATTN_HD int bytes() const { return k_by_channel ? bad_tokens() + 16 : channel_scales(); }
  QATTN_HD int code_bytes() const { return blocks * block.code_bytes(); }
  QATTN_HD int scale_bytes() const { return bytes() - code_bytes(); }
};

}  // namespace qattn::formats
