// Head dimensions that are no multiple of 32: a cache is what one of padded rows is, bit for bit,
// and whoever calls it never sees the zeros.
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

TEST(KvHeadDim, AnyMultipleOf8IsItsPaddedCache) {
  for (std::int64_t d = 8; d <= 256; d += 8) {
    const KvTier tier = d % 24 == 0 ? KvTier{2, 3} : d % 16 == 0 ? KvTier{8, 4} : KvTier{4, 2};
    for (const Granularity k : {Granularity::per_token, Granularity::per_channel}) {
      expect_padded(d, d % 5 == 0 ? 264 - d : d, tier, k);
    }
  }
}

TEST(KvHeadDim, OthersAreRefused) {
  for (const std::int64_t d : {0, 4, 12, 264, 512, -8}) {
    KvCacheOptions o;
    o.d = d;
    const std::string what = std::to_string(d) + " is not a multiple of 8 from 8 to 256";
    EXPECT_NE(KvCache::create(o).status().message().find("d: " + what), std::string::npos) << d;
    o.d = 128, o.dv = d;
    EXPECT_NE(KvCache::create(o).status().message().find("dv: " + what), std::string::npos) << d;
  }
}

TEST(KvHeadDim, ACacheOnAGpuTakesMultiplesOf32) {
  KvCacheOptions o;
  o.dv = 72;
  KvGpuCapacity capacity;
  capacity.sequences = 1;
  capacity.tokens = 64;
  const Status s = GpuKvCache::create(o, capacity, {DeviceType::cuda, 0}).status();
  EXPECT_EQ(s.code(), Code::invalid_argument);
  EXPECT_NE(s.message().find("dv: 72 is not a multiple of 32"), std::string::npos) << s.message();
}

/// With a budget, forks, truncations that open a page of codes again, evictions and files.
TEST(KvHeadDim, ServesEveryOperation) {
  KvCacheOptions o;
  o.heads_kv = 2;
  o.d = 72;
  o.dv = 40;
  o.window = 32;
  o.average_bits = 6;
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

}  // namespace
}  // namespace qattn
