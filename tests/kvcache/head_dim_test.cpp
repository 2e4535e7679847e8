// Head dimensions that are no multiple of 32, and long ones: a cache is what one of padded rows is,
// bit for bit, and whoever calls it never sees the zeros.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <limits>

#include "kvcache/decode_case.hpp"
#include "qattn/kv_cache_gpu.hpp"

namespace qattn {
namespace {

using test::append_rows;
using test::Contents;
using test::DecodeCase;
using test::KvRows;
using test::normal_rows;
using test::normal_values;
using test::read_contents;

KvCacheOptions options(std::int64_t d, std::int64_t dv, KvTier tier, Granularity k) {
  KvCacheOptions o;
  o.heads_kv = 2;
  o.d = d;
  o.dv = dv;
  o.tiers = {tier};
  o.window = 32;
  o.k_granularity = k;
  return o;
}

std::int64_t up(std::int64_t channels) { return (channels + 31) / 32 * 32; }

/// Rows of `channels` as the first of `wide` channels, or back.
std::vector<float> resized(const std::vector<float>& x, std::int64_t channels, std::int64_t wide) {
  std::vector<float> y(x.size() / static_cast<std::size_t>(channels) *
                       static_cast<std::size_t>(wide));
  const auto rows = static_cast<std::int64_t>(x.size()) / channels;
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < std::min(channels, wide); ++c) {
      y[static_cast<std::size_t>(r * wide + c)] = x[static_cast<std::size_t>(r * channels + c)];
    }
  }
  return y;
}

KvRows padded(const KvRows& rows, std::int64_t d, std::int64_t dv) {
  return {rows.count, resized(rows.k, d, up(d)), resized(rows.v, dv, up(dv))};
}

DecodeCase case_of(const KvCacheOptions& o, float scale) {
  DecodeCase c;
  c.queries = 3;
  c.heads_q = 2 * o.heads_kv;
  c.with_mass = true;
  c.options.softmax_scale = scale;
  c.options.debias = true;
  return c;
}

void expect_padded(std::int64_t d, std::int64_t dv, KvTier tier, Granularity k) {
  SCOPED_TRACE("d " + std::to_string(d) + ", dv " + std::to_string(dv));
  const KvCacheOptions o = options(d, dv, tier, k), wide = options(up(d), up(dv), tier, k);
  Result<KvCache> mine = KvCache::create(o), plain = KvCache::create(wide);
  ASSERT_TRUE(mine.ok()) << mine.status().message();
  ASSERT_TRUE(plain.ok());
  const KvRows rows = normal_rows(150, o.heads_kv, d, dv, 7, 3.0f);
  const std::int64_t a = *mine->add_sequence(), b = *plain->add_sequence();
  for (std::int64_t at = 0; at < rows.count; at += 50) {
    const KvRows part = test::slice(rows, at * 1, at + 50);
    append_rows(*mine, a, 0, part);
    append_rows(*plain, b, 0, padded(part, d, dv));
  }
  DecodeCase x = case_of(o, 1.0f / std::sqrt(static_cast<float>(d)));
  DecodeCase y = case_of(wide, *x.options.softmax_scale);
  x.q = normal_values(x.queries * x.heads_q * d, 11);
  y.q = resized(x.q, d, up(d));
  ASSERT_TRUE(x.run(*mine, {a}).ok());
  ASSERT_TRUE(y.run(*plain, {b}).ok());
  EXPECT_EQ(x.out, resized(y.out, up(dv), dv));
  EXPECT_EQ(x.lse, y.lse);
  EXPECT_EQ(x.mass, y.mass);
  DecodeCase own = x;  // the default scale is that of the callers' dimension
  own.options.softmax_scale.reset();
  ASSERT_TRUE(own.run(*mine, {a}).ok());
  EXPECT_EQ(own.out, x.out);

  const Contents held = read_contents(*mine, a), same = read_contents(*plain, b);
  EXPECT_EQ(held.k, resized(same.k, up(d), d));
  EXPECT_EQ(held.v, resized(same.v, up(dv), dv));
  const KvUsage u = *mine->usage(a, 0), v = *plain->usage(b, 0);
  EXPECT_EQ(u.bytes, v.bytes);
  EXPECT_EQ(u.balanced_channels, v.balanced_channels);
  EXPECT_DOUBLE_EQ(u.average_bits * static_cast<double>(d + dv),
                   v.average_bits * static_cast<double>(up(d) + up(dv)));
  EXPECT_EQ(mine->options().d, d);
  EXPECT_EQ(mine->options().dv, dv);
}

TEST(KvHeadDim, AnySizeIsItsPaddedCache) {
  std::vector<std::pair<std::int64_t, std::int64_t>> sizes;
  for (std::int64_t d = 1; d <= 40; ++d) sizes.emplace_back(d, d % 5 == 0 ? 41 - d : d);
  for (std::int64_t d = 48; d <= 256; d += 24) sizes.emplace_back(d, d % 5 == 0 ? 264 - d : d);
  for (const auto& [d, dv] : {std::pair{47, 61}, std::pair{100, 127}, std::pair{191, 129},
                              std::pair{255, 250}, std::pair{257, 300}, std::pair{289, 511},
                              std::pair{513, 1}, std::pair{575, 33}, std::pair{3, 509}}) {
    sizes.emplace_back(d, dv);
  }
  const KvTier tiers[] = {{2, 3}, {8, 4}, {4, 2}, {3, 8}};
  std::size_t turn = 0;
  for (const auto& [d, dv] : sizes) {
    const auto k = turn % 3 == 0 ? Granularity::per_channel : Granularity::per_token;
    expect_padded(d, dv, tiers[turn++ % 4], k);
  }
}

/// Sizes that are their own padded ones: against float64 over what the cache reads as, and that
/// against what was appended.
TEST(KvHeadDim, LongHeadsInEveryTier) {
  const struct {
    KvTier tier;
    double k, v;  // relative errors of rows of codes
  } rows[] = {
      {{2, 3}, 0.42, 0.22}, {{3, 2}, 0.22, 0.42}, {{4, 8}, 0.12, 0.009}, {{8, 4}, 0.009, 0.12}};
  for (const auto& [d, dv] : {std::pair{288, 512}, std::pair{576, 512}, std::pair{512, 288}}) {
    for (const auto& row : rows) {
      for (const Granularity k : {Granularity::per_token, Granularity::per_channel}) {
        SCOPED_TRACE(std::to_string(d) + " " + std::to_string(row.tier.k_bits));
        const KvCacheOptions o = options(d, dv, row.tier, k);
        Result<KvCache> cache = KvCache::create(o);
        ASSERT_TRUE(cache.ok()) << cache.status().message();
        const KvRows given = normal_rows(200, o.heads_kv, d, dv, 7, 3.0f);
        const std::int64_t id = *cache->add_sequence();
        append_rows(*cache, id, 0, given);
        const Contents held = read_contents(*cache, id);
        const Contents want = test::contents_of(given, o.heads_kv, d, dv);
        const auto doubles = [](const std::vector<float>& x) {
          return std::vector<double>(x.begin(), x.end());
        };
        EXPECT_LE(test::nrmse(held.k, doubles(want.k)), row.k);
        EXPECT_LE(test::nrmse(held.v, doubles(want.v)), row.v);
        DecodeCase c = case_of(o, 1.0f / std::sqrt(static_cast<float>(d)));
        c.options.debias = false;
        c.q = normal_values(c.queries * c.heads_q * d, 11);
        ASSERT_TRUE(c.run(*cache, {id}).ok());
        const test::DecodeTruth truth = test::attend(c, o, {held});
        EXPECT_LE(test::nrmse(c.out, truth.out), 4e-4);
        EXPECT_LE(test::largest_difference(c.mass, truth.mass), 1e-3);
      }
    }
  }
}

TEST(KvHeadDim, OthersAreRefused) {
  for (const std::int64_t d : {0, 513, 577, -8}) {
    KvCacheOptions o;
    const auto refused = [&](const std::string& what) {
      return KvCache::create(o).status().message().find(what) == 0;
    };
    const std::string value = std::to_string(d);
    o.d = d;
    EXPECT_EQ(refused("d: " + value + " is not from 1 to 576"), d != 513);
    o.d = 128, o.dv = d;
    EXPECT_TRUE(refused("dv: " + value + " is not from 1 to 512"));
  }
}

TEST(KvHeadDim, ACacheOnAGpuTakesMultiplesOf32To256) {
  const struct {
    std::int64_t d, dv;
    const char* says;
  } rows[] = {
      {128, 72,
       "dv: 72 is not a multiple of 32, as a cache on a GPU needs; pad rows with zeros to 96 and "
       "cut out"},
      {33, 128,
       "d: 33 is not a multiple of 32, as a cache on a GPU needs; pad rows with zeros to 64 and "
       "give softmax_scale 1 / sqrt(33)"},
      {576, 512, "d: 576 is above 256, the most in a cache on a GPU; one on CPUs (KvCache) takes"},
      {128, 257, "dv: 257 is above 256"},
      {0, 64, "d: 0 is not from 1 to 576"},
      {64, -3, "dv: -3 is not from 1 to 512"}};
  for (const auto& row : rows) {
    KvCacheOptions o;
    o.d = row.d, o.dv = row.dv;
    o.tiers = {{4, 4}};
    KvGpuCapacity capacity;
    capacity.sequences = 1;
    capacity.tokens = 64;
    const Status s = GpuKvCache::create(o, capacity, {DeviceType::cuda, 0}).status();
    EXPECT_EQ(s.code(), Code::invalid_argument);
    EXPECT_EQ(s.message().rfind(row.says, 0), 0u) << s.message();
  }
}

/// Nor does one take a file of such rows.
TEST(KvHeadDim, AFileOfOtherRowsIsRefusedOnAGpu) {
  const std::string path = testing::TempDir() + "qattn_head_dim_gpu.safetensors";
  for (const auto& [d, says] :
       {std::pair{33, "d: 33 is not a multiple of 32"}, std::pair{288, "d: 288 is above 256"}}) {
    KvCacheOptions o;
    o.d = d;
    o.tiers = {{4, 4}};
    ASSERT_TRUE(KvCache::create(o)->save(path).ok());
    KvGpuCapacity capacity;
    capacity.sequences = 1;
    capacity.tokens = 64;
    const Status s = GpuKvCache::load(path, capacity, {DeviceType::cuda, 0}).status();
    EXPECT_NE(s.message().find(says), std::string::npos) << s.message();
  }
  std::remove(path.c_str());
}

/// With a budget, forks, truncations that open a page of codes again, evictions and files.
void expect_every_operation(std::int64_t d, std::int64_t dv, double average_bits) {
  SCOPED_TRACE("d " + std::to_string(d) + ", dv " + std::to_string(dv));
  KvCacheOptions o;
  o.heads_kv = 2;
  o.d = d;
  o.dv = dv;
  o.window = 32;
  o.average_bits = average_bits;
  o.importance = KvImportance::key_norm;
  o.budget_from = *KvCache::shortest_length(o);
  Result<KvCache> cache = KvCache::create(o);
  ASSERT_TRUE(cache.ok()) << cache.status().message();
  const std::int64_t id = *cache->add_sequence();
  append_rows(*cache, id, 0, normal_rows(900, 2, o.d, o.dv, 3, 2.0f));
  const std::int64_t copy = *cache->fork(id);
  ASSERT_TRUE(cache->truncate(copy, 700).ok());
  append_rows(*cache, copy, 0, normal_rows(37, 2, o.d, o.dv, 4, 2.0f));
  ASSERT_TRUE(cache->evict(copy, 0, 1, 100, 200).ok());
  const KvUsage u = *cache->usage(copy, 0);
  EXPECT_LE(u.bytes, u.allowed_bytes);
  EXPECT_GT(u.tier_tokens.back(), 0);

  const std::string path = testing::TempDir() + "qattn_head_dim.safetensors";
  ASSERT_TRUE(cache->save(path).ok());
  Result<KvCache> loaded = KvCache::load(path);
  std::remove(path.c_str());
  ASSERT_TRUE(loaded.ok()) << loaded.status().message();
  EXPECT_EQ(loaded->options().d, o.d);
  DecodeCase c = case_of(o, 0.1f);
  c.q = normal_values(2 * c.queries * c.heads_q * o.d, 5);
  c.options.debias = false;
  DecodeCase again = c;
  ASSERT_TRUE(c.run(*cache, {id, copy}).ok());
  ASSERT_TRUE(again.run(*loaded, {id, copy}).ok());
  EXPECT_EQ(again.out, c.out);
  std::vector<Contents> contents;
  for (const std::int64_t s : {id, copy}) contents.push_back(read_contents(*cache, s));
  EXPECT_LE(test::nrmse(c.out, test::attend(c, o, contents).out), 4e-4);

  // NaN and Inf in a row are found as in any other cache, and only whoever sees the row is NaN.
  KvRows bad = normal_rows(1, 2, o.d, o.dv, 6);
  bad.k[static_cast<std::size_t>(o.d - 1)] = std::numeric_limits<float>::quiet_NaN();
  append_rows(*cache, id, 0, bad);
  ASSERT_TRUE(c.run(*cache, {id, copy}).ok());
  const std::size_t half = c.out.size() / 2;
  EXPECT_TRUE(std::isnan(c.out[half - c.heads_q * static_cast<std::size_t>(o.dv)]));
  for (std::size_t i = half; i < c.out.size(); ++i) ASSERT_TRUE(std::isfinite(c.out[i]));
}

TEST(KvHeadDim, ServesEveryOperation) {
  expect_every_operation(72, 40, 6);
  expect_every_operation(33, 61, 5);
  expect_every_operation(13, 5, 13);
  expect_every_operation(257, 255, 4);
  expect_every_operation(576, 512, 4);
}

}  // namespace
}  // namespace qattn
