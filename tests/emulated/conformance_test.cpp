// Features x recipes on the emulated GPU kernels: tight against the semantic model, loosely against
// float64, a sample under every schedule, with the same bits.
#include <gtest/gtest.h>

#include <algorithm>

#include "emulated/composed.hpp"
#include "emulated/emulated_backend.hpp"
#include "emulated/matrix.hpp"

namespace qattn::test {

void PrintTo(const Cell& cell, std::ostream* out) {
  *out << cell.name << ": " << cell.feature.name;
}
void PrintTo(const InstanceCell& cell, std::ostream* out) { *out << cell.cell.name; }

namespace {

std::string name_of(const testing::TestParamInfo<Cell>& cell) { return cell.param.name; }

Result<Plan> plan_emulated(const Call& call, const Laid& laid, const Recipe& recipe) {
  const EmulatedBackend backend(architecture_for(recipe));
  AttentionOptions options = call.options;
  options.recipe = recipe;
  return plan(laid.tensors(), options);
}

/// Is the cell left out of a sample? That has kernels of one head dimension, a call for each of
/// them and every fourth other cell.
bool is_left_out(const Cell& cell) {
#ifdef QATTN_SAMPLE
  if (cell.feature.dim > 64 || cell.feature.dim_v > 64) return true;
  return cell.name.find("_instance_") == std::string::npos && hash_of(cell.name) % 4 != 0;
#else
  static_cast<void>(cell);
  return false;
#endif
}

/// Runs the cell and compares; returns what ran.
Outcome expect_conforms(const Cell& cell) {
  const auto& [name, recipe, feature, refused, architecture, splits, consumers, shared_p, timing] =
      cell;
  const OnArchitecture on(architecture);
  const ForceSplitKv forced(0, splits, consumers, shared_p);
  Call call = make_call(feature, 1);
  Laid laid = lay_out(call, feature.how);
  const Result<Plan> planned = plan_emulated(call, laid, recipe);
  EXPECT_TRUE(planned.ok()) << planned.status().message();
  if (!planned.ok()) return {};
  EXPECT_EQ(is_emulated(planned->kernel()), !refused) << planned->to_string();
  if (refused || testing::Test::HasFailure()) return {};
  Recipe run = recipe;
  if (feature.static_scales) {
    // With given scales other things are automatic: one of K's a token.
    run = add_static_scales(call, laid, planned->recipe(), 0.6);
  }
  const Outcome outcome = run_emulated(call, laid, run, timings_for(name, timing));
  EXPECT_TRUE(splits == 0 || outcome.splits == splits) << outcome.plan;
  const std::string line = "\nconsumers: " + std::to_string(consumers) + "\n";
  const std::string place = "\nshared_p: " + std::to_string(shared_p) + "\n";
  EXPECT_TRUE(shared_p < 0 || outcome.plan.find(place) != std::string::npos) << outcome.plan;
  EXPECT_TRUE(consumers == 0 || outcome.plan.find(line) != std::string::npos) << outcome.plan;
  if (testing::Test::HasFailure()) return outcome;
  if (shared_p == 1 && !has_codes(run.v)) {  // but for the order in which rows' sums are added up
    const ForceSplitKv registers(0, splits, 2, 0);
    const Outcome other = run_emulated(call, laid, run, every_timing().first(1));
    const std::vector<double> want(other.out.begin(), other.out.end());
    const bool floats = feature.how.output == Format::f32;
    EXPECT_LE(distance(outcome.out, want, call.dim_v).nrmse, floats ? 1e-6 : 3e-4)
        << "not what P in registers gives";
  }
  const ModelOutput model = model_attention(call, outcome.model_options());
  expect_matches_model(outcome, call, feature.how.output, model);
  const Exact exact = reference(call, laid);
  EXPECT_LE(distance(outcome.out, exact.out, call.dim_v).nrmse,
            feature.loose * loose_bound(outcome.resolved, feature.how.output) +
                resolution(exact.out, feature.how.output))
      << "against float64";
  return outcome;
}

class Emulated : public testing::TestWithParam<Cell> {};

TEST_P(Emulated, MatchesModelAndReference) {
  if (is_left_out(GetParam())) GTEST_SKIP() << "not in the sample";
  expect_conforms(GetParam());
}

INSTANTIATE_TEST_SUITE_P(SplitKv, Emulated, testing::ValuesIn(spread_cells()), name_of);
INSTANTIATE_TEST_SUITE_P(Pairs, Emulated, testing::ValuesIn(paired_cells()), name_of);
INSTANTIATE_TEST_SUITE_P(PairsOfGroups, Emulated, testing::ValuesIn(grouped_cells()), name_of);
INSTANTIATE_TEST_SUITE_P(HeadSizes, Emulated, testing::ValuesIn(head_size_cells()), name_of);
INSTANTIATE_TEST_SUITE_P(Full, Emulated, testing::ValuesIn(all_cells()), name_of);

/// Hopper's kernels themselves, without the portable one's help.
class Hopper : public testing::TestWithParam<Cell> {};

void expect_no_portable_products(const emu::Stats& done) {
  EXPECT_GT(done.warp_instructions(emu::Word::wgmma), 0);
  for (const emu::Word word :
       {emu::Word::mma_f16, emu::Word::mma_bf16, emu::Word::mma_int8, emu::Word::mma_fp8}) {
    EXPECT_EQ(done.warp_instructions(word), 0) << emu::name(word);
  }
}

TEST_P(Hopper, DoesItAlone) {
  if (is_left_out(GetParam())) GTEST_SKIP() << "not in the sample";
  emu::take_stats();
  const Outcome outcome = expect_conforms(GetParam());
  const emu::Stats done = emu::take_stats();
  EXPECT_NE(outcome.plan.find("kernel: sm90a"), std::string::npos) << outcome.plan;
  EXPECT_EQ(outcome.plan.find("portable"), std::string::npos) << outcome.plan;
  expect_no_portable_products(done);
}

INSTANTIATE_TEST_SUITE_P(Cover, Hopper, testing::ValuesIn(hopper_instance_cells()), name_of);
INSTANTIATE_TEST_SUITE_P(Pairs, Hopper, testing::ValuesIn(hopper_cells()), name_of);

/// The covering array: a case has a level of each factor.
class Composition : public testing::TestWithParam<Cell> {};

TEST_P(Composition, MatchesModelAndReference) {
  if (is_left_out(GetParam())) GTEST_SKIP() << "not in the sample";
  emu::take_stats();
  const Outcome outcome = expect_conforms(settled(GetParam()));
  const emu::Stats done = emu::take_stats();
  const std::string directory = GetParam().name.substr(0, GetParam().name.find('_'));
  EXPECT_TRUE(outcome.plan.starts_with("kernel: " + directory + "_")) << outcome.plan;
  const bool sees = std::ranges::any_of(outcome.out, [](float x) { return x != 0; });
  if (sees && directory == "sm90a" && outcome.plan.find("portable") == std::string::npos) {
    expect_no_portable_products(done);
  }
}

std::vector<Cell> composed_cells() {
  std::vector<Cell> all;
  for (const Composed& of : composed()) all.insert(all.end(), of.cells().begin(), of.cells().end());
  return all;
}

INSTANTIATE_TEST_SUITE_P(Cover, Composition, testing::ValuesIn(composed_cells()), name_of);

class Instance : public testing::TestWithParam<InstanceCell> {};

TEST_P(Instance, IsChosenAndConforms) {
  const Outcome outcome = expect_conforms(GetParam().cell);
  EXPECT_NE(outcome.plan.find("variant: " + GetParam().variant), std::string::npos) << outcome.plan;
}

INSTANTIATE_TEST_SUITE_P(Cover, Instance, testing::ValuesIn(instance_cells()),
                         [](const auto& cell) { return cell.param.cell.name; });

}  // namespace
}  // namespace qattn::test
