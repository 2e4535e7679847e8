// Scores below the floats on the emulated GPU kernels, whole and with their keys in parts.
#include "conformance/overflow.hpp"

#include "emulated/on_gpu.hpp"
#include "support/thorough.hpp"

namespace qattn::test {
namespace {

class EmulatedOverflow : public OnGpuTest {
 protected:
  Feature small(std::int64_t sq, std::int64_t sk, std::int64_t dim = 64) const {
    Feature f = feature(sq, sk, 2, 1);
    f.sq = {sq}, f.sk = {sk}, f.dim = f.dim_v = dim, f.options.causal = false;
    return f;
  }
  /// `pack`, `splits`: as ForceSplitKv has them.
  void expect_bad(const Feature& f, int pack = 1, int splits = 1) {
    for (const Toggle smooth : {Toggle::automatic, Toggle::off}) {
      expect_rows_below_floats_are_bad(f, [=, this](const Call& call, Laid& laid) {
        const ForceSplitKv forced(pack, splits);
        Recipe r = recipe();
        if (has_codes(r.qk)) r.smooth_k = smooth;
        return run_emulated(call, laid, r, every_timing().subspan(1, 1));
      });
      if (HasFailure()) return;
    }
  }
};

TEST_P(EmulatedOverflow, OfAllKeys) {
  expect_bad(small(40, 256));
  expect_bad(small(40, 200, 128));
  expect_bad(small(2, 1));
}

TEST_P(EmulatedOverflow, WhereKeysAreSplit) {
  expect_bad(small(40, 512), 1, 2);
  expect_bad(small(15, 300), 2, 3);
}

TEST_P(EmulatedOverflow, BesideRowsThatSeeNothing) {
  Feature causal = small(200, 130), padded = small(40, 200), split = small(200, 300);
  causal.options.causal = true;
  padded.sq = {40, 40}, padded.sk = {200, 200}, padded.used_k = {150, 0};
  padded.how.seqused_k = true;
  split.sk = {190}, split.options.causal = true;
  expect_bad(causal);
  expect_bad(padded);
  expect_bad(split, 1, 2);
}

TEST_P(EmulatedOverflow, UnderMasks) {
  for (const char* name : {"mask_bool", "block_mask", "window_both", "sinks"}) {
    SCOPED_TRACE(name);
    Feature f = with_inputs(feature_named(name), recipe(), Format::bf16);
    f.heads_q = 2, f.heads_k = 1, f.sq.resize(1), f.sk.resize(1);
    expect_bad(f);
    if (HasFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(Cover, EmulatedOverflow, testing::ValuesIn(a_third(everywhere(), 1)),
                         recipe_name);

}  // namespace
}  // namespace qattn::test
