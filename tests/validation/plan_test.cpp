// Plans: what they say, what their hash covers, and that run() refuses a plan made for another
// call.
#include "core/plan.hpp"

#include <gtest/gtest.h>

#include <cstdlib>
#include <set>
#include <string>
#include <vector>

#include "qattn/qattn.hpp"

namespace qattn {
namespace {

AttentionTensors shapes(std::int64_t sq, std::int64_t sk, std::int64_t d) {
  AttentionTensors t;
  void* none = nullptr;
  t.q = TensorView::dense(none, Format::f32, {1, sq, 4, d});
  t.k = TensorView::dense(none, Format::f32, {1, sk, 2, d});
  t.v = TensorView::dense(none, Format::f32, {1, sk, 2, d});
  t.out = TensorView::dense(none, Format::f32, {1, sq, 4, d});
  return t;
}

TEST(Plan, HashTellsVariantsApart) {
  std::set<std::uint64_t> seen;
  std::size_t made = 0;
  const auto add = [&](const AttentionTensors& t, const AttentionOptions& o) {
    const Result<Plan> p = plan(t, o);
    ASSERT_TRUE(p.ok()) << p.status().message();
    seen.insert(p->hash());
    ++made;
  };
  AttentionOptions o;
  for (const Recipe& recipe : recipes()) {
    o.recipe = recipe;
    add(shapes(64, 64, 64), o);
  }
  o.recipe = *recipe_named("int8");
  add(shapes(64, 64, 128), o);
  add(shapes(1, 4096, 64), o);
  for (int i = 0; i < 9; ++i) {
    AttentionOptions x = o;
    if (i == 0) x.causal = true;
    if (i == 1) x.window_left = 8;
    if (i == 2) x.softcap = 3;
    if (i == 3) x.recipe.k_scale = {Granularity::per_block, 64, 0};
    if (i == 4) x.recipe.k_scale = {Granularity::per_block, 128, 0};
    if (i == 5) x.recipe.smooth_k = Toggle::off;
    if (i == 6) x.recipe.rotate = Toggle::on;
    if (i == 7) x.recipe.q_scale = {Granularity::per_warp, 128, 32};
    if (i == 8) x.recipe.balance_k = Toggle::off;
    add(shapes(64, 64, 64), x);
  }
  EXPECT_EQ(seen.size(), made);
}

TEST(Plan, TextNamesKernelRecipeAndSplits) {
  AttentionOptions o;
  o.recipe = *recipe_named("int8_full");
  const std::string text = plan(shapes(1, 4096, 64), o)->to_string();
  for (const char* word : {"kernel: attn.cpu.", "int8_full", "p=u8", "v_scale=per_token",
                           "split_keys: 1024", "workspace_bytes: "}) {
    EXPECT_NE(text.find(word), std::string::npos) << text;
  }
}

/// What "auto" is for 4 query heads on 2: so many queries on 256 keys, in one format. On AVX2 256
/// keys are too few for codes to gain; on AMX they are for ten rows a KV head.
std::string automatic(std::int64_t queries, Format format, std::int64_t batch = 1,
                      bool packed = false) {
  AttentionTensors t = shapes(queries, 256, 64);
  void* none = nullptr;
  for (TensorView* x : {&t.q, &t.k, &t.v, &t.out}) {
    const std::int64_t tokens = x == &t.q || x == &t.out ? queries : 256;
    const std::int64_t heads = x->shape[2];
    *x = packed ? TensorView::dense(none, format, {batch * tokens, heads, 64})
                : TensorView::dense(none, format, {batch, tokens, heads, 64});
  }
  AttentionOptions o;
  if (packed) {
    t.cu_seqlens_q = t.cu_seqlens_k = TensorView::dense(none, Format::s32, {batch + 1});
  }
  const Result<Plan> made = plan(t, o);
  EXPECT_TRUE(made.ok()) << made.status().message();
  return made.ok() ? made->recipe().name : "";
}

TEST(Plan, AutoLooksAtShapesAndFormats) {
  const std::string isa(*cpu_isa());
  const std::string bytes = isa == "scalar" || isa == "avx2" ? "f32" : "int8_full";
  for (const Format format : {Format::f32, Format::f16, Format::bf16}) {
    const std::string many = format == Format::bf16 && isa == "amx" ? "bf16" : bytes;
    const std::string packed = many == "f32" && isa != "scalar" ? "int8_full" : many;
    for (const std::int64_t batch : {1, 64}) {
      EXPECT_EQ(automatic(1, format, batch), "f32");
      EXPECT_EQ(automatic(4, format, batch), "f32");  // 8 rows a KV head
      EXPECT_EQ(automatic(5, format, batch), isa == "amx" && many == bytes ? "f32" : many);
      EXPECT_EQ(automatic(512, format, batch), many);
      EXPECT_EQ(automatic(1, format, batch, true), packed) << "neighbours may be longer";
    }
  }
  AttentionTensors counted = shapes(1, 256, 64);
  std::int64_t counts[3];
  counted.saturated = TensorView::dense(counts, Format::s64, {3});
  EXPECT_EQ(plan(counted, {})->recipe().name, "f32") << "a report changes no results";
  AttentionOptions o;
  o.recipe.rotate = Toggle::on;
  EXPECT_EQ(plan(shapes(1, 256, 64), o)->recipe().name, isa == "scalar" ? "f32" : "int8_full");
  EXPECT_NE(explain(shapes(1, 256, 64), {}).find("auto: few queries"), std::string::npos);
}

TEST(Plan, ForcedInstructionSetIsUsedAndUnknownOnesRefused) {
  setenv("QATTN_CPU_ISA", "scalar", 1);
  EXPECT_EQ(*cpu_isa(), "scalar");
  EXPECT_EQ(plan(shapes(8, 8, 64), {})->kernel(), "attn.cpu.scalar");
  EXPECT_EQ(plan(shapes(8, 8, 64), {})->recipe().name, "f32");
  setenv("QATTN_CPU_ISA", "mmx", 1);
  EXPECT_EQ(cpu_isa().status().code(), Code::invalid_argument);
  const Result<Plan> refused = plan(shapes(8, 8, 64), {});
  ASSERT_FALSE(refused.ok());
  EXPECT_NE(refused.status().message().find("mmx"), std::string::npos);
  unsetenv("QATTN_CPU_ISA");
}

TEST(Plan, ExplainNamesEveryKernelAndItsReason) {
  AttentionOptions o;
  o.recipe = *recipe_named("int8");
  o.recipe.p = Format::u8;
  const std::string text = explain(shapes(8, 8, 64), o);
  EXPECT_NE(text.find("attn.cpu.scalar:"), std::string::npos) << text;
  EXPECT_NE(text.find("attn.cpu.avx512vnni:"), std::string::npos) << text;
  AttentionTensors wrong = shapes(8, 8, 64);
  wrong.k.shape[3] = 32;
  EXPECT_NE(explain(wrong, {}).find("k: head_dim 32"), std::string::npos);
}

TEST(Plan, RunRefusesAnotherCall) {
  std::vector<float> q(64 * 4 * 64), k(64 * 2 * 64), v(k), out(q.size(), -7.0f);
  AttentionTensors t = shapes(64, 64, 64);
  t.q.data = q.data(), t.k.data = k.data(), t.v.data = v.data(), t.out.data = out.data();
  AttentionOptions o;
  o.recipe = *recipe_named("int8_full");
  const Result<Plan> p = plan(shapes(64, 64, 64), o);
  const std::size_t bytes = (p->workspace_bytes() + 63) / 64 * 64;
  void* memory = std::aligned_alloc(64, bytes);
  EXPECT_EQ(run(*p, t, o, static_cast<char*>(memory) + 4, bytes).code(), Code::invalid_argument);
  EXPECT_EQ(run(*p, t, o, memory, bytes - 64).code(), Code::out_of_memory);
  EXPECT_EQ(run(*p, t, o, memory, bytes, memory).code(),
            Code::invalid_argument);  // a stream on a CPU
  AttentionOptions other = o;
  other.softcap = 5;
  EXPECT_EQ(run(*p, t, other, memory, bytes).code(), Code::invalid_argument);
  for (int i = 0; i < 4; ++i) {
    AttentionOptions x = o;
    if (i == 0) x.recipe = *recipe_named("int8");
    if (i == 1) x.recipe.smooth_k = Toggle::off;
    if (i == 2) x.recipe.k_scale = {Granularity::per_block, 64, 0};
    if (i == 3) x.recipe.balance_k = Toggle::off;
    EXPECT_EQ(run(*p, t, x, memory, bytes).code(), Code::invalid_argument) << i;
  }
  AttentionOptions crowded = o;
  crowded.threads = 3;  // the plan's workspace holds scratch for its own number of threads
  EXPECT_EQ(run(*p, t, crowded, memory, bytes).code(), Code::invalid_argument);
  for (const float x : out) ASSERT_EQ(x, -7.0f);
  EXPECT_TRUE(run(*p, t, o, memory, bytes).ok());
  std::free(memory);
}

/// The plan itself, to see whether it is made anew.
const detail::PlanData* made(const AttentionTensors& t, const AttentionOptions& o) {
  const Result<Plan> p = plan(t, o);
  EXPECT_TRUE(p.ok()) << p.status().message();
  return p.ok() ? &p->data() : nullptr;
}

TEST(Plan, TheSameCallIsPlannedOnce) {
  AttentionTensors t = shapes(64, 64, 64);
  AttentionOptions o;
  o.recipe = *recipe_named("int8");
  const Result<Plan> first = plan(t, o);
  EXPECT_EQ(made(t, o), &first->data());
  alignas(128) static float memory[2 * 64 * 4 * 64];
  t.q.data = memory;
  EXPECT_EQ(made(t, o), &first->data());  // null has the same alignment
}

/// Whatever a plan may follow from: a field that the key forgets would give another call's plan.
TEST(Plan, OtherCallsHavePlansOfTheirOwn) {
  const AttentionTensors plain = shapes(64, 64, 64);
  AttentionOptions o;
  o.recipe = *recipe_named("int8");
  const Result<Plan> first = plan(plain, o);
  std::vector<float> some(4096);
  const auto tensors = [&](auto change) {
    AttentionTensors t = plain;
    change(t);
    EXPECT_NE(made(t, o), &first->data());
  };
  tensors([](AttentionTensors& t) { t = shapes(64, 65, 64); });
  tensors([](AttentionTensors& t) { t.q.format = t.k.format = t.v.format = Format::f16; });
  tensors([](AttentionTensors& t) { t.q.stride[1] += 8; });
  tensors([&](AttentionTensors& t) { t.q.data = reinterpret_cast<std::byte*>(some.data()) + 4; });
  tensors([&](AttentionTensors& t) {
    t.lse = TensorView::dense(some.data(), Format::f32, {1, 4, 64});
  });
  tensors([&](AttentionTensors& t) {
    t.mask = TensorView::dense(some.data(), Format::b8, {1, 1, 64, 64});
  });
  const auto options = [&](auto change) {
    AttentionOptions x = o;
    change(x);
    EXPECT_NE(made(plain, x), &first->data());
  };
  options([](AttentionOptions& x) { x.causal = true; });
  options([](AttentionOptions& x) { x.softcap = 1; });
  options([](AttentionOptions& x) { x.softmax_scale = 2.0f; });
  options([](AttentionOptions& x) { x.recipe.smooth_k = Toggle::off; });
  options([](AttentionOptions& x) { x.threads = 3; });
  setenv("QATTN_CPU_ISA", "scalar", 1);
  const Result<Plan> scalar = plan(plain, o);
  unsetenv("QATTN_CPU_ISA");
  ASSERT_TRUE(scalar.ok());
  EXPECT_NE(&scalar->data(), &first->data());
}

TEST(Plan, ManyPlansPushOldOnesOut) {
  AttentionOptions o;
  o.recipe = *recipe_named("int8");
  const Result<Plan> first = plan(shapes(64, 64, 64), o);
  for (int n = 0; n < 16; ++n) made(shapes(64, 65 + n, 64), o);
  EXPECT_NE(made(shapes(64, 64, 64), o), &first->data());
}

}  // namespace
}  // namespace qattn
