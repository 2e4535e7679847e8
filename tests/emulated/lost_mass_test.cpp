// One key beside which all others are small, on the emulated GPU kernels.
#include "conformance/lost_mass.hpp"

#include "emulated/on_gpu.hpp"
#include "support/thorough.hpp"

namespace qattn::test {
namespace {

class EmulatedLostMass : public OnGpuTest {
 protected:
  void expect_kept(std::int64_t queries, std::int64_t keys, std::int64_t dim, int splits) {
    if (recipe().p != Format::u8) GTEST_SKIP() << "P is no integer";
    Feature f = feature(queries, keys, 2, 1);
    f.sq = {queries}, f.sk = {keys}, f.dim = f.dim_v = dim, f.options.causal = false;
    expect_mass_kept(
        f, [=, this](const Call& call, Laid& laid) { return run(call, laid, 1, splits); });
  }
};

TEST_P(EmulatedLostMass, BesideADominatingKey) { expect_kept(40, 64, 64, 1); }
TEST_P(EmulatedLostMass, OfSeveralTiles) { expect_kept(40, 300, 128, 1); }
TEST_P(EmulatedLostMass, WhereKeysAreSplit) { expect_kept(40, 600, 64, 2); }

INSTANTIATE_TEST_SUITE_P(Cover, EmulatedLostMass, testing::ValuesIn(a_third(everywhere(), 0)),
                         recipe_name);

}  // namespace
}  // namespace qattn::test
