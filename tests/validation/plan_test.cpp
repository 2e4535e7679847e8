// Plans: what they say, what their hash covers, and that run() refuses a plan made for another
// call.
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

}  // namespace
}  // namespace qattn
