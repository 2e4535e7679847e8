// Operands that come quantised must give what quantising on the fly gives, and the index maps must
// be those of recipe.hpp.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "conformance/coded.hpp"
#include "conformance/runner.hpp"

namespace qattn::test {
namespace {

struct Results {
  std::vector<float> out, lse;
};

Results attend(const AttentionTensors& tensors, AttentionOptions options, const Recipe& recipe,
               const Call& call, Laid& laid) {
  laid.out.clear();
  laid.lse.clear();
  options.recipe = recipe;
  const Status status = attention(tensors, options);
  EXPECT_TRUE(status.ok()) << status.message();
  return {laid.read_out(call), laid.read_lse(call)};
}

void expect_same(const Results& a, const Results& b, const char* what) {
  ASSERT_EQ(a.out.size(), b.out.size());
  EXPECT_EQ(std::memcmp(a.out.data(), b.out.data(), a.out.size() * sizeof(float)), 0) << what;
  EXPECT_EQ(std::memcmp(a.lse.data(), b.lse.data(), a.lse.size() * sizeof(float)), 0) << what;
  std::vector<double> want(b.out.begin(), b.out.end());
  EXPECT_LE(distance(a.out, want, static_cast<std::int64_t>(want.size())).nrmse, 1e-6) << what;
}

/// Every mixture of coded and plain operands that the recipe allows.
void compare_with_codes(const Feature& feature, Recipe recipe) {
  if (!has_codes(recipe.qk) && !has_codes(recipe.v)) GTEST_SKIP() << "no operand has codes";
  if (recipe.smooth_k == Toggle::automatic) recipe.smooth_k = Toggle::off;
  const Call call = make_call(feature, 21);
  Laid laid = lay_out(call, feature.how);
  const AttentionTensors plain = laid.tensors();
  AttentionOptions options = call.options;
  options.recipe = recipe;
  const Result<Plan> planned = plan(plain, options);
  ASSERT_TRUE(planned.ok()) << planned.status().message();
  const Recipe r = planned->recipe();
  const Layout layout = options.layout;
  const bool qk = has_codes(r.qk), pv = has_codes(r.v);
  CodedTensor q, k, v;
  const TensorView cu_k = plain.cu_seqlens_k;
  if (qk) q = quantised(plain.q, options_for(Role::q, r.qk, r.q_scale, layout), plain.cu_seqlens_q);
  if (qk) k = quantised(plain.k, options_for(Role::k, r.qk, r.k_scale, layout), cu_k);
  if (pv) v = quantised(plain.v, options_for(Role::v, r.v, r.v_scale, layout), cu_k);
  if (testing::Test::HasFailure()) return;
  for (const std::string& isa : isas()) {
    SCOPED_TRACE(isa);
    const ForceIsa forced(isa);
    if (!forced.available()) continue;
    const Results want = attend(plain, call.options, recipe, call, laid);
    for (int which = 1; which < 8; ++which) {
      if (((which & 3) && !qk) || ((which & 4) && !pv)) continue;
      AttentionTensors t = plain;
      if (which & 1) t.q = q.codes.view(), t.q_scale = q.scale.view(), t.q_global = q.global.view();
      if (which & 2) t.k = k.codes.view(), t.k_scale = k.scale.view(), t.k_global = k.global.view();
      if (which & 4) t.v = v.codes.view(), t.v_scale = v.scale.view(), t.v_global = v.global.view();
      const std::string what = std::string(which & 1 ? "q" : "") + (which & 2 ? "k" : "") +
                               (which & 4 ? "v" : "") + " as codes";
      expect_same(attend(t, call.options, recipe, call, laid), want, what.c_str());
    }
  }
}

class CodedInput : public testing::TestWithParam<Recipe> {};

Feature small(bool causal) {
  Feature f;
  f.sq = {40, 40};
  f.sk = {150, 150};
  f.options.causal = causal;
  return f;
}

TEST_P(CodedInput, Dense) { compare_with_codes(small(true), GetParam()); }

TEST_P(CodedInput, DenseBhsd) {
  Feature feature = small(false);
  feature.how.layout = Layout::bhsd;
  feature.how.input = Format::f16;
  compare_with_codes(feature, GetParam());
}

TEST_P(CodedInput, OddDims) {
  Feature feature = small(false);
  feature.dim = 24;
  feature.dim_v = 72;
  compare_with_codes(feature, GetParam());
}

/// Codes end where the channels end, and rows of them lie one behind the other.
TEST_P(CodedInput, OddRows) {
  if (info(GetParam().qk).bits == 4) GTEST_SKIP() << "two codes a byte";
  Feature feature = small(true);
  feature.dim = 21;
  feature.dim_v = 69;
  compare_with_codes(feature, GetParam());
}

TEST_P(CodedInput, RowsOfLatentAttention) {
  Feature feature = small(true);
  feature.sq = feature.sk = {9};
  feature.dim = 576;
  feature.dim_v = 512;
  compare_with_codes(feature, GetParam());
}

TEST_P(CodedInput, Packed) {
  Feature feature = small(true);
  feature.sq = {40, 0, 7};
  feature.sk = {150, 9, 130};
  feature.how.packed_q = feature.how.packed_k = true;
  compare_with_codes(feature, GetParam());
}

/// Rows up to which codes of K and V are read where they lie, by the rules of the units that can.
std::int64_t rows_read_in_place(const std::string& isa, std::int64_t dim, std::int64_t dim_v) {
  if (dim % 64 != 0 || dim_v % 16 != 0) return 0;
  if (isa == "amx") return 7;
  return isa == "avx512bf16" || isa == "avx512vnni" ? 8 : 0;
}

/// The plan of K and V as codes says so on each instruction set.
void expect_in_place(const Feature& feature, Recipe recipe) {
  recipe.smooth_k = Toggle::off;
  const Call call = make_call(feature, 21);
  Laid laid = lay_out(call, feature.how);
  AttentionTensors t = laid.tensors();
  AttentionOptions options = call.options;
  options.recipe = recipe;
  const Layout layout = options.layout;
  const Result<Plan> plain = plan(t, options);
  ASSERT_TRUE(plain.ok()) << plain.status().message();
  EXPECT_EQ(plan_number(*plain, "rows_in_place"), 0) << "K and V are no codes";
  const Recipe r = plain->recipe();
  const CodedTensor k = quantised(t.k, options_for(Role::k, r.qk, r.k_scale, layout));
  const CodedTensor v = quantised(t.v, options_for(Role::v, r.v, r.v_scale, layout));
  t.k = k.codes.view(), t.k_scale = k.scale.view();
  t.v = v.codes.view(), t.v_scale = v.scale.view();
  for (const std::string& isa : isas()) {
    SCOPED_TRACE(isa);
    const ForceIsa forced(isa);
    if (!forced.available()) continue;
    const Result<Plan> planned = plan(t, options);
    ASSERT_TRUE(planned.ok()) << planned.status().message();
    EXPECT_EQ(plan_number(*planned, "rows_in_place"),
              rows_read_in_place(isa, feature.dim, feature.dim_v));
  }
}

/// Few queries: codes may be read where they lie (rows_in_place in the plan), in whole groups of
/// 16 keys and 64 channels; what is left of either goes another way.
TEST_P(CodedInput, FewQueries) {
  if (GetParam().qk != Format::s8 || GetParam().v != Format::s8) GTEST_SKIP() << "not in place";
  struct Case {
    std::int64_t queries, keys, heads_q, dim, dim_v;
  };
  const Case cases[] = {{1, 2064, 8, 128, 128}, {1, 1, 2, 64, 64},    {3, 130, 4, 192, 64},
                        {1, 1168, 6, 256, 80},  {7, 144, 2, 64, 256}, {1, 1045, 10, 64, 24},
                        {2, 160, 8, 128, 128}};
  for (const Case& c : cases) {
    SCOPED_TRACE(testing::Message() << c.queries << " of " << c.keys << ", heads " << c.heads_q
                                    << ", D " << c.dim << " " << c.dim_v);
    Feature feature = small(true);
    feature.sq = {c.queries, c.queries};
    feature.sk = {c.keys, c.keys};
    feature.heads_q = c.heads_q;
    feature.dim = c.dim;
    feature.dim_v = c.dim_v;
    feature.how.layout = c.keys % 2 == 0 ? Layout::bshd : Layout::bhsd;
    feature.options.window_left = c.queries == 7 ? 37 : -1;
    const std::int64_t rows = c.queries * feature.heads_q / feature.heads_k;
    ASSERT_LE(rows, rows_read_in_place("avx512vnni", 64, 64)) << "no case of this test";
    expect_in_place(feature, GetParam());
    compare_with_codes(feature, GetParam());
    if (HasFailure() || IsSkipped()) return;
  }
}

/// Heads whose tiles take turns on one thread give what each gives by itself: of one thread's tasks
/// all go together, of 64 threads' none.
TEST_P(CodedInput, HeadsInTurn) {
  const std::pair<std::int64_t, MaskShape> cases[] = {
      {3, MaskShape::none}, {3, MaskShape::heads}, {17, MaskShape::none}};
  for (const auto& [heads, mask] : cases) {
    SCOPED_TRACE(testing::Message() << heads << " heads, mask " << static_cast<int>(mask));
    Feature feature = small(true);
    feature.sq = {1};
    feature.sk = {1100};
    feature.heads_k = heads;
    feature.heads_q = 2 * heads;
    if (mask != MaskShape::none) {
      feature.block_mask = mask;
      feature.options.block_mask_q = feature.options.block_mask_k = 64;
    }
    feature.options.threads = 64;
    const Call alone = make_call(feature, 24);
    Laid laid = lay_out(alone, feature.how);
    const Results want = attend(laid.tensors(), alone.options, GetParam(), alone, laid);
    feature.options.threads = 1;
    const Call call = make_call(feature, 24);
    expect_same(attend(laid.tensors(), call.options, GetParam(), call, laid), want, "in turn");
    if (HasFailure()) return;
    // quantize() knows no masks: where they hide a token, its codes have other scales.
    const bool same_codes = mask == MaskShape::none && has_codes(GetParam().qk);
    if (heads == 3 && same_codes) compare_with_codes(feature, GetParam());
    if (HasFailure()) return;
  }
}

TEST_P(CodedInput, Granularities) {
  if (!free_scales(GetParam().qk)) GTEST_SKIP() << "scales are built into the format";
  const Scaling scalings[] = {{Granularity::per_tensor, 0, 0},
                              {Granularity::per_head, 0, 0},
                              {Granularity::per_block, 64, 0},
                              {Granularity::per_thread, 64, 16}};
  for (const Scaling& scaling : scalings) {
    SCOPED_TRACE(std::string(name(scaling.granularity)));
    Recipe recipe = GetParam();
    recipe.q_scale = recipe.k_scale = scaling;
    compare_with_codes(small(false), recipe);
    if (HasFailure()) return;
  }
}

TEST_P(CodedInput, GranularitiesOfV) {
  if (!free_scales(GetParam().v)) GTEST_SKIP() << "V has no free scales";
  const Scaling scalings[] = {
      {Granularity::per_tensor, 0, 0},         {Granularity::per_head, 0, 0},
      {Granularity::per_token, 0, 0},          {Granularity::per_channel, 0, 0},
      {Granularity::per_block_channel, 64, 0}, {Granularity::per_block_channel, 16, 0},
      {Granularity::per_block_channel, 8, 0}};
  for (const Scaling& scaling : scalings) {
    SCOPED_TRACE(std::string(name(scaling.granularity)) + " " + std::to_string(scaling.block));
    if (scaling.block > 0 && scaling.block < 64 && GetParam().v != Format::s8) continue;
    Recipe recipe = GetParam();
    recipe.v_scale = scaling;
    compare_with_codes(small(false), recipe);
    if (HasFailure()) return;
    if (GetParam().v != Format::s8) continue;
    Feature few = small(false);
    few.sq = {1, 2};
    few.sk = {144, 144};
    few.how.packed_q = true;
    compare_with_codes(few, recipe);
    if (HasFailure()) return;
  }
}

/// Of tokens that do not exist codes and scales may be anything: here scales are NaN.
TEST_P(CodedInput, TokensOutOfUse) {
  if (!has_codes(GetParam().qk)) GTEST_SKIP() << "no operand has codes";
  if (GetParam().qk == Format::nvfp4 || (has_codes(GetParam().v) && !free_scales(GetParam().v))) {
    GTEST_SKIP() << "a scale of several tokens";
  }
  Recipe recipe = GetParam();
  if (has_codes(recipe.v)) recipe.v_scale.granularity = Granularity::per_token;
  for (const std::int64_t queries : {40, 3}) {
    Feature feature = small(true);
    feature.sq = {queries, queries};
    feature.sk = {160, 160};
    feature.used_q = {queries, 2};
    feature.used_k = {77, 144};
    feature.how.seqused_q = feature.how.seqused_k = true;
    compare_with_codes(feature, recipe);
    if (HasFailure()) return;
  }
}

/// Pages of codes: scales per token belong to the page, so they do not see the sequence at all.
/// Those of free places are NaN.
void compare_pages(std::int64_t queries, std::int64_t page_size, Recipe recipe) {
  if (!has_codes(recipe.qk) || info(recipe.qk).bits < 8) GTEST_SKIP() << "no 8-bit K codes";
  if (has_codes(recipe.v) && !free_scales(recipe.v)) GTEST_SKIP() << "V groups span pages";
  recipe.smooth_k = Toggle::off;
  if (has_codes(recipe.v)) recipe.v_scale.granularity = Granularity::per_token;
  Feature feature = small(true);
  feature.sq = {queries, queries};
  feature.how.page_size = page_size;
  feature.used_k = {150, 77};
  const Call call = make_call(feature, 22);
  Laid laid = lay_out(call, feature.how);
  const AttentionTensors plain = laid.tensors();
  const Results want = attend(plain, call.options, recipe, call, laid);
  const Layout layout = call.options.layout;
  Scaling k_scaling = recipe.k_scale;
  const CodedTensor k = quantised(plain.k, options_for(Role::k, recipe.qk, k_scaling, layout));
  AttentionTensors t = plain;
  t.k = k.codes.view();
  t.k_scale = k.scale.view();
  CodedTensor v;
  if (has_codes(recipe.v)) {
    v = quantised(plain.v, options_for(Role::v, recipe.v, recipe.v_scale, layout));
    t.v = v.codes.view();
    t.v_scale = v.scale.view();
  }
  expect_same(attend(t, call.options, recipe, call, laid), want, "pages of codes");
}

TEST_P(CodedInput, Pages) { compare_pages(40, 48, GetParam()); }
TEST_P(CodedInput, PagesOfWholeGroupsForFewQueries) { compare_pages(3, 48, GetParam()); }
TEST_P(CodedInput, PagesOfOtherSizesForFewQueries) { compare_pages(1, 24, GetParam()); }

/// K quantised after its mean, which comes along: scores, softcap and LSE see it again.
void compare_key_means(std::int64_t queries, Recipe recipe) {
  if (!has_codes(recipe.qk)) GTEST_SKIP() << "K has no codes";
  Feature feature = small(true);
  feature.sq = {queries, queries};
  feature.sk = {160, 160};
  feature.family = Family::k_shift;
  feature.options.softcap = 6;
  feature.sinks = true;
  const Call call = make_call(feature, 23);
  Laid laid = lay_out(call, feature.how);
  const AttentionTensors plain = laid.tensors();
  recipe.smooth_k = Toggle::on;
  const Results want = attend(plain, call.options, recipe, call, laid);
  QuantizeOptions options = options_for(Role::k, recipe.qk, recipe.k_scale, call.options.layout);
  options.smooth = true;
  const CodedTensor k = quantised(plain.k, options);
  ASSERT_TRUE(k.mean.present());
  AttentionTensors t = plain;
  t.k = k.codes.view();
  t.k_scale = k.scale.view();
  t.k_global = k.global.view();
  t.k_mean = k.mean.view();
  CodedTensor v;
  if (has_codes(recipe.v) && free_scales(recipe.v)) {  // of few queries both are read in place
    v = quantised(plain.v, options_for(Role::v, recipe.v, recipe.v_scale, call.options.layout));
    t.v = v.codes.view();
    t.v_scale = v.scale.view();
  }
  recipe.smooth_k = Toggle::automatic;
  const Results got = attend(t, call.options, recipe, call, laid);
  const std::vector<double> out(want.out.begin(), want.out.end());
  const std::vector<double> lse(want.lse.begin(), want.lse.end());
  EXPECT_LE(distance(got.out, out, call.dim_v).nrmse, 1e-6);
  EXPECT_LE(lse_distance(got.lse, lse), 1e-5);
}

TEST_P(CodedInput, KeyMean) { compare_key_means(40, GetParam()); }
TEST_P(CodedInput, KeyMeanOfFewQueries) { compare_key_means(2, GetParam()); }

/// A mean beside numbers is taken off instead of K's own.
TEST_P(CodedInput, KeyMeanOfNumbers) {
  Recipe recipe = GetParam();
  if (!has_codes(recipe.qk)) GTEST_SKIP() << "K keeps its mean";
  recipe.balance_k = Toggle::off;  // which channels are loud depends on whether a mean is taken off
  Feature feature = small(true);
  feature.family = Family::k_shift;
  feature.options.softcap = 6;
  const Call call = make_call(feature, 29);
  Laid laid = lay_out(call, feature.how);
  AttentionTensors t = laid.tensors();
  const auto with = [&](Toggle smooth) {
    Recipe r = recipe;
    r.smooth_k = smooth;
    return attend(t, call.options, r, call, laid);
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

INSTANTIATE_TEST_SUITE_P(Cpu, CodedInput, testing::ValuesIn(recipes().begin(), recipes().end()),
                         [](const auto& recipe) { return recipe.param.name; });

TEST(ScaleIndex, FollowsTheTable) {
  const Scaling block{Granularity::per_block, 64, 16}, warp{Granularity::per_warp, 64, 16},
      thread{Granularity::per_thread, 64, 16}, token{Granularity::per_token, 64, 16},
      channels{Granularity::per_block_channel, 64, 16}, whole{Granularity::per_head, 64, 16};
  for (std::int64_t s = 0; s < 300; ++s) {
    EXPECT_EQ(scale_index(block, Role::k, s), s / 64);
    EXPECT_EQ(scale_index(warp, Role::q, s), s / 16);
    EXPECT_EQ(scale_index(thread, Role::q, s), s / 16 * 8 + s % 8);
    EXPECT_EQ(scale_index(thread, Role::k, s), s / 64 * 4 + s % 8 / 2);
    EXPECT_EQ(scale_index(token, Role::k, s), s);
    EXPECT_EQ(scale_index(channels, Role::v, s), s / 64);
    EXPECT_EQ(scale_index(whole, Role::q, s), 0);
  }
  EXPECT_EQ(scale_count(block, Role::k, 300), 5);
  EXPECT_EQ(scale_count(warp, Role::q, 300), 20);
  EXPECT_EQ(scale_count(thread, Role::q, 300), 160);
  EXPECT_EQ(scale_count(thread, Role::k, 300), 20);
  EXPECT_EQ(scale_count(token, Role::q, 300), 300);
  EXPECT_EQ(scale_count(channels, Role::v, 300), 5);
  EXPECT_EQ(scale_count(whole, Role::k, 300), 1);
}

}  // namespace
}  // namespace qattn::test
