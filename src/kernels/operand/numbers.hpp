// Constants and tests of float32 numbers, and how kernels load one.
#pragma once

#include <cstdint>

#include "isa/isa.hpp"
#include "qattn/format.hpp"

namespace qattn::tile {

inline constexpr float log2_e = 1.44269504088896341f, ln_2 = 0.693147180559945309f;

inline namespace QATTN_TARGET {

QATTN_DEVICE float infinity() { return __builtin_huge_valf(); }
QATTN_DEVICE float quiet_nan() { return __builtin_nanf(""); }
QATTN_DEVICE bool is_nan(float x) { return x != x; }
QATTN_DEVICE bool is_finite(float x) { return x - x == 0.0f; }

/// One number of a float tensor.
QATTN_DEVICE float load_number(const void* data, Format format, std::int64_t at) {
  if (format == Format::f32) return isa::load_global(static_cast<const float*>(data) + at);
  const std::uint32_t bits = isa::load_global(static_cast<const std::uint16_t*>(data) + at);
  return format == Format::f16 ? isa::unpack_f16(bits).lo : isa::unpack_bf16(bits).lo;
}

}  // namespace QATTN_TARGET
}  // namespace qattn::tile
