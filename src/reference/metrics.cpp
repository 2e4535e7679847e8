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

}  // namespace

ErrorMetrics compare(std::span<const float> out, std::span<const double> ref, std::int64_t row) {
  constexpr double nan = std::numeric_limits<double>::quiet_NaN();
  const ErrorMetrics incomparable{nan, nan, nan, nan};
  const auto count = static_cast<std::int64_t>(ref.size());
  if (out.size() != ref.size() || row <= 0 || count % row != 0) return incomparable;

  ErrorMetrics metrics;
  Sums all;
  for (std::int64_t begin = 0; begin < count; begin += row) {
    Sums sums;
    for (std::int64_t i = begin; i < begin + row; ++i) {
      const double o = out[i], r = ref[i];
      if (std::isnan(o) != std::isnan(r)) return incomparable;
      // Equal NaNs and equal infinities agree; their sums would not be numbers.
      if (std::isnan(o) || (std::isinf(o) && o == r)) continue;
      sums += {o * o, r * r, o * r, (o - r) * (o - r)};
      metrics.max_abs_err = std::max(metrics.max_abs_err, std::abs(o - r));
    }
    metrics.worst_row_cosine = std::min(metrics.worst_row_cosine, sums.cosine());
    all += sums;
  }
  metrics.cosine = all.cosine();
  if (all.diff2 > 0) metrics.nrmse = std::sqrt(all.diff2) / std::sqrt(all.ref2);
  return metrics;
}

}  // namespace qattn
