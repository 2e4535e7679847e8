// Block masks on the emulated GPU kernels: what is forbidden is skipped, and nothing else changes.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <utility>

#include "emulated/emulated_backend.hpp"
#include "emulated/matrix.hpp"

namespace qattn::test {
namespace {

Feature masked(const Recipe& recipe) {
  Feature f = feature_named("block_mask");
  f.heads_q = 2, f.heads_k = 1;
  return with_inputs(f, recipe, Format::bf16);
}

bool is_grouped(const Recipe& r) { return info(r.qk).group > 0; }

class EmulatedBlockMask : public testing::TestWithParam<Recipe> {};

TEST_P(EmulatedBlockMask, IsAMaskOfWholeBlocks) {
  // One path for both calls: Hopper's kernels take another for masks.
  const OnArchitecture on(is_grouped(GetParam()) ? 120 : 89);
  const Feature f = masked(GetParam());
  const Call call = make_call(f, 4);
  Laid laid = lay_out(call, f.how);
  const Outcome blocks = run_emulated(call, laid, GetParam());
  Call dense = call;
  dense.block_mask = {};
  dense.options.block_mask_q = dense.options.block_mask_k = 0;
  dense.mask.boolean = true;
  dense.mask.shape = {2, 2, 270, 330};
  for (std::int64_t n = 0; n < 2 * 2 * 270 * 330; ++n) {
    const std::int64_t j = n % 330, i = n / 330 % 270, h = n / (330 * 270) % 2, b = n / (660 * 270);
    dense.mask.values.push_back(call.block_mask.at(b, h, i / 128, j / 64));
  }
  Laid dense_laid = lay_out(dense, f.how);
  EXPECT_TRUE(same_bits(blocks, run_emulated(dense, dense_laid, GetParam())));
}

TEST_P(EmulatedBlockMask, RowsThatSeeNothingAreEmpty) {
  const Feature f = masked(GetParam());
  const Call call = make_call(f, 4);
  Laid laid = lay_out(call, f.how);
  const Outcome outcome = run_emulated(call, laid, GetParam());
  for (std::int64_t i = 128; i < 256; ++i) {  // the second row of blocks is blind
    const std::int64_t row = call.row(1, 1, i);
    ASSERT_EQ(outcome.lse[row], -std::numeric_limits<float>::infinity());
    ASSERT_EQ(outcome.out[row * call.dim_v], 0.0f);
  }
}

/// Keys of forbidden blocks are not read: NaN there stays there.
TEST_P(EmulatedBlockMask, ForbiddenKeysAreNotRead) {
  Recipe recipe = GetParam();
  recipe.smooth_k = Toggle::off;
  // A scale of V that the poked key shares with others would change with it.
  if (recipe.v == Format::e4m3) recipe.v_scale = {Granularity::per_block_channel, 64, 0};
  const Feature f = masked(recipe);
  Call call = make_call(f, 4);
  for (std::size_t n = 0; n < call.block_mask.values.size(); ++n) {
    if (n % 6 == 2) call.block_mask.values[n] = 0;  // keys 128 to 191, for everybody
  }
  Laid laid = lay_out(call, f.how);
  const Outcome clean = run_emulated(call, laid, recipe);
  for (std::int64_t b = 0; b < 2; ++b) {
    poke(laid, call, Operand::k, b, 0, 150, 3, NAN);
    poke(laid, call, Operand::v, b, 0, 160, 3, INFINITY);
  }
  const Outcome now = run_emulated(call, laid, recipe);
  if (free_scales(recipe.v)) {
    EXPECT_TRUE(same_bits(clean, now));
  } else {  // Hopper's kernel leaves such blocks to one that rounds P elsewhere
    const std::vector<double> was(clean.out.begin(), clean.out.end());
    EXPECT_LE(distance(now.out, was, call.dim_v).nrmse, 2e-3);
  }
}

TEST_P(EmulatedBlockMask, BlocksSmallerThanATileOfRowsAreRefused) {
  const std::pair<int, const char*> refusals[] = {
      {architecture_for(GetParam()),
       "block_mask_q: 64 is not a multiple of 128, the rows of a tile"},
      {90, "block_mask_q: 64 is not a multiple of 128, the rows of a block of work"}};
  for (const auto& [architecture, refusal] : refusals) {
    const bool grouped = is_grouped(GetParam());
    if (grouped && architecture == 90) continue;  // no kernel for these
    for (const std::int64_t dim : {64, 256}) {
      Feature f = masked(GetParam());
      f.dim = f.dim_v = dim;
      f.options.block_mask_q = 64;
      const Call call = make_call(f, 4);
      const Laid laid = lay_out(call, f.how);
      const EmulatedBackend backend(architecture);
      AttentionOptions options = call.options;
      options.recipe = GetParam();
      const std::string text = explain(laid.tensors(), options);
      const bool told = text.find(refusal) != std::string::npos;
      // Only the portable kernel's tiles of wide heads have 64 rows. Of narrow ones Hopper's
      // kernels for 16-bit V say what it says.
      if (grouped) {
        EXPECT_TRUE(told) << text;
      } else if (refusal == refusals[0].second) {
        EXPECT_EQ(told, dim == 64) << text;
      } else if (dim == 256 || has_codes(GetParam().v)) {
        EXPECT_TRUE(told) << text;
      }
    }
  }
}

/// Above 128 channels the portable kernel has tiles of 64 rows, on Hopper too.
TEST(EmulatedWideBlockMask, BlocksOf64RowsOnHopper) {
  const OnArchitecture on(90);
  for (const char* name : {"bf16", "int8", "int8_full"}) {
    SCOPED_TRACE(name);
    const Recipe recipe = *recipe_named(name);
    Feature f = masked(recipe);
    f.dim = f.dim_v = 256, f.sq = {200, 200};
    f.options.block_mask_q = 64;
    const Call call = make_call(f, 4);
    Laid laid = lay_out(call, f.how);
    const Outcome outcome = run_emulated(call, laid, recipe);
    EXPECT_NE(outcome.plan.find("kernel: sm80_prefill\n"), std::string::npos) << outcome.plan;
    ModelOptions options{.recipe = outcome.resolved, .tile_keys = outcome.tile_keys};
    options.lost_mass = lost_mass_of(outcome.plan);
    options.whole_references = has_whole_references(outcome.plan);
    options.splits = outcome.splits, options.tile_rows = outcome.tile_rows;
    const ModelOutput model = model_attention(call, options);
    EXPECT_LE(distance(outcome.out, model.out, call.dim_v).nrmse, 2e-3);
    EXPECT_LE(lse_distance(outcome.lse, model.lse, 0), 1e-3);
  }
}

INSTANTIATE_TEST_SUITE_P(Cover, EmulatedBlockMask, testing::ValuesIn(every_recipe()),
                         [](const auto& recipe) { return recipe.param.name; });

}  // namespace
}  // namespace qattn::test
