// The reference by hand-computed numbers, its refusals, and the metrics.
#include "qattn/reference.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <limits>
#include <numbers>

#include "conformance/runner.hpp"

namespace qattn::test {
namespace {

constexpr float nan = std::numeric_limits<float>::quiet_NaN();

/// Two keys with scores 0 and ln 3 (softmax_scale 1), values 4 and 8 in every channel.
struct Hand {
  float q[8] = {1}, k[16] = {}, v[16] = {}, out[8] = {};
  AttentionTensors tensors;
  AttentionOptions options;

  Hand() {
    k[8] = static_cast<float>(std::numbers::ln2 + std::log(1.5));
    for (int d = 0; d < 8; ++d) v[d] = 4, v[8 + d] = 8;
    tensors.q = TensorView::dense(q, Format::f32, {1, 1, 1, 8});
    tensors.k = TensorView::dense(k, Format::f32, {1, 2, 1, 8});
    tensors.v = TensorView::dense(v, Format::f32, {1, 2, 1, 8});
    tensors.out = TensorView::dense(out, Format::f32, {1, 1, 1, 8});
    options.softmax_scale = 1.0f;
  }
  void expect(double value, double lse) const {
    double o[8], l[1];
    const Status status = reference_attention(tensors, options, o, l);
    ASSERT_TRUE(status.ok()) << status.message();
    EXPECT_NEAR(o[0], value, 1e-6);
    EXPECT_NEAR(o[7], value, 1e-6);
    EXPECT_NEAR(l[0], lse, 1e-6);
  }
};

TEST(Reference, ByHand) {
  Hand hand;
  hand.expect(7, std::log(4.0));  // weights 1/4 and 3/4
  hand.options.softcap = 1;
  const double capped = std::exp(std::tanh(std::log(3.0)));  // tanh(ln 3) = 0.8
  hand.expect((4 + 8 * capped) / (1 + capped), std::log(1 + capped));
  hand.options.softcap = 0;
  float sink = static_cast<float>(std::log(4.0));  // the sink takes half of the mass
  hand.tensors.sinks = TensorView::dense(&sink, Format::f32, {1});
  hand.expect(3.5, std::log(8.0));
  hand.tensors.sinks = {};
  float slope = 1;  // biases -1 and 0
  hand.tensors.alibi_slopes = TensorView::dense(&slope, Format::f32, {1});
  const double e = std::exp(-1.0);
  hand.expect((4 * e + 24) / (e + 3), std::log(e + 3));
}

/// Keys on both sides of the diagonal lose by their distance from it, as FlashAttention has it; a
/// causal call sees one side of that.
TEST(Reference, AlibiOnBothSides) {
  Hand hand;
  float q[16] = {1};  // query 1 has scores 0 and 0
  float slope = 1;
  hand.tensors.q = TensorView::dense(q, Format::f32, {1, 2, 1, 8});
  hand.tensors.alibi_slopes = TensorView::dense(&slope, Format::f32, {1});
  double o[16], l[2];
  const double e = std::exp(-1.0);
  const auto expect = [&](double first, double lse) {
    const Status status = reference_attention(hand.tensors, hand.options, o, l);
    ASSERT_TRUE(status.ok()) << status.message();
    EXPECT_NEAR(o[0], first, 1e-6);
    EXPECT_NEAR(l[0], lse, 1e-6);
    EXPECT_NEAR(o[8], (4 * e + 8) / (e + 1), 1e-6);
    EXPECT_NEAR(l[1], std::log(e + 1), 1e-6);
  };
  expect((4 + 8 * 3 * e) / (1 + 3 * e), std::log(1 + 3 * e));
  hand.options.causal = true;
  expect(4, 0);
}

TEST(Reference, MaskedRow) {
  Hand hand;
  const std::uint8_t nothing[2] = {0, 0};
  hand.tensors.mask = TensorView::dense(nothing, Format::b8, {1, 2});
  hand.v[0] = nan;  // masked: never read
  double o[8], l[1];
  ASSERT_TRUE(reference_attention(hand.tensors, hand.options, o, l).ok());
  EXPECT_EQ(o[0], 0);
  EXPECT_EQ(l[0], -std::numeric_limits<double>::infinity());
  const std::uint8_t first[2] = {0, 1};
  hand.tensors.mask = TensorView::dense(first, Format::b8, {1, 2});
  ASSERT_TRUE(reference_attention(hand.tensors, hand.options, o, l).ok());
  EXPECT_EQ(o[0], 8);
}

TEST(Reference, Refuses) {
  Hand hand;
  double o[8], l[2];
  const auto code = [&] { return reference_attention(hand.tensors, hand.options, o, l).code(); };
  EXPECT_EQ(code(), Code::invalid_argument) << "lse of the wrong size";
  EXPECT_EQ(reference_attention(hand.tensors, hand.options, std::span(o, 7)).code(),
            Code::invalid_argument);
  hand.tensors.k.shape[3] = 16;
  EXPECT_EQ(reference_attention(hand.tensors, hand.options, o).code(), Code::invalid_argument);
  hand.tensors.k.shape[3] = 8;
  hand.tensors.k.format = Format::s8;
  EXPECT_EQ(reference_attention(hand.tensors, hand.options, o).code(), Code::invalid_argument);
  hand.tensors.k.format = Format::f32;
  const std::int32_t too_long = 3;
  hand.tensors.seqused_k = TensorView::dense(&too_long, Format::s32, {1});
  const Status status = reference_attention(hand.tensors, hand.options, o);
  EXPECT_EQ(status.code(), Code::invalid_argument);
  EXPECT_NE(status.message().find("seqused_k[0] is 3"), std::string::npos) << status.message();
}

TEST(Reference, RowsAndProgress) {
  const Feature feature = feature_named("gqa_8_2");
  const Call call = make_call(feature, 3);
  const Laid laid = lay_out(call, feature.how);
  const auto count = static_cast<std::size_t>(call.total_rows() * call.dim_v);
  std::vector<double> all(count), some(count, -7.0);
  ASSERT_TRUE(reference_attention(laid.tensors(), call.options, all).ok());
  const std::int64_t rows[] = {0, 17, 32};
  double last = 0;
  ReferenceOptions options;
  options.rows = rows;
  options.progress = [&last](double done) {
    EXPECT_GE(done, last);
    last = done;
  };
  ASSERT_TRUE(reference_attention(laid.tensors(), call.options, some, {}, options).ok());
  EXPECT_EQ(last, 1.0);
  for (std::size_t n = 0; n < count; ++n) {
    const auto i = static_cast<std::int64_t>(n) / call.dim_v % 33;
    const bool asked = i == 0 || i == 17 || i == 32;
    EXPECT_EQ(some[n], asked ? all[n] : -7.0);
  }
}

TEST(CpuIsa, UnknownNameIsRefused) {
  ASSERT_EQ(setenv("QATTN_CPU_ISA", "abacus", 1), 0);
  const Hand hand;
  const Status named = cpu_isa().status();
  const Status planned = plan(hand.tensors, hand.options).status();
  unsetenv("QATTN_CPU_ISA");
  EXPECT_EQ(named.code(), Code::invalid_argument);
  EXPECT_NE(named.message().find("abacus"), std::string::npos) << named.message();
  EXPECT_EQ(planned.code(), Code::invalid_argument);
  EXPECT_TRUE(cpu_isa().ok());
}

TEST(Compare, Metrics) {
  const double ref[] = {3, 4, 0, 0, 1, 0};
  const float same[] = {3, 4, 0, 0, 1, 0};
  const ErrorMetrics equal = compare(same, ref, 2);
  EXPECT_EQ(equal.nrmse, 0);
  EXPECT_EQ(equal.max_abs_err, 0);
  EXPECT_NEAR(equal.cosine, 1, 1e-12);
  EXPECT_NEAR(equal.worst_row_cosine, 1, 1e-12);
  const float turned[] = {3, 4, 0, 0, 0, 1};
  const ErrorMetrics bad = compare(turned, ref, 2);
  EXPECT_NEAR(bad.nrmse, std::sqrt(2.0 / 26), 1e-12);
  EXPECT_EQ(bad.max_abs_err, 1);
  EXPECT_EQ(bad.worst_row_cosine, 0);
  EXPECT_NEAR(bad.cosine, 25.0 / 26, 1e-12);
  const float broken[] = {3, 4, 0, nan, 1, 0};
  EXPECT_TRUE(std::isnan(compare(broken, ref, 2).nrmse));
  EXPECT_TRUE(std::isnan(compare(broken, ref, 2).worst_row_cosine));
  EXPECT_TRUE(std::isnan(compare(std::span(same, 5), ref, 2).nrmse));
  const double both[] = {3, 4, 0, nan, 1, 0};
  EXPECT_EQ(compare(broken, both, 2).nrmse, 0);
}

/// What is not a number is counted, wherever it stands, and never makes an error look small.
TEST(Compare, CountsRowsThatAreNoNumbers) {
  constexpr float inf = std::numeric_limits<float>::infinity();
  const double ref[] = {3, 4, 0, 0, 1, 0};
  const auto expect = [](const ErrorMetrics& m, std::int64_t of_out, std::int64_t of_ref) {
    EXPECT_EQ(m.rows, 3);
    EXPECT_EQ(m.nan_rows, of_out);
    EXPECT_EQ(m.nan_ref_rows, of_ref);
  };
  for (const float bad : {nan, inf, -inf}) {
    const float out[] = {3, 4, 0, 0, bad, bad};
    const ErrorMetrics m = compare(out, ref, 2);
    expect(m, 1, 0);
    for (const double x : {m.nrmse, m.max_abs_err, m.cosine, m.worst_row_cosine}) {
      EXPECT_TRUE(std::isnan(x)) << x << " with " << bad;
    }
    const double also[] = {3, 4, 0, 0, bad, bad};
    const ErrorMetrics both = compare(out, also, 2);
    expect(both, 1, 1);
    EXPECT_EQ(both.nrmse, 0);
    const float right[] = {3, 4, 0, 0, 1, 0};
    expect(compare(right, also, 2), 0, 1);
    EXPECT_TRUE(std::isnan(compare(right, also, 2).worst_row_cosine));
    const float nothing[] = {bad, bad, bad, bad, bad, bad};
    const double neither[] = {bad, bad, bad, bad, bad, bad};
    expect(compare(nothing, neither, 2), 3, 3);
    EXPECT_TRUE(std::isnan(compare(nothing, neither, 2).nrmse));
    EXPECT_TRUE(std::isnan(compare(nothing, neither, 2).worst_row_cosine));
  }
  expect(compare(std::vector<float>{3, 4, 0, 0, 1, 0}, ref, 2), 0, 0);
}

/// Codes beside a tie turn over with the last bit of a mean, so the model's mean is of the keys
/// that are seen, to the bit.
TEST(Model, KeysThatNobodySeesAreAsIfNotThere) {
  constexpr std::int64_t keys = 150, kept = 100;
  for (const char* recipe : {"fp8", "int8_fp8"}) {
    for (std::uint64_t seed = 0; seed < 30; ++seed) {
      Feature feature;
      feature.sq = {20}, feature.sk = {keys};
      Call call = make_call(feature, seed);
      Call cut = call;
      call.mask.boolean = true, call.mask.shape = {1, 1, 1, keys};
      for (std::int64_t j = 0; j < keys; ++j) call.mask.values.push_back(j < kept ? 1 : 0);
      Sequence& seq = cut.sequences[0];
      const auto keep = [&](std::vector<float>& x, std::int64_t dim) {
        std::vector<float> rest;
        for (std::size_t n = 0; n < x.size(); ++n) {
          if (static_cast<std::int64_t>(n) / dim % keys < kept) rest.push_back(x[n]);
        }
        x = std::move(rest);
      };
      keep(seq.k, call.dim), keep(seq.v, call.dim_v);
      seq.len_k = seq.room_k = kept;
      ModelOptions options;
      options.recipe = *recipe_named(recipe);
      options.recipe.smooth_k = Toggle::on, options.recipe.balance_k = Toggle::off;
      const ModelOutput masked = model_attention(call, options),
                        shorter = model_attention(cut, options);
      for (std::size_t n = 0; n < masked.lse.size(); ++n) {
        ASSERT_NEAR(masked.lse[n], shorter.lse[n], 1e-12) << recipe << ", seed " << seed;
      }
    }
  }
}

}  // namespace
}  // namespace qattn::test
