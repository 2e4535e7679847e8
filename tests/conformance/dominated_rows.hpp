// The LSE of rows that one key makes, or all but makes: as exact as the scores are, whatever P is
// rounded to.
#pragma once

#include "conformance/bad_input.hpp"

namespace qattn::test {

/// Rows beside whose dominating key, at several places, the others have 2^-20 of the mass, or
/// 2^-10, 2^-7 and 2^-4: of those P may be rounded. A row over one key is what `feature` says.
void expect_exact_lse(const Feature& feature, const RunCall& run);

}  // namespace qattn::test
