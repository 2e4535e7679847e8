#include "qattn/format.hpp"

#include <cstddef>
#include <iterator>

namespace qattn {
namespace {

constexpr FormatInfo kNone{Format::none, "none", 0, 0, Format::none};

constexpr FormatInfo kFormats[] = {
#define QATTN_FORMAT(id, name, bits, group, scale) {Format::id, name, bits, group, Format::scale},
#include "qattn/formats.def"
#undef QATTN_FORMAT
};

}  // namespace

std::span<const FormatInfo> all_formats() { return kFormats; }

const FormatInfo& info(Format format) {
  // The enumerators count from 1 in the order of the rows; a value from outside the enum, which the
  // C interface may hand in, is no format.
  const auto row = static_cast<std::size_t>(format) - 1;
  return row < std::size(kFormats) ? kFormats[row] : kNone;
}

std::optional<Format> format_named(std::string_view name) {
  for (const FormatInfo& row : kFormats) {
    if (row.name == name) return row.id;
  }
  return std::nullopt;
}

}  // namespace qattn
