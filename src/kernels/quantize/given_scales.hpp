// Scales that the caller gave, for kernels that read codes where they lie.
#pragma once

#include "core/problem.hpp"
#include "kernels/quantize/encode_groups.cuh"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

/// Where the scales of an operand lie, and which tokens share one. `recipe` as resolved.
Grouping given_scales(const Problem& problem, const Recipe& recipe, Role role);

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
