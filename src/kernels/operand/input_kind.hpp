// How the elements of a float tensor lie in memory.
#pragma once

#include <cstdint>

#include "isa/isa.hpp"
#include "qattn/recipe.hpp"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

enum class InputKind : std::int32_t { f32, f16, bf16 };

inline InputKind input_kind(Format f) {
  return f == Format::f16 ? InputKind::f16 : f == Format::bf16 ? InputKind::bf16 : InputKind::f32;
}

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
