// How the elements of a float tensor lie in memory.
#pragma once

#include <cstdint>

#include "isa/isa.hpp"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

enum class InputKind : std::int32_t { f32, f16, bf16 };

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
