// Is the tight comparison worth anything? With one defect planted in the model it must fail.
#include <gtest/gtest.h>

#include "conformance/runner.hpp"

namespace qattn::test {
namespace {

struct Plant {
  std::string name, recipe, feature;
  Mutation mutation;
};

void PrintTo(const Plant& plant, std::ostream* out) { *out << plant.name; }

std::vector<Plant> plants() {
  std::vector<Plant> all;
  const auto add = [&all](std::string name, std::string recipe, std::string feature,
                          Mutation mutation) {
    all.push_back({std::move(name), std::move(recipe), std::move(feature), mutation});
  };
  for (const Recipe& recipe : recipes()) {
    for (const char* feature : {"causal", "window_both"}) {
      add("mask_" + recipe.name + "_" + feature, recipe.name, feature, Mutation::shift_mask_bound);
    }
  }
  for (const char* recipe : {"int8", "int8_fp8", "int8_full", "fp8", "fp8_p16"}) {
    const std::string r = recipe;
    for (const char* q : {"q_per_block_64_0", "q_per_warp_64_32", "q_per_thread_64_16"}) {
      add("q_" + r + "_" + q, r, q, Mutation::swap_q_scale);
    }
    for (const char* k : {"k_per_block_64", "k_per_block_8", "k_per_thread_64", "k_per_token_0"}) {
      add("k_" + r + "_" + k, r, k, Mutation::swap_k_scale);
    }
  }
  for (const char* recipe : {"int8_full", "fp8"}) {
    const std::string r = recipe;
    for (const char* v : {"v_per_token_0", "v_per_channel_0", "v_per_block_channel_64"}) {
      add("v_" + r + "_" + v, r, v, Mutation::swap_v_scale);
    }
  }
  for (const char* recipe : {"mxfp8", "nvfp4_qk", "nvfp4"}) {
    const std::string r = recipe;
    add("q_group_" + r, r, "plain", Mutation::swap_q_scale);
    add("k_group_" + r, r, "plain", Mutation::swap_k_scale);
    if (r != "nvfp4_qk") add("v_group_" + r, r, "plain", Mutation::swap_v_scale);
  }
  return all;
}

/// Neighbouring groups of 32 get magnitudes apart by 4, or power-of-two scales of N(0,1) would be
/// equal and a swap invisible: along channels for Q and K, along tokens for V.
void spread_magnitudes(Call& call) {
  const auto channels = [&call](std::vector<float>& x) {
    for (std::size_t n = 0; n < x.size(); ++n) {
      if (n % call.dim / 32 % 2 == 1) x[n] *= 0.25f;
    }
  };
  for (Sequence& sequence : call.sequences) {
    channels(sequence.q);
    channels(sequence.k);
    for (std::size_t n = 0; n < sequence.v.size(); ++n) {
      const auto token = static_cast<std::int64_t>(n) / call.dim_v % sequence.len_k;
      if (token / 32 % 2 == 1) sequence.v[n] *= 0.25f;
    }
  }
}

class Mutations : public testing::TestWithParam<Plant> {};

TEST_P(Mutations, AreSeen) {
  const Plant& plant = GetParam();
  const Feature& feature = feature_named(plant.feature);
  Recipe recipe = *recipe_named(plant.recipe);
  feature.tweak(recipe);
  Call call = make_call(feature, 11);
  spread_magnitudes(call);
  Laid laid = lay_out(call, feature.how);
  const Outcome outcome = run_call(call, laid, recipe);
  ASSERT_TRUE(outcome.status.ok()) << outcome.status.message();
  const std::int64_t spared = spared_rows(outcome.resolved, call.total_rows());
  const auto apart = [&](Mutation mutation) {
    const ModelOutput model = model_attention(call, outcome.model_options(mutation));
    return distance(outcome.out, model.out, call.dim_v, spared).trimmed;
  };
  EXPECT_LE(apart(Mutation::none), tight_bound(Format::f32));
  EXPECT_GT(apart(plant.mutation), 2 * tight_bound(Format::f32));
}

INSTANTIATE_TEST_SUITE_P(Cpu, Mutations, testing::ValuesIn(plants()),
                         [](const auto& plant) { return plant.param.name; });

}  // namespace
}  // namespace qattn::test
