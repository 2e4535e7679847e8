// Biases of any size on the emulated GPU kernels, whole and with their keys in parts.
#include "conformance/extreme_bias.hpp"

#include "emulated/on_gpu.hpp"
#include "support/thorough.hpp"

namespace qattn::test {
namespace {

class EmulatedExtremeBias : public OnGpuTest {
 protected:
  Feature small(std::int64_t sq, std::int64_t sk, std::int64_t dim = 64) const {
    Feature f = feature(sq, sk, 2, 1);
    f.sq = {sq}, f.sk = {sk}, f.dim = f.dim_v = dim, f.options.causal = false;
    return f;
  }
  /// `pack`, `splits`: as ForceSplitKv has them.
  RunCall run_on(int pack, int splits) {
    return [=, this](const Call& call, Laid& laid) { return run(call, laid, pack, splits); };
  }
};

TEST_P(EmulatedExtremeBias, RowsAreMeansOfWhatTheySee) {
  for (const std::int64_t keys : {1, 65, 130, 300}) {
    expect_extreme_biases(small(40, keys, keys == 130 ? 128 : 64), recipe(), run_on(1, 1));
    if (HasFailure()) return;
  }
}

TEST_P(EmulatedExtremeBias, WhereKeysAreSplit) {
  expect_extreme_biases(small(40, 300), recipe(), run_on(1, 2));
  expect_extreme_biases(small(15, 300), recipe(), run_on(2, 3));
}

TEST_P(EmulatedExtremeBias, UnderOtherMasks) {
  Feature causal = small(140, 200), window = small(140, 160), padded = small(40, 300);
  causal.options.causal = true;
  window.options.window_left = 70, window.options.window_right = 3;
  padded.used_k = {231}, padded.how.seqused_k = true;
  for (const Feature& f : {causal, window, padded}) {
    expect_extreme_biases(f, recipe(), run_on(1, 1));
  }
}

TEST_P(EmulatedExtremeBias, OfSlopes) {
  for (const bool causal : {false, true}) {
    Feature f = small(70, 150);
    f.options.causal = causal;
    expect_extreme_slopes(f, recipe(), run_on(1, causal ? 1 : 2));
  }
}

INSTANTIATE_TEST_SUITE_P(Cover, EmulatedExtremeBias, testing::ValuesIn(a_third(everywhere(), 1)),
                         recipe_name);

}  // namespace
}  // namespace qattn::test
