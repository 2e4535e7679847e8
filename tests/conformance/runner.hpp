// Runs one call on the library and measures how far it is from the model and the reference.
#pragma once

#include <gtest/gtest.h>

#include <ostream>
#include <span>
#include <string>
#include <vector>

#include "conformance/feature.hpp"

namespace qattn {

/// How GoogleTest shows a recipe.
inline void PrintTo(const Recipe& recipe, std::ostream* out) { *out << recipe.name; }

}  // namespace qattn

namespace qattn::test {

/// Forces an instruction set for as long as it lives.
class ForceIsa {
 public:
  explicit ForceIsa(const std::string& isa);
  ~ForceIsa();
  ForceIsa(const ForceIsa&) = delete;
  ForceIsa& operator=(const ForceIsa&) = delete;

  /// False where this CPU lacks it; a failure is recorded if the library then uses another one.
  bool available() const { return available_; }

 private:
  std::string before_;
  bool had_ = false, available_ = false;
};

/// Every instruction set that the library knows; tests skip those that this CPU lacks.
std::span<const std::string> isas();

struct Outcome {
  Status status;
  std::vector<float> out, lse;  ///< rows in Call::row() order
  std::vector<double> saturated;
  Recipe resolved;
  std::int64_t split_keys = 0, split_rows = 0;  ///< as the plan prints them
  std::string plan;                             ///< Plan::to_string()
  std::string violation;  ///< an input or a byte outside the outputs that was written

  ModelOptions model_options(Mutation mutation = Mutation::none) const;
};

/// plan() and run(); outputs start as sentinels.
Outcome run_call(const Call& call, Laid& laid, const Recipe& recipe);

/// The number in the line `field: N` of a plan's text, 0 if it has none.
std::int64_t plan_number(const Plan& plan, const std::string& field);

/// |out - want| / |want| over everything, and the same without the `spared` worst rows. A NaN in
/// either makes both NaN.
struct Distance {
  double nrmse = 0, trimmed = 0;
  double worst_row = 0;       ///< |out - want| of the worst row over the norm of an average row
  std::int64_t worst_at = 0;  ///< its index
};
Distance distance(std::span<const float> out, std::span<const double> want, std::int64_t row,
                  std::int64_t spared = 0);

/// Largest |lse - want|, the `spared` worst rows apart; equal infinities agree.
double lse_distance(std::span<const float> lse, std::span<const double> want,
                    std::int64_t spared = 0);

/// Rows that a tight comparison may spare where P is rounded: 1 and 1 of 200. A score whose last
/// float32 bit differs can put its P on the other side of a rounding boundary (about one P in 10^5;
/// a unit of u8 P, 1/255, moves the LSE of a row of weight 35 by 1e-4).
std::int64_t spared_rows(const Recipe& resolved, std::int64_t rows);

/// NRMSE that a kernel may be from the model.
double tight_bound(Format output);

/// NRMSE that a recipe may be from float64 on N(0,1), roughly: a sanity bound, not the error rule.
double loose_bound(const Recipe& resolved, Format output);

/// Records failures unless `outcome` matches the model.
void expect_matches_model(const Outcome& outcome, const Call& call, Format output,
                          const ModelOutput& model);

}  // namespace qattn::test
