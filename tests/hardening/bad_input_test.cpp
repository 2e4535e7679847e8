// Thousands of random calls through the C interface: each either succeeds on memory that is exactly
// as large as its views, or refuses with a message that names something and writes nothing.
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <random>

#include "hardening/wild_c.hpp"

namespace qattn::test {
namespace {

using fuzz::Choices;
using fuzz::WildCall;
using fuzz::WildQuantize;

constexpr int calls = 20000;

qattn_scaling c_scaling(const Scaling& s) {
  return {static_cast<std::int32_t>(s.granularity), s.block, s.warp};
}

struct CCall {
  qattn_attention_tensors tensors;
  qattn_attention_options options;
};

CCall c_call(const WildCall& call) {
  CCall c;
  qattn_attention_tensors_init(&c.tensors);
  qattn_attention_options_init(&c.options);
#define QATTN_TENSOR(name, output) c.tensors.name = c_tensor(call.tensors.name);
#include "qattn/attention_tensors.def"
#undef QATTN_TENSOR
  const AttentionOptions& from = call.options;
  qattn_attention_options& o = c.options;
  o.recipe = from.recipe.name.c_str();
  o.layout = static_cast<std::int32_t>(from.layout);
  o.causal = from.causal;
  o.has_softmax_scale = from.softmax_scale.has_value();
  o.softmax_scale = from.softmax_scale.value_or(0);
  o.window_left = from.window_left;
  o.window_right = from.window_right;
  o.softcap = from.softcap;
  o.threads = from.threads;
  o.block_mask_q = from.block_mask_q;
  o.block_mask_k = from.block_mask_k;
  o.q_scaling = c_scaling(from.recipe.q_scale);
  o.k_scaling = c_scaling(from.recipe.k_scale);
  o.v_scaling = c_scaling(from.recipe.v_scale);
  o.smooth_k = static_cast<std::int32_t>(from.recipe.smooth_k);
  o.smooth_q = static_cast<std::int32_t>(from.recipe.smooth_q);
  o.smooth_v = static_cast<std::int32_t>(from.recipe.smooth_v);
  o.rotate = static_cast<std::int32_t>(from.recipe.rotate);
  return c;
}

void break_struct(std::mt19937_64& random, CCall& c) {
  switch (random() % 7) {
    case 0:
      c.tensors.struct_size = random() % 4 ? random() % 4096 : random();
      break;
    case 1:
      c.options.struct_size = random() % 4 ? random() % 256 : random();
      break;
    case 2:
      c.options.recipe = random() % 2 ? "int8_fulll" : "";
      break;
    case 3:
      c.options.scales_for = {random() % 2 ? "fp8" : "", static_cast<std::int32_t>(random() % 4),
                              static_cast<std::int32_t>(random()), 0, 0};
      break;
    case 4:
      c.options.causal = static_cast<std::int32_t>(random());
      break;
    case 5:
      c.options.has_softmax_scale = static_cast<std::int32_t>(random());
      break;
    default:
      c.options.recipe = nullptr;
  }
}

TEST(BadInput, AttentionThroughC) {
  std::mt19937_64 random(2026);
  std::array<int, 5> seen{};
  for (int n = 0; n < calls; ++n) {
    SCOPED_TRACE("call " + std::to_string(n));
    const std::vector<std::uint8_t> bytes = draw(random, n);
    WildCall call(Choices(bytes), n % 4 != 0);
    CCall c = c_call(call);
    if (random() % 16 == 0) break_struct(random, c);
    const qattn_status status = qattn_attention(&c.tensors, &c.options);
    ASSERT_TRUE(status >= 0 && status < 5);
    ++seen[static_cast<std::size_t>(status)];
    if (status != QATTN_OK) {
      ASSERT_TRUE(refused_well(status));
    }
    ASSERT_EQ(call.memory.violation(status != QATTN_OK), "") << qattn_last_error();
  }
  // A generator that only makes nonsense, or only good calls, would test half of this.
  EXPECT_GT(seen[QATTN_OK], calls / 20);
  EXPECT_GT(seen[QATTN_INVALID_ARGUMENT], calls / 10);
  EXPECT_GT(seen[QATTN_UNSUPPORTED], 0);
}

TEST(BadInput, PlansThroughC) {
  std::mt19937_64 random(2027);
  std::vector<char> text(1 << 15);
  for (int n = 0; n < calls; ++n) {
    SCOPED_TRACE("call " + std::to_string(n));
    const std::vector<std::uint8_t> bytes = draw(random, n);
    WildCall call(Choices(bytes), false);
    CCall c = c_call(call);
    qattn_plan* plan = nullptr;
    const qattn_status status = qattn_plan_create(&c.tensors, &c.options, &plan);
    ASSERT_EQ(status == QATTN_OK, plan != nullptr);
    if (status != QATTN_OK) {
      ASSERT_TRUE(refused_well(status));
    }
    const std::size_t capacity = random() % text.size();
    text[capacity] = 'x';
    std::size_t needed = 0;
    ASSERT_EQ(qattn_explain(&c.tensors, &c.options, text.data(), capacity, &needed), QATTN_OK);
    ASSERT_GT(needed, 1u);
    ASSERT_EQ(text[capacity], 'x');
    if (plan != nullptr) {
      // A plan never runs with less than it asked for, nor on other tensors.
      alignas(64) char workspace[64];
      const std::size_t bytes_needed = qattn_plan_workspace_bytes(plan);
      ASSERT_GT(bytes_needed, sizeof workspace);
      const qattn_status ran =
          qattn_run(plan, &c.tensors, &c.options, workspace, sizeof workspace, nullptr);
      ASSERT_EQ(ran, QATTN_OUT_OF_MEMORY) << qattn_last_error();
    }
    qattn_plan_destroy(plan);
  }
}

TEST(BadInput, QuantizeThroughC) {
  std::mt19937_64 random(2028);
  int good = 0;
  for (int n = 0; n < calls; ++n) {
    SCOPED_TRACE("call " + std::to_string(n));
    const std::vector<std::uint8_t> bytes = draw(random, n);
    WildQuantize call(Choices(bytes), n % 4 != 0);
    qattn_quantize_tensors t;
    qattn_quantize_options o;
    qattn_quantize_tensors_init(&t);
    qattn_quantize_options_init(&o);
    t.x = c_tensor(call.tensors.x);
    t.codes = c_tensor(call.tensors.codes);
    t.scale = c_tensor(call.tensors.scale);
    t.global = c_tensor(call.tensors.global);
    t.mean = c_tensor(call.tensors.mean);
    t.static_scale = c_tensor(call.tensors.static_scale);
    t.cu_seqlens = c_tensor(call.tensors.cu_seqlens);
    o.format = static_cast<std::int32_t>(call.options.format);
    o.role = static_cast<std::int32_t>(call.options.role);
    o.layout = static_cast<std::int32_t>(call.options.layout);
    o.scaling = c_scaling(call.options.scaling);
    o.smooth = call.options.smooth;
    o.rotate = call.options.rotate;
    o.threads = call.options.threads;
    std::int64_t saturated = 0;
    const qattn_status status =
        call.backwards ? qattn_dequantize(&t, &o) : qattn_quantize(&t, &o, &saturated);
    if (status == QATTN_OK) {
      ++good;
    } else {
      ASSERT_TRUE(refused_well(status));
    }
    ASSERT_EQ(call.memory.violation(status != QATTN_OK), "") << qattn_last_error();
    qattn_quantize_tensors shapes = t;
    if (qattn_quantize_shapes(&shapes, &o) != QATTN_OK) {
      ASSERT_EQ(std::memcmp(&shapes, &t, sizeof t), 0) << "a refused call wrote its output";
    }
  }
  EXPECT_GT(good, calls / 20);
}

}  // namespace
}  // namespace qattn::test
