// Rows whose mass lies on a token without a value, on the emulated GPU kernels with FP8's P, over
// seeds.
#include "emulated/on_gpu.hpp"

namespace qattn::test {
namespace {

class EmulatedZeroSink : public OnGpuTest {
 protected:
  void expect_match(Feature f, std::uint64_t seed, int splits) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    f.family = Family::zero_sink;
    const Call call = make_call(f, seed);
    Laid laid = lay_out(call, f.how);
    const Outcome now = run(call, laid, 1, splits);
    expect_matches_model(now, call, f.how.output, model_attention(call, now.model_options()));
  }
  static Feature feature(std::int64_t sq, std::int64_t sk, Format output) {
    Feature f;
    f.sq = {sq, sq}, f.sk = {sk, sk}, f.heads_q = f.heads_k = 1, f.dim = f.dim_v = 32;
    f.how.input = f.how.output = output;
    return f;
  }
};

TEST_P(EmulatedZeroSink, OfFewQueries) {
  for (std::uint64_t seed = 1; seed <= 30; ++seed) {
    const int splits = seed % 4 < 2 ? 2 : 1;
    expect_match(feature(4, 328, seed % 2 ? Format::bf16 : Format::f16), seed, splits);
    if (HasFailure()) return;
  }
}

TEST_P(EmulatedZeroSink, OfManyQueries) {
  for (std::uint64_t seed = 1; seed <= 6; ++seed) {
    expect_match(feature(70, 200, seed % 2 ? Format::f16 : Format::bf16), seed, 1);
    if (HasFailure()) return;
  }
}

std::vector<OnGpu> with_fp8() {
  std::vector<OnGpu> all = everywhere();
  std::erase_if(all, [](const OnGpu& on) { return on.recipe.p != Format::e4m3; });
  return all;
}

INSTANTIATE_TEST_SUITE_P(Cover, EmulatedZeroSink, testing::ValuesIn(with_fp8()), recipe_name);

}  // namespace
}  // namespace qattn::test
