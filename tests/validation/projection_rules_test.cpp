// What an output projection must look like, in C++ and in C.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "core/backend.hpp"
#include "qattn/qattn.h"
#include "qattn/qattn.hpp"

namespace qattn {
namespace {

constexpr std::int64_t tokens = 6, heads = 2, dim = 16, features = 5;

struct Call {
  std::vector<float> q = std::vector<float>(2 * tokens * heads * dim, 0.5f);
  std::vector<float> weight = std::vector<float>(64 * 64, 0.25f), bias = {1, 2, 3, 4, 5, 6, 7, 8};
  std::vector<float> out = std::vector<float>(1024, 7.0f);
  AttentionTensors t;
  AttentionOptions o;

  Call() {
    t.q = t.k = t.v = TensorView::dense(q.data(), Format::f32, {2, tokens, heads, dim});
    t.out = TensorView::dense(out.data(), Format::f32, {2, tokens, features});
    t.projection = TensorView::dense(weight.data(), Format::f32, {features, heads * dim});
    t.projection_bias = TensorView::dense(bias.data(), Format::f32, {features});
    o.recipe = *recipe_named("f32");
  }
  Call(const Call&) = delete;

  /// The refusal; "" where it ran. Nothing may be written then.
  std::string message() {
    const Status status = attention(t, o);
    if (!status.ok()) {
      for (const float x : out) EXPECT_EQ(x, 7.0f);
    }
    return status.message();
  }
};

TEST(ProjectionRules, WhatFits) {
  Call call;
  ASSERT_EQ(call.message(), "");
  EXPECT_NEAR(call.out[0], 0.5f * 0.25f * 32 + 1, 1e-5f);
  EXPECT_NEAR(call.out[4], 0.5f * 0.25f * 32 + 5, 1e-5f);
  EXPECT_EQ(call.out[2 * tokens * features], 7.0f);
  call.t.projection_bias = {};
  call.t.projection.stride[0] = 64;  // rows may lie apart
  call.o.layout = Layout::bhsd;
  call.t.q = call.t.k = call.t.v =
      TensorView::dense(call.q.data(), Format::f32, {2, heads, tokens, dim});
  ASSERT_EQ(call.message(), "");
  EXPECT_NEAR(call.out[0], 4.0f, 1e-5f);
  call.t.q = call.t.k = call.t.v = TensorView::dense(call.q.data(), Format::f32, {2, 0, 2, 16});
  call.o.layout = Layout::bshd;
  call.t.out = TensorView::dense(call.out.data(), Format::f32, {2, 0, features});
  EXPECT_EQ(call.message(), "");
}

/// Changes one thing of a call and expects its refusal.
template <class Change>
void expect_refusal(const std::string& message, Change change) {
  Call call;
  change(call);
  EXPECT_EQ(call.message(), message);
}

TEST(ProjectionRules, Refusals) {
  expect_refusal(
      "projection: shape (5, 31) should be (E, Hq * Dv) with Hq * Dv = 32 and E at least 1",
      [](Call& c) { c.t.projection.shape[1] = 31; });
  expect_refusal(
      "projection: shape (0, 32) should be (E, Hq * Dv) with Hq * Dv = 32 and E at least 1",
      [](Call& c) { c.t.projection.shape[0] = 0; });
  expect_refusal(
      "projection: shape (160) should be (E, Hq * Dv) with Hq * Dv = 32 and E at least 1",
      [](Call& c) { c.t.projection = TensorView::dense(c.weight.data(), Format::f32, {160}); });
  expect_refusal(
      "projection: stride 5 of the last dimension should be 1 (torch.nn.Linear has its weight so)",
      [](Call& c) { c.t.projection.stride = {1, 5}; });
  expect_refusal("projection: format bf16 differs from out's f32",
                 [](Call& c) { c.t.projection.format = Format::bf16; });
  expect_refusal("projection_bias: format f16 differs from out's f32",
                 [](Call& c) { c.t.projection_bias.format = Format::f16; });
  expect_refusal("projection_bias: shape (4) should be (5)",
                 [](Call& c) { c.t.projection_bias.shape[0] = 4; });
  expect_refusal("projection_bias: is given without projection", [](Call& c) {
    c.t.projection = {};
    c.t.out = TensorView::dense(c.out.data(), Format::f32, {2, tokens, heads, dim});
  });
  expect_refusal("out: shape (2, 6, 4) should be (2, 6, 5)", [](Call& c) {
    c.t.out = TensorView::dense(c.out.data(), Format::f32, {2, tokens, 4});
  });
  expect_refusal("out: rank 4 should be 3 (projected)", [](Call& c) {
    c.t.out = TensorView::dense(c.out.data(), Format::f32, {2, tokens, heads, dim});
  });
  expect_refusal(
      "out: overlaps the memory of projection; an output must not share memory with any other "
      "tensor",
      [](Call& c) { c.t.projection.data = c.out.data() + 3; });
  expect_refusal("projection: data pointer is null",
                 [](Call& c) { c.t.projection.data = nullptr; });
  expect_refusal("projection_bias: value inf at (2) is not finite",
                 [](Call& c) { c.bias[2] = std::numeric_limits<float>::infinity(); });
  expect_refusal("projection: lies on another device than q (cuda:0, q on cpu)",
                 [](Call& c) { c.t.projection.device = {DeviceType::cuda, 0}; });
}

TEST(ProjectionRules, PackedSequences) {
  Call call;
  std::vector<std::int32_t> cu = {0, 5, 2 * tokens};
  call.t.q = call.t.k = call.t.v =
      TensorView::dense(call.q.data(), Format::f32, {2 * tokens, heads, dim});
  call.t.cu_seqlens_q = call.t.cu_seqlens_k = TensorView::dense(cu.data(), Format::s32, {3});
  EXPECT_EQ(call.message(), "out: rank 3 should be 2 (packed by cu_seqlens) (projected)");
  call.t.out = TensorView::dense(call.out.data(), Format::f32, {2 * tokens, features});
  EXPECT_EQ(call.message(), "");
}

TEST(ProjectionRules, PlansSayIt) {
  Call call;
  const Result<Plan> with = plan(call.t, call.o);
  ASSERT_TRUE(with.ok());
  EXPECT_NE(with->to_string().find("projection-to-5 projection_bias"), std::string::npos);
  EXPECT_NE(with->to_string().find("projection: f32 products, after all heads\n"),
            std::string::npos);
  call.t.projection_bias = {};
  EXPECT_NE(plan(call.t, call.o)->hash(), with->hash());
}

TEST(ProjectionRules, KernelsWithoutOneSaySo) {
  static const detail::Kernel kernels[] = {
      {"any", [](const Problem&) { return Status(); }, nullptr, nullptr}};
  detail::Backend backend;
  backend.name = "front";
  backend.kernels = kernels;
  backend.enter = [](int, int*) { return Status(); };
  backend.leave = [](int) {};
  detail::use_backend(&backend);
  Call call;
  const std::string text = explain(call.t, call.o);
  detail::use_backend(nullptr);
  EXPECT_NE(text.find("any: projection: this kernel has none"), std::string::npos) << text;
  EXPECT_NE(text.find("kernel: attn.cpu"), std::string::npos) << text;
}

TEST(ProjectionRules, InC) {
  Call call;
  qattn_attention_tensors t;
  qattn_attention_options o;
  qattn_attention_tensors_init(&t);
  qattn_attention_options_init(&o);
  const std::int64_t shape[] = {2, tokens, heads, dim}, weight[] = {features, heads * dim};
  const std::int64_t out[] = {2, tokens, features};
  t.q = t.k = t.v = qattn_tensor_dense(call.q.data(), QATTN_FORMAT_f32, 4, shape);
  t.out = qattn_tensor_dense(call.out.data(), QATTN_FORMAT_f32, 3, out);
  t.projection_bias = qattn_tensor_dense(call.bias.data(), QATTN_FORMAT_f32, 1, weight);
  t.projection = qattn_tensor_dense(call.weight.data(), QATTN_FORMAT_f32, 2, weight);
  ASSERT_EQ(qattn_attention(&t, &o), QATTN_OK) << qattn_last_error();
  EXPECT_NEAR(call.out[1], 6.0f, 0.05f);
  // Callers that were compiled before projections existed.
  t.struct_size = offsetof(qattn_attention_tensors, projection);
  EXPECT_EQ(qattn_attention(&t, &o), QATTN_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(qattn_last_error()), "out: rank 3 should be 4");
}

}  // namespace
}  // namespace qattn
