#include "io/convert.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "io/file.hpp"

namespace qattn::io {

void swap_bytes(std::span<std::byte> data, std::size_t width) {
  for (std::size_t at = 0; at + width <= data.size(); at += width) {
    std::reverse(data.begin() + static_cast<std::ptrdiff_t>(at),
                 data.begin() + static_cast<std::ptrdiff_t>(at + width));
  }
}

Status narrow_float64(const std::string& where, std::span<const std::byte> from, Array& array) {
  for (std::int64_t i = 0; i < array.count(); ++i) {
    double wide = 0;
    std::memcpy(&wide, from.data() + i * 8, sizeof wide);
    const auto value = static_cast<float>(wide);
    if (std::isfinite(wide) && !std::isfinite(value)) {
      char text[32];
      std::snprintf(text, sizeof text, "%.6e", wide);
      return file_error(where, "element " + std::to_string(i) + " is " + text +
                                   ", beyond the largest float of 32 bits");
    }
    std::memcpy(array.bytes.data() + i * 4, &value, sizeof value);
  }
  return {};
}

void from_column_major(Array& array) {
  const auto rank = array.shape.size();
  const auto width = static_cast<std::int64_t>(info(array.format).bits / 8);
  Bytes sorted(array.bytes.size());
  std::vector<std::int64_t> at(rank), step(rank);
  std::int64_t size = width;
  for (std::size_t i = 0; i < rank; ++i) {
    step[i] = size;
    size *= array.shape[i];
  }
  std::int64_t from = 0;
  const std::int64_t count = array.count();
  for (std::int64_t n = 0; n < count; ++n) {
    std::memcpy(sorted.data() + n * width, array.bytes.data() + from,
                static_cast<std::size_t>(width));
    for (std::size_t i = rank; i-- > 0;) {
      from += step[i];
      if (++at[i] < array.shape[i]) break;
      from -= step[i] * at[i];
      at[i] = 0;
    }
  }
  array.bytes.swap(sorted);
}

}  // namespace qattn::io
