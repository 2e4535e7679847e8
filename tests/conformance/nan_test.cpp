// What one bad element of an input does, on every instruction set of this CPU and in the reference.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "conformance/bad_input.hpp"
#include "qattn/reference.hpp"

namespace qattn::test {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

class BadInput : public testing::TestWithParam<Recipe> {
 protected:
  template <class Expect>
  void on_every_isa(const Recipe& recipe, Expect expect) {
    for (const std::string& isa : isas()) {
      SCOPED_TRACE(isa);
      const ForceIsa forced(isa);
      if (!forced.available()) continue;
      expect([&](const Call& call, Laid& laid) { return run_call(call, laid, recipe); });
      if (HasFailure()) return;
    }
  }
  void sweep(const Feature& feature, const Recipe& recipe) {
    on_every_isa(recipe, [&](const RunCall& run) { expect_bad_input_stays(feature, run); });
  }
};

TEST_P(BadInput, StaysInItsPlace) { sweep(bad_input_feature(), GetParam()); }

TEST_P(BadInput, SoftcapDoesNotHideIt) {
  Feature feature = bad_input_feature();
  feature.options.softcap = 2.0f;
  sweep(feature, GetParam());
}

TEST_P(BadInput, StaysInItsPlaceWithoutSharedScales) {
  Recipe recipe = GetParam();
  recipe.smooth_k = Toggle::off;
  if (free_scales(recipe.v)) recipe.v_scale.granularity = Granularity::per_token;
  Feature feature = bad_input_feature();
  feature.how.input = Format::f16;
  sweep(feature, recipe);
}

TEST_P(BadInput, NanBiasAndSink) {
  on_every_isa(GetParam(),
               [](const RunCall& run) { expect_bad_bias_and_sink_stay(bad_input_feature(), run); });
}

INSTANTIATE_TEST_SUITE_P(Cpu, BadInput, testing::ValuesIn(recipes().begin(), recipes().end()),
                         [](const auto& recipe) { return recipe.param.name; });

TEST(ReferenceBadInput, FollowsTheRule) {
  Feature feature = bad_input_feature();
  feature.options.softcap = 2.0f;
  const Call call = make_call(feature, 5);
  Recipe exact;
  exact.qk = exact.p = exact.v = Format::f32;
  for (const Operand operand : {Operand::q, Operand::k, Operand::v}) {
    Laid laid = lay_out(call, feature.how);
    const std::int64_t token = operand == Operand::q ? bad_query : bad_key;
    const auto values = [&] {
      std::vector<double> out(static_cast<std::size_t>(call.total_rows() * call.dim_v));
      const Status status = reference_attention(laid.tensors(), call.options, out);
      EXPECT_TRUE(status.ok()) << status.message();
      return out;
    };
    const std::vector<double> clean = values();
    poke(laid, call, operand, bad_b, bad_h, token, bad_d, infinity);
    const std::vector<double> now = values();
    for (std::int64_t n = 0; n < call.total_rows() * call.dim_v; ++n) {
      const std::int64_t row = n / call.dim_v;
      const Fate expected = fate(exact, operand, row / 400, row / 100 % 4, row % 100);
      EXPECT_TRUE(expected == Fate::is_nan ? std::isnan(now[n]) : now[n] == clean[n]) << n;
    }
  }
}

}  // namespace
}  // namespace qattn::test
