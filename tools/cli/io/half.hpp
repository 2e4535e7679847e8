// The two 16-bit float formats, for what the program itself computes (synthetic inputs, errors).
#pragma once

#include <cstdint>

#include "io/array.hpp"

namespace qattn::io {

/// Round half to even; f16 overflows to infinity.
std::uint16_t f16_from(float value);
std::uint16_t bf16_from(float value);
float f16_to_float(std::uint16_t bits);
float bf16_to_float(std::uint16_t bits);

/// Element `index` of a dense f32, f16 or bf16 array.
float get(const Array& array, std::int64_t index);
void set(Array& array, std::int64_t index, float value);

}  // namespace qattn::io
