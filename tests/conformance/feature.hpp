// One row of the conformance table: sizes, layout, masks and recipe options of a call.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "support/call.hpp"
#include "support/layout.hpp"
#include "support/model.hpp"

namespace qattn::test {

enum class MaskShape { none, full, rows_keys, keys_only, heads };

struct Feature {
  std::string name;
  std::vector<std::int64_t> sq = {65, 65}, sk = {300, 300};  ///< room of each sequence
  std::vector<std::int64_t> used_q, used_k;                  ///< empty: all of it
  std::int64_t heads_q = 4, heads_k = 2, dim = 64, dim_v = 64;
  LayoutOptions how;
  AttentionOptions options;
  MaskShape mask = MaskShape::none;
  bool boolean_mask = true, bit_mask = false;  ///< a boolean one in b8, or in b1
  MaskShape block_mask = MaskShape::none;      ///< of options.block_mask_q x block_mask_k tokens
  bool sinks = false, alibi = false;
  float slope = 1;  ///< factor of ALiBi's slopes
  bool static_scales = false;
  Family family = Family::normal;
  bool behind = false;  ///< rotates behind all others, so that those keep what has rotated for them
  double loose = 3;     ///< factor on the recipe's error bound against float64
  std::function<void(Recipe&)> tweak = [](Recipe&) {};
  std::function<bool(const Recipe&)> applies = [](const Recipe&) { return true; };
};

/// The whole table. Names are unique.
const std::vector<Feature>& features();
/// Without those that GPUs refuse: the caller's functions.
std::vector<Feature> features_of_gpus();
const Feature& feature_named(const std::string& name);

/// A feature's call without numbers: shapes, options, and which tensors there are.
Call make_shapes(const Feature& feature);
/// Numbers for a feature; equal seeds give equal numbers.
Call make_call(const Feature& feature, std::uint64_t seed);

/// Formats whose scales have a free granularity (s8, e4m3, ...).
bool free_scales(Format format);
bool has_codes(Format format);

/// Computes static scales at the recipe's resolved granularities, `shrink` times the exact ones,
/// and puts them into the call and the tensors; of a call without numbers their shapes alone.
/// Returns what to ask for with them: `resolved` without what given scales forbid.
Recipe add_static_scales(Call& call, Laid& laid, const Recipe& resolved, double shrink);

}  // namespace qattn::test
