// Operands that come in different forms (codes, floats of other widths, scales by the caller): the
// GPU kernels say what the CPU says, and bad numbers among them show.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "conformance/coded.hpp"
#include "emulated/emulated_backend.hpp"
#include "emulated/matrix.hpp"

namespace qattn::test {
namespace {

constexpr float nan_value = std::numeric_limits<float>::quiet_NaN();

struct Results {
  std::vector<float> out, lse;
};

Results run(const AttentionTensors& tensors, const Call& call, const Recipe& recipe, Laid& laid) {
  laid.out.clear();
  laid.lse.clear();
  AttentionOptions options = call.options;
  options.recipe = recipe;
  const Status status = attention(tensors, options);
  EXPECT_TRUE(status.ok()) << status.message();
  return {laid.read_out(call), laid.read_lse(call)};
}

/// On emulated kernels of the recipe's GPU, or of another, which cannot look at contents.
Results run_emulated(const AttentionTensors& tensors, const Call& call, const Recipe& recipe,
                     Laid& laid, int architecture = 0) {
  const EmulatedBackend backend(architecture ? architecture : architecture_for(recipe), false);
  AttentionOptions options = call.options;
  options.recipe = recipe;
  const Result<Plan> made = plan(tensors, options);
  EXPECT_TRUE(made.ok() && is_emulated(made->kernel())) << made.status().message();
  return run(tensors, call, recipe, laid);
}

void expect_near(const Results& got, const Results& want, const Call& call, double bound) {
  const std::vector<double> out(want.out.begin(), want.out.end());
  const std::vector<double> lse(want.lse.begin(), want.lse.end());
  EXPECT_LE(distance(got.out, out, call.dim_v).nrmse, bound);
  EXPECT_LE(lse_distance(got.lse, lse), 1e-2);
}

Feature small() {
  Feature f;
  f.heads_q = 2, f.heads_k = 1, f.how.input = Format::bf16;
  f.sq = {70}, f.sk = {150}, f.options.causal = true;
  return f;
}

CodedTensor coded(Role role, const TensorView& x, const Recipe& r) {
  const Format format = role == Role::v ? r.v : r.qk;
  const Scaling& scaling = role == Role::q ? r.q_scale : role == Role::k ? r.k_scale : r.v_scale;
  return quantised(x, options_for(role, format, scaling, Layout::bshd));
}

bool is_nan_row(const Results& x, const Call& call, std::int64_t row) {
  const float* out = x.out.data() + row * call.dim_v;
  return std::all_of(out, out + call.dim_v, [](float v) { return std::isnan(v); });
}

/// A GPU whose portable kernel serves the recipe.
int portable(const Recipe& r) { return r.qk == Format::s8 && r.v != Format::e4m3 ? 80 : 89; }

class EmulatedMixedInput : public testing::TestWithParam<Recipe> {
 protected:
  void SetUp() override {
    if (!has_codes(GetParam().qk)) GTEST_SKIP() << "no operand has codes";
    recipe_ = GetParam();
    recipe_.smooth_k = Toggle::off;
    recipe_.q_scale.granularity = recipe_.k_scale.granularity = Granularity::per_token;
    if (recipe_.v == Format::s8) recipe_.v_scale.granularity = Granularity::per_token;
  }
  /// P in e4m3 is rounded against the maximum so far, by tiles of other sizes.
  double bound() const { return recipe_.p == Format::e4m3 ? 2e-2 : 6e-3; }

  Recipe recipe_;
};

/// The part of the scores that K's mean had is added in LSE, softcap and sinks: codes of Q count
/// with their scale.
TEST_P(EmulatedMixedInput, CodesOfQueriesBesideAMeanOfKeys) {
  Feature f = small();
  f.family = Family::k_shift, f.options.softcap = 6, f.sinks = true;
  const Call call = make_call(f, 31);
  Laid laid = lay_out(call, f.how);
  AttentionTensors t = laid.tensors();
  recipe_.smooth_k = Toggle::on;
  const CodedTensor q = coded(Role::q, t.q, recipe_);
  t.q = q.codes.view(), t.q_scale = q.scale.view();
  expect_near(run_emulated(t, call, recipe_, laid), run(t, call, recipe_, laid), call, bound());
}

TEST_P(EmulatedMixedInput, MeansOfQueriesBesideKeysInF32) {
  if (GetParam().qk != Format::s8) GTEST_SKIP() << "smooth_q is for s8";
  if (!has_codes(GetParam().v)) GTEST_SKIP() << "16-bit V is not in f32";
  for (const std::int64_t dim : {64, 72, 40}) {
    Feature f = small();
    f.how.input = Format::f32, f.dim = dim;
    const Call call = make_call(f, 32);
    Laid laid = lay_out(call, f.how);
    recipe_.smooth_q = Toggle::on, recipe_.q_scale = {Granularity::per_token, 64, 0};
    const AttentionTensors t = laid.tensors();
    expect_near(run_emulated(t, call, recipe_, laid, portable(recipe_)),
                run(t, call, recipe_, laid), call, bound());
  }
}

/// As beside a cache in 16 bits; on kernels that read Q themselves, too.
TEST_P(EmulatedMixedInput, QueriesInAnotherFormatThanKeysAndValues) {
  for (const int gpu : {portable(recipe_), 90}) {
    for (const auto& [of_q, of_kv] :
         {std::pair{Format::f32, Format::f16}, std::pair{Format::bf16, Format::f16}}) {
      Feature f = small();
      const Call call = make_call(f, 34);
      f.how.input = of_q;
      Laid queries = lay_out(call, f.how);
      f.how.input = of_kv;
      Laid laid = lay_out(call, f.how);
      laid.q = std::move(queries.q);
      for (const Toggle smooth : {Toggle::off, Toggle::on}) {
        recipe_.smooth_k = smooth;
        const AttentionTensors t = laid.tensors();
        expect_near(run_emulated(t, call, recipe_, laid, gpu), run(t, call, recipe_, laid), call,
                    bound());
      }
    }
  }
}

/// K as codes sets no format for the others: Q and V may differ.
TEST_P(EmulatedMixedInput, QueriesAndValuesInOtherFormats) {
  if (!has_codes(GetParam().v)) GTEST_SKIP() << "16-bit V has the formats of the recipe";
  for (const Format input : {Format::bf16, Format::f16}) {
    Feature f = small();
    f.how.input = input;
    const Call call = make_call(f, 33);
    Laid laid = lay_out(call, f.how);
    f.how.input = input == Format::bf16 ? Format::f16 : Format::bf16;
    const Laid other = lay_out(call, f.how);
    AttentionTensors t = laid.tensors();
    t.v = other.v.view();
    const CodedTensor k = coded(Role::k, t.k, recipe_);
    t.k = k.codes.view(), t.k_scale = k.scale.view();
    for (const int architecture : {0, portable(recipe_)}) {
      expect_near(run_emulated(t, call, recipe_, laid, architecture), run(t, call, recipe_, laid),
                  call, bound());
    }
  }
}

/// Under a scale that many keys share, a key that is NaN spoils whoever sees it.
TEST_P(EmulatedMixedInput, ABadKeyUnderAGivenScaleShows) {
  const Feature f = small();
  const Call call = make_call(f, 34);
  for (const Granularity g : {Granularity::per_tensor, Granularity::per_head}) {
    Laid laid = lay_out(call, f.how);
    recipe_.k_scale = {g, 0, 0};
    const CodedTensor k = coded(Role::k, laid.tensors().k, recipe_);
    poke(laid, call, Operand::k, 0, 0, 17, 3, nan_value);
    AttentionTensors t = laid.tensors();
    t.k_scale = k.scale.view();
    const Results got = run_emulated(t, call, recipe_, laid);
    // Query i sees keys up to i + 80: all see key 17.
    for (std::int64_t row = 0; row < 2 * 70; ++row) {
      ASSERT_TRUE(is_nan_row(got, call, row)) << row;
    }
  }
}

TEST_P(EmulatedMixedInput, ABadScaleOfATokenOfVShows) {
  if (GetParam().v != Format::s8) GTEST_SKIP() << "V has no scale a token";
  const Feature f = small();
  const Call call = make_call(f, 35);
  Laid laid = lay_out(call, f.how);
  AttentionTensors t = laid.tensors();
  CodedTensor v = coded(Role::v, t.v, recipe_);
  v.scale.set({0, 0, 17}, nan_value);
  t.v = v.codes.view(), t.v_scale = v.scale.view();
  const Results got = run_emulated(t, call, recipe_, laid);
  for (std::int64_t row = 0; row < 2 * 70; ++row) {
    ASSERT_TRUE(is_nan_row(got, call, row)) << row;
  }
}

/// Scales of packed sequences that end before the longest one does: nobody's memory is read.
TEST_P(EmulatedMixedInput, ScalesThatEndBeforeASequenceShow) {
  Feature f = small();
  f.sq = {20, 30}, f.sk = {100, 150}, f.how.packed_q = f.how.packed_k = true;
  f.options.causal = false;
  const Call call = make_call(f, 36);
  Laid laid = lay_out(call, f.how);
  AttentionTensors t = laid.tensors();
  const CodedTensor k = quantised(
      t.k, options_for(Role::k, recipe_.qk, recipe_.k_scale, Layout::bshd), t.cu_seqlens_k);
  t.k = k.codes.view(), t.k_scale = k.scale.view();
  const Results whole = run_emulated(t, call, recipe_, laid);
  t.k_scale.shape[2] = 120;
  const Results got = run_emulated(t, call, recipe_, laid);
  ASSERT_EQ(got.out.size(), whole.out.size());
  for (std::int64_t b = 0; b < 2; ++b) {
    for (std::int64_t i = 0; i < 2 * f.sq[static_cast<std::size_t>(b)]; ++i) {
      const std::int64_t row = call.row(b, i % 2, i / 2);
      EXPECT_EQ(is_nan_row(got, call, row), b == 1) << row;
      EXPECT_FALSE(is_nan_row(whole, call, row)) << row;
    }
  }
}

/// Rows and keys of zeros have the smallest scales, whose product is below all floats.
TEST_P(EmulatedMixedInput, ZerosGiveTheMeanOfV) {
  Feature f = small();
  f.sk = {70};
  const Call call = make_call(f, 37);
  Laid laid = lay_out(call, f.how);
  for (Tensor* x : {&laid.q, &laid.k}) {
    for (std::int64_t s = 0; s < 70; ++s) {
      for (std::int64_t h = 0; h < x->view().shape[2]; ++h) {
        for (std::int64_t c = 0; c < 64; ++c) x->set({0, s, h, c}, 0.0);
      }
    }
  }
  const AttentionTensors t = laid.tensors();
  recipe_.k_scale = {Granularity::per_block, 64, 0};
  for (const int architecture : {0, portable(recipe_)}) {
    const Results got = run_emulated(t, call, recipe_, laid, architecture);
    for (const float x : got.out) ASSERT_TRUE(std::isfinite(x)) << "sm_" << architecture;
    expect_near(got, run(t, call, recipe_, laid), call, bound());
  }
}

INSTANTIATE_TEST_SUITE_P(Cover, EmulatedMixedInput, testing::ValuesIn(gpu_recipes()),
                         [](const auto& recipe) { return recipe.param.name; });

}  // namespace
}  // namespace qattn::test
