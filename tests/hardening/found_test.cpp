// Defects that random input found, each as the smallest call that showed it.
#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>

#include "hardening/small_call.hpp"
#include "qattn/qattn.h"

namespace qattn::test {
namespace {

testing::AssertionResult refused(const Status& s, Code code, const std::string& name) {
  if (s.code() == code && s.message().starts_with(name + ": ")) return testing::AssertionSuccess();
  return testing::AssertionFailure() << qattn::name(s.code()) << " \"" << s.message() << "\"";
}

TEST(Found, MeansOfQueriesWithoutScales) {
  // Divided by the block size of scales that 16- and 32-bit operands do not have.
  const SmallCall call(300, 300);
  for (const char* recipe : {"f32", "f16", "bf16"}) {
    SCOPED_TRACE(recipe);
    AttentionOptions options = options_of(recipe, 1);
    std::vector<float> plain = call.output(), smooth = call.output();
    ASSERT_TRUE(attention(call.tensors(plain), options).ok());
    options.recipe.smooth_q = Toggle::on;
    ASSERT_TRUE(attention(call.tensors(smooth), options).ok());
    double error = 0;
    for (std::size_t i = 0; i < plain.size(); ++i) {
      error = std::max<double>(error, std::abs(plain[i] - smooth[i]));
    }
    EXPECT_LT(error, recipe == std::string("f32") ? 1e-5 : 5e-2);
  }
}

TEST(Found, RowsBeyondAnyWorkspace) {
  // Stride 0 asks for no memory, but the workspace is of every row: its size overflowed.
  const SmallCall call;
  std::vector<float> out = call.output();
  AttentionTensors t = call.tensors(out);
  for (TensorView* x : {&t.q, &t.k, &t.v, &t.out}) {
    x->shape[0] = std::int64_t{1} << 40;
    x->stride[0] = 0;
    x->data = nullptr;
  }
  t.q.shape[1] = t.out.shape[1] = 0;  // an output without elements may have stride 0
  EXPECT_TRUE(refused(plan(t, options_of("f32", 1)).status(), Code::invalid_argument, "q"));
  QuantizeOptions o;
  EXPECT_TRUE(refused(quantize_shapes(t.k, o).status(), Code::invalid_argument, "x"));
}

TEST(Found, AnAbsentTensorOfAnyRank) {
  // Its extents were looked at before its presence.
  const SmallCall call;
  std::vector<float> out = call.output();
  AttentionTensors t = call.tensors(out);
  t.block_mask.rank = t.sinks.rank = 1 << 30;
  EXPECT_TRUE(attention(t, options_of("f32", 1)).ok());
}

TEST(Found, GranularityThatNothingUses) {
  const SmallCall call;
  std::vector<float> out = call.output();
  const AttentionTensors t = call.tensors(out);
  const auto with = [&](const char* recipe, Scaling Recipe::* scaling, const Scaling& value) {
    AttentionOptions options = options_of(recipe, 1);
    options.recipe.*scaling = value;
    return attention(t, options);
  };
  const Scaling tensor{Granularity::per_tensor, 0, 0}, block{Granularity::automatic, 64, 0};
  constexpr Code code = Code::invalid_argument;
  EXPECT_TRUE(refused(with("auto", &Recipe::q_scale, tensor), code, "q_scale"));
  EXPECT_TRUE(refused(with("int8", &Recipe::v_scale, tensor), code, "v_scale"));
  EXPECT_TRUE(refused(with("f32", &Recipe::k_scale, block), code, "k_scale"));
  EXPECT_TRUE(with("int8", &Recipe::k_scale, tensor).ok());
}

TEST(Found, QuantizeTensors) {
  const SmallCall call;
  std::vector<float> out = call.output();
  QuantizeTensors t;
  t.x = call.tensors(out).k;
  std::vector<std::int8_t> codes(call.k.size(), 7);
  std::vector<float> scale(static_cast<std::size_t>(call.keys * SmallCall::heads), 7.0f);
  t.codes = TensorView::dense(static_cast<void*>(codes.data()), Format::s8,
                              {1, call.keys, SmallCall::heads, SmallCall::dim});
  t.scale = TensorView::dense(static_cast<void*>(scale.data()), Format::f32,
                              {1, SmallCall::heads, call.keys});
  const QuantizeOptions o;
  QuantizeTensors bad = t;
  bad.codes.stride[1] = 0;  // every token's codes in one place
  EXPECT_TRUE(refused(quantize(bad, o).status(), Code::invalid_argument, "codes"));
  bad = t;
  bad.x.stride[2] = 0;
  EXPECT_TRUE(quantize(bad, o).ok()) << "an input may";
  EXPECT_TRUE(refused(dequantize(bad, o), Code::invalid_argument, "x"));
  bad = t;
  bad.x.device.type = DeviceType::cuda;  // was read as if it lay in host memory
  EXPECT_TRUE(refused(quantize(bad, o).status(), Code::unsupported, "x"));
  bad = t;
  bad.scale.device.type = DeviceType::cuda;
  EXPECT_TRUE(refused(quantize(bad, o).status(), Code::invalid_argument, "scale"));
  alignas(4) std::byte memory[12] = {};
  bad.x = TensorView::dense(call.k.data(), Format::f32, {call.keys, 2, 32});
  bad.cu_seqlens = TensorView::dense(static_cast<void*>(memory + 1), Format::s32, {2});
  EXPECT_TRUE(refused(quantize_shapes(bad.x, o, bad.cu_seqlens).status(), Code::invalid_argument,
                      "cu_seqlens"));
}

TEST(Found, StructThatEndsInsideAPointer) {
  qattn_attention_tensors t;
  qattn_attention_options o;
  qattn_attention_tensors_init(&t);
  qattn_attention_options_init(&o);
  o.recipe = "f32";
  o.struct_size = offsetof(qattn_attention_options, recipe) + 4;
  EXPECT_EQ(qattn_attention(&t, &o), QATTN_INVALID_ARGUMENT);
  EXPECT_NE(std::string(qattn_last_error()).find("struct_size 12"), std::string::npos);
}

TEST(Found, EmptyTensorsWithoutMemory) {
  // Null plus an offset is undefined, also where nothing is read.
  AttentionTensors t;
  for (TensorView* x : {&t.q, &t.k, &t.v, &t.out}) {
    *x = TensorView::dense(static_cast<void*>(nullptr), Format::f32, {2, 0, 2, 32});
  }
  EXPECT_TRUE(attention(t, options_of("int8_full", 1)).ok());
}

}  // namespace
}  // namespace qattn::test
