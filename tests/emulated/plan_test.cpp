// A plan knows shapes, formats and options; addresses, strides and numbers come with run().
#include <gtest/gtest.h>

#include <cmath>
#include <utility>

#include "emulated/emulated_backend.hpp"
#include "emulated/matrix.hpp"

namespace qattn::test {
namespace {

/// A workspace between bytes that nobody may write.
class Workspace {
 public:
  explicit Workspace(std::size_t bytes) : bytes_(bytes), memory_(bytes + 64 + guard, 0xFF) {
    const auto address = reinterpret_cast<std::uintptr_t>(memory_.data());
    begin_ = memory_.data() + (64 - address % 64) % 64;
  }
  void* data() { return begin_; }
  bool intact() const {
    for (const std::uint8_t* at = begin_ + bytes_; at < memory_.data() + memory_.size(); ++at) {
      if (*at != 0xFF) return false;
    }
    return true;
  }

 private:
  static constexpr std::size_t guard = 4096;
  std::size_t bytes_;
  std::vector<std::uint8_t> memory_;
  std::uint8_t* begin_ = nullptr;
};

/// The views of a planning call: shapes without memory.
AttentionTensors without_addresses(AttentionTensors t) {
  for (TensorView* view : {&t.q, &t.k, &t.v, &t.out, &t.lse, &t.cu_seqlens_q, &t.cu_seqlens_k,
                           &t.seqused_q, &t.seqused_k, &t.page_table, &t.mask, &t.sinks}) {
    view->data = nullptr;
  }
  return t;
}

class EmulatedPlan : public testing::TestWithParam<Recipe> {
 protected:
  /// Plans on `planned`, runs on `laid`, and expects what a plan of its own gives.
  void expect_same(const Call& call, const AttentionTensors& planned, const AttentionOptions& asked,
                   Laid& laid) {
    const Outcome want = run_emulated(call, laid, GetParam());
    ASSERT_FALSE(HasFailure());
    const EmulatedBackend backend(architecture_for(GetParam()));
    AttentionOptions options = asked;
    options.recipe = GetParam();
    const Result<Plan> made = plan(planned, options);
    ASSERT_TRUE(made.ok()) << made.status().message();
    ASSERT_TRUE(is_emulated(made->kernel())) << made->kernel();
    laid.out.clear();
    laid.lse.clear();
    options = call.options;
    options.recipe = GetParam();
    Workspace workspace(made->workspace_bytes());
    const Status ran =
        run(*made, laid.tensors(), options, workspace.data(), made->workspace_bytes());
    ASSERT_TRUE(ran.ok()) << ran.message();
    EXPECT_EQ(laid.violation(), "");
    EXPECT_TRUE(workspace.intact()) << "a byte past the workspace was written";
    EXPECT_TRUE(same_bits(laid.read_out(call), want.out));
    EXPECT_TRUE(same_bits(laid.read_lse(call), want.lse));
  }
  Feature feature() const {
    Feature f;
    f.sq = {130, 130}, f.sk = {150, 150}, f.options.causal = true;
    return with_inputs(f, GetParam(), Format::bf16);
  }
};

TEST_P(EmulatedPlan, ServesUnalignedAddressesAfterNone) {
  Feature f = feature();
  f.how.strides = Strides::odd;
  const Call call = make_call(f, 3);
  Laid laid = lay_out(call, f.how);
  AttentionTensors planned = without_addresses(laid.tensors());
  for (TensorView* view : {&planned.q, &planned.k, &planned.v, &planned.out}) {
    *view = TensorView::dense(static_cast<void*>(nullptr), view->format,
                              {view->shape[0], view->shape[1], view->shape[2], view->shape[3]});
  }
  expect_same(call, planned, call.options, laid);
}

TEST_P(EmulatedPlan, ServesAlignedAddressesAfterOthers) {
  const Feature f = feature();
  const Call call = make_call(f, 3);
  Laid laid = lay_out(call, f.how);
  LayoutOptions odd = f.how;
  odd.strides = Strides::odd;
  const Laid other = lay_out(call, odd);
  expect_same(call, other.tensors(), call.options, laid);
}

TEST_P(EmulatedPlan, ServesAnotherSignOfTheScale) {
  const Feature f = feature();
  Call call = make_call(f, 3);
  Laid laid = lay_out(call, f.how);
  AttentionOptions planned = call.options;
  planned.softmax_scale = 0.125f;
  call.options.softmax_scale = -0.125f;
  expect_same(call, laid.tensors(), planned, laid);
}

TEST_P(EmulatedPlan, PackedSequencesNeedNoAddressesToPlan) {
  const std::vector<std::int64_t> queries[] = {{40, 64, 3, 129, 1}, {128}, {1, 1, 1}};
  const std::vector<std::int64_t> keys[] = {{40, 64, 65, 129, 200}, {150}, {130, 300, 64}};
  for (const auto& [n, splits] : {std::pair{0, 0}, {0, 2}, {1, 2}, {2, 0}}) {
    SCOPED_TRACE(std::to_string(queries[n].size()) + " sequences");
    const ForceSplitKv forced(0, splits);
    Feature f = feature();
    f.sq = queries[n], f.sk = keys[n], f.how.packed_q = f.how.packed_k = true;
    const Call call = make_call(f, 3);
    Laid laid = lay_out(call, f.how);
    expect_same(call, without_addresses(laid.tensors()), call.options, laid);
  }
}

/// As replays of a captured graph: the workspace is full of what the data before left there.
TEST_P(EmulatedPlan, ServesOtherDataInAUsedWorkspace) {
  for (const std::int64_t dim_v : {64, 128}) {
    Feature f = feature();
    f.dim_v = dim_v, f.used_k = {150, 70}, f.used_q = {130, 129};
    f.how.seqused_q = f.how.seqused_k = true;
    Feature other = f;
    other.used_k = {40, 150}, other.used_q = {130, 3};
    const Call before = make_call(other, 3), call = make_call(f, 4);
    Laid laid_before = lay_out(before, other.how), laid = lay_out(call, f.how);
    // NaN in a key and in a value of what is gone.
    poke(laid_before, before, Operand::k, 1, 0, 100, 5, NAN);
    poke(laid_before, before, Operand::v, 1, 1, 101, 5, NAN);
    const Outcome want = run_emulated(call, laid, GetParam());
    ASSERT_FALSE(HasFailure());
    const EmulatedBackend backend(architecture_for(GetParam()));
    AttentionOptions options = call.options;
    options.recipe = GetParam();
    const Result<Plan> made = plan(laid.tensors(), options);
    ASSERT_TRUE(made.ok()) << made.status().message();
    Workspace workspace(made->workspace_bytes());
    for (Laid* each : {&laid_before, &laid}) {
      each->out.clear();
      each->lse.clear();
      const Status ran =
          run(*made, each->tensors(), options, workspace.data(), made->workspace_bytes());
      ASSERT_TRUE(ran.ok()) << ran.message();
    }
    EXPECT_TRUE(workspace.intact());
    EXPECT_TRUE(same_bits(laid.read_out(call), want.out)) << dim_v;
    EXPECT_TRUE(same_bits(laid.read_lse(call), want.lse)) << dim_v;
  }
}

/// Whose sequences may be as long as all together, but are not.
TEST_P(EmulatedPlan, PackedScalesTakeTheRoomOfTheirTokens) {
  Recipe recipe = GetParam();
  if (!free_scales(recipe.v)) GTEST_SKIP() << "V has no scales";
  recipe.v_scale = {Granularity::per_block_channel, 64, 0};
  recipe.smooth_q = Toggle::off;  // of one long sequence Q has many means, of short ones one each
  const auto bytes = [&](bool packed) {
    Feature f = with_inputs(Feature(), recipe, Format::bf16);
    f.sq.assign(256, 64), f.sk.assign(256, 64), f.heads_q = f.heads_k = 1;
    f.how.packed_q = f.how.packed_k = packed;
    const Call call = make_call(f, 5);
    const Laid laid = lay_out(call, f.how);
    const EmulatedBackend backend(architecture_for(recipe));
    AttentionOptions options = call.options;
    options.recipe = recipe;
    const Result<Plan> made = plan(laid.tensors(), options);
    return made.ok() && is_emulated(made->kernel()) ? made->workspace_bytes() : 0;
  };
  const std::size_t packed = bytes(true), dense = bytes(false);
  ASSERT_GT(dense, 0U);
  EXPECT_LT(packed, 3 * dense);
}

/// Whether a kernel makes Q's codes depends on Q's address: a plan serves either.
TEST_P(EmulatedPlan, ServesQueriesThatTheKernelEncodesOrNot) {
  const LeaveQueries leave(true);
  const bool can = GetParam().name == "int8_full";
  Feature f = feature();
  f.how.lse = false;  // with K's mean it needs more of Q
  LayoutOptions how = f.how;
  how.strides = Strides::odd;
  const Call call = make_call(f, 4);
  Laid even = lay_out(call, f.how), odd = lay_out(call, how);
  AttentionOptions options = call.options;
  options.recipe = GetParam();
  {
    const EmulatedBackend backend(architecture_for(GetParam()));
    const auto made = [&](const Laid& x) { return plan(x.tensors(), options)->to_string(); };
    EXPECT_EQ(made(even).find("q_codes: in the attention kernel") != std::string::npos, can);
    EXPECT_EQ(made(odd).find("q_codes"), std::string::npos);
  }
  const AttentionTensors at_even = even.tensors();
  expect_same(call, odd.tensors(), call.options, even);
  expect_same(call, at_even, call.options, odd);
}

/// What run() would have to compute that the plan has no memory for.
TEST_P(EmulatedPlan, OtherGivenScalesNeedAnotherPlan) {
  if (!free_scales(GetParam().qk)) GTEST_SKIP() << "no scales";
  const Feature f = feature();
  Recipe recipe = GetParam();
  recipe.k_scale = {Granularity::per_head, 0, 0};
  recipe.smooth_k = Toggle::off;
  Call call = make_call(f, 3);
  Laid laid = lay_out(call, f.how);
  const AttentionTensors plain = laid.tensors();
  AttentionOptions options = call.options;
  options.recipe = recipe;
  add_static_scales(call, laid, plan(plain, options)->recipe(), 1);
  const EmulatedBackend backend(architecture_for(GetParam()));
  AttentionTensors given = plain;
  given.k_scale = laid.k_scale.view();
  const Result<Plan> made = plan(given, options);
  ASSERT_TRUE(made.ok()) << made.status().message();
  Workspace workspace(made->workspace_bytes());
  const Status ran = run(*made, plain, options, workspace.data(), made->workspace_bytes());
  EXPECT_EQ(ran.code(), Code::invalid_argument) << ran.message();
  EXPECT_NE(made->hash(), plan(plain, options)->hash());
}

/// Given scales of automatic granularity are one a token on every device.
TEST_P(EmulatedPlan, GivenScalesKeepTheirShape) {
  if (!free_scales(GetParam().qk)) GTEST_SKIP() << "no scales";
  const Feature f = feature();
  Recipe recipe = GetParam();
  recipe.smooth_k = Toggle::off;
  recipe.q_scale = recipe.k_scale = {Granularity::per_token, 0, 0};
  Call call = make_call(f, 3);
  Laid laid = lay_out(call, f.how);
  Recipe resolved = recipe;
  resolved.v = Format::none;  // no scales of V
  add_static_scales(call, laid, resolved, 0.8);
  const Outcome named = run_emulated(call, laid, recipe);
  recipe.q_scale = recipe.k_scale = {};
  const Outcome automatic = run_emulated(call, laid, recipe);
  EXPECT_EQ(automatic.resolved.k_scale.granularity, Granularity::per_token);
  EXPECT_TRUE(same_bits(named, automatic));
}

/// Rows that end inside 16 bytes, cut out of wider tensors: aligned, with NaN behind them, or close
/// together.
TEST_P(EmulatedPlan, RowsCutOutOfWiderOnes) {
  constexpr std::int64_t keys = 70, queries = 20, widths[] = {36, 36, 20, 20};
  const Recipe& recipe = GetParam();
  const Format format = recipe.qk == Format::f16 ? Format::f16 : Format::bf16;
  for (const int gpu : {80, 90, 120}) {
    const EmulatedBackend backend(gpu);
    std::vector<std::uint16_t> memory[2][4];
    bool served = true;
    for (const int cut : {0, 1}) {
      AttentionTensors t;
      int n = 0;
      for (TensorView AttentionTensors::* at : {&AttentionTensors::q, &AttentionTensors::k,
                                                &AttentionTensors::v, &AttentionTensors::out}) {
        const std::int64_t width = widths[n], room = width + (cut ? 4 : 0);
        const std::int64_t tokens = n % 3 == 0 ? queries : keys;
        std::vector<std::uint16_t>& x = memory[cut][n++];
        x.assign(static_cast<std::size_t>(tokens * room), 0x7fff);
        for (std::int64_t i = 0; n < 4 && i < tokens * width; ++i) {  // between 0.5 and 2
          const auto number = static_cast<std::uint16_t>(i * 2654435761u >> 7 & 0x80ff);
          x[static_cast<std::size_t>(i / width * room + i % width)] =
              static_cast<std::uint16_t>(number + (format == Format::f16 ? 0x3800 : 0x3f00));
        }
        t.*at = TensorView::dense(x.data(), format, {1, tokens, 1, room});
        (t.*at).shape[3] = width;
      }
      AttentionOptions options;
      options.recipe = recipe, options.causal = true;
      const Result<Plan> made = plan(t, options);
      served = made.ok() && is_emulated(made->kernel());
      if (!served) break;
      const Status status = attention(t, options);
      ASSERT_TRUE(status.ok()) << status.message();
    }
    for (std::int64_t i = 0; served && i < queries * 24; ++i) {
      const std::uint16_t x = memory[1][3][static_cast<std::size_t>(i)];
      const std::int64_t at = i / 24 * 20 + i % 24;
      ASSERT_EQ(x, i % 24 < 20 ? memory[0][3][static_cast<std::size_t>(at)] : 0x7fff) << gpu;
      ASSERT_EQ(x == 0x7fff, i % 24 >= 20) << gpu << ": " << i;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Cover, EmulatedPlan, testing::ValuesIn(every_recipe()),
                         [](const auto& recipe) { return recipe.param.name; });

}  // namespace
}  // namespace qattn::test
