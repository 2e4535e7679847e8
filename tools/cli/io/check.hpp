// Rules that every tensor file obeys, whatever its container.
#pragma once

#include <string>
#include <vector>

#include "io/array.hpp"

namespace qattn::io {

/// `shape` in `format` (float64: in that) must take exactly `bytes`. `where` begins the message.
Status check_extent(const std::string& where, Format format, const std::vector<std::int64_t>& shape,
                    std::uint64_t bytes, bool float64 = false);

/// Every byte of a b8 array must be 0 or 1: any other value is undefined as a C++ bool.
Status check_booleans(const std::string& where, const Array& array);

}  // namespace qattn::io
