#include "io/check.hpp"

#include <algorithm>

#include "io/file.hpp"

namespace qattn::io {

Status check_extent(const std::string& where, Format format, const std::vector<std::int64_t>& shape,
                    std::uint64_t bytes, bool float64) {
  const auto needed = dense_bytes(float64 ? Format::s64 : format, shape);
  if (!needed) {
    return file_error(where, "shape " + shape_text(shape) + " is negative or overflows 64 bits");
  }
  const auto expected = static_cast<std::uint64_t>(*needed);
  if (expected == bytes) return {};
  return file_error(where, std::string(bytes < expected ? "truncated" : "has trailing bytes") +
                               ": shape " + shape_text(shape) + " in " +
                               (float64 ? "float64" : std::string(info(format).name)) + " needs " +
                               std::to_string(expected) + " bytes of data, found " +
                               std::to_string(bytes));
}

Status check_booleans(const std::string& where, const Array& array) {
  if (array.format != Format::b8) return {};
  const auto bad = std::find_if(array.bytes.begin(), array.bytes.end(),
                                [](std::byte b) { return b > std::byte{1}; });
  if (bad == array.bytes.end()) return {};
  return file_error(where, "boolean " + std::to_string(bad - array.bytes.begin()) + " has value " +
                               std::to_string(static_cast<int>(*bad)) + "; 0 or 1 only");
}

}  // namespace qattn::io
