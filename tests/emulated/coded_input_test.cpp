// Operands that come quantised must give, bit by bit, what quantising them in the call gives; but
// for rounding where decode over codes takes the call (coded_decode_test.cpp).
#include <gtest/gtest.h>

#include <cstring>

#include "conformance/coded.hpp"
#include "emulated/emulated_backend.hpp"
#include "emulated/matrix.hpp"

namespace qattn::test {
namespace {

struct Results {
  std::vector<float> out, lse;
  std::string kernel;
};

Results attend(const AttentionTensors& tensors, const Call& call, const Recipe& recipe,
               Laid& laid) {
  const EmulatedBackend backend(architecture_for(recipe));
  laid.out.clear();
  laid.lse.clear();
  AttentionOptions options = call.options;
  options.recipe = recipe;
  const Result<Plan> made = plan(tensors, options);
  EXPECT_TRUE(made.ok()) << made.status().message();
  EXPECT_TRUE(made.ok() && is_emulated(made->kernel()));
  const Status status = attention(tensors, options);
  EXPECT_TRUE(status.ok()) << status.message();
  return {laid.read_out(call), laid.read_lse(call), std::string(made->kernel())};
}

void expect_near(const Results& got, const Results& want, const Call& call) {
  const std::vector<double> out(want.out.begin(), want.out.end());
  const std::vector<double> lse(want.lse.begin(), want.lse.end());
  EXPECT_LE(distance(got.out, out, call.dim_v).nrmse, 1e-2);  // u8 P of other tiles
  EXPECT_LE(lse_distance(got.lse, lse), 3e-3);
}

class EmulatedCodedInput : public testing::TestWithParam<Recipe> {
 protected:
  /// Every mixture of coded and plain operands.
  void compare(const Feature& feature) {
    if (!has_codes(GetParam().qk)) GTEST_SKIP() << "no operand has codes";
    Recipe recipe = GetParam();
    recipe.smooth_k = Toggle::off;
    recipe.q_scale.granularity = Granularity::per_token;
    // Where some tokens are NaN each has a scale of its own; V in e4m3 has no kernel for those.
    const bool alone = feature.how.page_size > 0 || feature.how.seqused_k;
    recipe.k_scale = {alone ? Granularity::per_token : Granularity::per_block, alone ? 0 : 64, 0};
    const bool pv = has_codes(recipe.v) && !(alone && recipe.v != Format::s8);
    if (pv) {
      recipe.v_scale.granularity =
          recipe.v == Format::s8 ? Granularity::per_token : Granularity::per_channel;
    }
    const Feature f = with_inputs(feature, recipe, Format::bf16);
    const Call call = make_call(f, 21);
    Laid laid = lay_out(call, f.how);
    const AttentionTensors plain = laid.tensors();
    const auto coded = [&](Role role, const TensorView& x, Format format, const Scaling& scaling,
                           const TensorView& cu) {
      return quantised(x, options_for(role, format, scaling, call.options.layout), cu);
    };
    const TensorView& cu_k = plain.cu_seqlens_k;
    CodedTensor q = coded(Role::q, plain.q, recipe.qk, recipe.q_scale, plain.cu_seqlens_q), v;
    CodedTensor k = coded(Role::k, plain.k, recipe.qk, recipe.k_scale, cu_k);
    if (pv) v = coded(Role::v, plain.v, recipe.v, recipe.v_scale, cu_k);
    const Results want = attend(plain, call, recipe, laid);
    ASSERT_FALSE(HasFailure());
    for (int which = 1; which < (pv ? 8 : 4); ++which) {
      AttentionTensors t = plain;
      if (which & 1) t.q = q.codes.view(), t.q_scale = q.scale.view();
      if (which & 2) t.k = k.codes.view(), t.k_scale = k.scale.view();
      if (which & 4) t.v = v.codes.view(), t.v_scale = v.scale.view();
      const Results got = attend(t, call, recipe, laid);
      if (got.kernel == "uniform8_decode") {
        expect_near(got, want, call);
      } else {
        EXPECT_TRUE(same_bits(got.out, want.out) && same_bits(got.lse, want.lse));
      }
      if (HasFailure()) {
        FAIL() << (which & 1 ? "q" : "") << (which & 2 ? "k" : "") << (which & 4 ? "v" : "")
               << " as codes";
      }
    }
  }
};

Feature small() {
  Feature f;
  f.heads_q = 2, f.heads_k = 1;
  f.sq = {40, 66}, f.sk = {150, 130}, f.options.causal = true;
  f.how.packed_q = f.how.packed_k = true;
  return f;
}

TEST_P(EmulatedCodedInput, Packed) { compare(small()); }

TEST_P(EmulatedCodedInput, DenseWithOddDimsAndSoftcap) {
  Feature f = small();
  f.how.packed_q = f.how.packed_k = false;
  f.sq = {40, 40}, f.sk = {150, 150}, f.dim = 72, f.dim_v = 24, f.options.softcap = 3;
  compare(f);
}

TEST_P(EmulatedCodedInput, HeadsOfAnySize) {
  Feature f = small();
  f.dim = 36, f.dim_v = 65, f.sq = {20, 33}, f.sk = {70, 45};
  compare(f);
}

TEST_P(EmulatedCodedInput, TokensOutOfUse) {
  Feature f = small();
  f.how.packed_q = f.how.packed_k = false;
  f.sq = {40, 40}, f.sk = {150, 150}, f.used_q = {40, 3}, f.used_k = {77, 130};
  f.how.seqused_q = f.how.seqused_k = true;
  compare(f);
}

/// What caches of 8-bit pages give: codes and scales by page, those of no token poisoned.
Feature in_pages(std::int64_t page_size) {
  Feature f;
  f.heads_q = 4, f.heads_k = 2;
  f.how.page_size = page_size;
  f.sq = {20, 20, 20}, f.sk = {300, 300, 300}, f.used_k = {261, 0, 130}, f.options.causal = true;
  return f;
}

TEST_P(EmulatedCodedInput, Paged) { compare(in_pages(16)); }

TEST_P(EmulatedCodedInput, PagedWithHeadsFirst) {
  Feature f = in_pages(24);
  // Some row sees every key: codes that are given have hidden ones in what their tiles share.
  f.how.layout = Layout::bhsd, f.options.window_left = 245;
  compare(f);
}

TEST_P(EmulatedCodedInput, PagedDecode) {
  Feature f = in_pages(64);
  f.sq = {1, 1, 1}, f.heads_q = 8, f.how.shared_pages = 2, f.used_k = {261, 128, 130};
  compare(f);
}

/// A mean beside numbers is taken off instead of K's own, and K is read once.
TEST_P(EmulatedCodedInput, KeyMeanOfNumbers) {
  Recipe recipe = GetParam();
  if (!has_codes(recipe.qk)) GTEST_SKIP() << "K keeps its mean";
  recipe.balance_k = Toggle::off;  // which channels are loud depends on whether a mean is taken off
  Feature f = small();
  f.family = Family::k_shift;
  f = with_inputs(f, recipe, Format::bf16);
  const Call call = make_call(f, 29);
  Laid laid = lay_out(call, f.how);
  AttentionTensors t = laid.tensors();
  const auto with = [&](Toggle smooth) {
    Recipe r = recipe;
    r.smooth_k = smooth;
    return attend(t, call, r, laid);
  };
  const Results own = with(Toggle::on), none = with(Toggle::off);
  QuantizeOptions options = options_for(Role::k, recipe.qk, recipe.k_scale, call.options.layout);
  options.smooth = true;
  CodedTensor k = quantised(t.k, options, t.cu_seqlens_k);
  t.k_mean = k.mean.view();
  const Results given = with(Toggle::automatic);
  EXPECT_TRUE(same_bits(given.out, own.out) && same_bits(given.lse, own.lse));
  std::memset(k.mean.view().data, 0, sizeof(float) * static_cast<std::size_t>(k.mean.count()));
  const Results zero = with(Toggle::on);
  EXPECT_TRUE(same_bits(zero.out, none.out) && same_bits(zero.lse, none.lse));
  EXPECT_FALSE(same_bits(zero.out, own.out));
}

INSTANTIATE_TEST_SUITE_P(Cover, EmulatedCodedInput, testing::ValuesIn(gpu_recipes()),
                         [](const auto& recipe) { return recipe.param.name; });

}  // namespace
}  // namespace qattn::test
