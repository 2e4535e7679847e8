// What the matrices of cells are made of: features beyond the conformance table, and their cells.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "emulated/matrix.hpp"

namespace qattn::test {

struct Heads {
  std::int64_t dim, dim_v;
};

// Often the cheap ones: D = 256 takes four times the emulator's time of D = 64.
constexpr Heads rotation[] = {{64, 64},  {128, 128}, {64, 64}, {80, 80},
                              {128, 64}, {64, 128},  {64, 64}, {96, 96}};

template <class Edit>
void add(std::vector<Feature>& rows, const std::string& name, Edit edit) {
  Feature feature;
  feature.name = name;
  feature.sq = {65};
  feature.sk = {130};
  edit(feature);
  rows.push_back(std::move(feature));
}

/// What GPUs' tiles and paths ask beyond the table: 64 keys, 64 or 128 rows, 16-byte rows.
std::vector<Feature> gpu_features();

struct SplitKvFeature {
  Feature feature;
  int splits;
};

/// Rows of several heads in a tile, and keys that several blocks share: everything that depends on
/// a row's head, its query or on where its keys begin and end.
std::vector<SplitKvFeature> split_kv_features();

Cell cell_of(const Recipe& recipe, const Feature& feature, std::string tail);

}  // namespace qattn::test
