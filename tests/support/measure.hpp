// How far an output is from what it should be, and how far it may be.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "qattn/attention.hpp"

namespace qattn::test {

/// The number in the line `field: N` of a plan's text, 0 if it has none.
std::int64_t plan_number(const Plan& plan, const std::string& field);

/// How a plan shares the keys among blocks, as ModelOptions wants it.
struct PlanSplitKv {
  std::int64_t splits = 1, tile_rows = 0;
};
PlanSplitKv split_kv_of(const Plan& plan);

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

/// The model's output in the format of the call's. Of numbers below 2^-14 f16 keeps so few bits
/// that rounding them is more than the bounds on errors.
std::vector<double> in_format(std::vector<double> out, Format output);

/// What the smallest number of the output's format is of an average one that it should hold: where
/// a sink draws all weight outputs are as small as 1e-8, and f16 has nothing between 0 and 6e-8.
double resolution(std::span<const double> want, Format output);

/// NRMSE that a kernel may be from the model.
double tight_bound(Format output);

/// NRMSE that a recipe may be from float64 on N(0,1), roughly: a sanity bound, not the error rule.
double loose_bound(const Recipe& resolved, Format output);

}  // namespace qattn::test
