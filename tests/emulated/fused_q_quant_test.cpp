// Codes of Q that the Hopper kernel makes itself are those that the quantisation kernels make: the
// whole call is equal, bit by bit.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <utility>

#include "emulated/emulated_backend.hpp"
#include "emulated/matrix.hpp"

namespace qattn::test {
namespace {

constexpr const char* in_kernel = "q_codes: in the attention kernel\n";

std::vector<Recipe> code_recipes() {
  std::vector<Recipe> all;
  for (const char* name : {"int8_full", "int8_fp8", "fp8"}) {
    all.push_back(*recipe_named(name));
  }
  return all;
}

class FusedQQuant : public testing::TestWithParam<Recipe> {
 protected:
  const Recipe& recipe() const { return GetParam(); }

  void expect_equal(const Call& call, Laid& laid, const char* what) {
    Outcome prepared, made;
    {
      const LeaveQueries off(false);
      prepared = run_emulated(call, laid, recipe(), every_timing().subspan(1, 1));
    }
    {
      const LeaveQueries on(true);
      made = run_emulated(call, laid, recipe());
    }
    ASSERT_FALSE(HasFailure()) << what;
    EXPECT_EQ(prepared.plan.find(in_kernel), std::string::npos) << what;
    EXPECT_NE(made.plan.find(in_kernel), std::string::npos) << what << "\n" << made.plan;
    EXPECT_TRUE(same_bits(prepared, made)) << what;
  }

  void expect_equal(Feature f, Format format, std::uint64_t seed, const char* what) {
    f = with_inputs(std::move(f), recipe(), format);
    const Call call = make_call(f, seed);
    Laid laid = lay_out(call, f.how);
    expect_equal(call, laid, what);
  }

 private:
  OnArchitecture on_{90};
};

TEST_P(FusedQQuant, AreThoseOfTheQuantisationKernels) {
  expect_equal(unprepared(128, {200, 200}, {150, 150}), Format::bf16, 1, "dense, D 128");
  expect_equal(unprepared(64, {300}, {200}), Format::f16, 2, "dense, D 64");
  expect_equal(unprepared(80, {129}, {64}), Format::bf16, 3, "channels that are padded");
  Feature causal = unprepared(128, {260, 260}, {390, 390});
  causal.options.causal = true;
  expect_equal(causal, Format::f16, 4, "causal");
}

/// Whose channels change by powers of two.
TEST_P(FusedQQuant, OfLoudKeys) {
  Recipe r = recipe();
  if (r.qk != Format::s8) GTEST_SKIP() << "floats need no balancing";
  // The first pair's kernel is one of 128 channels, but codes and factors have 64.
  for (const auto& [dim, dim_v] : {std::pair{64, 128}, {64, 64}, {96, 96}, {128, 128}}) {
    Feature f = unprepared(dim, {200, 200}, {150, 150});
    f.dim_v = dim_v;
    f.family = Family::loud;
    f.heads_q = 4, f.heads_k = 2;
    expect_equal(f, dim == 64 ? Format::f16 : Format::bf16, 12, "loud keys");
    f = with_inputs(std::move(f), r, Format::bf16);
    const Call call = make_call(f, 12);
    Laid laid = lay_out(call, f.how);
    const Outcome balanced = run_emulated(call, laid, r, every_timing().first(1));
    EXPECT_NE(balanced.plan.find("balance_k=on"), std::string::npos) << balanced.plan;
    r.balance_k = Toggle::off;
    EXPECT_FALSE(same_bits(balanced, run_emulated(call, laid, r, every_timing().first(1))));
    r = recipe();
  }
}

TEST_P(FusedQQuant, OfPackedAndShortSequences) {
  Feature packed = unprepared(128, {130, 0, 65, 200}, {200, 70, 0, 130});
  packed.how.packed_q = packed.how.packed_k = true;
  expect_equal(packed, Format::bf16, 5, "packed");
  Feature used = unprepared(64, {200, 200}, {150, 150});
  used.used_q = {200, 63}, used.used_k = {150, 1};
  used.how.seqused_q = used.how.seqused_k = true;
  expect_equal(used, Format::bf16, 6, "sequences used in part");
}

/// Every work of a persistent block finds its own rows: more works than multiprocessors.
TEST_P(FusedQQuant, OfManyWorksABlock) {
  Feature f = unprepared(64, {300, 300, 300, 300}, {64, 64, 64, 64});
  f.heads_q = 24, f.heads_k = 2;
  expect_equal(f, Format::bf16, 7, "many works");
}

TEST_P(FusedQQuant, OfThreeConsumers) {
  const ForceSplitKv three(0, 0, 3);
  if (recipe().v != Format::s8) {  // e4m3 P is slower so
    const LeaveQueries on(true);
    const Feature f = with_inputs(unprepared(64, {200}, {64}), recipe(), Format::bf16);
    const Call call = make_call(f, 10);
    Laid laid = lay_out(call, f.how);
    const std::string plan = run_emulated(call, laid, recipe(), every_timing().first(1)).plan;
    EXPECT_NE(plan.find("\nconsumers: 3\n"), std::string::npos) << plan;
    EXPECT_EQ(plan.find(in_kernel), std::string::npos) << plan;
    return;
  }
  expect_equal(unprepared(64, {400, 400}, {200, 200}), Format::bf16, 10, "D 64");
  Feature packed = unprepared(64, {130, 0, 65, 200}, {200, 70, 0, 130});
  packed.how.packed_q = packed.how.packed_k = true;
  expect_equal(packed, Format::f16, 11, "packed");
}

TEST_P(FusedQQuant, OfBadRows) {
  const Feature f = with_inputs(unprepared(128, {200, 200}, {150, 150}), recipe(), Format::bf16);
  const Call call = make_call(f, 8);
  for (const float bad : {static_cast<float>(NAN), std::numeric_limits<float>::infinity(), 0.0f}) {
    Laid laid = lay_out(call, f.how);
    for (const std::int64_t token : {0, 77, 199}) {
      for (int channel = 0; channel < 128; channel += bad == 0.0f ? 1 : 128) {
        poke(laid, call, Operand::q, 1, 2, token, channel, bad);
      }
    }
    expect_equal(call, laid, std::to_string(bad).c_str());
  }
}

/// Calls that need more of Q than its codes, or have other scales, are prepared as ever.
TEST_P(FusedQQuant, AreNotMadeWhereMoreIsAsked) {
  const LeaveQueries on(true);
  const auto plan_of = [&](Feature f, const Recipe& r) {
    f = with_inputs(std::move(f), r, Format::bf16);
    const Call call = make_call(f, 9);
    Laid laid = lay_out(call, f.how);
    const std::string plan = run_emulated(call, laid, r, every_timing().subspan(1, 1)).plan;
    EXPECT_NE(plan.find("kernel: sm90a_prefill\n"), std::string::npos) << plan;
    return plan;
  };
  Recipe r = recipe();
  r.q_scale = {Granularity::per_block, 64, 0};
  EXPECT_EQ(plan_of(unprepared(64, {70}, {70}), r).find(in_kernel), std::string::npos)
      << "per block";
  r = recipe();
  r.smooth_k = Toggle::on;
  Feature sinks = unprepared(64, {70}, {70});
  sinks.sinks = true;
  EXPECT_EQ(plan_of(sinks, r).find(in_kernel), std::string::npos) << "q . mean";
  EXPECT_EQ(plan_of(unprepared(64, {2}, {600}), recipe()).find(in_kernel), std::string::npos)
      << "few queries";
  if (recipe().v == Format::s8) {
    EXPECT_EQ(plan_of(unprepared(192, {70}, {70}), recipe()).find(in_kernel), std::string::npos)
        << "D 256";
  }
}

/// At D 128 up to 2048 keys that a row sees on average, at D 64 to 4096.
TEST_P(FusedQQuant, AreLeftToTheKernelWhereThatIsFaster) {
  const EmulatedBackend backend(90);
  const auto leaves = [&](std::int64_t tokens, auto edit, std::int64_t dim = 128) {
    const auto view = [&](Format format) {
      return TensorView::dense(static_cast<void*>(nullptr), format, {1, tokens, 4, dim});
    };
    AttentionTensors t;
    t.q = t.k = t.v = view(Format::bf16);
    t.out = view(Format::f32);
    AttentionOptions options;
    options.recipe = recipe();
    edit(options);
    const std::string text = plan(t, options)->to_string();
    EXPECT_NE(text.find("kernel: sm90a_prefill\n"), std::string::npos) << text;
    return text.find(in_kernel) != std::string::npos;
  };
  const auto full = [](AttentionOptions&) {};
  const auto causal = [](AttentionOptions& o) { o.causal = true; };
  EXPECT_TRUE(leaves(2048, full));
  EXPECT_FALSE(leaves(2176, full));
  EXPECT_TRUE(leaves(4096, causal));
  EXPECT_FALSE(leaves(4224, causal));
  EXPECT_TRUE(leaves(16384, [](AttentionOptions& o) { o.causal = true, o.window_left = 512; }));
  EXPECT_FALSE(leaves(6144, [](AttentionOptions& o) { o.window_right = 6000; }));
  EXPECT_TRUE(leaves(512, full, 64));
  EXPECT_TRUE(leaves(4096, full, 64));
  EXPECT_FALSE(leaves(4224, full, 64));
}

/// So the batch may choose between them.
TEST_P(FusedQQuant, ThreeConsumersHaveTheBitsOfTwo) {
  for (const std::int64_t dim : {64, 128}) {
    if (dim == 128 && recipe().v == Format::s8) continue;  // there are no three
    for (const bool causal : {false, true}) {
      Feature f = unprepared(dim, {270, 270}, {420, 420});
      f.options.causal = causal, f.how.lse = true;
      f = with_inputs(std::move(f), recipe(), Format::bf16);
      const Call call = make_call(f, 13);
      Laid laid = lay_out(call, f.how);
      Outcome two, three;
      {
        const ForceSplitKv forced(0, 0, 2);
        two = run_emulated(call, laid, recipe(), every_timing().first(1));
      }
      {
        const ForceSplitKv forced(0, 0, 3);
        three = run_emulated(call, laid, recipe(), every_timing().first(1));
      }
      EXPECT_NE(three.plan.find("\nconsumers: 3\n"), std::string::npos) << three.plan;
      EXPECT_TRUE(same_bits(two, three)) << dim << (causal ? " causal" : " full");
    }
  }
}

/// Long rows, in blocks that fill the GPU's multiprocessors as well as those of two consumers.
TEST_P(FusedQQuant, ThreeConsumersServeLongRows) {
  const EmulatedBackend backend(90);
  const auto consumers = [&](std::int64_t dim, std::int64_t queries, std::int64_t keys, auto edit,
                             std::int64_t heads = 33, std::int64_t batch = 1) {
    const auto view = [&](Format format, std::int64_t tokens) {
      return TensorView::dense(static_cast<void*>(nullptr), format, {batch, tokens, heads, dim});
    };
    AttentionTensors t;
    t.q = view(Format::bf16, queries), t.k = t.v = view(Format::bf16, keys);
    t.out = view(Format::f32, queries);
    AttentionOptions options;
    options.recipe = recipe();
    edit(t, options);
    const std::string text = plan(t, options)->to_string();
    for (const int n : {2, 3}) {
      if (text.find("\nconsumers: " + std::to_string(n) + "\n") != std::string::npos) return n;
    }
    ADD_FAILURE() << text;
    return 0;
  };
  const auto full = [](AttentionTensors&, AttentionOptions&) {};
  const auto causal = [](AttentionTensors&, AttentionOptions& o) { o.causal = true; };
  const bool u8 = recipe().v == Format::s8;
  EXPECT_EQ(consumers(64, 3072, 2048, full), 3);
  EXPECT_EQ(consumers(64, 3072, 1536, full), u8 ? 2 : 3);
  EXPECT_EQ(consumers(64, 3072, 3072, causal), u8 ? 2 : 3);
  EXPECT_EQ(consumers(64, 3072, 512, full), 2);
  EXPECT_EQ(consumers(64, 1024, 8192, full), 2) << "a third of six blocks is empty";
  EXPECT_EQ(consumers(128, 6144, 8192, full), u8 ? 2 : 3);
  EXPECT_EQ(consumers(128, 6144, 6144, full), 2);
  EXPECT_EQ(consumers(256, 6144, 8192, full), 2);
  EXPECT_EQ(consumers(64, 1, 65536, full), 2);
  // Of three multiprocessors two blocks leave one idle, in a batch of one.
  EXPECT_EQ(consumers(128, 384, 8192, full, 1, 1), 2);
  EXPECT_EQ(consumers(128, 384, 8192, full, 1, 3), u8 ? 2 : 3);
  EXPECT_EQ(consumers(64, 384, 8192, full, 1, 3), 3);
  std::uint8_t mask[1] = {1};
  EXPECT_EQ(consumers(64, 3072, 4096,
                      [&](AttentionTensors& t, AttentionOptions& o) {
                        t.block_mask = TensorView::dense(mask, Format::b8, {1, 1, 1, 1});
                        o.block_mask_q = o.block_mask_k = 4096;
                      }),
            2);
}

INSTANTIATE_TEST_SUITE_P(Cover, FusedQQuant, testing::ValuesIn(code_recipes()),
                         [](const testing::TestParamInfo<Recipe>& p) {
                           return std::string(p.param.name);
                         });

}  // namespace
}  // namespace qattn::test
