// Values of any size, in one call, in one tile: what they do to scales and sums on the emulated GPU
// kernels.
#include <cmath>

#include "emulated/on_gpu.hpp"
#include "support/thorough.hpp"

namespace qattn::test {
namespace {

/// The product of `f`'s operands in 16 bits, on the same GPU.
Outcome of_16_bits(const Call& call, const Feature& f) {
  Laid laid = lay_out(call, f.how);
  const Recipe recipe = *recipe_named(f.how.input == Format::f16 ? "f16" : "bf16");
  return run_emulated(call, laid, recipe, every_timing().subspan(1, 1));
}

class EmulatedValues : public OnGpuTest {
 protected:
  /// What `f` gives where V of each token is as many times as large as size(token), beside 16 bits.
  template <class Size>
  void expect_near_16_bits(const Feature& f, Size size, double nrmse, double lse) {
    Call call = make_call(f, 5);
    for (Sequence& s : call.sequences) {
      for (std::size_t n = 0; n < s.v.size(); ++n) {
        s.v[n] *= size(static_cast<std::int64_t>(n) / call.dim_v % s.len_k);
      }
    }
    Laid laid = lay_out(call, f.how);
    const Outcome now = run(call, laid, 1, 1), want = of_16_bits(call, f);
    ASSERT_FALSE(HasFailure());
    EXPECT_LE(distance(now.out, widened(want.out), call.dim_v).nrmse, nrmse);
    EXPECT_LE(lse_distance(now.lse, widened(want.lse)), lse);
  }
};

/// Sums of u8 P are as small as V is large, and what rows are scaled by has V's units besides. P is
/// rounded with log2 of V's scale, whose last bits are larger then.
TEST_P(EmulatedValues, ValuesOfAnySize) {
  const Feature f = feature(130, 150, 4, 2);
  if (f.how.input == Format::f16) GTEST_SKIP() << "f16 holds no such values";
  const Call call = make_call(f, 5);
  Laid laid = lay_out(call, f.how);
  const Outcome one = run(call, laid, 1, 1);
  // 16-bit sums with V and e4m3 P, which is 2^8 times as large, have less room.
  const float largest = recipe().p == Format::u8 ? 0x1p121f : 0x1p110f;
  int turn = 0;
  for (const float size : {0x1p-80f, 0x1p-30f, 0x1p50f, 0x1p75f, 0x1p100f, largest}) {
    Call scaled = call;
    for (Sequence& s : scaled.sequences) {
      for (float& v : s.v) v *= size;
    }
    Laid now = lay_out(scaled, f.how);
    std::vector<double> want = widened(one.out);
    for (double& x : want) x *= size;
    const int splits = 1 + turn++ % 2;
    const Outcome outcome = run(scaled, now, 1, splits);
    ASSERT_FALSE(HasFailure());
    EXPECT_LE(distance(outcome.out, want, call.dim_v).nrmse, std::max(tolerance(), 1e-3))
        << size << ", splits " << splits;
  }
}

/// Rows that see small values alone share a warp with rows that see large ones.
TEST_P(EmulatedValues, ValuesOfAllSizes) {
  if (recipe().p != Format::u8) GTEST_SKIP() << "V has no scale a token";
  const Feature f = feature(130, 150, 4, 2);
  Call call = make_call(f, 5);
  const std::int64_t small = 150 - 130 + 4;  // tokens: four rows see no others
  for (Sequence& s : call.sequences) {
    for (std::size_t n = 0; n < s.v.size(); ++n) {
      const auto token = static_cast<std::int64_t>(n) / call.dim_v % s.room_k;
      s.v[n] *= token < small ? 0x1p-80f : 0x1p80f;
    }
  }
  Laid laid = lay_out(call, f.how);
  const Outcome whole = run(call, laid, 1, 1), parts = run(call, laid, 1, 2);
  ASSERT_FALSE(HasFailure());
  const auto width = static_cast<std::size_t>(call.dim_v);
  for (std::size_t at = 0; at < whole.out.size(); at += width) {
    double error = 0, norm = 0;
    for (std::size_t n = at; n < at + width; ++n) {
      error += std::pow((double{whole.out[n]} - parts.out[n]) * 0x1p60, 2);
      norm += std::pow(parts.out[n] * 0x1p60, 2);
    }
    // Parts know their own codes alone, of which a share may be lost ("Lost mass").
    ASSERT_LE(std::sqrt(error / norm), 1e-2) << "row " << at / width;
  }
}

/// A tile of 128 keys is two prepared tiles of V, of which each knows its own scales alone. Where
/// one has few codes, or none, beside the other's, its weights stay in the sum (docs/NUMERICS.md).
TEST_P(EmulatedValues, HalvesOfATileDiffer) {
  int turn = 0;
  for (const float size :
       {0x1p-1f, 0x1p-2f, 0x1p-3f, 0x1p-4f, 0x1p-5f, 0x1p-6f, 0x1p-8f, 0x1p-10f, 0x1p-30f}) {
    if (recipe().p != Format::u8 && size != 0x1p-8f) continue;  // others know no such halves
    for (const bool softcap : {false, true}) {
      const bool causal = (turn + softcap) % 2 == 1;
      const int small = turn++ / 2 % 2;
      SCOPED_TRACE(testing::Message() << size << " in halves " << small << ", causal " << causal
                                      << ", softcap " << softcap);
      Feature f = feature(130, 300, 4, 2);
      f.options.causal = causal, f.options.softcap = softcap ? 30.0f : 0.0f;
      const auto at = [&](std::int64_t token) { return token / 64 % 2 == small ? size : 1.0f; };
      const bool fp8 = has_fp8(recipe()), fp4 = recipe().qk == Format::nvfp4;
      const double bound = fp4 ? 0.25 : fp8 ? 8e-2 : 2e-2;
      expect_near_16_bits(f, at, bound, fp8 || fp4 ? 0.2 : 0.07);
    }
  }
}

/// Tokens of a tile have scales of their own, or a group's, which each meet the same rule. In the
/// second half of `beside` tiles of 128 keys half the tokens are small for the first half alone.
TEST_P(EmulatedValues, TokensOfATileDiffer) {
  if (recipe().p != Format::u8) GTEST_SKIP() << "V has no scale a token";
  for (const bool beside : {false, true}) {
    for (const float size : {0x1p-2f, 0x1p-3f, 0x1p-4f, 0x1p-5f, 0x1p-7f}) {
      SCOPED_TRACE(testing::Message() << size << (beside ? " and 1/4 beside 1" : " beside 1"));
      Feature f = feature(130, 300, 4, 2);
      f.options.causal = false;
      expect_near_16_bits(
          f,
          [&](std::int64_t token) {
            if (beside && token / 64 % 2 == 0) return 1.0f;
            return token % 2 == 0 ? size : beside ? 0.25f : 1.0f;
          },
          2.5e-2, 0.07);
    }
  }
}

/// Tokens whose V is zero weigh as much as their scores say, however these grow along the keys.
TEST_P(EmulatedValues, ZerosWeighAsOthers) {
  for (const bool rising : {false, true}) {
    Feature f = feature(2, 256, 2, 1);
    f.options.causal = false;
    Call call = make_call(f, 5);
    const double high = 20;  // of scores, in nats: 2^29; each half of K is exact in FP8
    for (Sequence& s : call.sequences) {
      std::fill(s.q.begin(), s.q.end(), 1.0f), std::fill(s.v.begin(), s.v.end(), 0.0f);
      for (std::size_t n = 0; n < s.k.size(); ++n) {
        const auto token = static_cast<std::int64_t>(n) / call.dim % s.len_k;
        const double score = (token < 128) == rising ? 0 : high;
        s.k[n] = static_cast<float>(score / std::sqrt(static_cast<double>(call.dim)));
      }
    }
    Laid laid = lay_out(call, f.how);
    const Outcome now = run(call, laid, 1, 1);
    ASSERT_FALSE(HasFailure());
    for (const float x : now.out) ASSERT_LE(std::abs(x), 1e-25f);  // no V is below 2^-90
    for (const float x : now.lse) EXPECT_NEAR(x, high + std::log(128.0), 0.2) << rising;
  }
}

INSTANTIATE_TEST_SUITE_P(Cover, EmulatedValues, testing::ValuesIn(a_third(everywhere(), 0)),
                         recipe_name);

}  // namespace
}  // namespace qattn::test
