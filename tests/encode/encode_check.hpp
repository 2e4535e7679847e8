// Every byte that prepare() writes, against what it should be.
#pragma once

#include "encode_case.hpp"

namespace qattn::encode_test {

/// Position of a key of a tile in the contraction order, found in prepared.hpp's own function.
int position(int key);

/// Q or K: codes, scales, flags, padding. Fails the current test with the first differences.
void check_rows(const Case& c, Role r);
/// V's tiles, built slowly from the text of prepared.hpp, and its scales per channel.
void check_tiles(const Case& c);
void check_means(const Case& c, Role r);
void check_block_means(const Case& c);
/// Products of those with K, against float64.
void check_mean_scores(const Case& c);
void check_dots(const Case& c);
/// All of these, after running the kernels.
void check_case(const CaseOptions& options);

}  // namespace qattn::encode_test
