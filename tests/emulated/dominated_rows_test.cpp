// The LSE of rows that one key dominates, on the emulated GPU kernels.
#include "conformance/dominated_rows.hpp"

#include "emulated/on_gpu.hpp"
#include "support/thorough.hpp"

namespace qattn::test {
namespace {

class EmulatedDominatedRows : public OnGpuTest {
 protected:
  /// `pack`, `splits`: as ForceSplitKv has them.
  void expect_exact(std::int64_t queries, std::int64_t keys, std::int64_t dim, int pack, int splits,
                    bool general = false) {
    Feature f = feature(queries, keys, 2, 1);
    f.sq = {queries}, f.sk = {keys}, f.dim = f.dim_v = dim, f.options.causal = false;
    if (general) f.options.window_left = 1000, f.options.softcap = 500;
    expect_exact_lse(
        f, [=, this](const Call& call, Laid& laid) { return run(call, laid, pack, splits); });
  }
};

TEST_P(EmulatedDominatedRows, OfOneKey) { expect_exact(40, 1, 128, 1, 1); }
TEST_P(EmulatedDominatedRows, OfSeveralTiles) { expect_exact(40, 300, 64, 1, 1); }
TEST_P(EmulatedDominatedRows, OfWideHeads) { expect_exact(33, 130, 128, 1, 1); }
TEST_P(EmulatedDominatedRows, UnderMasks) { expect_exact(40, 200, 64, 1, 1, true); }
TEST_P(EmulatedDominatedRows, WhereKeysAreSplit) {
  expect_exact(40, 300, 64, 1, 2);
  expect_exact(3, 300, 64, 2, 3);
}

INSTANTIATE_TEST_SUITE_P(Cover, EmulatedDominatedRows, testing::ValuesIn(a_third(everywhere(), 0)),
                         recipe_name);

}  // namespace
}  // namespace qattn::test
