// Loud channels of K in the semantic model: as docs/NUMERICS.md states it, in float64.
#include <algorithm>
#include <cmath>

#include "support/model.hpp"

namespace qattn::test {
namespace {

/// Places of the tokens that tell how loud a sequence is, among `count`.
std::vector<std::int64_t> places(std::int64_t count) {
  std::vector<std::int64_t> all;
  const auto tokens = std::min(count, std::clamp<std::int64_t>(count / 16, 8, 32));
  for (std::int64_t i = 0; i < tokens; ++i) {
    double within = 0, weight = 0.5;  // the bits of i behind the point, lowest first
    for (std::int64_t bits = i; bits > 0; bits /= 2, weight /= 2) {
      within += static_cast<double>(bits % 2) * weight;
    }
    const double place = static_cast<double>(count) * (static_cast<double>(i) + within);
    all.push_back(static_cast<std::int64_t>(place / static_cast<double>(tokens)));
  }
  return all;
}

/// Mean square of each channel of `rows` ([token][dim]), about the mean with `central`.
std::vector<double> loudness(const std::vector<const float*>& rows, std::int64_t dim,
                             bool central) {
  std::vector<double> square(static_cast<std::size_t>(dim));
  const auto count = static_cast<double>(rows.size());
  for (std::int64_t d = 0; d < dim; ++d) {
    double mean = 0;
    for (const float* row : rows) mean += central ? row[d] / count : 0;
    for (const float* row : rows) square[d] += (row[d] - mean) * (row[d] - mean) / count;
  }
  return square;
}

}  // namespace

std::vector<float> balance(std::span<const float> k, const std::vector<bool>& seen,
                           std::int64_t dim, bool central) {
  std::vector<float> factors(static_cast<std::size_t>(dim), 1.0f);
  std::vector<const float*> tokens, rows;
  for (std::size_t j = 0; j < seen.size(); ++j) {
    if (seen[j]) tokens.push_back(&k[j * static_cast<std::size_t>(dim)]);
  }
  for (const std::int64_t place : places(static_cast<std::int64_t>(tokens.size()))) {
    const float* row = tokens[place];
    if (std::all_of(row, row + dim, [](float x) { return std::isfinite(x); })) rows.push_back(row);
  }
  if (rows.size() < 4) return factors;
  const std::vector<double> square = loudness(rows, dim, central);
  std::vector<double> heard;
  for (const double x : square) {
    if (x > 0) heard.push_back(x);
  }
  if (heard.empty()) return factors;
  std::sort(heard.begin(), heard.end());
  const double median = heard[heard.size() / 2];
  if (heard.back() < 16 * median) return factors;
  for (std::int64_t d = 0; d < dim; ++d) {
    const double power = square[d] > 0 ? 0.75 * std::log2(std::sqrt(square[d] / median)) : 0;
    factors[d] = std::exp2(static_cast<float>(std::clamp(std::floor(power + 0.5), 0.0, 12.0)));
  }
  return factors;
}

}  // namespace qattn::test
