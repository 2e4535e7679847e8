// The LSE of rows that one key dominates, on instruction sets of this CPU in turn.
#include "conformance/dominated_rows.hpp"

#include <gtest/gtest.h>

namespace qattn::test {
namespace {

class DominatedRows : public testing::TestWithParam<Recipe> {
 protected:
  void expect_exact(const Feature& f) {
    for (const std::string& isa : turns_.next()) {
      SCOPED_TRACE(isa);
      const ForceIsa forced(isa);
      expect_exact_lse(
          f, [](const Call& call, Laid& laid) { return run_call(call, laid, GetParam()); });
      if (HasFailure()) return;
    }
  }
  static Feature feature(std::int64_t sq, std::int64_t sk) {
    Feature f;
    f.sq = {sq}, f.sk = {sk}, f.heads_q = 2, f.heads_k = 1;
    f.how.input = Format::bf16;
    return f;
  }

 private:
  IsaTurns turns_;
};

TEST_P(DominatedRows, OfOneKey) { expect_exact(feature(40, 1)); }
TEST_P(DominatedRows, OfManyKeys) { expect_exact(feature(40, 300)); }
TEST_P(DominatedRows, OfFewQueriesOverSplitKeys) { expect_exact(feature(3, 2100)); }
TEST_P(DominatedRows, UnderMasks) {
  Feature f = feature(40, 300);
  f.options.window_left = 1000, f.options.softcap = 500;
  expect_exact(f);
}

INSTANTIATE_TEST_SUITE_P(Cpu, DominatedRows, testing::ValuesIn(recipes().begin(), recipes().end()),
                         [](const auto& recipe) { return recipe.param.name; });

}  // namespace
}  // namespace qattn::test
