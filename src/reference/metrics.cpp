// The metrics of docs/NUMERICS.md: how far an output is from the reference.
#include <algorithm>
#include <cmath>
#include <limits>

#include "qattn/reference.hpp"

namespace qattn {
namespace {

struct Sums {
  double out2 = 0, ref2 = 0, cross = 0, diff2 = 0;

  void operator+=(const Sums& other) {
    out2 += other.out2;
    ref2 += other.ref2;
    cross += other.cross;
    diff2 += other.diff2;
  }
  /// Two zero vectors point the same way; a zero and a nonzero one do not.
  double cosine() const {
    if (out2 == 0 && ref2 == 0) return 1;
    if (out2 == 0 || ref2 == 0) return 0;
    return cross / (std::sqrt(out2) * std::sqrt(ref2));
  }
};

constexpr double nan = std::numeric_limits<double>::quiet_NaN();

/// Rows that hold NaN or Inf.
template <class T>
std::int64_t nan_rows(std::span<const T> x, std::int64_t row) {
  std::int64_t count = 0;
  for (std::size_t begin = 0; begin < x.size(); begin += static_cast<std::size_t>(row)) {
    const auto values = x.subspan(begin, static_cast<std::size_t>(row));
    if (!std::all_of(values.begin(), values.end(), [](T v) { return std::isfinite(v); })) ++count;
  }
  return count;
}

}  // namespace

ErrorMetrics compare(std::span<const float> out, std::span<const double> ref, std::int64_t row) {
  ErrorMetrics metrics{nan, nan, nan, nan};
  const auto count = static_cast<std::int64_t>(ref.size());
  if (out.size() != ref.size() || row <= 0 || count % row != 0) return metrics;
  metrics.rows = count / row;
  metrics.nan_rows = nan_rows(out, row);
  metrics.nan_ref_rows = nan_rows(ref, row);

  Sums all;
  double largest = 0, worst = 1;
  bool any = count == 0;
  for (std::int64_t begin = 0; begin < count; begin += row) {
    Sums sums;
    for (std::int64_t i = begin; i < begin + row; ++i) {
      const double o = out[i], r = ref[i];
      // Equal NaNs and equal infinities agree; their sums would not be numbers.
      if ((std::isnan(o) && std::isnan(r)) || (std::isinf(o) && o == r)) continue;
      if (!std::isfinite(o) || !std::isfinite(r)) return metrics;
      any = true;
      sums += {o * o, r * r, o * r, (o - r) * (o - r)};
      largest = std::max(largest, std::abs(o - r));
    }
    worst = std::min(worst, sums.cosine());
    all += sums;
  }
  if (!any) return metrics;
  metrics.nrmse = 0;
  metrics.max_abs_err = largest;
  metrics.worst_row_cosine = worst;
  metrics.cosine = all.cosine();
  if (all.diff2 > 0) metrics.nrmse = std::sqrt(all.diff2) / std::sqrt(all.ref2);
  return metrics;
}

}  // namespace qattn
