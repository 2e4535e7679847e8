// Offsets beyond 2^32 elements on the CPU.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "qattn/qattn.hpp"
#include "support/far_tensor.hpp"

namespace qattn::test {
namespace {

constexpr std::int64_t batch = 2, heads_q = 2, heads_kv = 2, keys = 150, dim = 32;
/// Tasks of up to 32 query rows pack the tiles that they use; more rows share packed panels.
constexpr std::int64_t few = 5, many = 40;

/// CTest takes this line for a skipped test: a program that skips and passes would count as passed,
/// and one that skips and fails must not count as skipped.
class SaySkipped : public testing::Environment {
 public:
  void TearDown() override {
    const testing::UnitTest& all = *testing::UnitTest::GetInstance();
    if (all.skipped_test_count() == 0 || all.failed_test_count() > 0) return;
    std::printf("%d skipped, none failed\n", all.skipped_test_count());
  }
};

// GoogleTest owns it.
[[maybe_unused]] testing::Environment* const say =
    testing::AddGlobalTestEnvironment(new SaySkipped);

/// Both calls give the same bits; `out` is theirs in turn.
void expect_equal(AttentionTensors near, AttentionTensors away, Pair<>& out,
                  const AttentionOptions& options) {
  near.out = out.near;
  away.out = out.away;
  const Status dense = attention(near, options);
  ASSERT_TRUE(dense.ok()) << dense.message();
  const std::vector<float> expected = out.dense;
  const Status s = attention(away, options);
  ASSERT_TRUE(s.ok()) << s.message();
  ASSERT_TRUE(out.copy(false));
  EXPECT_EQ(std::memcmp(expected.data(), out.dense.data(), expected.size() * 4), 0);
}

void compare(const std::string& recipe, std::int64_t queries, int axis, int sign) {
  SCOPED_TRACE(testing::Message() << recipe << ", " << queries << " queries, axis " << axis
                                  << (sign < 0 ? ", backwards" : ""));
  Pair<> q, k, v, out;
  if (!q.make({batch, queries, heads_q, dim}, axis, sign, 1) ||
      !k.make({batch, keys, heads_kv, dim}, axis, sign, 2) ||
      !v.make({batch, keys, heads_kv, dim}, axis, sign, 3) ||
      !out.make({batch, queries, heads_q, dim}, axis, sign, 4)) {
    return no_space();
  }
  AttentionOptions options;
  options.recipe = *recipe_named(recipe);
  options.causal = true;
  options.threads = 1;
  AttentionTensors near, away;
  near.q = q.near, near.k = k.near, near.v = v.near;
  away.q = q.away, away.k = k.away, away.v = v.away;
  expect_equal(near, away, out, options);
}

TEST(FarStrides, EveryAxis) {
  for (const char* recipe : {"f32", "bf16", "int8", "int8_full", "fp8", "nvfp4"}) {
    for (const std::int64_t queries : {few, many}) {
      for (const int axis : {far_batch, far_token, far_head}) {
        for (const int sign : {1, -1}) {
          compare(recipe, queries, axis, sign);
          if (IsSkipped() || HasFatalFailure()) return;
        }
      }
    }
  }
}

/// K or V as s8 codes with a scale a token.
struct Coded {
  Pair<std::int8_t> codes;
  Pair<> scale;

  bool make(int axis, int sign, unsigned seed) {
    const std::initializer_list<std::int64_t> shape = {batch, keys, heads_kv, wide},
                                              scales = {batch, heads_kv, keys};
    std::vector<float> x = draw(shape, seed), s(batch * heads_kv * keys);
    std::vector<std::int8_t> c(x.size());
    QuantizeTensors t;
    t.x = TensorView::dense(x.data(), Format::f32, shape);
    t.codes = TensorView::dense(static_cast<void*>(c.data()), Format::s8, shape);
    t.scale = TensorView::dense(static_cast<void*>(s.data()), Format::f32, scales);
    EXPECT_TRUE(quantize(t, {}).ok());
    return codes.make(shape, axis, sign, std::move(c)) &&
           scale.make(scales, axis == far_head ? 1 : 0, sign, std::move(s));
  }
  /// K's and V's codes are what int8_full takes; 64 channels can be read in place.
  static constexpr std::int64_t wide = 64;
};

TEST(FarStrides, Codes) {
  AttentionOptions options;
  options.recipe = *recipe_named("int8_full");
  options.recipe.smooth_k = Toggle::off;
  options.causal = true;
  options.threads = 1;
  for (const std::int64_t queries : {few, many}) {
    for (const int axis : {far_batch, far_token, far_head}) {
      for (const int sign : {1, -1}) {
        SCOPED_TRACE(testing::Message() << queries << " queries, axis " << axis << " " << sign);
        Pair<> q, out;
        Coded k, v;
        if (!q.make({batch, queries, heads_q, Coded::wide}, far_batch, 1, 1) ||
            !out.make({batch, queries, heads_q, Coded::wide}, far_batch, 1, 4) ||
            !k.make(axis, sign, 2) || !v.make(axis, sign, 3)) {
          return no_space();
        }
        AttentionTensors near, away;
        near.q = q.near;
        near.k = k.codes.near, near.k_scale = k.scale.near;
        near.v = v.codes.near, near.v_scale = v.scale.near;
        away.q = q.away;
        away.k = k.codes.away, away.k_scale = k.scale.away;
        away.v = v.codes.away, away.v_scale = v.scale.away;
        expect_equal(near, away, out, options);
      }
    }
  }
}

TEST(FarStrides, Pages) {
  // Two pages of 80 keys a sequence, each page far from the next.
  constexpr std::int64_t size = 80, pages = 4;
  const std::int32_t table[] = {3, 0, 1, 2}, used[] = {150, 99};
  for (const std::int64_t queries : {few, many}) {
    Pair<> q, k, v, out;
    if (!q.make({batch, queries, heads_q, dim}, far_batch, 1, 1) ||
        !k.make({pages, size, heads_kv, dim}, far_batch, 1, 2) ||
        !v.make({pages, size, heads_kv, dim}, far_batch, 1, 3) ||
        !out.make({batch, queries, heads_q, dim}, far_batch, 1, 4)) {
      return no_space();
    }
    for (const char* recipe : {"f32", "int8_full"}) {
      SCOPED_TRACE(testing::Message() << recipe << ", " << queries << " queries");
      AttentionOptions options;
      options.recipe = *recipe_named(recipe);
      options.threads = 1;
      AttentionTensors near, away;
      near.page_table = TensorView::dense(table, Format::s32, {batch, 2});
      near.seqused_k = TensorView::dense(used, Format::s32, {batch});
      near.q = q.near;
      away = near;
      near.k = k.near, near.v = v.near;
      away.k = k.away, away.v = v.away;
      expect_equal(near, away, out, options);
    }
  }
}

TEST(FarStrides, Quantize) {
  Pair<> x;
  if (!x.make({batch, keys, heads_kv, dim}, far_token, 1, 5)) {
    return no_space();
  }
  QuantizeOptions o;
  o.threads = 1;
  std::vector<std::int8_t> codes[2];
  std::vector<float> scale[2];
  for (const int i : {0, 1}) {
    codes[i].resize(x.dense.size());
    scale[i].resize(batch * heads_kv * keys);
    QuantizeTensors t;
    t.x = i ? x.away : x.near;
    t.codes = TensorView::dense(codes[i].data(), Format::s8, {batch, keys, heads_kv, dim});
    t.scale = TensorView::dense(scale[i].data(), Format::f32, {batch, heads_kv, keys});
    const auto done = quantize(t, o);
    ASSERT_TRUE(done.ok()) << done.status().message();
  }
  EXPECT_EQ(codes[0], codes[1]);
  EXPECT_EQ(scale[0], scale[1]);
}

TEST(FarStrides, Mask) {
  for (const std::int64_t queries : {few, many}) {
    SCOPED_TRACE(testing::Message() << queries << " queries");
    Pair<> mask, q, k, v, out;
    if (!mask.make({batch, heads_q, queries, keys}, 2, 1, 6) ||
        !q.make({batch, queries, heads_q, dim}, far_batch, 1, 1) ||
        !k.make({batch, keys, heads_kv, dim}, far_batch, 1, 2) ||
        !v.make({batch, keys, heads_kv, dim}, far_batch, 1, 3) ||
        !out.make({batch, queries, heads_q, dim}, far_batch, 1, 4)) {
      return no_space();
    }
    AttentionOptions options;
    options.recipe = *recipe_named("f32");
    AttentionTensors near, away;
    near.q = q.near, near.k = k.near, near.v = v.near;
    away = near;
    near.mask = mask.near;
    away.mask = mask.away;
    expect_equal(near, away, out, options);
  }
}

}  // namespace
}  // namespace qattn::test
