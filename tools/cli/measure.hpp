// Time, error and memory of recipes on one attention call, for compare, bench and demo.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "call.hpp"
#include "console.hpp"
#include "qattn/qattn.hpp"

namespace qattn::cli {

/// Evenly spaced query rows, both ends included; empty (= all) if `count` is at least `queries`.
std::vector<std::int64_t> sample_rows(std::int64_t queries, std::int64_t count);

/// All rows where that costs at most 2e10 operations, else 256.
std::int64_t default_reference_rows(const Geometry& geometry);

/// Float64 outputs of the chosen query rows, (B, Hq, rows, Dv).
struct Reference {
  std::vector<std::int64_t> rows;  ///< empty: all
  std::vector<double> values;
};
Result<Reference> make_reference(const Case& c, std::int64_t rows,
                                 const std::function<void(double)>& progress = {});

struct TimingOptions {
  int runs = 0;           ///< exactly so many timed runs; 0: as many as the budget allows
  double budget_s = 0.3;  ///< for the automatic number of runs, which is at least 1
};

struct Measurement {
  std::string recipe, kernel;
  double ms = 0;              ///< median, quantisation included
  ErrorMetrics error;         ///< against the reference, if one was given
  std::int64_t rows = 0;      ///< of the output, whether or not the reference has them
  std::int64_t nan_rows = 0;  ///< of those, the ones that hold NaN or Inf
  double memory_vs_f16 = 0;   ///< bytes of Q, K, V as multiplied, scales included, over f16's
};

/// Warm-up run, timed runs, error. `reference` may be null. Errors: as plan() and run().
Result<Measurement> measure(const Case& c, const Recipe& recipe, const Reference* reference,
                            const TimingOptions& timing);

struct Skipped {
  std::string recipe, reason;
};

struct Comparison {
  std::vector<Measurement> results;
  std::vector<Skipped> skipped;  ///< recipes that the device refuses
  double f32_ms = 0;             ///< NaN where f32 was refused

  double speedup(const Measurement& m) const { return f32_ms / m.ms; }
};

/// Measures every recipe, and f32 for the speedup. `step` is told each recipe's name before it
/// runs. Errors: any refusal but unsupported; unsupported if no recipe is left.
Result<Comparison> compare_recipes(const Case& c, const std::vector<Recipe>& list,
                                   const Reference* reference, const TimingOptions& timing,
                                   const std::function<void(std::string_view)>& step);

/// warn_of_nan(), a line a recipe whose output holds NaN or Inf, and one where the reference does.
void warn_of_nan(const std::string& where, const std::vector<Measurement>& results);

Json to_json(const std::vector<Skipped>& skipped);
std::string text_of(const std::vector<Skipped>& skipped);

}  // namespace qattn::cli
