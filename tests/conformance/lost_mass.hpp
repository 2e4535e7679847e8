// Rows that one key dominates: what lies beside it in its tile keeps its mass (docs/NUMERICS.md,
// "Lost mass").
#pragma once

#include "conformance/bad_input.hpp"

namespace qattn::test {

/// One key has a share of 0.6 to 0.97 of each row's mass; the other scores spread by 0.5 or 1.5; V
/// without and with a mean. O and the LSE are those of P and V in floats, but for V's codes.
/// `feature`: lengths, heads and dimensions.
void expect_mass_kept(const Feature& feature, const RunCall& run);

}  // namespace qattn::test
