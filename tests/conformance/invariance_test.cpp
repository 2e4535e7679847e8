// Results must keep their bits whatever else is in the batch, however many threads run, and in
// whatever order and size pages lie.
#include <gtest/gtest.h>

#include <cstring>

#include "conformance/runner.hpp"

namespace qattn::test {
namespace {

class Invariance : public testing::TestWithParam<Recipe> {};

/// Rows of sequence b, head by head.
std::vector<float> rows_of(const Call& call, const Outcome& outcome, std::int64_t b) {
  std::vector<float> rows;
  const Sequence& sequence = call.sequences[b];
  for (std::int64_t h = 0; h < call.heads_q; ++h) {
    for (std::int64_t i = 0; i < sequence.len_q; ++i) {
      const std::int64_t row = call.row(b, h, i);
      const auto begin = outcome.out.begin() + row * call.dim_v;
      rows.insert(rows.end(), begin, begin + call.dim_v);
      rows.push_back(outcome.lse[row]);
    }
  }
  return rows;
}

bool same(const std::vector<float>& a, const std::vector<float>& b) {
  if (a.size() != b.size()) return false;
  return a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

Outcome run_feature(const Call& call, const LayoutOptions& how, const Recipe& recipe) {
  Laid laid = lay_out(call, how);
  Outcome outcome = run_call(call, laid, recipe);
  EXPECT_TRUE(outcome.status.ok()) << outcome.status.message();
  EXPECT_EQ(outcome.violation, "");
  return outcome;
}

/// The call with sequence b alone.
Call alone(const Call& call, std::int64_t b) {
  Call one = call;
  one.sequences = {call.sequences[b]};
  return one;
}

void expect_batch_independent(const Feature& feature, const Recipe& recipe) {
  const Call call = make_call(feature, 7);
  const Outcome together = run_feature(call, feature.how, recipe);
  ASSERT_FALSE(testing::Test::HasFailure());
  for (std::size_t n = 0; n < call.sequences.size(); ++n) {
    const auto b = static_cast<std::int64_t>(n);
    const Call one = alone(call, b);
    const Outcome single = run_feature(one, feature.how, recipe);
    ASSERT_FALSE(testing::Test::HasFailure());
    EXPECT_TRUE(same(rows_of(call, together, b), rows_of(one, single, 0)))
        << "sequence " << b << " (splits of " << together.split_keys << " and " << single.split_keys
        << " keys)";
  }
}

TEST_P(Invariance, BatchComposition) {
  expect_batch_independent(feature_named("varlen"), GetParam());
  Feature decode = feature_named("decode_long");
  decode.sq = {1, 1, 1};
  decode.sk = {2100, 2100, 2100};
  expect_batch_independent(decode, GetParam());
}

TEST_P(Invariance, LongestNeighbour) {
  Feature feature;
  feature.sq = {1, 1};
  feature.sk = {700, 4100};
  feature.heads_q = feature.heads_k = 1;
  feature.how.packed_q = feature.how.packed_k = true;
  expect_batch_independent(feature, GetParam());
}

TEST_P(Invariance, Threads) {
  for (const char* name : {"everything", "decode_long", "varlen", "functions_decode_paged"}) {
    SCOPED_TRACE(name);
    const Feature& feature = feature_named(name);
    Call call = make_call(feature, 8);
    call.options.threads = 1;
    const Outcome one = run_feature(call, feature.how, GetParam());
    for (const int threads : {2, 3, 7}) {
      call.options.threads = threads;
      const Outcome many = run_feature(call, feature.how, GetParam());
      EXPECT_TRUE(same(one.out, many.out) && same(one.lse, many.lse)) << threads << " threads";
    }
  }
}

/// One thread runs heads in turn, whose queries lie beside each other.
TEST_P(Invariance, HeadsInTurn) {
  Feature feature;
  feature.sq = {20};
  feature.sk = {256};
  feature.heads_q = feature.heads_k = 8;
  Call call = make_call(feature, 12);
  call.options.threads = 1;
  const Outcome in_turn = run_feature(call, feature.how, GetParam());
  call.options.threads = 7;
  const Outcome apart = run_feature(call, feature.how, GetParam());
  EXPECT_TRUE(same(in_turn.out, apart.out) && same(in_turn.lse, apart.lse));
}

TEST_P(Invariance, PagesAndPacking) {
  Feature feature = feature_named("seqused_k");
  feature.used_k = {150, 1, 200};
  const Call call = make_call(feature, 9);
  const Outcome dense = run_feature(call, feature.how, GetParam());
  for (const std::int64_t size : {16, 40, 128}) {
    for (const std::uint64_t order : {1, 2}) {
      LayoutOptions how = feature.how;
      how.page_size = size;
      how.page_seed = order;
      const Outcome paged = run_feature(call, how, GetParam());
      EXPECT_TRUE(same(dense.out, paged.out) && same(dense.lse, paged.lse))
          << "pages of " << size << ", order " << order;
    }
  }
  Feature packed = feature;
  packed.sk = feature.used_k;
  packed.used_k.clear();
  packed.how.packed_q = packed.how.packed_k = true;
  packed.how.seqused_k = false;
  const Call packed_call = make_call(packed, 9);
  const Outcome compact = run_feature(packed_call, packed.how, GetParam());
  for (std::int64_t b = 0; b < 3; ++b) {
    EXPECT_TRUE(same(rows_of(call, dense, b), rows_of(packed_call, compact, b))) << "packed " << b;
  }
}

TEST_P(Invariance, StridesAndLayout) {
  const Feature feature = feature_named("causal_fewer_queries");
  const Call call = make_call(feature, 10);
  const Outcome dense = run_feature(call, feature.how, GetParam());
  for (const Layout layout : {Layout::bshd, Layout::bhsd}) {
    for (const Strides strides : {Strides::dense, Strides::odd, Strides::reversed}) {
      LayoutOptions how = feature.how;
      how.strides = strides;
      how.layout = layout;
      Call laid_call = call;
      laid_call.options.layout = layout;
      const Outcome other = run_feature(laid_call, how, GetParam());
      EXPECT_TRUE(same(dense.out, other.out) && same(dense.lse, other.lse))
          << "layout " << static_cast<int>(layout) << " strides " << static_cast<int>(strides);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Cpu, Invariance, testing::ValuesIn(recipes().begin(), recipes().end()),
                         [](const auto& recipe) { return recipe.param.name; });

}  // namespace
}  // namespace qattn::test
