// One key beside which all others are small, on every instruction set of this CPU.
#include "conformance/lost_mass.hpp"

#include <gtest/gtest.h>

namespace qattn::test {
namespace {

class LostMass : public testing::TestWithParam<const char*> {
 protected:
  static void expect_kept(std::int64_t queries, std::int64_t keys) {
    const Recipe recipe = *recipe_named(GetParam());
    Feature f;
    f.sq = {queries}, f.sk = {keys}, f.heads_q = 2, f.heads_k = 1;
    for (const std::string& isa : isas()) {
      SCOPED_TRACE(isa);
      const ForceIsa forced(isa);
      if (!forced.available()) continue;
      expect_mass_kept(f,
                       [&](const Call& call, Laid& laid) { return run_call(call, laid, recipe); });
    }
  }
};

TEST_P(LostMass, BesideADominatingKey) {
  for (const std::int64_t keys : {64, 300, 1000}) expect_kept(40, keys);
}

TEST_P(LostMass, OfFewQueries) { expect_kept(3, 700); }

INSTANTIATE_TEST_SUITE_P(Cpu, LostMass, testing::Values("int8_full"),
                         [](const auto& recipe) { return std::string(recipe.param); });

}  // namespace
}  // namespace qattn::test
