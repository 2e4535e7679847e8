// Loud channels of K under a scale a token: keys as Qwen2.5 has them, a bias in a few pairs of
// channels that rotary embeddings turn, where queries are small.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "kvcache/decode_case.hpp"

namespace qattn {
namespace {

using test::append_rows;
using test::contents_of;
using test::DecodeCase;
using test::KvRows;
using test::normal_rows;
using test::normal_values;
using test::slice;

constexpr std::int64_t heads = 2, d = 128, length = 2048, group = 2;

KvCacheOptions options(KvTier tier) {
  KvCacheOptions o;
  o.heads_kv = heads;
  o.window = 64;
  o.tiers = {tier};
  return o;
}

bool is_loud(std::int64_t c, std::int64_t first) {
  return c % (d / 2) >= first && c % (d / 2) < first + 4;
}

/// Pairs `first` to first + 3 have a bias of `size`, turned at the rate of theta 10^6.
KvRows loud_rows(std::int64_t first, float size) {
  KvRows rows = normal_rows(length, heads, d, d, 31);
  for (std::int64_t j = 0; j < length * heads; ++j) {
    for (std::int64_t c = first; c < first + 4; ++c) {
      const double turn = static_cast<double>(j / heads) * std::pow(1e6, -2.0 * c / d);
      const double x = static_cast<double>(size), y = -0.7 * x;
      float* row = rows.k.data() + j * d + c;
      row[0] += static_cast<float>(x * std::cos(turn) - y * std::sin(turn));
      row[d / 2] += static_cast<float>(x * std::sin(turn) + y * std::cos(turn));
    }
  }
  return rows;
}

/// Small in the loud channels, unless they `listen`.
DecodeCase queries(std::int64_t first, bool listen = false) {
  DecodeCase c;
  c.queries = 8;
  c.heads_q = heads * group;
  c.options.causal = false;
  c.q = normal_values(c.queries * c.heads_q * d, 7, 2.0f);
  for (std::size_t i = 0; i < c.q.size(); ++i) {
    if (!listen && is_loud(static_cast<std::int64_t>(i) % d, first)) c.q[i] *= 0.02f;
  }
  return c;
}

struct Seen {
  double error;
  KvUsage usage;
};
/// `prompt` tokens come at once, the others 16 at a time.
Seen decode(const KvCacheOptions& o, const KvRows& rows, std::int64_t first,
            std::int64_t prompt = length, bool listen = false) {
  Result<KvCache> cache = KvCache::create(o);
  if (!cache.ok()) ADD_FAILURE() << cache.status().message();
  const std::int64_t id = *cache->add_sequence();
  append_rows(*cache, id, 0, slice(rows, 0, prompt));
  for (std::int64_t at = prompt; at < length; at += 16) {
    append_rows(*cache, id, 0, slice(rows, at, std::min(at + 16, length)));
  }
  DecodeCase c = queries(first, listen);
  const auto truth = attend(c, o, {contents_of(rows, heads, d, d)});
  if (const Status s = c.run(*cache, {id}); !s.ok()) ADD_FAILURE() << s.message();
  return {test::nrmse(c.out, truth.out), *cache->usage(id, 0)};
}

TEST(KvBalance, LoudChannelsCostAScaleATokenLittle) {
  for (const std::int64_t first : {60, 30, 0}) {
    for (const float size : {50.0f, 200.0f, 400.0f}) {
      const KvRows rows = loud_rows(first, size);
      const double normal = decode(options({4, 4}), normal_rows(length, heads, d, d, 31), 0).error;
      for (const KvTier tier : {KvTier{8, 8}, KvTier{4, 4}}) {
        KvCacheOptions o = options(tier);
        const Seen balanced = decode(o, rows, first);
        o.balance_k = false;
        const Seen plain = decode(o, rows, first);
        o.k_granularity = Granularity::per_channel;
        const Seen channels = decode(o, rows, first);
        std::printf("pairs from %2d, bias %3.0f, %d bits: %.3f, %.3f without, %.3f a channel\n",
                    static_cast<int>(first), static_cast<double>(size), tier.k_bits, balanced.error,
                    plain.error, channels.error);
        EXPECT_LE(balanced.error, tier.k_bits == 8 ? 0.12 : 1.7 * normal);
        EXPECT_LE(balanced.error, 1.05 * plain.error + 0.003);
        EXPECT_EQ(plain.usage.balanced_channels, 0);
        EXPECT_EQ(channels.usage.balanced_channels, 0);
        if (first == 60) continue;  // these hardly turn: they have a mean
        EXPECT_EQ(balanced.usage.balanced_channels, heads * 8);
      }
    }
  }
}

// Biases turn slowly: when the first page is quantised they have not come far from the mean.
TEST(KvBalance, KeysThatMoveOnGetFurtherSets) {
  const double normal = decode(options({4, 4}), normal_rows(length, heads, d, d, 31), 0).error;
  for (const std::int64_t first : {40, 30, 20}) {
    for (const float size : {50.0f, 200.0f, 400.0f}) {
      const KvRows rows = loud_rows(first, size);
      KvCacheOptions o = options({4, 4});
      const double balanced = decode(o, rows, first, 144).error;
      o.balance_k = false;
      const double plain = decode(o, rows, first, 144).error;
      std::printf("pairs from %2d, bias %3.0f, 144 tokens at once: %.3f, %.3f without\n",
                  static_cast<int>(first), static_cast<double>(size), balanced, plain);
      EXPECT_LE(balanced, 2 * normal);
    }
  }
}

// SmolLM2 has such pairs: far from 0, hardly turning, and of use to its queries.
TEST(KvBalance, QueriesThatListenLoseLittle) {
  for (const std::int64_t prompt : {144, 1024, 2048}) {
    for (const float size : {20.0f, 50.0f, 200.0f}) {
      const KvRows rows = loud_rows(52, size);
      KvCacheOptions o = options({4, 4});
      const double balanced = decode(o, rows, 52, prompt, true).error;
      o.balance_k = false;
      const double plain = decode(o, rows, 52, prompt, true).error;
      std::printf("queries listen, bias %3.0f, %4d tokens at once: %.3f, %.3f without\n",
                  static_cast<double>(size), static_cast<int>(prompt), balanced, plain);
      EXPECT_LE(balanced, 1.2 * plain + 0.02);
    }
  }
}

TEST(KvBalance, WhereNoChannelIsLoudNothingChanges) {
  const KvRows rows = normal_rows(length, heads, d, d, 3, 10.0f);
  KvCacheOptions o = options({3, 3});
  test::Contents read[2];
  for (const bool balance : {false, true}) {
    o.balance_k = balance;
    Result<KvCache> cache = KvCache::create(o);
    const std::int64_t id = *cache->add_sequence();
    append_rows(*cache, id, 0, slice(rows, 0, 81));
    append_rows(*cache, id, 0, slice(rows, 81, length));
    EXPECT_EQ(cache->usage(id, 0)->balanced_channels, 0);
    read[balance ? 1 : 0] = test::read_contents(*cache, id);
  }
  EXPECT_EQ(read[0].k, read[1].k);
  EXPECT_EQ(read[0].v, read[1].v);
}

// An offset of V is in every output, and a scale a token must hold it.
TEST(KvBalance, VFarFromZeroCostsNoBits) {
  const KvRows rows = normal_rows(length, heads, d, d, 31);
  const DecodeCase asked = queries(60);
  const auto error_of = [&](const KvRows& given, const KvCacheOptions& o, std::int64_t shifted) {
    Result<KvCache> cache = KvCache::create(o);
    const std::int64_t id = *cache->add_sequence();
    append_rows(*cache, id, 0, slice(given, 0, 150));
    append_rows(*cache, id, 0, slice(given, 150, length));
    EXPECT_EQ(cache->usage(id, 0)->shifted_heads, shifted);
    DecodeCase c = asked;
    EXPECT_TRUE(c.run(*cache, {id}).ok());
    const auto truth = attend(c, o, {contents_of(given, heads, d, d)});
    double error = 0;
    for (std::size_t i = 0; i < c.out.size(); ++i) {
      error += std::pow(static_cast<double>(c.out[i]) - truth.out[i], 2);
    }
    return std::sqrt(error / static_cast<double>(c.out.size()));
  };
  KvRows far = rows;
  for (std::size_t i = 0; i < far.v.size(); ++i) {
    far.v[i] = static_cast<float>(std::round(static_cast<double>(far.v[i]) * 64) / 64) +
               30 * std::cos(static_cast<float>(i % d));
  }
  for (const KvTier tier : {KvTier{8, 8}, KvTier{4, 4}, KvTier{2, 2}}) {
    KvCacheOptions o = options(tier);
    o.window_format = Format::f16;
    const double plain = error_of(rows, o, 0), shifted = error_of(far, o, heads);
    o.smooth_v = false;
    const double kept = error_of(far, o, 0);
    std::printf("V %d bits: %.4f, far from 0 %.4f, with its mean %.4f\n", tier.v_bits, plain,
                shifted, kept);
    EXPECT_LE(shifted, 1.1 * plain + 0.01);
    if (tier.v_bits == 8) continue;
    EXPECT_GE(kept, 4 * shifted);
  }
}

TEST(KvBalance, ABudgetHolds) {
  for (const double bits : {3.0, 4.0}) {
    KvCacheOptions o;
    o.heads_kv = heads;
    o.window = 64;
    o.average_bits = bits;
    o.budget_from = *KvCache::shortest_length(o);
    const Seen seen = decode(o, loud_rows(30, 200), 30);
    EXPECT_LE(seen.usage.bytes, seen.usage.allowed_bytes);
    EXPECT_EQ(seen.usage.balanced_channels, heads * 8);
    o.balance_k = false;
    EXPECT_LE(seen.error, 0.5 * decode(o, loud_rows(30, 200), 30).error);
  }
}

}  // namespace
}  // namespace qattn
