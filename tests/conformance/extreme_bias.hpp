// Biases as large as floats are, such as finfo.min in masks: every row is still a mean of the V
// that it sees, and keys that tie for the largest score share it, whatever their V's scales.
#pragma once

#include "conformance/bad_input.hpp"

namespace qattn::test {

/// Additive masks from -3.4e38 to 3.4e38, another shape of them in each row: constant, mixed, one
/// key spared, rising, by blocks of keys, -inf among them. `feature`: lengths, causal, windows.
void expect_extreme_biases(Feature feature, const Recipe& recipe, const RunCall& run);

/// ALiBi's slopes of any size and sign, one a head.
void expect_extreme_slopes(Feature feature, const Recipe& recipe, const RunCall& run);

}  // namespace qattn::test
