// Rows that see keys, but none whose score is a float: no number is their result.
#pragma once

#include "conformance/bad_input.hpp"

namespace qattn::test {

/// Finite Q and K of which every score lies below the floats, because of the operands or of
/// softmax_scale: rows that see a key are NaN, the others 0 with an LSE of -Inf.
void expect_rows_below_floats_are_bad(const Feature& feature, const RunCall& run);

}  // namespace qattn::test
