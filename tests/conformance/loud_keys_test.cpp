// Keys with loud channels, as Qwen2.5 has them: balanced by themselves, and nothing changes where
// there are none.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "conformance/runner.hpp"

namespace qattn::test {
namespace {

class LoudKeys : public testing::TestWithParam<Recipe> {
 protected:
  static Feature feature_of(Family family) {
    Feature feature;
    feature.family = family, feature.sq = {40}, feature.sk = {300};
    feature.dim = feature.dim_v = 128;
    return feature;
  }

  static Outcome run(const Call& call, Toggle balance, const LayoutOptions& how = {}) {
    Laid laid = lay_out(call, how);
    Recipe recipe = GetParam();
    recipe.balance_k = balance;
    Outcome outcome = run_call(call, laid, recipe);
    EXPECT_TRUE(outcome.status.ok()) << outcome.status.message();
    return outcome;
  }

  static double error_of(const Call& call, const Outcome& outcome) {
    return distance(outcome.out, reference(call, lay_out(call, {})).out, call.dim_v).nrmse;
  }
};

TEST_P(LoudKeys, AreBalanced) {
  const Call call = make_call(feature_of(Family::loud), 5);
  const bool four_bits = info(GetParam().qk).bits == 4;
  const Outcome balanced = run(call, Toggle::automatic);
  EXPECT_LE(error_of(call, balanced), four_bits ? 0.45 : 0.06);
  EXPECT_GE(error_of(call, run(call, Toggle::off)), four_bits ? 0.6 : 0.15);
  EXPECT_NE(balanced.plan.find("balance_k=on"), std::string::npos) << balanced.plan;
}

TEST_P(LoudKeys, AreBalancedBeforeTheyAreRotated) {
  const Call call = make_call(feature_of(Family::loud), 5);
  Recipe recipe = GetParam();
  recipe.rotate = Toggle::on;
  Laid laid = lay_out(call, {});
  EXPECT_LE(error_of(call, run_call(call, laid, recipe)), info(recipe.qk).bits == 4 ? 0.45 : 0.06);
}

/// Nor do keys of large means, or few large values.
TEST_P(LoudKeys, OthersKeepTheirBits) {
  for (const Family family : {Family::normal, Family::k_shift, Family::peaky, Family::v_mean}) {
    SCOPED_TRACE(name(family));
    const Call call = make_call(feature_of(family), 5);
    EXPECT_TRUE(same_bits(run(call, Toggle::automatic), run(call, Toggle::off)));
  }
}

/// Keys that no query sees are not among those that tell.
TEST_P(LoudKeys, HiddenOnesChangeNothing) {
  Call call = make_call(feature_of(Family::normal), 5);
  call.mask.boolean = true;
  call.mask.shape = {1, 1, 1, 300};
  for (int j = 0; j < 300; ++j) call.mask.values.push_back(j % 3 == 0 ? 0 : 1);
  const Outcome want = run(call, Toggle::automatic);
  std::vector<float>& k = call.sequences[0].k;
  for (std::size_t n = 3; n < k.size(); n += 128) {
    const std::size_t j = n / 128 % 300;
    if (j % 3 == 0) k[n] = j % 2 == 0 ? 500.0f : -500.0f;
  }
  EXPECT_TRUE(same_bits(want, run(call, Toggle::automatic)));
}

/// A bad key spoils the rows that see it and nothing else, though it is among those that tell.
TEST_P(LoudKeys, BadOnesSpoilNobodyElse) {
  Call call = make_call(feature_of(Family::loud), 5);
  call.options.causal = true, call.options.softcap = 30;
  const std::int64_t first_seeing = 32, key = 300 - 40 + first_seeing;
  call.sequences[0].k[key * 128 + 7] = std::numeric_limits<float>::infinity();
  Laid laid = lay_out(call, {});
  Recipe recipe = GetParam();
  recipe.smooth_k = Toggle::off;
  const Outcome outcome = run_call(call, laid, recipe);
  ASSERT_TRUE(outcome.status.ok()) << outcome.status.message();
  for (std::int64_t i = 0; i < 40; ++i) {
    // Query heads 0 and 1 share the KV head. nvfp4's scale of a head spoils all of its rows.
    const bool bad = i >= first_seeing || recipe.qk == Format::nvfp4;
    EXPECT_EQ(std::isfinite(outcome.out[i * 128]), !bad) << i;
    EXPECT_TRUE(std::isfinite(outcome.out[(2 * 40 + i) * 128])) << i;
  }
}

/// The rule is about the tokens of a sequence, wherever they lie.
TEST_P(LoudKeys, InPagesHaveTheSameBits) {
  const Call call = make_call(feature_of(Family::loud), 5);
  LayoutOptions pages;
  pages.page_size = 16;
  EXPECT_TRUE(same_bits(run(call, Toggle::automatic), run(call, Toggle::automatic, pages)));
}

std::vector<Recipe> balancing_recipes() {
  std::vector<Recipe> all;
  for (const Recipe& recipe : recipes()) {
    if (recipe.qk == Format::s8 || recipe.qk == Format::nvfp4) all.push_back(recipe);
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Cpu, LoudKeys, testing::ValuesIn(balancing_recipes()),
                         [](const auto& recipe) { return recipe.param.name; });

}  // namespace
}  // namespace qattn::test
