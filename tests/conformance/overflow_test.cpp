// Scores below the floats, on instruction sets of this CPU in turn.
#include "conformance/overflow.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

namespace qattn::test {
namespace {

class Overflow : public testing::TestWithParam<Recipe> {
 protected:
  template <class Expect>
  void on_isas(const Recipe& recipe, Expect expect) {
    for (const std::string& isa : turns_.next()) {
      SCOPED_TRACE(isa);
      const ForceIsa forced(isa);
      expect([&](const Call& call, Laid& laid) { return run_call(call, laid, recipe); });
      if (HasFailure()) return;
    }
  }
  /// With the recipe's own `smooth_k`, and without: means take such keys apart.
  void expect_bad(const Feature& f) {
    for (const Toggle smooth : {Toggle::automatic, Toggle::off}) {
      Recipe recipe = GetParam();
      recipe.smooth_k = smooth;
      on_isas(recipe, [&](const RunCall& run) { expect_rows_below_floats_are_bad(f, run); });
      if (HasFailure()) return;
    }
  }
  static Feature feature(std::int64_t sq, std::int64_t sk, Format input = Format::f32) {
    Feature f;
    f.sq = {sq}, f.sk = {sk}, f.heads_q = 2, f.heads_k = 1, f.how.input = input;
    return f;
  }

 private:
  IsaTurns turns_;
};

TEST_P(Overflow, OfAllKeys) {
  expect_bad(feature(40, 300));
  expect_bad(feature(40, 300, Format::bf16));
  expect_bad(feature(1, 1));
}

TEST_P(Overflow, OfFewQueriesOverSplitKeys) { expect_bad(feature(3, 2100)); }

TEST_P(Overflow, BesideRowsThatSeeNothing) {
  Feature causal = feature(200, 130), padded = feature(20, 200);
  causal.options.causal = true;
  padded.sq = {20, 20}, padded.sk = {200, 200}, padded.used_k = {150, 0};
  padded.how.seqused_k = true;
  for (const Feature& f : {causal, padded}) expect_bad(f);
}

TEST_P(Overflow, UnderMasks) {
  for (const char* name : {"mask_bool", "mask_additive", "block_mask", "function_of_masks",
                           "window_both", "alibi_more_queries", "sinks"}) {
    SCOPED_TRACE(name);
    expect_bad(feature_named(name));
    if (HasFailure()) return;
  }
}

/// Scores that are floats by themselves, and none in units of log2: a row that sees one is no row
/// that sees none.
TEST_P(Overflow, InUnitsOfLog2Alone) {
  Recipe recipe = GetParam();
  recipe.smooth_k = Toggle::off;
  for (const char* name : {"plain", "mask_bool", "block_mask"}) {
    SCOPED_TRACE(name);
    Feature f = feature_named(name);
    f.how.input = Format::bf16, f.options.softmax_scale = 1.0f;
    Call call = make_call(f, 3);
    for (Sequence& s : call.sequences) {
      const auto put = [&](std::vector<float>& x, float first) {
        for (std::size_t n = 0; n < x.size(); ++n) x[n] = n % call.dim == 0 ? first : 0.0f;
      };
      put(s.q, 0x1.bp63f), put(s.k, -0x1.cp63f);
    }
    Laid laid = lay_out(call, f.how);
    const Exact exact = reference(call, laid);
    on_isas(recipe, [&](const RunCall& run) {
      const Outcome now = run(call, laid);
      ASSERT_TRUE(now.status.ok()) << now.status.message();
      for (std::size_t row = 0; row < exact.lse.size(); ++row) {
        const bool blind = std::isinf(exact.lse[row]);
        ASSERT_EQ(now.lse[row] == -std::numeric_limits<float>::infinity(), blind) << "row " << row;
      }
    });
    if (HasFailure()) return;
  }
}

/// What lies below the floats weighs nothing beside what does not.
TEST_P(Overflow, BesideOneKeyWithinFloats) {
  const Recipe& recipe = GetParam();
  if (recipe.qk != Format::f32 && recipe.qk != Format::bf16) {
    GTEST_SKIP() << "keys share scales or a mean";
  }
  for (const char* name : {"plain", "decode_long", "alibi", "mask_additive", "window_both"}) {
    SCOPED_TRACE(name);
    const Feature& f = feature_named(name);
    Call call = make_call(f, 3);
    for (Sequence& s : call.sequences) {
      std::fill(s.q.begin(), s.q.end(), 0x1p60f), std::fill(s.k.begin(), s.k.end(), -0x1p80f);
      for (std::int64_t h = 0; h < call.heads_k; ++h) {
        const auto key = s.k.begin() + (h * s.len_k + s.len_k / 2) * call.dim;
        std::fill(key, key + call.dim, -0x1p-65f);
      }
    }
    Laid laid = lay_out(call, f.how);
    const Exact exact = reference(call, laid);
    on_isas(recipe, [&](const RunCall& run) {
      const Outcome now = run(call, laid);
      ASSERT_TRUE(now.status.ok()) << now.status.message();
      for (std::size_t row = 0; row < exact.lse.size(); ++row) {
        if (exact.lse[row] < -1e30) continue;  // the row does not see that key
        ASSERT_NEAR(now.lse[row], exact.lse[row], 1e-2) << "row " << row;
        for (std::size_t n = row * call.dim_v; n < (row + 1) * call.dim_v; ++n) {
          ASSERT_NEAR(now.out[n], exact.out[n], 2e-2) << "row " << row;
        }
      }
    });
    if (HasFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(Cpu, Overflow, testing::ValuesIn(recipes().begin(), recipes().end()),
                         [](const auto& recipe) { return recipe.param.name; });

}  // namespace
}  // namespace qattn::test
