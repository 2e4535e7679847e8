// What files hold and tensors do not: numbers of 64 bits, the other byte order, the other order of
// dimensions.
#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "io/array.hpp"
#include "qattn/status.hpp"

namespace qattn::io {

/// Turns the bytes of every element of `width` bytes around.
void swap_bytes(std::span<std::byte> data, std::size_t width);

/// Fills an f32 array of the same shape from little-endian float64 numbers, rounding to nearest.
/// Errors: invalid_argument for a finite number that f32 has no room for; `where` begins it.
Status narrow_float64(const std::string& where, std::span<const std::byte> from, Array& array);

/// The elements, of whole bytes, of an array whose memory is in column-major (Fortran) order, in
/// row-major order.
void from_column_major(Array& array);

}  // namespace qattn::io
