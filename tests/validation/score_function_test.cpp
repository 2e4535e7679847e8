// The caller's score and mask functions, against the float64 reference and against the features
// that they can spell out, on several recipes, with the things they must not break.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "qattn/qattn.hpp"

namespace qattn {
namespace {

struct Call {
  std::vector<float> q, k, v, out, lse;
  AttentionTensors t;
  AttentionOptions o;

  explicit Call(const char* recipe, std::int64_t sq = 70, std::int64_t sk = 300) {
    std::mt19937 engine(7);
    std::normal_distribution<float> normal;
    const auto fill = [&](std::vector<float>& x, std::int64_t n) {
      x.resize(static_cast<std::size_t>(n));
      for (float& e : x) e = normal(engine);
    };
    fill(q, 2 * sq * 4 * 64);
    fill(k, 2 * sk * 2 * 64);
    fill(v, 2 * sk * 2 * 64);
    out.assign(q.size(), 0.0f);
    lse.assign(static_cast<std::size_t>(2 * 4 * sq), 0.0f);
    for (std::size_t i = 0; i < k.size(); ++i) k[i] += 0.5f * static_cast<float>(i % 64 % 5);
    t.q = TensorView::dense(q.data(), Format::f32, {2, sq, 4, 64});
    t.k = TensorView::dense(k.data(), Format::f32, {2, sk, 2, 64});
    t.v = TensorView::dense(v.data(), Format::f32, {2, sk, 2, 64});
    t.out = TensorView::dense(out.data(), Format::f32, {2, sq, 4, 64});
    t.lse = TensorView::dense(lse.data(), Format::f32, {2, 4, sq});
    o.recipe = *recipe_named(recipe);
  }
  double error() {
    const Status s = attention(t, o);
    EXPECT_TRUE(s.ok()) << s.message();
    std::vector<double> ref(out.size());
    EXPECT_TRUE(reference_attention(t, o, ref).ok());
    // The reference is (B, H, S, D), the output (B, S, H, D).
    const std::int64_t sq = t.q.shape[1];
    double e = 0, n = 0;
    for (std::int64_t b = 0; b < 2; ++b) {
      for (std::int64_t i = 0; i < sq; ++i) {
        for (std::int64_t h = 0; h < 4; ++h) {
          for (std::int64_t d = 0; d < 64; ++d) {
            const double want = ref[((b * 4 + h) * sq + i) * 64 + d];
            const double got = out[((b * sq + i) * 4 + h) * 64 + d];
            e += (got - want) * (got - want);
            n += want * want;
          }
        }
      }
    }
    return std::sqrt(e / n);
  }
};

using Index = std::int64_t;

TEST(ScoreFunction, AgreesWithTheReference) {
  const auto bend = [](float s, Index b, Index h, Index i, Index j) {
    return 3.0f * std::sin(s) + 0.01f * static_cast<float>(j - i) * static_cast<float>(h + b);
  };
  const auto stripes = [](Index, Index h, Index i, Index j) { return (i + j + h) % 3 != 0; };
  for (const auto& [recipe, bound] :
       {std::pair{"f32", 1e-5}, std::pair{"int8", 4e-2}, std::pair{"int8_full", 4e-2}}) {
    for (const Index sq : {70, 1}) {
      Call call(recipe, sq, sq == 1 ? 2300 : 300);  // one query: split into runs of keys
      call.o.score_function = score_function(bend);
      call.o.mask_function = mask_function(stripes);
      call.o.causal = true;
      EXPECT_LT(call.error(), bound) << recipe << " Sq " << sq;
    }
  }
}

TEST(ScoreFunction, SpellsOutSoftcapAndMask) {
  std::vector<std::uint8_t> mask(70 * 300);
  for (std::size_t i = 0; i < mask.size(); ++i) mask[i] = i % 7 != 0;
  Call feature("int8_full"), function("int8_full");
  feature.o.softcap = 5;
  feature.t.mask = TensorView::dense(mask.data(), Format::b8, {70, 300});
  const auto cap = [](float s, Index, Index, Index, Index) { return 5 * std::tanh(s / 5); };
  const auto look = [&](Index, Index, Index i, Index j) { return mask[i * 300 + j] != 0; };
  function.o.score_function = score_function(cap);
  function.o.mask_function = mask_function(look);
  ASSERT_TRUE(attention(feature.t, feature.o).ok());
  ASSERT_TRUE(attention(function.t, function.o).ok());
  for (std::size_t i = 0; i < feature.out.size(); ++i) {
    ASSERT_NEAR(feature.out[i], function.out[i], 2e-2f);  // a code may round the other way
  }
  for (std::size_t i = 0; i < feature.lse.size(); ++i) {
    ASSERT_NEAR(feature.lse[i], function.lse[i], 1e-3f);
  }
}

TEST(ScoreFunction, CannotReviveMaskedOrBadKeys) {
  Call call("f32");
  const auto flat = [](float, Index, Index, Index, Index) { return 0.0f; };
  call.o.score_function = score_function(flat);
  call.o.causal = true;
  call.k[(299 * 2) * 64] = std::numeric_limits<float>::quiet_NaN();  // key 299, head 0, sequence 0
  ASSERT_TRUE(attention(call.t, call.o).ok());
  for (Index i = 0; i < 70; ++i) {
    for (Index h = 0; h < 4; ++h) {
      const float lse = call.lse[h * 70 + i];
      if (h < 2 && i == 69) {  // the one row that sees the bad key
        EXPECT_TRUE(std::isnan(lse));
      } else {
        EXPECT_NEAR(lse, std::log(static_cast<float>(231 + i)), 1e-5f);
      }
    }
  }
}

TEST(ScoreFunction, IsPartOfThePlan) {
  Call call("f32");
  const auto keep = [](float s, Index, Index, Index, Index) { return s; };
  const std::uint64_t plain = plan(call.t, call.o)->hash();
  call.o.score_function = score_function(keep);
  EXPECT_NE(plan(call.t, call.o)->hash(), plain);
}

}  // namespace
}  // namespace qattn
