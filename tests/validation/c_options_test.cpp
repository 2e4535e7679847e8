// The C interface hands on every option and every tensor: none is ignored, none takes another's
// place.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "core/c/translate_kv.hpp"

namespace qattn {
namespace {

constexpr std::int64_t tokens = 96, heads = 96, dim = 32;

std::vector<float> numbers(unsigned seed) {
  std::vector<float> x(tokens * heads * dim);
  std::uint32_t state = seed;
  for (float& value : x) {
    state = state * 1664525u + 1013904223u;
    value = static_cast<float>(state >> 8) / 8388608.0f - 1.0f;
  }
  return x;
}

/// As many heads as tokens, so that either layout fits.
struct Data {
  std::vector<float> q = numbers(1), k = numbers(2), v = numbers(3), out = q;
  std::vector<std::uint8_t> blocks = {1, 0, 0, 1};
  qattn_attention_tensors c;
  AttentionTensors t;

  Data() {
    const std::int64_t shape[] = {1, tokens, heads, dim};
    qattn_attention_tensors_init(&c);
    c.q = qattn_tensor_dense(q.data(), QATTN_FORMAT_f32, 4, shape);
    c.k = qattn_tensor_dense(k.data(), QATTN_FORMAT_f32, 4, shape);
    c.v = qattn_tensor_dense(v.data(), QATTN_FORMAT_f32, 4, shape);
    c.out = qattn_tensor_dense(out.data(), QATTN_FORMAT_f32, 4, shape);
    t.q = c::view(c.q), t.k = c::view(c.k), t.v = c::view(c.v), t.out = c::view(c.out);
  }
  void mask_blocks() {
    const std::int64_t shape[] = {1, 1, 2, 2};
    c.block_mask = qattn_tensor_dense(blocks.data(), QATTN_FORMAT_b8, 4, shape);
    t.block_mask = c::view(c.block_mask);
  }
};

/// What a call does, as text and numbers.
struct Answer {
  std::string plan;
  std::vector<float> out;
  bool operator==(const Answer& other) const {
    return plan == other.plan && out.size() == other.out.size() &&
           std::memcmp(out.data(), other.out.data(), 4 * out.size()) == 0;
  }
};

Answer of_c(Data& data, const qattn_attention_options& o) {
  qattn_plan* plan = nullptr;
  EXPECT_EQ(qattn_plan_create(&data.c, &o, &plan), QATTN_OK) << qattn_last_error();
  const Answer planned{plan != nullptr ? qattn_plan_text(plan) : "", {}};
  qattn_plan_destroy(plan);
  EXPECT_EQ(qattn_attention(&data.c, &o), QATTN_OK) << qattn_last_error();
  return {planned.plan, data.out};
}

Answer of_cpp(Data& data, const AttentionOptions& o) {
  const Result<Plan> made = plan(data.t, o);
  EXPECT_TRUE(made.ok()) << made.status().message();
  const Status s = attention(data.t, o);
  EXPECT_TRUE(s.ok()) << s.message();
  return {made.ok() ? made->to_string() : "", data.out};
}

struct Option {
  const char* name;
  void (*c)(qattn_attention_options&);
  void (*cpp)(AttentionOptions&);
};

constexpr Option options[] = {
    {"recipe", [](auto& o) { o.recipe = "int8"; },
     [](auto& o) { o.recipe = *recipe_named("int8"); }},
    {"layout", [](auto& o) { o.layout = QATTN_LAYOUT_BHSD; },
     [](auto& o) { o.layout = Layout::bhsd; }},
    {"causal", [](auto& o) { o.causal = 1; }, [](auto& o) { o.causal = true; }},
    {"softmax_scale", [](auto& o) { o.has_softmax_scale = 1, o.softmax_scale = 0.5f; },
     [](auto& o) { o.softmax_scale = 0.5f; }},
    {"window_left", [](auto& o) { o.window_left = 3; }, [](auto& o) { o.window_left = 3; }},
    {"window_right", [](auto& o) { o.window_right = 5; }, [](auto& o) { o.window_right = 5; }},
    {"softcap", [](auto& o) { o.softcap = 0.25f; }, [](auto& o) { o.softcap = 0.25f; }},
    {"threads", [](auto& o) { o.threads = 7; }, [](auto& o) { o.threads = 7; }},
    {"q_scaling", [](auto& o) { o.q_scaling = {QATTN_PER_WARP, 64, 32}; },
     [](auto& o) { o.recipe.q_scale = {Granularity::per_warp, 64, 32}; }},
    {"k_scaling", [](auto& o) { o.k_scaling = {QATTN_PER_BLOCK, 32, 0}; },
     [](auto& o) { o.recipe.k_scale = {Granularity::per_block, 32, 0}; }},
    {"v_scaling", [](auto& o) { o.v_scaling = {QATTN_PER_CHANNEL, 0, 0}; },
     [](auto& o) { o.recipe.v_scale = {Granularity::per_channel, 0, 0}; }},
    {"smooth_k", [](auto& o) { o.smooth_k = QATTN_TOGGLE_OFF; },
     [](auto& o) { o.recipe.smooth_k = Toggle::off; }},
    {"smooth_q",
     [](auto& o) { o.smooth_q = QATTN_TOGGLE_ON, o.q_scaling = {QATTN_PER_BLOCK, 64, 0}; },
     [](auto& o) {
       o.recipe.smooth_q = Toggle::on, o.recipe.q_scale = {Granularity::per_block, 64, 0};
     }},
    {"smooth_v", [](auto& o) { o.smooth_v = QATTN_TOGGLE_ON; },
     [](auto& o) { o.recipe.smooth_v = Toggle::on; }},
    {"rotate", [](auto& o) { o.rotate = QATTN_TOGGLE_ON; },
     [](auto& o) { o.recipe.rotate = Toggle::on; }},
    {"balance_k", [](auto& o) { o.balance_k = QATTN_TOGGLE_OFF; },
     [](auto& o) { o.recipe.balance_k = Toggle::off; }},
};

TEST(COptions, EveryOptionOfAttentionArrives) {
  Data data;
  qattn_attention_options c;
  qattn_attention_options_init(&c);
  c.recipe = "int8_full";
  AttentionOptions cpp;
  cpp.recipe = *recipe_named("int8_full");
  const Answer plain = of_c(data, c);
  EXPECT_EQ(plain, of_cpp(data, cpp));
  for (const Option& option : options) {
    SCOPED_TRACE(option.name);
    qattn_attention_options c_changed = c;
    AttentionOptions cpp_changed = cpp;
    option.c(c_changed);
    option.cpp(cpp_changed);
    const Answer answer = of_c(data, c_changed);
    EXPECT_FALSE(answer == plain) << "has no effect";
    EXPECT_TRUE(answer == of_cpp(data, cpp_changed)) << answer.plan;
  }
  data.mask_blocks();
  c.block_mask_q = cpp.block_mask_q = 64;
  c.block_mask_k = cpp.block_mask_k = 64;
  const Answer masked = of_c(data, c);
  EXPECT_FALSE(masked == plain);
  EXPECT_TRUE(masked == of_cpp(data, cpp)) << masked.plan;
}

/// One and the same in both interfaces.
struct ScalesFor {
  qattn_scales_for c;
  Recipe cpp;
};

std::vector<ScalesFor> scales_for() {
  std::vector<ScalesFor> list;
  for (const char* name : {"int8", "fp8", "mxfp8", "bf16", "auto"}) {
    list.push_back({{name, 0, 0, 0, 0}, *recipe_named(name)});
  }
  constexpr std::int32_t on = QATTN_TOGGLE_ON, off = QATTN_TOGGLE_OFF;
  const ScalesFor plain{{"int8_full", 0, 0, 0, 0}, *recipe_named("int8_full")};
  for (int n = 0; n < 6; ++n) list.push_back(plain);
  ScalesFor* s = &list[list.size() - 5];  // the first of them is as it is
  s[0].c.smooth_k = off, s[0].cpp.smooth_k = Toggle::off;
  s[1].c.smooth_q = on, s[1].cpp.smooth_q = Toggle::on;
  s[2].c.smooth_v = on, s[2].cpp.smooth_v = Toggle::on;
  s[3].c.rotate = on, s[3].cpp.rotate = Toggle::on;
  s[4].c.rotate = 9, s[4].cpp.rotate = static_cast<Toggle>(9);
  return list;
}

TEST(COptions, WhatScalesWereMadeForArrives) {
  Data data;
  std::vector<float> scale(heads, 0.05f);
  const std::int64_t shape[] = {1, heads};
  for (auto* t : {&data.c.q_scale, &data.c.k_scale, &data.c.v_scale}) {
    *t = qattn_tensor_dense(scale.data(), QATTN_FORMAT_f32, 2, shape);
  }
  data.t.q_scale = data.t.k_scale = data.t.v_scale = c::view(data.c.q_scale);
  qattn_attention_options c;
  qattn_attention_options_init(&c);
  c.recipe = "int8_full";
  c.q_scaling = c.k_scaling = c.v_scaling = {QATTN_PER_HEAD, 0, 0};
  AttentionOptions cpp;
  cpp.recipe = *recipe_named("int8_full");
  for (Scaling* s : {&cpp.recipe.q_scale, &cpp.recipe.k_scale, &cpp.recipe.v_scale}) {
    s->granularity = Granularity::per_head;
  }
  EXPECT_EQ(qattn_attention(&data.c, &c), QATTN_OK) << qattn_last_error();
  int taken = 0;
  for (const ScalesFor& told : scales_for()) {
    c.scales_for = told.c;
    cpp.scales_for = told.cpp;
    const Status want = attention(data.t, cpp);
    EXPECT_EQ(qattn_attention(&data.c, &c), static_cast<int>(want.code())) << want.message();
    if (!want.ok()) {
      EXPECT_EQ(qattn_last_error(), want.message());
    }
    taken += want.ok();
  }
  EXPECT_EQ(taken, 1);
  // A caller of the library before knew no such field.
  c.struct_size = offsetof(qattn_attention_options, scales_for);
  EXPECT_EQ(qattn_attention(&data.c, &c), QATTN_OK) << qattn_last_error();
  c.struct_size = sizeof c;
  c.scales_for = {"int9", 0, 0, 0, 0};
  EXPECT_EQ(qattn_attention(&data.c, &c), QATTN_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(qattn_last_error()).rfind("scales_for: recipe: \"int9\"", 0), 0u);
  c.scales_for = {nullptr, 0, 0, 0, QATTN_TOGGLE_OFF};
  EXPECT_EQ(qattn_attention(&data.c, &c), QATTN_INVALID_ARGUMENT);
  EXPECT_STREQ(qattn_last_error(), "scales_for: has toggles, and its recipe is NULL");
  c.scales_for = {"int8_full", 0, 0, 0, 0};
  for (auto* t : {&data.c.q_scale, &data.c.k_scale, &data.c.v_scale}) *t = {};
  c.q_scaling = c.k_scaling = c.v_scaling = {};
  EXPECT_EQ(qattn_attention(&data.c, &c), QATTN_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(qattn_last_error()).rfind("scales_for: is given without q_scale", 0), 0u);
}

TEST(COptions, WhatAStaticScaleOfQuantizeWasMadeForArrives) {
  Data data;
  qattn_quantize_tensors t;
  qattn_quantize_options o;
  qattn_quantize_tensors_init(&t);
  qattn_quantize_options_init(&o);
  o.scaling.granularity = QATTN_PER_HEAD;
  t.x = data.c.k;
  ASSERT_EQ(qattn_quantize_shapes(&t, &o), QATTN_OK) << qattn_last_error();
  std::vector<std::int8_t> codes(tokens * heads * dim, 77);
  std::vector<float> scale(heads), given(heads, 0.01f);
  t.static_scale = t.scale;
  t.codes.data = codes.data(), t.scale.data = scale.data(), t.static_scale.data = given.data();
  o.scales_for = {"fp8", 0, 0, 0, 0};
  EXPECT_EQ(qattn_quantize(&t, &o, nullptr), QATTN_INVALID_ARGUMENT);
  EXPECT_STREQ(qattn_last_error(),
               "static_scale: was made for recipe fp8, k in e4m3; the call has k in s8");
  o.scales_for = {"int8", 0, 0, 0, 0};
  EXPECT_EQ(qattn_quantize(&t, &o, nullptr), QATTN_INVALID_ARGUMENT);
  EXPECT_STREQ(
      qattn_last_error(),
      "static_scale: was made for recipe int8, k less its mean; the call has k with its mean");
  for (const std::int8_t code : codes) ASSERT_EQ(code, 77);
  o.scales_for.smooth_k = QATTN_TOGGLE_OFF;
  EXPECT_EQ(qattn_quantize(&t, &o, nullptr), QATTN_OK) << qattn_last_error();
  const qattn_tensor static_scale = t.static_scale;
  t.static_scale = {};
  EXPECT_EQ(qattn_quantize(&t, &o, nullptr), QATTN_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(qattn_last_error()).rfind("scales_for: is given without static", 0), 0u);
  t.static_scale = static_scale;
  o.scales_for.recipe = "fp8";
  o.struct_size = offsetof(qattn_quantize_options, scales_for);
  EXPECT_EQ(qattn_quantize(&t, &o, nullptr), QATTN_OK) << qattn_last_error();
}

/// Every tensor, where it is wrong, is refused by its own name, or by what it asks of others.
TEST(COptions, EveryTensorOfAttentionArrives) {
  using T = qattn_attention_tensors;
  const std::pair<const char*, qattn_tensor T::*> all[] = {
      {"q", &T::q},
      {"k", &T::k},
      {"v", &T::v},
      {"out", &T::out},
      {"lse", &T::lse},
      {"q_scale", &T::q_scale},
      {"k_scale", &T::k_scale},
      {"v_scale", &T::v_scale},
      {"q_global", &T::q_global},
      {"k_global", &T::k_global},
      {"v_global", &T::v_global},
      {"k_mean", &T::k_mean},
      {"v_mean", &T::v_mean},
      {"saturated", &T::saturated},
      {"sinks", &T::sinks},
      {"mask", &T::mask},
      {"alibi_slopes", &T::alibi_slopes},
      {"q: rank 4 should be 3 (packed by cu_seqlens)", &T::cu_seqlens_q},
      {"k: rank 4 should be 3 (packed by cu_seqlens)", &T::cu_seqlens_k},
      {"seqused_q", &T::seqused_q},
      {"seqused_k", &T::seqused_k},
      {"page_table", &T::page_table},
      {"block_mask_q: 0", &T::block_mask},
      {"out: rank 4 should be 3 (projected)", &T::projection},
      {"projection_bias", &T::projection_bias}};
  static_assert(sizeof(T) == sizeof(std::size_t) + std::size(all) * sizeof(qattn_tensor));
  std::uint8_t byte = 0;
  const std::int64_t shape[] = {1, 1, 1, 1, 1};
  for (const auto& [name, member] : all) {
    Data data;
    qattn_attention_options o;
    qattn_attention_options_init(&o);
    o.recipe = "int8_full";
    data.c.*member = qattn_tensor_dense(&byte, QATTN_FORMAT_b8, 5, shape);
    EXPECT_EQ(qattn_attention(&data.c, &o), QATTN_INVALID_ARGUMENT) << name;
    const std::string start = std::strchr(name, ':') != nullptr ? name : name + std::string(":");
    EXPECT_EQ(std::string(qattn_last_error()).rfind(start, 0), 0u) << start << qattn_last_error();
  }
}

TEST(COptions, EveryOptionOfACacheArrives) {
  qattn_kv_options given;
  qattn_kv_options_init(&given);
  const KvCacheOptions before;
  KvCacheOptions o;
  ASSERT_TRUE(c::read_options(&given, o).ok());
  EXPECT_EQ(o.tiers, before.tiers);
  // A new field needs a line here.
  static_assert(sizeof(qattn_kv_options) == 184);
  given.layers = 3, given.heads_kv = 5, given.d = 64, given.dv = 96, given.page_size = 32;
  given.window = 256, given.sinks = 64, given.window_format = QATTN_FORMAT_bf16;
  given.tier_count = 2, given.tiers[0] = {8, 4}, given.tiers[1] = {3, 2};
  given.average_bits = 5.5, given.budget_from = 4096;
  given.smooth_k = !before.smooth_k, given.rotate = !before.rotate;
  given.balance_k = !before.balance_k, given.smooth_v = !before.smooth_v;
  given.importance = QATTN_KV_IMPORTANCE_KEY_NORM, given.threads = 7;
  given.importance_decay = 0.5f, given.hysteresis = 0.75f;
  given.k_granularity = QATTN_PER_CHANNEL;
  ASSERT_TRUE(c::read_options(&given, o).ok());
  EXPECT_EQ(o.layers, 3);
  EXPECT_EQ(o.heads_kv, 5);
  EXPECT_EQ(o.d, 64);
  EXPECT_EQ(o.dv, 96);
  EXPECT_EQ(o.page_size, 32);
  EXPECT_EQ(o.window, 256);
  EXPECT_EQ(o.sinks, 64);
  EXPECT_EQ(o.window_format, Format::bf16);
  EXPECT_EQ(o.tiers, (std::vector<KvTier>{{8, 4}, {3, 2}}));
  EXPECT_EQ(o.average_bits, 5.5);
  EXPECT_EQ(o.budget_from, 4096);
  EXPECT_EQ(o.smooth_k, !before.smooth_k);
  EXPECT_EQ(o.rotate, !before.rotate);
  EXPECT_EQ(o.balance_k, !before.balance_k);
  EXPECT_EQ(o.smooth_v, !before.smooth_v);
  EXPECT_EQ(o.importance, KvImportance::key_norm);
  EXPECT_EQ(o.threads, 7);
  EXPECT_EQ(o.importance_decay, 0.5f);
  EXPECT_EQ(o.hysteresis, 0.75f);
  EXPECT_EQ(o.k_granularity, Granularity::per_channel);
}

TEST(COptions, EveryOptionOfDecodeArrives) {
  qattn_kv_decode_tensors tensors;
  qattn_kv_decode_options given;
  qattn_kv_decode_tensors_init(&tensors);
  qattn_kv_decode_options_init(&given);
  static_assert(sizeof(qattn_kv_decode_options) == 48);  // a new field needs a line here
  qattn_tensor* const all[] = {&tensors.q,     &tensors.out,       &tensors.lse,
                               &tensors.sinks, &tensors.tree_mask, &tensors.mass};
  float places[std::size(all)];
  const std::int64_t shape[] = {1};
  for (std::size_t n = 0; n < std::size(all); ++n) {
    *all[n] = qattn_tensor_dense(&places[n], QATTN_FORMAT_f32, 1, shape);
  }
  given.layout = QATTN_LAYOUT_BHSD, given.causal = 0;
  given.has_softmax_scale = 1, given.softmax_scale = 0.5f;
  given.window_left = 9, given.softcap = 2.0f, given.threads = 7, given.debias = 1;
  KvDecodeTensors t;
  KvDecodeOptions o;
  ASSERT_TRUE(c::read_decode(&tensors, &given, t, o).ok());
  const TensorView* views[] = {&t.q, &t.out, &t.lse, &t.sinks, &t.tree_mask, &t.mass};
  for (std::size_t n = 0; n < std::size(all); ++n) EXPECT_EQ(views[n]->data, &places[n]) << n;
  EXPECT_EQ(o.layout, Layout::bhsd);
  EXPECT_EQ(o.causal, false);
  EXPECT_EQ(o.softmax_scale, 0.5f);
  EXPECT_EQ(o.window_left, 9);
  EXPECT_EQ(o.softcap, 2.0f);
  EXPECT_EQ(o.threads, 7);
  EXPECT_EQ(o.debias, true);
}

TEST(COptions, EveryOptionOfQuantizeArrives) {
  Data data;
  qattn_quantize_tensors c;
  qattn_quantize_options plain;
  qattn_quantize_tensors_init(&c);
  qattn_quantize_options_init(&plain);
  c.x = data.c.k;
  static_assert(sizeof(qattn_quantize_options) == 72);  // a new field needs a line here
  const std::vector<std::function<void(qattn_quantize_options&, QuantizeOptions&)>> changes = {
      [](auto& a, auto& b) { a.format = QATTN_FORMAT_e4m3, b.format = Format::e4m3; },
      [](auto& a, auto& b) {
        a.role = QATTN_ROLE_V, b.role = Role::v;
        a.scaling = {QATTN_PER_CHANNEL, 0, 0}, b.scaling = {Granularity::per_channel, 0, 0};
      },
      [](auto& a, auto& b) { a.layout = QATTN_LAYOUT_BHSD, b.layout = Layout::bhsd; },
      [](auto& a, auto& b) {
        a.scaling = {QATTN_PER_BLOCK, 32, 0}, b.scaling = {Granularity::per_block, 32, 0};
      },
      [](auto& a, auto& b) { a.smooth = 1, b.smooth = true; },
      [](auto& a, auto& b) { a.rotate = 1, b.rotate = true; },
      [](auto&, auto&) {}};
  std::vector<std::vector<std::uint8_t>> seen;
  for (std::size_t n = 0; n < changes.size(); ++n) {
    SCOPED_TRACE(n);
    qattn_quantize_options a = plain;
    QuantizeOptions b;
    changes[n](a, b);
    ASSERT_EQ(qattn_quantize_shapes(&c, &a), QATTN_OK) << qattn_last_error();
    // Codes, scales and means by each interface, side by side.
    std::vector<std::uint8_t> of[2];
    for (const bool cpp : {false, true}) {
      std::vector<std::uint8_t> codes(tokens * heads * dim);
      std::vector<float> scale(tokens * heads * 32), mean(heads * dim);
      c.codes.data = codes.data(), c.scale.data = scale.data();
      if (a.smooth != 0) c.mean.data = mean.data();
      QuantizeTensors t{c::view(c.x),
                        c::view(c.codes),
                        c::view(c.scale),
                        c::view(c.global),
                        c::view(c.mean),
                        {},
                        {}};
      if (cpp) {
        const auto done = quantize(t, b);
        ASSERT_TRUE(done.ok()) << done.status().message();
      } else {
        ASSERT_EQ(qattn_quantize(&c, &a, nullptr), QATTN_OK) << qattn_last_error();
      }
      of[cpp] = codes;
      const auto* bytes = reinterpret_cast<const std::uint8_t*>(scale.data());
      of[cpp].insert(of[cpp].end(), bytes, bytes + 4 * scale.size());
    }
    EXPECT_TRUE(of[0] == of[1]);
    for (const auto& other : seen) EXPECT_FALSE(of[0] == other) << "has no effect";
    seen.push_back(of[0]);
    c.codes = c.scale = c.mean = c.global = {};
  }
  plain.threads = -1;
  EXPECT_EQ(qattn_quantize_shapes(&c, &plain), QATTN_INVALID_ARGUMENT);
}

}  // namespace
}  // namespace qattn
