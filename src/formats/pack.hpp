// Sub-byte codes in bytes, lowest bits first: two 4-bit codes a byte (low nibble first), four 2-bit
// codes a byte, eight 3-bit codes in three little-endian bytes.
#pragma once

#include <cstdint>

#include "formats/hd.hpp"

namespace qattn::formats {

/// The fewest codes that fill whole bytes, and those bytes.
template <int Bits>
struct PackUnit {
  static_assert(Bits == 2 || Bits == 3 || Bits == 4 || Bits == 8);
  static constexpr int codes = Bits == 3 ? 8 : 8 / Bits;
  static constexpr int bytes = codes * Bits / 8;
};

/// Writes count * Bits / 8 bytes; count * Bits must be a multiple of 8. Bits of a code above its
/// width are dropped.
template <int Bits>
QATTN_HD void pack(const std::uint8_t* codes, std::int64_t count, std::uint8_t* bytes) {
  using Unit = PackUnit<Bits>;
  constexpr std::uint32_t mask = (1u << Bits) - 1;
  for (std::int64_t unit = 0; unit < count / Unit::codes; ++unit) {
    std::uint32_t word = 0;
    for (int i = 0; i < Unit::codes; ++i) {
      word |= (codes[unit * Unit::codes + i] & mask) << (i * Bits);
    }
    for (int i = 0; i < Unit::bytes; ++i) {
      bytes[unit * Unit::bytes + i] = static_cast<std::uint8_t>(word >> (8 * i));
    }
  }
}

/// The inverse of pack: reads count * Bits / 8 bytes and writes one code a byte.
template <int Bits>
QATTN_HD void unpack(const std::uint8_t* bytes, std::int64_t count, std::uint8_t* codes) {
  using Unit = PackUnit<Bits>;
  constexpr std::uint32_t mask = (1u << Bits) - 1;
  for (std::int64_t unit = 0; unit < count / Unit::codes; ++unit) {
    std::uint32_t word = 0;
    for (int i = 0; i < Unit::bytes; ++i) {
      word |= static_cast<std::uint32_t>(bytes[unit * Unit::bytes + i]) << (8 * i);
    }
    for (int i = 0; i < Unit::codes; ++i) {
      codes[unit * Unit::codes + i] = static_cast<std::uint8_t>((word >> (i * Bits)) & mask);
    }
  }
}

}  // namespace qattn::formats
