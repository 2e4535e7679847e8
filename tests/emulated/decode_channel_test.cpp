// The GPU's decode of caches whose K has a scale a channel, in the emulator, against the CPU's.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "emulated/decode_same.hpp"

namespace qattn {
namespace {

using test::append_rows;
using test::by_channel;
using test::DecodeCase;
using test::DeviceCall;
using test::expect_same;
using test::fill;
using test::Filled;
using test::MirroredCache;
using test::normal_rows;
using test::normal_values;
using test::queries_for;
using test::timings;

TEST(DeviceDecodeByChannel, EveryPairOfBits) {
  int turn = 0;
  for (const int k_bits : {2, 3, 4, 8}) {
    for (const int v_bits : {2, 3, 4, 8}) {
      const Filled f = fill(by_channel(test::uniform(k_bits, v_bits)), 500);
      DecodeCase c = queries_for(f.cache.options(), 4, 1);
      const std::string bits = std::to_string(k_bits) + "/" + std::to_string(v_bits) + ": ";
      expect_same(c, f.cache, {f.id}, bits, turn++);
    }
  }
}

TEST(DeviceDecodeByChannel, HeadDimensionsGroupsAndPages) {
  int turn = 0;
  for (const std::int64_t d : {64, 128, 256}) {
    for (const std::int64_t page : {16, 64}) {
      KvCacheOptions o = test::mixed(2, d);
      o.average_bits = page == 16 ? 6.3 : 4.6;
      const Filled f = fill(by_channel(o, page), 1100);
      const Result<KvUsage> usage = f.cache.usage(f.id, 0);
      std::int64_t tiers = 0;
      for (const std::int64_t tokens : usage->tier_tokens) tiers += tokens > 0 ? 1 : 0;
      EXPECT_GE(tiers, 3) << "tiers that are tested";
      for (const std::int64_t group : {1, 4, 16}) {
        DecodeCase c = queries_for(f.cache.options(), group, 1);
        expect_same(c, f.cache, {f.id},
                    "d " + std::to_string(d) + " page " + std::to_string(page) + " group " +
                        std::to_string(group) + ": ",
                    turn++);
      }
    }
  }
}

TEST(DeviceDecodeByChannel, LengthsAcrossPagesAndTiles) {
  int turn = 0;
  for (const std::int64_t page : {16, 32, 64}) {
    const KvCacheOptions o = by_channel(test::uniform(4, 2), page);
    for (const std::int64_t length : {1, 16, 17, 65, 129, 257}) {
      const Filled f = fill(o, length);
      DecodeCase c = queries_for(o, 2, 1);
      expect_same(c, f.cache, {f.id},
                  "page " + std::to_string(page) + " length " + std::to_string(length) + ": ",
                  turn++);
    }
  }
}

TEST(DeviceDecodeByChannel, SeveralQueriesWindowsSoftcapSinksAndEvictions) {
  KvCacheOptions o = test::mixed();
  o.average_bits = 5.5;
  Filled f = fill(by_channel(o), 700);
  ASSERT_TRUE(f.cache.evict(f.id, 0, -1, 100, 133).ok());
  ASSERT_TRUE(f.cache.evict(f.id, 0, 1, 401, 402).ok());
  int turn = 0;
  for (int features = 0; features < 8; ++features) {
    const std::int64_t queries = std::array<std::int64_t, 4>{1, 3, 8, 2}[features % 4];
    DecodeCase c = queries_for(f.cache.options(), 4, queries);
    c.options.causal = (features & 1) == 0;
    if (features & 2) c.options.window_left = 317;
    if (features & 4) c.options.softcap = 2.5f;
    if (features & 4) c.sinks = normal_values(c.heads_q, 5, 3.0f);
    expect_same(c, f.cache, {f.id}, "features " + std::to_string(features) + ": ", turn++);
  }
}

TEST(DeviceDecodeByChannel, OptionsOfTheCache) {
  test::expect_same_under_every_option(by_channel(test::uniform(3, 4)), 300);
}

/// Channels of very different size, which is what this granularity is for.
TEST(DeviceDecodeByChannel, ChannelsOfAnySize) {
  const KvCacheOptions o = by_channel(test::uniform(4, 4));
  for (const float size : {1e-3f, 1.0f, 200.0f}) {
    Result<KvCache> cache = KvCache::create(o);
    const std::int64_t id = *cache->add_sequence();
    test::KvRows rows = normal_rows(300, 1, 128, 128, 1);
    for (std::size_t i = 0; i < rows.k.size(); ++i) rows.k[i] *= i % 128 % 16 == 3 ? size : 1.0f;
    append_rows(*cache, id, 0, rows);
    DecodeCase c = queries_for(o, 4, 1);
    c.options.softmax_scale = 0.088f / std::max(1.0f, size);
    expect_same(c, *cache, {id}, "size " + std::to_string(size) + ": ", 0);
  }
}

TEST(DeviceDecodeByChannel, BadTokensSpoilExactlyTheRowsThatSeeThem) {
  int turn = 0;
  for (const int bits : {2, 4, 8}) {
    for (const bool in_v : {false, true}) {
      for (const std::int64_t bad : {5, 200, 397}) {  // a sink, a quantised token, the window
        test::expect_spoilt_by(by_channel(test::uniform(bits, bits, 2)), in_v, bad, false, turn);
        turn += 2;
      }
    }
  }
}

/// What f16 does not hold spoils who sees it, also where its score is -Inf, and nobody else: keys
/// of a bf16 window, and keys far from their mean.
void keys_beyond_f16(Format format, float key, float others) {
  KvCacheOptions o = by_channel(test::uniform(4, 4, 2));
  o.window_format = format;
  o.smooth_k = format == Format::f16;
  Result<KvCache> cache = KvCache::create(o);
  const std::int64_t id = *cache->add_sequence();
  test::KvRows rows = normal_rows(200, 2, 128, 128, 1);
  for (std::size_t i = 0; i < 200; ++i) {
    rows.k[(i * 2 + 1) * 128 + 5] = i == 70 ? key : others;  // of head 1
  }
  append_rows(*cache, id, 0, rows);
  DecodeCase c = queries_for(o, 2, 1);
  for (std::size_t head = 0; head < 4; ++head) c.q[head * 128 + 5] = -1.0f;
  ASSERT_TRUE(c.run(*cache, {id}).ok());
  MirroredCache mirror(*cache, {id});
  DeviceCall device(c, mirror.view(), {0}, 13);
  ASSERT_TRUE(device.run(timings[2]).ok());
  for (std::size_t i = 0; i < c.out.size(); ++i) {
    ASSERT_FALSE(std::isnan(c.out[i]));
    const float got = device.results().out[i];
    ASSERT_EQ(std::isnan(got), i >= 2 * 128) << i;
    if (i >= 2 * 128) continue;
    ASSERT_NEAR(got, c.out[i], 1e-2);
  }
}

TEST(DeviceDecodeByChannel, KeysBeyondF16) {
  keys_beyond_f16(Format::bf16, 3e5f, 0.0f);
  keys_beyond_f16(Format::f16, 6e4f, -6e4f);
}

/// A sum over channels of a page and a row: the CPU's alone.
TEST(DeviceDecodeByChannel, DebiasIsRefused) {
  const Filled f = fill(by_channel(test::uniform(4, 4)), 100);
  DecodeCase c = queries_for(f.cache.options(), 4, 1);
  c.options.debias = true;
  MirroredCache mirror(f.cache, {f.id});
  DeviceCall device(c, mirror.view(), {0}, 7);
  const Status s = device.run(timings[0]);
  EXPECT_EQ(s.code(), Code::unsupported);
  EXPECT_EQ(s.message(), "debias: should be off on a GPU where K has a scale a channel");
  for (const float x : device.results().out) ASSERT_EQ(x, 7.0f);
}

}  // namespace
}  // namespace qattn
