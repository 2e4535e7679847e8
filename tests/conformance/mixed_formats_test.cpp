// Q in another float format than K and V, as over a cache in 16 bits: what comes out is bit for bit
// what all of them in float32 give, on instruction sets of this CPU in turn.
#include <gtest/gtest.h>

#include <utility>

#include "conformance/runner.hpp"
#include "support/numbers.hpp"

namespace qattn::test {
namespace {

class MixedFormats : public testing::TestWithParam<Recipe> {
 protected:
  /// `formats`: of Q, and of K and V.
  void expect_same(const char* feature, Format of_q, Format of_kv) {
    SCOPED_TRACE(feature);
    Feature f = feature_named(feature);
    f.how.input = Format::f32;
    Call call = make_call(f, 5);
    for (Sequence& s : call.sequences) {  // numbers that each of its formats has
      for (float& x : s.q) x = static_cast<float>(round_real(static_cast<double>(x), of_q));
      for (std::vector<float>* operand : {&s.k, &s.v}) {
        for (float& x : *operand) {
          x = static_cast<float>(round_real(static_cast<double>(x), of_kv));
        }
      }
    }
    Laid wide = lay_out(call, f.how);
    f.how.input = of_q;
    Laid queries = lay_out(call, f.how);
    f.how.input = of_kv;
    Laid mixed = lay_out(call, f.how);
    mixed.q = std::move(queries.q);
    for (const std::string& isa : turns_.next()) {
      SCOPED_TRACE(isa);
      const ForceIsa forced(isa);
      const Outcome want = run_call(call, wide, GetParam());
      const Outcome got = run_call(call, mixed, GetParam());
      ASSERT_TRUE(want.status.ok()) << want.status.message();
      ASSERT_TRUE(got.status.ok()) << got.status.message();
      EXPECT_TRUE(same_bits(got, want));
      EXPECT_EQ(got.violation, "");
    }
  }

 private:
  IsaTurns turns_;
};

TEST_P(MixedFormats, GiveWhatFloat32Gives) {
  for (const char* feature : {"plain", "decode", "decode_long", "causal", "varlen", "paged_16"}) {
    expect_same(feature, Format::f32, Format::f16);
    expect_same(feature, Format::bf16, Format::f16);
    expect_same(feature, Format::f16, Format::f32);
    if (HasFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(Cpu, MixedFormats, testing::ValuesIn(recipes().begin(), recipes().end()),
                         [](const auto& recipe) { return recipe.param.name; });

}  // namespace
}  // namespace qattn::test
