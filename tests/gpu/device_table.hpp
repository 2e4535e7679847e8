// What the programs here run beside the conformance table.
#pragma once

#include <string>
#include <vector>

#include "conformance/feature.hpp"

namespace qattn::test {

/// How names of features begin that three consumers of Hopper's kernel serve; others have two.
inline constexpr char three_consumers[] = "three_consumers_";
/// And those that Hopper's kernel of 16-bit products serves with P in shared memory; others not.
inline constexpr char long_rows[] = "long_rows_";

/// The table as GPUs take it, and what it lacks: head dimensions with instances of their own, over
/// several tiles of queries. Output `none` stands for the inputs' format.
std::vector<Feature> device_table();

}  // namespace qattn::test
