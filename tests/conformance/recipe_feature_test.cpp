// Every recipe x every feature, on instruction sets of this CPU in turn: tight against the semantic
// model, within a sanity bound against float64.
#include <gtest/gtest.h>

#include "conformance/runner.hpp"

namespace qattn::test {
namespace {

struct Cell {
  Recipe recipe;
  const Feature* feature;
};

void PrintTo(const Cell& cell, std::ostream* out) {
  *out << cell.recipe.name << " " << cell.feature->name;
}

std::vector<Cell> cells() {
  std::vector<Cell> all;
  for (const Feature& feature : features()) {
    for (const Recipe& recipe : recipes()) {
      if (!feature.applies(recipe)) continue;
      Cell cell{recipe, &feature};
      feature.tweak(cell.recipe);
      all.push_back(cell);
    }
  }
  // P in bf16 beside V whose products are in float32: of tokens' scales, or of its format.
  static const Feature token_scales = [] {
    Feature f = feature_named("v_per_token_0");
    f.name += "_out_bf16", f.how.output = Format::bf16;
    return f;
  }();
  all.push_back({*recipe_named("fp8_p16"), &token_scales});
  token_scales.tweak(all.back().recipe);
  for (const char* name : {"paged_16", "varlen"}) {
    all.push_back({*recipe_named("int8"), &feature_named(name)});
    all.back().recipe.name = "int8_p_bf16", all.back().recipe.p = Format::bf16;
  }
  return all;
}

/// The feature's call and what float64 makes of it, which many recipes share.
struct Known {
  const Feature* feature = nullptr;
  Call call;
  Exact exact;
};
const Known& known(const Feature& feature) {
  static Known last;
  if (last.feature != &feature) {
    last = {&feature, make_call(feature, 1), {}};
    last.exact = reference(last.call, lay_out(last.call, feature.how));
  }
  return last;
}

class RecipeFeature : public testing::TestWithParam<Cell> {};

TEST_P(RecipeFeature, MatchesModelAndReference) {
  const auto& [recipe, feature] = GetParam();
  Call call = known(*feature).call;
  Laid laid = lay_out(call, feature->how);
  if (feature->static_scales) {
    AttentionOptions options = call.options;
    options.recipe = recipe;
    const Result<Plan> planned = plan(laid.tensors(), options);
    ASSERT_TRUE(planned.ok()) << planned.status().message();
    add_static_scales(call, laid, planned->recipe(), 0.6);
  }
  const Exact& exact = known(*feature).exact;
  ModelOutput model;
  for (const std::string& isa : IsaTurns().next()) {
    SCOPED_TRACE(isa);
    const ForceIsa forced(isa);
    const Outcome outcome = run_call(call, laid, recipe);
    ASSERT_TRUE(outcome.status.ok()) << outcome.status.message();
    EXPECT_NE(outcome.plan.find("isa: " + isa + "\n"), std::string::npos) << outcome.plan;
    if (model.out.empty()) {
      model = model_attention(call, outcome.model_options());
    }
    expect_matches_model(outcome, call, feature->how.output, model);
    const Distance d = distance(outcome.out, exact.out, call.dim_v);
    EXPECT_LE(d.nrmse, feature->loose * loose_bound(outcome.resolved, feature->how.output))
        << "against float64";
  }
}

INSTANTIATE_TEST_SUITE_P(Cpu, RecipeFeature, testing::ValuesIn(cells()), [](const auto& cell) {
  return cell.param.recipe.name + "_" + cell.param.feature->name;
});

/// |LSE error| of 8-bit Q and K on N(0,1) (docs/NUMERICS.md, the error rule).
class LseRule : public testing::TestWithParam<Recipe> {};

TEST_P(LseRule, Normal) {
  Feature feature;
  feature.sq = {64};
  feature.sk = {2048};
  feature.dim = feature.dim_v = 128;
  feature.heads_q = 2;
  const Call call = make_call(feature, 3);
  Laid laid = lay_out(call, feature.how);
  const Exact exact = reference(call, laid);
  const Outcome outcome = run_call(call, laid, GetParam());
  ASSERT_TRUE(outcome.status.ok()) << outcome.status.message();
  // Power-of-two scales cost mxfp8 a quarter more than the rule's 2e-2: the recipe, not the kernel.
  const double bound = outcome.resolved.qk == Format::mxfp8 ? 3e-2 : 2e-2;
  EXPECT_LE(lse_distance(outcome.lse, exact.lse), bound);
}

std::vector<Recipe> recipes_of_8_bits() {
  std::vector<Recipe> all;
  for (const Recipe& recipe : recipes()) {
    if (info(recipe.qk).bits == 8) all.push_back(recipe);
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Cpu, LseRule, testing::ValuesIn(recipes_of_8_bits()),
                         [](const auto& recipe) { return recipe.param.name; });

/// Two independent statements of the function: the reference and the model without any rounding.
class Judges : public testing::TestWithParam<const Feature*> {};

TEST_P(Judges, Agree) {
  const Feature& feature = *GetParam();
  const Call call = make_call(feature, 2);
  const Laid laid = lay_out(call, feature.how);
  const Exact exact = reference(call, laid);
  Recipe recipe;
  recipe.qk = recipe.p = recipe.v = Format::f32;
  for (const std::int64_t split : {std::int64_t{0}, std::int64_t{96}}) {
    const ModelOutput model = model_attention(call, {.recipe = recipe, .split_keys = split});
    const std::vector<float> out(exact.out.begin(), exact.out.end());
    const std::vector<float> lse(exact.lse.begin(), exact.lse.end());
    EXPECT_LE(distance(out, model.out, call.dim_v).nrmse, 1e-6);
    EXPECT_LE(lse_distance(lse, model.lse), 1e-5);
  }
}

/// Rows that are about the recipe alone apply to no recipe without codes.
std::vector<const Feature*> distinct_functions() {
  Recipe exact;
  exact.qk = exact.p = exact.v = Format::f32;
  std::vector<const Feature*> all;
  for (const Feature& feature : features()) {
    if (feature.applies(exact)) all.push_back(&feature);
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Reference, Judges, testing::ValuesIn(distinct_functions()),
                         [](const auto& row) { return row.param->name; });

}  // namespace
}  // namespace qattn::test
