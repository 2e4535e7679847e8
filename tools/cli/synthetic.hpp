// Inputs that need no file; the same at every call.
#pragma once

#include "call.hpp"

namespace qattn::cli {

/// Q, K, V ~ N(0, 1). Errors: as plan(); unsupported if memory is short.
Result<Operands> normal_operands(const Geometry& geometry, Layout layout, Format format);

/// The same in bhsd and f32 with two habits of real models that low precision suffers from: keys
/// share a mean of 8 N(0, 1) per channel, and every query attends to the first key, whose value is
/// small (input families "K shift" and "sink" of tools/sim/recipe_sim.py).
Result<Operands> long_context_operands(const Geometry& geometry);

}  // namespace qattn::cli
