// Number formats by name. See formats.def for the list and docs/NUMERICS.md for their meaning.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

namespace qattn {

enum class Format : std::int32_t {
  none = 0,  ///< no tensor, or "keeps the 16-bit format of the input" in a Recipe
#define QATTN_FORMAT(id, name, bits, group, scale) id,
#include "qattn/formats.def"
#undef QATTN_FORMAT
};

struct FormatInfo {
  Format id;
  std::string_view name;
  int bits;      ///< bits per element as stored
  int group;     ///< elements along the contraction per built-in scale; 0: free granularity
  Format scale;  ///< format of one scale; Format::none for formats that have none
};

/// Every row of formats.def, in its order.
std::span<const FormatInfo> all_formats();

/// The row of `format`; for Format::none a row named "none" with 0 bits.
const FormatInfo& info(Format format);

/// The format called `name`, or nothing.
std::optional<Format> format_named(std::string_view name);

/// Bytes that `count` consecutive elements take; `count * bits` must be a multiple of 8.
constexpr std::int64_t packed_bytes(std::int64_t count, int bits) { return count * bits / 8; }

}  // namespace qattn
