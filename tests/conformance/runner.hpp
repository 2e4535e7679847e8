// Runs one call on the library and measures how far it is from the model and the reference.
#pragma once

#include <gtest/gtest.h>

#include <ostream>
#include <string>
#include <vector>

#include "conformance/feature.hpp"
#include "support/isas.hpp"
#include "support/measure.hpp"

namespace qattn {

/// How GoogleTest shows a recipe.
inline void PrintTo(const Recipe& recipe, std::ostream* out) { *out << recipe.name; }

}  // namespace qattn

namespace qattn::test {

struct Outcome {
  Status status;
  std::vector<float> out, lse;  ///< rows in Call::row() order
  std::vector<double> saturated;
  Recipe resolved;
  std::int64_t split_keys = 0, split_rows = 0;  ///< as the plan prints them
  std::int64_t rising_rows = 0;                 ///< likewise
  std::int64_t tile_keys = 128;                 ///< likewise; CPU plans print none
  std::int64_t splits = 1, tile_rows = 0;       ///< as ModelOptions has them
  std::string plan;                             ///< Plan::to_string()
  std::string violation;  ///< an input or a byte outside the outputs that was written

  ModelOptions model_options(Mutation mutation = Mutation::none) const;
};

/// Are outputs, LSE and counters of two runs equal bit by bit?
bool same_bits(const Outcome& a, const Outcome& b);
bool same_bits(const std::vector<float>& a, const std::vector<float>& b);

/// plan() and run(); outputs start as sentinels.
Outcome run_call(const Call& call, Laid& laid, const Recipe& recipe);

/// The call in float64, rows in Call::row() order.
struct Exact {
  std::vector<double> out, lse;
};
Exact reference(const Call& call, const Laid& laid);

/// Records failures unless `outcome` matches the model.
void expect_matches_model(const Outcome& outcome, const Call& call, Format output,
                          const ModelOutput& model);

}  // namespace qattn::test
