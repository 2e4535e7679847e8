#include "conformance/overflow.hpp"

#include <cmath>
#include <limits>

#include "support/numbers.hpp"

namespace qattn::test {
namespace {

/// Q above zero and K below it, both `size` times as large.
void repel(Call& call, float size, Format format) {
  const auto scaled = [&](float x, float sign) {
    const double value = static_cast<double>(sign * size) * (1 + std::abs(static_cast<double>(x)));
    return static_cast<float>(round_real(value, format));
  };
  for (Sequence& s : call.sequences) {
    for (float& x : s.q) x = scaled(x, 1);
    for (float& x : s.k) x = scaled(x, -1);
  }
}

/// The reference's scores are of float64: a row whose LSE is -Inf there sees no key.
void expect_rows(const Call& call, const Laid& laid, const Outcome& now) {
  ASSERT_TRUE(now.status.ok()) << now.status.message();
  const Exact exact = reference(call, laid);
  for (std::size_t row = 0; row < exact.lse.size(); ++row) {
    const bool blind = exact.lse[row] == -std::numeric_limits<double>::infinity();
    for (std::int64_t d = 0; d < call.dim_v; ++d) {
      const float x = now.out[row * call.dim_v + d];
      ASSERT_TRUE(blind ? x == 0.0f : std::isnan(x)) << "row " << row << " holds " << x;
    }
    const float lse = now.lse[row];
    ASSERT_TRUE(blind ? lse == -std::numeric_limits<float>::infinity() : std::isnan(lse))
        << "row " << row << " has an LSE of " << lse;
  }
}

}  // namespace

void expect_rows_below_floats_are_bad(const Feature& feature, const RunCall& run) {
  for (const bool by_scale : {false, true}) {
    if (!by_scale && feature.how.input == Format::f16) continue;  // which holds no such numbers
    SCOPED_TRACE(by_scale ? "by softmax_scale" : "by Q and K");
    Feature f = feature;
    if (by_scale) f.options.softmax_scale = 1e36f;
    Call call = make_call(f, 3);
    repel(call, by_scale ? 10.0f : 1e20f, f.how.input);
    Laid laid = lay_out(call, f.how);
    expect_rows(call, laid, run(call, laid));
    if (testing::Test::HasFailure()) return;
  }
}

}  // namespace qattn::test
