// What is run on the emulated kernels: features of the conformance table and some of GPUs' own,
// with recipes, shapes of heads, formats and layouts.
#pragma once

#include <string>
#include <vector>

#include "conformance/feature.hpp"

namespace qattn::test {

struct Cell {
  std::string name;
  Recipe recipe;
  Feature feature;
  bool refused = false;  ///< no GPU kernel: another one must serve it
  int architecture = 0;  ///< of the GPU; 0: architecture_for() the recipe
  int splits = 0;        ///< of the keys; 0: what the kernel takes
  int consumers = 0;     ///< of Hopper's kernel; 0: what it takes
  int shared_p = -1;     ///< of Hopper's kernel: P in shared memory; -1: as plans do
  int timing = -1;       ///< of every_timing(); -1: timings_for() the name
};

/// Few queries, with several splits of the keys and as many heads in a tile as the kernel can have.
std::vector<Cell> spread_cells();

/// Every feature with every recipe that GPUs have, once, with s8 V once for each directory of
/// kernels: what else there is to choose rotates, the GPU too.
std::vector<Cell> paired_cells();

/// Every feature with every recipe of scaled groups once, of whole rows and of split keys. Recipes
/// that have nvfp4's products of Q and K but not its V share the features, unless `every`.
std::vector<Cell> grouped_cells(bool every = false);

/// Every feature with every recipe, every shape of heads and every 16-bit format, and of recipes of
/// scaled groups those above.
std::vector<Cell> all_cells();

/// Rows that are no whole pieces of eight channels: every recipe with sizes and features in turn.
std::vector<Cell> head_size_cells();

/// One call for every line of sm90a/instances.inc; raw queries: fused_q_quant_test.cpp.
std::vector<Cell> hopper_instance_cells();

/// What Hopper's kernels do without the portable one: windows, masks, pages and block masks of
/// 16-bit V, block masks of all recipes, and the above.
std::vector<Cell> hopper_cells();

/// One call for every line of sm80/instances.inc; the plan's text must begin its variant so.
struct InstanceCell {
  Cell cell;
  std::string variant;
};
std::vector<InstanceCell> instance_cells();

/// Recipes of the table that have GPU kernels.
std::vector<Recipe> gpu_recipes();
/// Those with scales of groups, which GeForce Blackwell alone has.
std::vector<Recipe> grouped_recipes();
/// Both.
std::vector<Recipe> every_recipe();

/// Sequences of four heads, two of K and V, whose codes attention kernels may make: without LSE,
/// which needs more of Q where K has a mean.
Feature unprepared(std::int64_t dim, std::vector<std::int64_t> sq, std::vector<std::int64_t> sk);

/// The feature with inputs that the recipe takes on GPUs: 16 bits.
Feature with_inputs(Feature feature, const Recipe& recipe, Format wanted);

}  // namespace qattn::test
