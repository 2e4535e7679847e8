// Biases of any size on instruction sets of this CPU in turn (docs/NUMERICS.md, "Sizes").
#include "conformance/extreme_bias.hpp"

#include <gtest/gtest.h>

namespace qattn::test {
namespace {

class ExtremeBias : public testing::TestWithParam<Recipe> {
 protected:
  template <class Expect>
  void on_isas(Expect expect) {
    for (const std::string& isa : turns_.next()) {
      SCOPED_TRACE(isa);
      const ForceIsa forced(isa);
      expect([&](const Call& call, Laid& laid) { return run_call(call, laid, GetParam()); });
      if (HasFailure()) return;
    }
  }
  static Feature feature(std::int64_t sq, std::int64_t sk) {
    Feature f;
    f.sq = {sq}, f.sk = {sk}, f.heads_q = 2, f.heads_k = 1;
    return f;
  }
  void expect_biases(const Feature& f) {
    on_isas([&](const RunCall& run) { expect_extreme_biases(f, GetParam(), run); });
  }

 private:
  IsaTurns turns_;
};

TEST_P(ExtremeBias, RowsAreMeansOfWhatTheySee) {
  for (const std::int64_t keys : {1, 2, 17, 63, 64, 65, 128, 129, 200, 300}) {
    expect_biases(feature(40, keys));
    if (HasFailure()) return;
  }
}

TEST_P(ExtremeBias, UnderOtherMasks) {
  Feature causal = feature(150, 200), window = feature(150, 160), padded = feature(40, 300);
  causal.options.causal = true;
  window.options.window_left = 70, window.options.window_right = 3;
  padded.sq = {40, 40}, padded.sk = {300, 300}, padded.used_k = {300, 131};
  padded.how.seqused_k = true;
  for (const Feature& f : {causal, window, padded}) expect_biases(f);
}

TEST_P(ExtremeBias, OfFewQueriesOverSplitKeys) { expect_biases(feature(12, 2100)); }

TEST_P(ExtremeBias, OfSlopes) {
  for (const bool causal : {false, true}) {
    Feature f = feature(70, 150);
    f.options.causal = causal;
    on_isas([&](const RunCall& run) { expect_extreme_slopes(f, GetParam(), run); });
  }
}

INSTANTIATE_TEST_SUITE_P(Cpu, ExtremeBias, testing::ValuesIn(recipes().begin(), recipes().end()),
                         [](const auto& recipe) { return recipe.param.name; });

}  // namespace
}  // namespace qattn::test
