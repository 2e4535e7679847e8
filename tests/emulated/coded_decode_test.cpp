// Decode over K and V that come as 8-bit codes (kernels/decode/uniform8/kernel.cuh): what is read
// in place gives what the semantic model gives, and pages give what rows do.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "conformance/coded.hpp"
#include "emulated/emulated_backend.hpp"
#include "emulated/matrix.hpp"

namespace qattn::test {
namespace {

using enum Granularity;
constexpr float nan_value = std::numeric_limits<float>::quiet_NaN();

/// Every recipe that has such kernels.
std::vector<Recipe> coded_recipes() { return {*recipe_named("int8_full"), *recipe_named("fp8")}; }

class EmulatedCodedDecode : public testing::TestWithParam<Recipe> {
 protected:
  void SetUp() override { scales(per_token, GetParam().v == Format::s8 ? per_token : per_channel); }

  void scales(Granularity k, Granularity v) {
    recipe_ = GetParam();
    recipe_.smooth_k = Toggle::off;
    recipe_.q_scale.granularity = per_token;
    recipe_.k_scale.granularity = k;
    recipe_.v_scale.granularity = v;
  }

  /// Grouped heads, a few queries, lengths that fill neither tiles nor shares.
  Feature feature() const {
    Feature f;
    f.sq = {3, 3}, f.sk = {450, 450}, f.heads_q = 8, f.heads_k = 2, f.options.causal = true;
    return with_inputs(f, recipe_, Format::bf16);
  }

  /// The operands of a call with K and V as codes.
  Laid laid(const Call& call, const LayoutOptions& how) const {
    Laid x = lay_out(call, how);
    const Status status = put_codes(x, recipe_);
    EXPECT_TRUE(status.ok()) << status.message();
    return x;
  }

  Outcome run(const Call& call, Laid& x, std::span<const Timing> timings = every_timing()) const {
    const OnArchitecture on(GetParam().name == "int8_full" ? 80 : 90);
    Outcome outcome = run_emulated(call, x, recipe_, timings);
    EXPECT_NE(outcome.plan.find("kernel: uniform8_decode"), std::string::npos) << outcome.plan;
    return outcome;
  }
  Outcome run_once(const Call& call, Laid& x) const {
    return run(call, x, every_timing().subspan(1, 1));
  }

  void matches_model(const Feature& f) const {
    const Call call = make_call(f, 41);
    Laid x = laid(call, f.how);
    const Outcome outcome = run(call, x);
    ASSERT_FALSE(HasFailure());
    expect_matches_model(outcome, call, f.how.output,
                         model_attention(call, outcome.model_options()));
  }

  Recipe recipe_;
};

TEST_P(EmulatedCodedDecode, MatchesTheModel) {
  matches_model(feature());
  const Call call = make_call(feature(), 41);
  Laid x = laid(call, {});
  const Outcome outcome = run_once(call, x);
  for (const Mutation mutation : {Mutation::swap_k_scale, Mutation::swap_v_scale}) {
    const ModelOutput wrong = model_attention(call, outcome.model_options(mutation));
    EXPECT_GT(distance(outcome.out, wrong.out, call.dim_v).nrmse, 2e-3) << "is it the scales?";
  }
}

/// Codes of Q that the kernel makes are those of the quantiser.
TEST_P(EmulatedCodedDecode, QueriesAreCodedAlike) {
  for (const auto& [d, format] :
       {std::pair{64, Format::bf16}, {72, Format::f16}, {128, Format::f16}, {256, Format::bf16}}) {
    Feature f = feature();
    f.dim = f.dim_v = d, f.how.input = format, f.sk = {150, 150};
    const Call call = make_call(f, 45);
    Laid x = laid(call, f.how);
    Outcome outcomes[2];
    for (const bool leave : {false, true}) {
      const LeaveQueries chosen(leave);
      outcomes[leave] = run_once(call, x);
      EXPECT_EQ(outcomes[leave].plan.find("q_codes") != std::string::npos, leave);
    }
    EXPECT_TRUE(same_bits(outcomes[0], outcomes[1])) << d;
  }
}

TEST_P(EmulatedCodedDecode, SharesOfKeys) {
  Feature f = feature();
  f.sk = {1000, 1000};
  for (const int splits : {1, 3, 8}) {
    const ForceSplitKv forced(0, splits);
    matches_model(f);
    if (HasFailure()) FAIL() << splits;
  }
  const ForceSplitKv forced(1, 1);  // no parts but one
  for (const Format output : {Format::f32, Format::f16}) {
    f.how.output = output;
    matches_model(f);
  }
}

TEST_P(EmulatedCodedDecode, PagesGiveWhatRowsGive) {
  const ForceSplitKv forced(0, 2);  // pages have room for more keys, which a plan knows of alone
  const bool s8 = GetParam().v == Format::s8;
  for (const bool by_token : {true, false}) {
    scales(by_token ? per_token : per_tensor, by_token && s8 ? per_token : per_tensor);
    for (const std::int64_t page_size : {16, 24, 64, 128}) {
      Feature f = feature();
      f.sq = {1, 1}, f.dim = f.dim_v = 128, f.heads_q = 4;
      const Call call = make_call(f, 42);
      Laid rows = laid(call, f.how), pages = laid(call, f.how);
      put_into_pages(pages, call, page_size);
      const Outcome want = run_once(call, rows), got = run(call, pages);
      ASSERT_FALSE(HasFailure());
      EXPECT_TRUE(same_bits(got.out, want.out) && same_bits(got.lse, want.lse)) << page_size;
    }
  }
}

/// Rows that see the key `bad` of sequence 1, KV head 1, are NaN; all others are as they were.
void expect_spoiled(const Outcome& now, const Outcome& clean, const Call& call, std::int64_t bad) {
  const std::int64_t group = call.heads_q / call.heads_k;
  for (std::int64_t b = 0; b < 2; ++b) {
    for (std::int64_t h = 0; h < call.heads_q; ++h) {
      for (std::int64_t i = 0; i < call.sequences[0].room_q; ++i) {
        const std::int64_t last = call.sequences[0].room_k - call.sequences[0].room_q + i;
        const std::int64_t row = call.row(b, h, i), at = row * call.dim_v;
        const bool sees = b == 1 && h / group == 1 && last >= bad;
        for (std::int64_t d = 0; d < call.dim_v; ++d) {
          const float x = now.out[at + d], y = clean.out[at + d];
          ASSERT_TRUE(sees ? std::isnan(x) : std::memcmp(&x, &y, 4) == 0)
              << "sequence " << b << " head " << h << " query " << i << " channel " << d << ": "
              << x << ", was " << y;
        }
        ASSERT_EQ(std::isnan(now.lse[row]), sees) << b << " " << h << " " << i;
      }
    }
  }
}

TEST_P(EmulatedCodedDecode, CodesThatAreNaN) {
  if (GetParam().qk == Format::s8) GTEST_SKIP() << "s8 has none";
  Feature f = feature();
  const Call call = make_call(f, 43);
  Laid x = laid(call, f.how);
  const Outcome clean = run_once(call, x);
  for (const std::int64_t bad :
       {100, 449}) {  // all three queries see one, the last alone the other
    for (Tensor* operand : {&x.k, &x.v}) {
      const TensorView& v = operand->view();
      if (v.format != Format::e4m3) continue;
      auto* code = static_cast<std::uint8_t*>(v.data) + v.stride[0] + bad * v.stride[1] +
                   v.stride[2] + 5 * v.stride[3];
      const std::uint8_t before = *code;
      *code = 0xff;
      const Outcome now = run(call, x);
      ASSERT_FALSE(HasFailure());
      expect_spoiled(now, clean, call, bad);
      *code = before;
      if (HasFailure()) FAIL() << (operand == &x.k ? "k " : "v ") << bad;
    }
  }
}

/// Codes that a window hides from every query, NaN among them.
TEST_P(EmulatedCodedDecode, HiddenKeysHaveNoInfluence) {
  Feature f = feature();
  f.options.window_left = 100;
  const Call call = make_call(f, 44);
  Laid x = laid(call, f.how);
  const Outcome clean = run_once(call, x);
  const std::int64_t hidden = f.sk[0] - f.sq[0] - f.options.window_left;
  for (const std::uint8_t code : {0x7f, 0x80}) {
    for (Tensor* operand : {&x.k, &x.v}) {
      const TensorView& v = operand->view();
      for (std::int64_t n = 0; n < v.shape[0] * hidden * v.shape[2] * v.shape[3]; ++n) {
        const std::int64_t row = n / v.shape[3], token = row / v.shape[2];
        static_cast<std::uint8_t*>(
            v.data)[token / hidden * v.stride[0] + token % hidden * v.stride[1] +
                    row % v.shape[2] * v.stride[2] + n % v.shape[3] * v.stride[3]] = code;
      }
    }
    EXPECT_TRUE(same_bits(clean, run_once(call, x))) << int{code};
  }
}

/// Packed sequences that are longer than the scales of their tokens, which may be of no token.
TEST_P(EmulatedCodedDecode, ScalesThatEndBeforeASequence) {
  Feature f = feature();
  f.sq = {1, 4}, f.sk = {100, 150}, f.how.packed_q = f.how.packed_k = true;
  f.options.causal = false;
  const Call call = make_call(f, 49);
  Laid x = laid(call, f.how);
  const EmulatedBackend backend(90, false);
  AttentionOptions options = call.options;
  options.recipe = recipe_;
  for (const bool of_k : {true, false}) {
    if (!of_k && GetParam().v != Format::s8) continue;  // V's scales are of channels
    for (const std::int64_t tokens : {120, 0}) {
      AttentionTensors t = x.tensors();
      (of_k ? t.k_scale : t.v_scale).shape[2] = tokens;
      x.out.clear();
      const Status status = attention(t, options);
      ASSERT_TRUE(status.ok()) << status.message();
      const std::vector<float> out = x.read_out(call);
      for (std::int64_t b = 0; b < 2; ++b) {
        const bool bad = call.sequences[static_cast<std::size_t>(b)].len_k > tokens;
        for (std::int64_t h = 0; h < call.heads_q; ++h) {
          EXPECT_EQ(std::isnan(out[call.row(b, h, 0) * call.dim_v]), bad)
              << (of_k ? "k " : "v ") << tokens << " sequence " << b;
        }
      }
    }
  }
}

/// Zeros, and tokens whose V is far smaller than their tile's: their probability counts.
TEST_P(EmulatedCodedDecode, ValuesOfZero) {
  const auto zero = [](Call& call, std::int64_t b, std::int64_t begin, std::int64_t end) {
    Sequence& s = call.sequences[b];
    for (std::int64_t h = 0; h < call.heads_k; ++h) {
      const auto row = s.v.begin() + (h * s.room_k + begin) * call.dim_v;
      std::fill(row, row + (end - begin) * call.dim_v, 0.0f);
    }
  };
  for (const float rest : {1.0f, 0x1p33f, 0x1p-33f}) {
    Feature f = feature();
    Call call = make_call(f, 47);
    for (Sequence& s : call.sequences) {
      for (float& v : s.v) v *= rest;
    }
    zero(call, 0, 64, 128);     // a tile
    zero(call, 0, 300, 301);    // a token
    zero(call, 1, 0, f.sk[1]);  // all
    Laid x = laid(call, f.how);
    const Outcome outcome = run(call, x);
    ASSERT_FALSE(HasFailure());
    const ModelOutput model = model_attention(call, outcome.model_options());
    EXPECT_LE(lse_distance(outcome.lse, model.lse), 1e-3) << rest;
    EXPECT_LE(distance(outcome.out, model.out, call.dim_v).nrmse, 2e-3) << rest;
    const std::int64_t first = call.row(1, 0, 0) * call.dim_v;
    EXPECT_TRUE(std::all_of(outcome.out.begin() + first, outcome.out.begin() + first + call.dim_v,
                            [](float v) { return v == 0.0f; }));
  }
}

/// One key has all the weight, however large the scores are.
TEST_P(EmulatedCodedDecode, LargeScores) {
  for (const float q : {1.0f, 91.0f, 3e3f}) {
    Feature f = feature();
    Call call = make_call(f, 48);
    for (Sequence& s : call.sequences) {
      std::fill(s.q.begin(), s.q.end(), q);
      for (std::size_t i = 0; i < s.k.size(); ++i) {
        const std::size_t key =
            i / static_cast<std::size_t>(call.dim) % static_cast<std::size_t>(s.room_k);
        s.k[i] = key == 333 ? 91.0f : -91.0f;
      }
    }
    Laid x = laid(call, f.how);
    const Outcome outcome = run_once(call, x);
    const ModelOutput model = model_attention(call, outcome.model_options());
    EXPECT_LE(distance(outcome.out, model.out, call.dim_v).nrmse, 2e-3) << q;
  }
}

/// Numbers and places that the host cannot look at.
TEST_P(EmulatedCodedDecode, BadScalesAndPages) {
  const EmulatedBackend backend(90, false);
  const bool s8 = GetParam().v == Format::s8;
  scales(per_token, s8 ? per_token : per_tensor);
  Feature f = feature();
  const Call call = make_call(f, 44);
  Laid x = laid(call, f.how);
  put_into_pages(x, call, 16);
  AttentionOptions options = call.options;
  options.recipe = recipe_;
  const auto attend = [&] {
    x.out.clear(), x.lse.clear();
    const Status status = attention(x.tensors(), options);
    EXPECT_TRUE(status.ok()) << status.message();
    Outcome o;
    o.out = x.read_out(call), o.lse = x.read_lse(call);
    return o;
  };
  const Outcome clean = attend();
  ASSERT_TRUE(device_errors({}).ok());
  for (Tensor* scale : {&x.k_scale, &x.v_scale}) {
    const TensorView& v = scale->view();
    if (v.rank != 3) continue;
    for (const float value : {nan_value, std::numeric_limits<float>::infinity(), -1.0f}) {
      // Key 100 of sequence 1 is in page 57 - 29 - 6.
      auto* place = static_cast<float*>(v.data) + 22 * v.stride[0] + v.stride[1] + 4 * v.stride[2];
      const float before = *place;
      *place = value;
      expect_spoiled(attend(), clean, call, 100);
      *place = before;
      if (HasFailure()) FAIL() << (scale == &x.k_scale ? "k" : "v");
    }
  }
  ASSERT_TRUE(device_errors({}).ok());
  for (const double page : {-1.0, 58.0, 1e9}) {
    const double before = 57;
    x.pages.set({0, 0}, page);
    const Outcome now = attend();
    x.pages.set({0, 0}, before);
    EXPECT_FALSE(device_errors({}).ok());
    for (std::int64_t h = 0; h < call.heads_q; ++h) {
      EXPECT_TRUE(std::isnan(now.out[call.row(0, h, 0) * call.dim_v]));
      EXPECT_EQ(now.lse[call.row(1, h, 0)], clean.lse[call.row(1, h, 0)]);
    }
  }
}

/// The table that GPUs are tested with, too.
class EmulatedCodedCase : public testing::TestWithParam<CodedCase> {};

TEST_P(EmulatedCodedCase, MatchesTheModel) {
  const CodedCase& c = GetParam();
  const OnArchitecture on(c.recipe.v == Format::s8 ? 80 : 90);
  const Call call = make_call(c.feature, 46);
  Laid x = lay_out(call, c.feature.how);
  const Status status = put_codes(x, c.recipe);
  ASSERT_TRUE(status.ok()) << status.message();
  if (c.page_size > 0) put_into_pages(x, call, c.page_size);
  const Outcome outcome = run_emulated(call, x, c.recipe);
  ASSERT_FALSE(HasFailure());
  EXPECT_NE(outcome.plan.find("kernel: uniform8_decode"), std::string::npos) << outcome.plan;
  expect_matches_model(outcome, call, c.feature.how.output,
                       model_attention(call, outcome.model_options()));
}

INSTANTIATE_TEST_SUITE_P(Cover, EmulatedCodedCase, testing::ValuesIn(coded_decode_cases()),
                         [](const auto& test) {
                           std::string name = test.param.name;
                           std::replace(name.begin(), name.end(), ' ', '_');
                           return name;
                         });

INSTANTIATE_TEST_SUITE_P(Cover, EmulatedCodedDecode, testing::ValuesIn(coded_recipes()),
                         [](const auto& recipe) { return recipe.param.name; });

}  // namespace
}  // namespace qattn::test
