// Keys that no query sees have no influence, whatever they hold: not a bit of the results changes
// with them, on every instruction set of this CPU. And keys under biases like finfo.min have none
// on what keys share.
#include "conformance/hidden_keys.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "conformance/runner.hpp"

namespace qattn::test {
namespace {

constexpr std::int64_t queries = 5, keys = 150;
constexpr float infinity = std::numeric_limits<float>::infinity();

class HiddenKeys : public testing::TestWithParam<Recipe> {
 protected:
  static Call call_with(std::int64_t rows = queries) {
    Feature feature;
    feature.sq = {rows}, feature.sk = {keys};
    return make_call(feature, 3);
  }

  static void on_every_isa(const std::function<void()>& expect) {
    for (const std::string& isa : isas()) {
      SCOPED_TRACE(isa);
      const ForceIsa forced(isa);
      if (forced.available()) expect();
      if (HasFailure()) return;
    }
  }

  static Outcome run(const Call& call, const Recipe& recipe) {
    Laid laid = lay_out(call, {});
    Outcome outcome = run_call(call, laid, recipe);
    EXPECT_TRUE(outcome.status.ok()) << outcome.status.message();
    return outcome;
  }
};

TEST_P(HiddenKeys, HaveNoInfluence) {
  on_every_isa([&] {
    for (const Hiding& hiding : every_hiding(queries, keys)) {
      SCOPED_TRACE(hiding.name);
      Call call = call_with();
      hiding.apply(call);
      const Outcome want = run(call, GetParam());
      for (const float x : want.out) EXPECT_TRUE(std::isfinite(x));
      for (const float value : {0.0f, 1000.0f, -3e38f, infinity, std::nanf("")}) {
        fill_keys(call, hiding.hides, value);
        EXPECT_TRUE(same_bits(want, run(call, GetParam()))) << "filled with " << value;
      }
    }
  });
}

/// Nor on the factors that balance K's channels, where keys share nothing else.
TEST_P(HiddenKeys, HaveNoInfluenceOnBalance) {
  if (!free_scales(GetParam().qk)) GTEST_SKIP() << "no scales per token";
  Recipe recipe = GetParam();
  recipe.k_scale = {Granularity::per_token, 0, 0};
  recipe.smooth_k = Toggle::off, recipe.balance_k = Toggle::on;
  Feature feature;
  feature.sq = {queries}, feature.sk = {keys}, feature.family = Family::loud;
  on_every_isa([&] {
    Call call = make_call(feature, 3);
    call.mask = padding_mask({1, 1, 1, keys}, true, 1, 0);
    const Outcome want = run(call, recipe);
    for (const float value : {0.0f, 1000.0f, std::nanf("")}) {
      fill_keys(call, is_padding, value);
      EXPECT_TRUE(same_bits(want, run(call, recipe))) << "filled with " << value;
    }
  });
}

/// Many rows, so that tiles are prepared before the tasks: another way through the code.
TEST_P(HiddenKeys, HaveNoInfluenceOnManyRows) {
  on_every_isa([&] {
    Call call = call_with(70);
    call.mask = padding_mask({1, 1, 70, keys}, true, 1, 0);
    const Outcome want = run(call, GetParam());
    fill_keys(call, is_padding, std::nanf(""));
    EXPECT_TRUE(same_bits(want, run(call, GetParam())));
  });
}

/// Keys as large as uninitialised memory may be, under the masks of padding that models add.
TEST_P(HiddenKeys, HaveNoPartInWhatIsSharedUnderTheLowestBias) {
  Call alone = call_with();
  alone.mask = padding_mask({1, 1, 1, keys}, false, 0, -infinity);
  on_every_isa([&] {
    for (const float bias : {-3.4028235e38f, -1e9f, -1e4f}) {
      SCOPED_TRACE(bias);
      Call call = call_with();
      call.mask = padding_mask({1, 1, 1, keys}, false, 0, bias);
      fill_keys(call, is_padding, 1000.0f);
      const Outcome want = run(alone, GetParam()), got = run(call, GetParam());
      std::vector<double> exact(want.out.begin(), want.out.end());
      EXPECT_LE(distance(got.out, exact, call.dim_v).nrmse, 1e-2);
    }
  });
}

/// A row that sees nothing but such keys gives them equal weights, as in torch.
TEST_P(HiddenKeys, UnderTheLowestBiasAloneStayUniform) {
  on_every_isa([&] {
    Call call = call_with();
    call.mask.shape = {1, 1, 1, keys};
    call.mask.values.assign(keys, -1e9f);
    Call free = call;
    free.mask = {};
    for (Call* c : {&call, &free}) {
      std::fill(c->sequences[0].q.begin(), c->sequences[0].q.end(), 0.0f);
    }
    const Outcome want = run(free, GetParam()), got = run(call, GetParam());
    std::vector<double> exact(want.out.begin(), want.out.end());
    EXPECT_LE(distance(got.out, exact, call.dim_v).nrmse, 1e-2);
  });
}

/// Of such keys alone a group of K's has a scale all the same, for the row that sees no others.
TEST(HiddenKeysInGroups, AreRightWhereARowSeesNothingElse) {
  for (const Granularity granularity : {Granularity::per_block, Granularity::per_thread}) {
    Feature feature;
    feature.sq = {queries}, feature.sk = {keys};
    Call call = make_call(feature, 3);
    call.mask = padding_mask({1, 1, queries, keys}, false, 0, -1e4f);
    for (std::int64_t n = 0; n < queries * keys; ++n) {
      const std::int64_t j = n % keys;
      call.mask.values[static_cast<std::size_t>(n)] = j >= 100 ? -1e4f : n < keys ? -infinity : 0;
    }
    for (const char* name : {"int8_full", "fp8"}) {
      SCOPED_TRACE(std::string(name) + " " + std::string(qattn::name(granularity)));
      Recipe recipe = *recipe_named(name);
      recipe.k_scale = {granularity, 32, 16};
      Laid laid = lay_out(call, {});
      const Outcome got = run_call(call, laid, recipe);
      ASSERT_TRUE(got.status.ok()) << got.status.message();
      EXPECT_LE(distance(got.out, reference(call, laid).out, call.dim_v).nrmse, 6e-2);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Cpu, HiddenKeys, testing::ValuesIn(recipes().begin(), recipes().end()),
                         [](const auto& recipe) { return recipe.param.name; });

}  // namespace
}  // namespace qattn::test
