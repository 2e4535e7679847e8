// The GPU's decode at head dimension 128 where a block may have 99 KiB of shared memory: the
// kernels with small rings in the emulator, against the CPU's decode() and those with large ones.
// Where K has a scale a channel, rings leave no room for queries, and products read them where they
// are in the workspace.
#include <gtest/gtest.h>

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
using test::EmulatedGpu;
using test::expect_same;
using test::fill;
using test::Filled;
using test::MirroredCache;
using test::mixed;
using test::normal_rows;
using test::queries_for;
using test::timings;
using test::uniform;

constexpr int small_gpus[] = {86, 89, 120, 121};

/// The one predicate: which GPU has which kernel. Of up to 8 rows large rings leave two blocks on a
/// multiprocessor of an sm_90, of 16 rows or with small rings there is one.
TEST(SmallDecode, IsChosenWhereLargeRingsDoNotFit) {
  const Filled f = fill(uniform(4, 4), 40);
  MirroredCache mirror(f.cache, {f.id});
  const auto params = [&](int gpu, std::int64_t group) {
    const EmulatedGpu on(gpu);
    const DecodeCase c = queries_for(f.cache.options(), group, 1);
    DeviceCall device(c, mirror.view(), {0}, 3);
    EXPECT_TRUE(kernels::supports(device.call()).ok());
    const kernels::DecodeParams p = kernels::params_in(device.call(), nullptr);
    return std::vector<int>{p.unit_rows, p.chunks, p.blocks};
  };
  using Chosen = std::vector<int>;
  for (const int gpu : small_gpus) {
    EXPECT_EQ(params(gpu, 4), (Chosen{8, 1, 3})) << gpu;
    EXPECT_EQ(params(gpu, 16), (Chosen{8, 2, 3})) << gpu;
  }
  for (const int gpu : {80, 87}) {
    EXPECT_EQ(params(gpu, 4), (Chosen{8, 1, 3})) << gpu;
    EXPECT_EQ(params(gpu, 16), (Chosen{16, 1, 3})) << gpu;
  }
  for (const int gpu : {90, 100, 103, 110}) {
    EXPECT_EQ(params(gpu, 4), (Chosen{8, 1, 6})) << gpu;
    EXPECT_EQ(params(gpu, 16), (Chosen{16, 1, 3})) << gpu;
  }
}

/// 16 to 128 rows are units of 8.
TEST(SmallDecode, MixedTiersAtEveryGroup) {
  const EmulatedGpu on(120);
  const Filled f = fill(mixed(), 1200);
  const Result<KvUsage> usage = f.cache.usage(f.id, 0);
  for (const std::int64_t tokens : usage->tier_tokens) EXPECT_GT(tokens, 0) << "a tier";
  int turn = 0;
  for (const auto& [group, queries] : {std::pair{1, 1}, {4, 1}, {8, 1}, {16, 1}, {16, 8}}) {
    DecodeCase c = queries_for(f.cache.options(), group, queries);
    expect_same(c, f.cache, {f.id}, "rows " + std::to_string(group * queries) + ": ", turn++);
  }
}

TEST(SmallDecode, SeveralQueriesWindowsSoftcapSinksAndTrees) {
  const EmulatedGpu on(89);
  Filled f = fill(mixed(), 700);
  ASSERT_TRUE(f.cache.evict(f.id, 0, -1, 100, 133).ok());
  ASSERT_TRUE(f.cache.evict(f.id, 0, 1, 401, 402).ok());
  test::expect_same_with_every_feature(f);
}

/// A warp's block of 16 bits alone is 16 KiB at head dimension 256, and eight warps have one each.
TEST(SmallDecode, WhatDoesNotFitIsRefused) {
  const auto refused = [](const KvCacheOptions& o, int gpu, const std::string& what,
                          const std::string& rule) {
    const Filled f = fill(o, 100);
    const DecodeCase c = queries_for(o, 4, 1);
    MirroredCache mirror(f.cache, {f.id});
    const EmulatedGpu on(gpu);
    DeviceCall device(c, mirror.view(), {0}, 7);
    const Status s = device.run(timings[0]);
    EXPECT_EQ(s.code(), Code::unsupported);
    EXPECT_EQ(s.message(), what + " bytes of shared memory a block; " + rule);
    for (const float x : device.results().out) ASSERT_EQ(x, 7.0f);
  };
  for (const int gpu : small_gpus) {
    refused(test::by_channel(uniform(4, 4, 1, 256)), gpu,
            "head dimension 256, K with a scale a channel, needs 215296",
            "sm_" + std::to_string(gpu) + " has 101376");
  }
  refused(uniform(4, 4, 1, 256), 89, "head dimension 256 needs 215296", "sm_89 has 101376");
  refused(uniform(4, 4, 1, 256), 80, "head dimension 256 needs 215296", "sm_80 has 166912");
}

// ---- Both kernels -------------------------------------------------------------------------------

/// Scales of K: of tokens, or of channels.
class SmallDecodeBy : public testing::TestWithParam<bool> {
 protected:
  static bool channel() { return GetParam(); }
  static KvCacheOptions scaled(const KvCacheOptions& o) { return channel() ? by_channel(o) : o; }
};

/// Depths of rings and the place of queries do not reach the result: with as many blocks, the bits
/// of the large kernel.
TEST_P(SmallDecodeBy, GivesTheBitsOfTheLargeOne) {
  for (const int k_bits : {2, 3, 4, 8}) {
    for (const int v_bits : {2, 3, 4, 8}) {
      SCOPED_TRACE(std::to_string(k_bits) + "/" + std::to_string(v_bits));
      const Filled f = fill(scaled(uniform(k_bits, v_bits)), 500);
      const DecodeCase c = queries_for(f.cache.options(), 4, 1);
      MirroredCache mirror(f.cache, {f.id});
      const auto run = [&](int gpu, int multiprocessors, int timing) {
        const EmulatedGpu on(gpu, multiprocessors);
        DeviceCall device(c, mirror.view(), {0}, 32);
        const Status s = device.run(timings[timing]);
        EXPECT_TRUE(s.ok()) << s.message();
        return device.results();
      };
      const test::DecodeResults small = run(89, 6, 0), large = run(90, 3, 1);
      EXPECT_EQ(small.out, large.out);
      EXPECT_EQ(small.lse, large.lse);
      EXPECT_EQ(small.mass, large.mass);
    }
  }
}

TEST_P(SmallDecodeBy, EveryPairOfBitsUnderEverySchedule) {
  const EmulatedGpu on(channel() ? 120 : 89);
  for (const int k_bits : {2, 3, 4, 8}) {
    for (const int v_bits : {2, 3, 4, 8}) {
      const Filled f = fill(scaled(uniform(k_bits, v_bits)), 500);
      DecodeCase c = queries_for(f.cache.options(), 4, 1);
      c.options.debias = !channel() && v_bits > 3;
      const std::string bits = std::to_string(k_bits) + "/" + std::to_string(v_bits) + ": ";
      expect_same(c, f.cache, {f.id}, bits, -1);
    }
  }
}

TEST_P(SmallDecodeBy, LengthsAcrossPagesAndTiles) {
  const EmulatedGpu on(channel() ? 121 : 86);
  int turn = 0;
  for (const std::int64_t page : {16, 32, 64}) {
    KvCacheOptions o = channel() ? by_channel(uniform(8, 3), page) : uniform(3, 3);
    if (!channel()) o.page_size = o.window = o.sinks = page;
    for (const std::int64_t length : {1, 16, 17, 65, 129, 257}) {
      const Filled f = fill(o, length);
      DecodeCase c = queries_for(o, 2, 1);
      expect_same(c, f.cache, {f.id},
                  "page " + std::to_string(page) + " length " + std::to_string(length) + ": ",
                  turn++);
    }
  }
}

TEST_P(SmallDecodeBy, OptionsOfTheCache) {
  const EmulatedGpu on(89);
  test::expect_same_under_every_option(scaled(uniform(8, 3)), 300);
}

TEST_P(SmallDecodeBy, BadTokensSpoilExactlyTheRowsThatSeeThem) {
  const EmulatedGpu on(89);
  int turn = 0;
  for (const bool in_v : {false, true}) {
    for (const std::int64_t bad : {5, 200, 397}) {  // a sink, a quantised token, the window
      test::expect_spoilt_by(scaled(uniform(4, 4, 2)), in_v, bad, !channel(), turn);
      turn += 2;
    }
  }
}

TEST_P(SmallDecodeBy, ABatchOfDifferentLengths) {
  const EmulatedGpu on(channel() ? 120 : 89);
  const KvCacheOptions o = scaled(mixed());
  Result<KvCache> cache = KvCache::create(o);
  ASSERT_TRUE(cache.ok());
  std::vector<std::int64_t> ids;
  for (const std::int64_t length : {1, 17, 144, 1333}) {
    ids.push_back(*cache->add_sequence());
    append_rows(*cache, ids.back(), 0,
                normal_rows(length, o.heads_kv, o.d, o.dv, static_cast<unsigned>(length)));
  }
  DecodeCase c = queries_for(o, 4, 1, static_cast<std::int64_t>(ids.size()));
  expect_same(c, *cache, ids, "batch: ", -1);
}

INSTANTIATE_TEST_SUITE_P(Scales, SmallDecodeBy, testing::Bool(), [](const auto& scales) {
  return std::string(scales.param ? "Channel" : "Token");
});

// ---- K with a scale a channel -------------------------------------------------------------------

/// The one predicate: which GPU has which kernel. Large rings leave two blocks on a multiprocessor
/// of an sm_90 alone.
TEST(SmallDecodeByChannel, IsChosenWhereLargeRingsDoNotFit) {
  const Filled f = fill(by_channel(uniform(4, 4)), 100);
  MirroredCache mirror(f.cache, {f.id});
  for (const auto& [gpu, blocks] :
       {std::pair{80, 3}, {86, 3}, {87, 3}, {89, 3}, {90, 6}, {100, 6}, {120, 3}, {121, 3}}) {
    SCOPED_TRACE(gpu);
    const EmulatedGpu on(gpu);
    for (const std::int64_t group : {4, 16}) {
      const DecodeCase c = queries_for(f.cache.options(), group, 1);
      DeviceCall device(c, mirror.view(), {0}, 7);
      const Status s = kernels::supports(device.call());
      ASSERT_TRUE(s.ok()) << s.message();
      const kernels::DecodeParams p = kernels::params_in(device.call(), nullptr);
      EXPECT_EQ(p.unit_rows, 8);
      EXPECT_EQ(p.chunks, group == 4 ? 1 : 2);
      EXPECT_EQ(p.blocks, blocks);
    }
  }
}

/// 16 to 128 rows are units of 8, each with queries of its own.
TEST(SmallDecodeByChannel, MixedTiersAtEveryGroup) {
  const EmulatedGpu on(89);
  int turn = 0;
  for (const std::int64_t page : {16, 64}) {
    KvCacheOptions o = mixed();
    o.average_bits = page == 16 ? 6.3 : 4.6;
    const Filled f = fill(by_channel(o, page), 1100);
    for (const auto& [group, queries] : {std::pair{1, 1}, {4, 1}, {8, 1}, {16, 1}, {16, 8}}) {
      DecodeCase c = queries_for(f.cache.options(), group, queries);
      expect_same(c, f.cache, {f.id}, "rows " + std::to_string(group * queries) + ": ", turn++);
    }
  }
}

/// Pages of several sets, each with a mean of K of its own.
TEST(SmallDecodeByChannel, KeysThatDrift) {
  const EmulatedGpu on(86);
  Result<KvCache> cache = KvCache::create(by_channel(uniform(3, 3)));
  const std::int64_t id = *cache->add_sequence();
  unsigned seed = 1;
  for (const float shift : {0.0f, 9.0f, -9.0f}) {
    test::KvRows rows = normal_rows(300, 1, 128, 128, seed++);
    for (std::size_t i = 0; i < rows.k.size(); ++i) {
      rows.k[i] += shift * std::cos(static_cast<float>(i % 128));
      rows.v[i] += shift * std::sin(static_cast<float>(i % 128));
    }
    append_rows(*cache, id, 0, rows);
  }
  EXPECT_EQ(cache->data().find(id)->layers[0].sets.count, 3);
  DecodeCase c = queries_for(cache->options(), 4, 1);
  expect_same(c, *cache, {id}, "drift: ", -1);
}

}  // namespace
}  // namespace qattn
