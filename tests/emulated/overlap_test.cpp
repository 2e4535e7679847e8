// Codes that are made while attention runs are those that are made before: the whole call is equal,
// bit by bit.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>

#include "emulated/emulated_backend.hpp"
#include "emulated/matrix.hpp"

namespace qattn::test {
namespace {

constexpr const char* said = "codes: beside attention\n";

class Overlap : public testing::Test {
 protected:
  const Recipe recipe_ = *recipe_named("int8_full");

  std::string plan_of(Feature f, const Recipe& recipe, Format format = Format::bf16) {
    const LeaveQueries all(kernels::CodesLeft::all);
    f = with_inputs(std::move(f), recipe, format);
    const Call call = make_call(f, 9);
    Laid laid = lay_out(call, f.how);
    return run_emulated(call, laid, recipe, every_timing().subspan(1, 1)).plan;
  }

  void expect_equal(const Call& call, Laid& laid, const Recipe& recipe, const char* what) {
    Outcome before, made;
    {
      const LeaveQueries none(kernels::CodesLeft::none);
      before = run_emulated(call, laid, recipe, every_timing().subspan(1, 1));
    }
    {
      const LeaveQueries all(kernels::CodesLeft::all);
      made = run_emulated(call, laid, recipe);
    }
    ASSERT_FALSE(HasFailure()) << what;
    EXPECT_EQ(before.plan.find(said), std::string::npos) << what;
    EXPECT_NE(made.plan.find(said), std::string::npos) << what << "\n" << made.plan;
    EXPECT_TRUE(same_bits(before, made)) << what;
  }
  void expect_equal(Feature f, Format format, std::uint64_t seed, const char* what,
                    const Recipe& recipe) {
    f = with_inputs(std::move(f), recipe, format);
    const Call call = make_call(f, seed);
    Laid laid = lay_out(call, f.how);
    expect_equal(call, laid, recipe, what);
  }
  void expect_equal(Feature f, Format format, std::uint64_t seed, const char* what) {
    expect_equal(std::move(f), format, seed, what, recipe_);
  }

 private:
  OnArchitecture on_{90};
};

using CoverOverlap = Overlap;

TEST_F(CoverOverlap, HasTheBitsOfCodesMadeBefore) {
  expect_equal(unprepared(128, {200, 200}, {150, 150}), Format::bf16, 1, "D 128");
  expect_equal(unprepared(64, {300}, {200}), Format::f16, 2, "D 64");
  expect_equal(unprepared(120, {129}, {64}), Format::bf16, 3, "channels that are padded to 128");
  expect_equal(unprepared(40, {129}, {190}), Format::f16, 4, "and to 64");
  Feature causal = unprepared(128, {260, 260}, {390, 390});
  causal.options.causal = true;
  expect_equal(causal, Format::f16, 5, "causal");
  Feature heads = unprepared(64, {140, 140, 140}, {65, 65, 65});
  heads.heads_q = heads.heads_k = 3, heads.how.layout = Layout::bhsd;
  expect_equal(heads, Format::bf16, 6, "another layout");
}

/// More works than multiprocessors, which take them as they come, and three warpgroups a block.
TEST_F(CoverOverlap, OfManyWorksABlock) {
  Feature f = unprepared(64, {300, 300, 300, 300}, {64, 64, 64, 64});
  f.heads_q = 24, f.heads_k = 2;
  expect_equal(f, Format::bf16, 7, "many works");
  Feature units =
      unprepared(64, std::vector<std::int64_t>(12, 70), std::vector<std::int64_t>(12, 70));
  units.heads_q = 6, units.heads_k = 2;  // of which sums of twelve are made ahead
  expect_equal(units, Format::bf16, 9, "many units");
  const ForceSplitKv three(0, 0, 3);
  expect_equal(unprepared(64, {400, 400}, {200, 200}), Format::bf16, 8, "three consumers");
}

TEST_F(CoverOverlap, WithAndWithoutAMeanAndAScaleForEachThread) {
  Recipe plain = recipe_;
  plain.smooth_k = Toggle::off;
  expect_equal(unprepared(128, {200, 200}, {150, 150}), Format::bf16, 10, "no mean", plain);
  Recipe token = recipe_;
  token.k_scale = {Granularity::per_token, 0, 0};
  expect_equal(unprepared(64, {200}, {150}), Format::bf16, 11, "K's scales per token", token);
  token.v_scale = {Granularity::per_token, 0, 0};
  expect_equal(unprepared(128, {130}, {100}), Format::f16, 12, "V's, too", token);
}

/// K's and Q's channels change by powers of two.
TEST_F(CoverOverlap, OfLoudKeys) {
  for (const bool mean : {false, true}) {
    Recipe recipe = recipe_;
    recipe.smooth_k = mean ? Toggle::on : Toggle::off;
    for (const int dim : {64, 128}) {
      Feature f = unprepared(dim, {200, 200}, {150, 150});
      f.family = Family::loud;
      expect_equal(f, dim == 64 ? Format::f16 : Format::bf16, 14, "loud keys", recipe);
      EXPECT_NE(plan_of(f, recipe).find("balance_k=on"), std::string::npos);
    }
  }
}

TEST_F(CoverOverlap, OfBadValues) {
  const Feature f = with_inputs(unprepared(128, {200, 200}, {150, 150}), recipe_, Format::bf16);
  const Call call = make_call(f, 13);
  for (const float bad : {static_cast<float>(NAN), std::numeric_limits<float>::infinity()}) {
    for (const Operand operand : {Operand::q, Operand::k, Operand::v}) {
      Laid laid = lay_out(call, f.how);
      for (const std::int64_t token : {0, 77, 149}) {
        poke(laid, call, operand, 1, 1, token, static_cast<int>(token) % 128, bad);
      }
      expect_equal(call, laid, recipe_,
                   (std::to_string(bad) + " " + std::to_string(static_cast<int>(operand))).c_str());
    }
  }
}

/// Calls with codes of other kinds, or sequences in other places, are prepared as ever.
TEST_F(Overlap, IsNotWhereMoreIsAsked) {
  const auto expect_not = [&](Feature f, const Recipe& recipe, const char* what) {
    EXPECT_EQ(plan_of(std::move(f), recipe).find(said), std::string::npos) << what;
  };
  const Feature plain = unprepared(128, {200}, {150});
  expect_not(plain, *recipe_named("fp8"), "e4m3");
  expect_not(plain, *recipe_named("int8_fp8"), "V in e4m3");
  expect_not(unprepared(96, {200}, {150}), recipe_, "D 96");
  expect_not(unprepared(64, {2}, {600}), recipe_, "few queries");
  Feature f = plain;
  f.how.packed_q = f.how.packed_k = true;
  expect_not(f, recipe_, "packed");
  f = plain, f.how.lse = true;
  expect_not(f, recipe_, "LSE with a mean of K");
  Recipe other = recipe_;
  other.rotate = Toggle::on;
  expect_not(plain, other, "rotated");
  other = recipe_, other.q_scale = {Granularity::per_block, 64, 0};
  expect_not(plain, other, "Q's scales per block");
  EXPECT_EQ(plan_of(plain, recipe_, Format::f32).find(said), std::string::npos) << "f32";
}

/// It finds K's own mean, and would not know of another.
TEST_F(Overlap, IsNotWhereAMeanIsGiven) {
  const LeaveQueries all(kernels::CodesLeft::all);
  const EmulatedBackend backend(90);
  const Feature f = with_inputs(unprepared(128, {200}, {150}), recipe_, Format::bf16);
  const Call call = make_call(f, 9);
  const Laid laid = lay_out(call, f.how);
  AttentionTensors t = laid.tensors();
  AttentionOptions options = call.options;
  options.recipe = recipe_;
  EXPECT_NE(plan(t, options)->to_string().find(said), std::string::npos);
  const Tensor mean(Format::f32, {1, f.heads_k, 128});
  t.k_mean = mean.view();
  EXPECT_EQ(plan(t, options)->to_string().find(said), std::string::npos);
}

TEST_F(Overlap, IsChosenWhereThatIsFaster) {
  emu::options().multiprocessors = 132;
  const EmulatedBackend backend(90);
  const auto chosen = [&](std::int64_t batch, std::int64_t tokens, std::int64_t heads,
                          std::int64_t heads_kv, bool causal = false) {
    const auto view = [&](std::int64_t n) {
      return TensorView::dense(static_cast<void*>(nullptr), Format::bf16, {batch, tokens, n, 128});
    };
    AttentionTensors t;
    t.q = t.out = view(heads);
    t.k = t.v = view(heads_kv);
    AttentionOptions options;
    options.recipe = recipe_;
    options.causal = causal;
    const std::string text = plan(t, options)->to_string();
    EXPECT_NE(text.find("kernel: sm90a_prefill\n"), std::string::npos) << text;
    return text.find(said) != std::string::npos;
  };
  EXPECT_TRUE(chosen(16, 1024, 32, 32));
  EXPECT_TRUE(chosen(16, 1024, 32, 32, true));
  EXPECT_TRUE(chosen(32, 512, 32, 32, true));
  EXPECT_TRUE(chosen(4, 4096, 32, 32));
  EXPECT_TRUE(chosen(2, 8192, 32, 32, true));
  EXPECT_TRUE(chosen(1, 4096, 32, 32, true));
  EXPECT_TRUE(chosen(8, 2048, 32, 8));
  EXPECT_FALSE(chosen(256, 64, 32, 32)) << "few keys";
  EXPECT_FALSE(chosen(2, 8192, 32, 32)) << "many keys";
  EXPECT_FALSE(chosen(1, 1024, 32, 32, true)) << "few works";
  EXPECT_FALSE(chosen(1, 4096, 32, 32)) << "few units";
  EXPECT_FALSE(chosen(1, 8192, 32, 8, true)) << "few units";
  emu::options() = {};
}

}  // namespace
}  // namespace qattn::test
