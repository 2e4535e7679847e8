// Rows whose mass lies on a token without a value, on instruction sets of this CPU in turn, over
// many seeds: what they give is small, and few codes of FP8's P make it.
#include <gtest/gtest.h>

#include "conformance/runner.hpp"

namespace qattn::test {
namespace {

class ZeroSink : public testing::TestWithParam<const char*> {
 protected:
  void expect_match(Feature f, std::uint64_t seed) {
    const Recipe recipe = *recipe_named(GetParam());
    f.family = Family::zero_sink;
    const Call call = make_call(f, seed);
    Laid laid = lay_out(call, f.how);
    ModelOutput model;
    for (const std::string& isa : turns_.next()) {
      SCOPED_TRACE(isa + ", seed " + std::to_string(seed));
      const ForceIsa forced(isa);
      const Outcome now = run_call(call, laid, recipe);
      if (model.out.empty()) model = model_attention(call, now.model_options());
      expect_matches_model(now, call, f.how.output, model);
    }
  }
  static Feature feature(std::int64_t sq, std::int64_t sk, Format output) {
    Feature f;
    f.sq = {sq, sq}, f.sk = {sk, sk}, f.heads_q = f.heads_k = 1, f.dim = f.dim_v = 32;
    f.how.input = f.how.output = output;
    return f;
  }

 private:
  IsaTurns turns_;
};

TEST_P(ZeroSink, OfFewQueries) {
  for (std::uint64_t seed = 1; seed <= 200; ++seed) {
    expect_match(feature(4, 328, seed % 2 ? Format::bf16 : Format::f16), seed);
    if (HasFailure()) return;
  }
}

TEST_P(ZeroSink, OfManyQueries) {
  for (std::uint64_t seed = 1; seed <= 30; ++seed) {
    expect_match(feature(70, 200, seed % 2 ? Format::f16 : Format::bf16), seed);
    if (HasFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(Cpu, ZeroSink, testing::Values("fp8", "int8_fp8"),
                         [](const auto& recipe) { return std::string(recipe.param); });

}  // namespace
}  // namespace qattn::test
