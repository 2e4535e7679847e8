// NaN and Inf in operands of Hopper's kernels for 16-bit V, where windows, masks and pages decide
// who sees them: rows that do become NaN, all others stay what they were. And scores below the
// floats in all of Hopper's kernels.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "emulated/emulated_backend.hpp"
#include "emulated/matrix.hpp"
#include "support/thorough.hpp"

namespace qattn::test {
namespace {

struct Hiding {
  std::string name;
  Feature feature;
  std::vector<std::int64_t> keys;  ///< of head 0, sequence 1, where something bad will lie
  int splits = 0;
};

std::vector<Hiding> ways_to_hide() {
  std::vector<Hiding> all;
  const auto add = [&](const char* name, std::int64_t sq, std::int64_t sk,
                       std::vector<std::int64_t> keys, auto edit) {
    Feature f;
    f.name = name;
    f.heads_q = 2, f.heads_k = 1, f.dim = f.dim_v = 32;
    f.sq = {sq, sq}, f.sk = {sk, sk};
    edit(f);
    all.push_back({name, f, std::move(keys)});
  };
  // Tiles that a block sees whole, sees in part and does not see.
  add("window", 400, 420, {30, 190, 300},
      [](Feature& f) { f.options.causal = true, f.options.window_left = 260; });
  add("window_of_both_sides", 300, 300, {0, 130},
      [](Feature& f) { f.options.window_left = 200, f.options.window_right = 150; });
  add("window_splits", 4, 900, {397, 520, 898},
      [](Feature& f) { f.options.causal = true, f.options.window_left = 500; });
  all.back().splits = 3;
  add("window_splits_blocks", 300, 420, {30, 190, 300},
      [](Feature& f) { f.options.causal = true, f.options.window_left = 260; });
  all.back().splits = 2;
  add("mask", 70, 200, {5, 140}, [](Feature& f) { f.mask = MaskShape::full; });
  add("mask_bits", 70, 203, {5, 140},
      [](Feature& f) { f.mask = MaskShape::full, f.bit_mask = true; });
  add("mask_additive", 70, 200, {5, 140},
      [](Feature& f) { f.mask = MaskShape::full, f.boolean_mask = false, f.options.softcap = 3; });
  add("alibi_window", 150, 200, {70, 199},
      [](Feature& f) { f.alibi = true, f.options.window_left = 40, f.options.window_right = 3; });
  add("block_mask", 270, 330, {10, 100, 150, 320}, [](Feature& f) {
    f.block_mask = MaskShape::full, f.options.block_mask_q = 128, f.options.block_mask_k = 64;
  });
  add("pages", 150, 256, {31, 180}, [](Feature& f) {
    f.how.page_size = 32, f.used_k = {256, 230}, f.options.causal = true;
    f.options.window_left = 60;
  });
  add("pages_causal", 300, 300, {140, 290}, [](Feature& f) {
    f.how.page_size = 64, f.sk = {320, 320}, f.used_k = {256, 310}, f.options.causal = true;
  });
  // Above 128 channels: other tiles, also of the kernel that does blocks again.
  for (const std::string name : {"window", "block_mask", "pages", "pages_causal"}) {
    Hiding wide = *std::ranges::find(all, name, &Hiding::name);
    wide.name += "_wide";
    wide.feature.dim = wide.feature.dim_v = 160;
    all.push_back(std::move(wide));
  }
  return all;
}

bool sees(const Call& call, std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) {
  const AttentionOptions& o = call.options;
  const Sequence& s = call.sequences[static_cast<std::size_t>(b)];
  const std::int64_t diagonal = i + s.len_k - s.len_q, right = o.causal ? 0 : o.window_right;
  if (j >= s.len_k || (right >= 0 && j > diagonal + right)) return false;
  if (o.window_left >= 0 && j < diagonal - o.window_left) return false;
  if (!call.mask.shape.empty()) {
    const float m = call.mask.at(b, h, i, j);
    if (call.mask.boolean ? m == 0 : m == -std::numeric_limits<float>::infinity()) return false;
  }
  return call.block_mask.shape.empty() ||
         call.block_mask.at(b, h, i / o.block_mask_q, j / o.block_mask_k) != 0;
}

enum class Expected { as_before, bad, either };

/// What becomes of a row when key `key` is bad: its scale is that of 64 keys, if it has one.
Expected expected(const Call& call, bool scaled, std::int64_t b, std::int64_t h, std::int64_t i,
                  std::int64_t key) {
  if (b != 1) return Expected::as_before;
  if (sees(call, b, h, i, key)) return Expected::bad;
  for (std::int64_t j = key / 64 * 64; scaled && j < key / 64 * 64 + 64; ++j) {
    if (sees(call, b, h, i, j)) return Expected::either;
  }
  return Expected::as_before;
}

struct HidingRecipe {
  Hiding hiding;
  Recipe recipe;
};

void PrintTo(const HidingRecipe& c, std::ostream* out) {
  *out << c.recipe.name << " " << c.hiding.name;
}

class HopperBadKeys : public testing::TestWithParam<HidingRecipe> {
 protected:
  Outcome run(const Call& call, Laid& laid) {
    Recipe recipe = GetParam().recipe;
    recipe.smooth_k = Toggle::off;
    return run_emulated(call, laid, recipe, every_timing().subspan(turn_++ % 3, 1));
  }

 private:
  const OnArchitecture on_{90};
  const ForceSplitKv forced_{0, GetParam().hiding.splits};
  std::size_t turn_ = 0;
};

TEST_P(HopperBadKeys, SpoilWhoSeesThem) {
  const auto& [hiding, recipe] = GetParam();
  const Feature f = with_inputs(hiding.feature, recipe, Format::bf16);
  const Call call = make_call(f, 11);
  Laid laid = lay_out(call, f.how);
  const Outcome clean = run(call, laid);
  ASSERT_FALSE(HasFailure());
  EXPECT_EQ(clean.plan.find("portable"), std::string::npos) << clean.plan;
  const double values[] = {NAN, -INFINITY, INFINITY};
  std::size_t n = 0;
  std::int64_t seen = 0, hidden = 0;
  for (const Operand operand : {Operand::k, Operand::v}) {
    for (const std::int64_t key : hiding.keys) {
      const double value = values[n++ % 3];
      SCOPED_TRACE((operand == Operand::k ? "k " : "v ") + std::to_string(key) + " " +
                   std::to_string(value));
      Laid bad = lay_out(call, f.how);
      poke(bad, call, operand, 1, 0, key, 5, value);
      const Outcome now = run(call, bad);
      ASSERT_FALSE(HasFailure());
      const bool scaled = operand == Operand::k && has_codes(now.resolved.qk);
      for (std::int64_t b = 0; b < 2; ++b) {
        for (std::int64_t h = 0; h < call.heads_q; ++h) {
          for (std::int64_t i = 0; i < f.sq[0]; ++i) {
            SCOPED_TRACE("row " + std::to_string(b) + " " + std::to_string(h) + " " +
                         std::to_string(i));
            const Expected fate = expected(call, scaled, b, h, i, key);
            if (fate == Expected::either) continue;
            const std::int64_t row = call.row(b, h, i);
            double square = 0, error = 0;
            for (std::int64_t c = 0; c < call.dim_v; ++c) {
              const double x = clean.out[row * call.dim_v + c];
              const double y = now.out[row * call.dim_v + c];
              if (fate == Expected::bad) {
                ASSERT_TRUE(std::isnan(y)) << y;
              }
              square += x * x, error += (y - x) * (y - x);
            }
            if (fate == Expected::bad) {
              ++seen;
              ASSERT_TRUE(operand == Operand::v || std::isnan(now.lse[row]));
              continue;
            }
            hidden += b;
            // A block may be done again by a kernel that rounds P elsewhere.
            ASSERT_LE(error, 1e-4 * square);
            ASSERT_TRUE(now.lse[row] == clean.lse[row] ||
                        std::abs(now.lse[row] - clean.lse[row]) < 1e-3);
          }
        }
      }
    }
  }
  EXPECT_GT(seen, 0);
  EXPECT_GT(hidden, 0);
}

/// Rows whose scores all lie below the floats become NaN in every tile, edge tiles among them: no
/// row looks as if it saw nothing.
TEST(HopperScores, BeyondFloatsAreNotHidden) {
  const OnArchitecture on(90);
  for (const char* name : {"int8_full", "int8_fp8", "fp8", "int8", "bf16"}) {
    for (const std::int64_t keys : {100, 128, 228}) {
      SCOPED_TRACE(std::string(name) + " " + std::to_string(keys));
      Recipe recipe = *recipe_named(name);
      recipe.smooth_k = Toggle::off;
      Feature f = with_inputs(Feature(), recipe, Format::bf16);
      f.heads_q = f.heads_k = 1, f.sq = {70}, f.sk = {keys};
      f.options.softmax_scale = 100;
      const Call call = make_call(f, 3);
      Laid laid = lay_out(call, f.how);
      for (std::int64_t c = 0; c < call.dim; ++c) {
        for (std::int64_t i = 0; i < f.sq[0]; ++i) poke(laid, call, Operand::q, 0, 0, i, c, 1e18);
        for (std::int64_t j = 0; j < keys; ++j) poke(laid, call, Operand::k, 0, 0, j, c, -1e18);
      }
      const Outcome now = run_emulated(call, laid, recipe, every_timing().first(1));
      EXPECT_EQ(now.plan.find("portable"), std::string::npos) << now.plan;
      for (const float x : now.out) ASSERT_TRUE(std::isnan(x)) << x;
      for (const float x : now.lse) ASSERT_TRUE(std::isnan(x)) << x;
    }
  }
}

/// What the kernels leave to the portable one says so.
TEST(HopperPlan, NamesThePortableKernel) {
  const OnArchitecture on(90);
  for (const char* name : {"bf16", "int8"}) {
    const Recipe recipe = *recipe_named(name);
    const auto expect = [&](std::int64_t dim, std::int64_t page_size, Strides strides,
                            bool portable, std::int64_t queries = 200) {
      Feature f = with_inputs(Feature(), recipe, Format::bf16);
      f.dim = f.dim_v = dim, f.sq = {queries}, f.sk = {768}, f.heads_q = 2, f.heads_k = 1;
      f.how.page_size = page_size, f.how.strides = strides;
      const Call call = make_call(f, 1);
      const Laid laid = lay_out(call, f.how);
      const EmulatedBackend backend(90);
      AttentionOptions options = call.options;
      options.recipe = recipe;
      const std::string text = plan(laid.tensors(), options)->to_string();
      EXPECT_EQ(text.find("by the portable kernel") != std::string::npos, portable)
          << dim << " " << page_size << "\n"
          << text;
    };
    for (const std::int64_t page_size : {0, 8, 16, 48, 64, 192, 256}) {
      const bool odd_pages = page_size == 8 || page_size == 48;
      expect(64, page_size, Strides::dense, odd_pages || page_size == 192);
      expect(256, page_size, Strides::dense, odd_pages);  // tiles of 64 keys
      expect(64, page_size, Strides::odd, true);
      expect(256, page_size, Strides::odd, true);
    }
    // Parts of few queries of wide rows, which the portable kernel could not do again.
    expect(128, 0, Strides::dense, false, 1);
    expect(256, 0, Strides::dense, true, 1);
  }
}

std::vector<HidingRecipe> cases() {
  std::vector<HidingRecipe> all;
  for (const Hiding& hiding : ways_to_hide()) {
    for (const char* name : {"bf16", "f16", "int8"}) all.push_back({hiding, *recipe_named(name)});
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Cover, HopperBadKeys, testing::ValuesIn(a_third(cases(), 0)),
                         [](const auto& c) {
                           return c.param.recipe.name + "_" + c.param.hiding.name;
                         });

}  // namespace
}  // namespace qattn::test
