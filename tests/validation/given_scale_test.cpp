// Scales that callers give, static ones of quantize() and those of attention(), are positive and
// finite.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "qattn/qattn.hpp"

namespace qattn {
namespace {

constexpr float infinite = std::numeric_limits<float>::infinity();
constexpr float no_scales[] = {0.0f, -0.0f, -1.0f, infinite, -infinite, NAN};

/// Every granularity, format and role; the last scale is as wrong as the first.
TEST(StaticScales, ArePositiveAndFinite) {
  using enum Granularity;
  std::vector<float> x(2 * 40 * 3 * 16, 1.0f);
  const TensorView view = TensorView::dense(x.data(), Format::f32, {2, 40, 3, 16});
  int tried = 0;
  for (const Granularity g : {per_tensor, per_head, per_block, per_warp, per_thread, per_token,
                              per_channel, per_block_channel}) {
    for (const Role role : {Role::q, Role::k, Role::v}) {
      for (const Format format : {Format::s8, Format::e4m3, Format::e5m2, Format::e4m3fnuz}) {
        QuantizeOptions o;
        o.format = format, o.role = role, o.scaling = {g, 0, 0};
        const Result<QuantizeShapes> shapes = quantize_shapes(view, o);
        if (!shapes.ok()) continue;  // per_channel and per_block_channel are V's
        std::int64_t count = 1;
        for (int i = 0; i < shapes->scale.rank; ++i) count *= shapes->scale.shape[i];
        for (const float bad : no_scales) {
          for (const std::int64_t place : {std::int64_t{0}, count - 1}) {
            std::vector<std::int8_t> codes(x.size(), -7);
            std::vector<float> scale(count, -7.0f), given(count, 0.5f);
            given[place] = bad;
            QuantizeTensors t{view, shapes->codes, shapes->scale, {}, {}, shapes->scale, {}};
            t.codes.data = codes.data(), t.scale.data = scale.data();
            t.static_scale.data = given.data();
            const Status s = quantize(t, o).status();
            EXPECT_EQ(s.code(), Code::invalid_argument);
            const std::string text = "static_scale: value " + std::to_string(bad) + " at (";
            EXPECT_EQ(s.message().find(text), 0u) << s.message() << " of " << text;
            EXPECT_NE(s.message().find("is not positive and finite"), std::string::npos);
            for (const std::int8_t c : codes) ASSERT_EQ(c, -7);
            for (const float y : scale) ASSERT_EQ(y, -7.0f);
            given[place] = 0.5f;
            EXPECT_TRUE(quantize(t, o).ok());
            ++tried;
          }
        }
      }
    }
  }
  EXPECT_GE(tried, 700);
}

/// Packed sequences: what stands behind the end of one is nobody's scale, as in attention().
TEST(StaticScales, OfTokensThatExist) {
  std::vector<float> x(7 * 2 * 16, 1.0f), scale(2 * 2 * 5), given(2 * 2 * 5, 0.5f);
  std::vector<std::int8_t> codes(x.size());
  std::vector<std::int32_t> cu = {0, 2, 7};
  QuantizeTensors t;
  t.x = TensorView::dense(x.data(), Format::f32, {7, 2, 16});
  t.codes = TensorView::dense(codes.data(), Format::s8, {7, 2, 16});
  t.scale = TensorView::dense(scale.data(), Format::f32, {2, 2, 5});
  t.static_scale = TensorView::dense(given.data(), Format::f32, {2, 2, 5});
  t.cu_seqlens = TensorView::dense(cu.data(), Format::s32, {3});
  given[2] = given[9] = NAN;  // tokens 2 and 4 of the sequence of two
  EXPECT_TRUE(quantize(t, {}).ok());
  given[6] = -1.0f;  // head 1, token 1
  EXPECT_NE(quantize(t, {}).status().message().find("static_scale: value -1.000000 at (0, 1, 1)"),
            std::string::npos);
}

/// attention() refuses scales of V by the same rule, whatever the granularity.
TEST(GivenScales, OfVArePositiveAndFinite) {
  std::vector<float> x(2 * 40 * 3 * 16, 1.0f), out(x.size(), -7.0f);
  for (const char* recipe : {"int8_full", "int8_fp8", "fp8"}) {
    for (const Granularity g : {Granularity::automatic, Granularity::per_tensor,
                                Granularity::per_head, Granularity::per_channel}) {
      AttentionTensors t;
      t.q = t.k = t.v = TensorView::dense(x.data(), Format::f32, {2, 40, 3, 16});
      t.out = t.q;
      t.out.data = out.data();
      AttentionOptions o;
      o.recipe = *recipe_named(recipe);
      o.recipe.v_scale.granularity = g;
      QuantizeOptions quantized;
      quantized.role = Role::v, quantized.format = o.recipe.v, quantized.scaling = o.recipe.v_scale;
      t.v_scale = quantize_shapes(t.v, quantized)->scale;
      std::int64_t count = 1;
      for (int i = 0; i < t.v_scale.rank; ++i) count *= t.v_scale.shape[i];
      for (const float bad : no_scales) {
        std::vector<float> given(count, 0.5f);
        t.v_scale.data = given.data();
        given[count - 1] = bad;
        const Status s = attention(t, o);
        EXPECT_EQ(s.message().find("v_scale: value " + std::to_string(bad) + " at ("), 0u)
            << s.message();
        for (const float y : out) ASSERT_EQ(y, -7.0f);
      }
    }
  }
}

}  // namespace
}  // namespace qattn
