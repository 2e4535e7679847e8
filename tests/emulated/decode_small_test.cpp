// The GPU's decode at head dimension 128 where a block may have 99 KiB of shared memory: the kernel
// with small rings in the emulator, against the CPU's decode() and the kernel with large ones.
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "emulated/decode_same.hpp"

namespace qattn {
namespace {

using test::append_rows;
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

/// Depths of rings do not reach the result: with as many blocks, the bits of the large one.
TEST(SmallDecode, GivesTheBitsOfTheLargeOne) {
  for (const int k_bits : {2, 3, 4, 8}) {
    for (const int v_bits : {2, 3, 4, 8}) {
      const std::string bits = std::to_string(k_bits) + "/" + std::to_string(v_bits) + ": ";
      const Filled f = fill(uniform(k_bits, v_bits), 500);
      DecodeCase c = queries_for(f.cache.options(), 4, 1);
      MirroredCache mirror(f.cache, {f.id});
      const auto run = [&](int gpu, int multiprocessors, int timing) {
        const EmulatedGpu on(gpu, multiprocessors);
        DeviceCall device(c, mirror.view(), {0}, 32);
        const Status s = device.run(timings[timing]);
        EXPECT_TRUE(s.ok()) << bits << s.message();
        return device.results();
      };
      const test::DecodeResults small = run(89, 6, 0), large = run(90, 3, 1);
      EXPECT_EQ(small.out, large.out) << bits;
      EXPECT_EQ(small.lse, large.lse) << bits;
      EXPECT_EQ(small.mass, large.mass) << bits;
    }
  }
}

TEST(SmallDecode, EveryPairOfBitsUnderEverySchedule) {
  const EmulatedGpu on(89);
  for (const int k_bits : {2, 3, 4, 8}) {
    for (const int v_bits : {2, 3, 4, 8}) {
      const Filled f = fill(uniform(k_bits, v_bits), 500);
      DecodeCase c = queries_for(f.cache.options(), 4, 1);
      c.options.debias = v_bits > 3;
      const std::string bits = std::to_string(k_bits) + "/" + std::to_string(v_bits) + ": ";
      expect_same(c, f.cache, {f.id}, bits, -1);
    }
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

TEST(SmallDecode, LengthsAcrossPagesAndTiles) {
  const EmulatedGpu on(86);
  int turn = 0;
  for (const std::int64_t page : {16, 32, 64}) {
    KvCacheOptions o = uniform(3, 3);
    o.page_size = o.window = o.sinks = page;
    for (const std::int64_t length : {1, 16, 17, 65, 129, 257}) {
      const Filled f = fill(o, length);
      DecodeCase c = queries_for(o, 2, 1);
      expect_same(c, f.cache, {f.id},
                  "page " + std::to_string(page) + " length " + std::to_string(length) + ": ",
                  turn++);
    }
  }
}

TEST(SmallDecode, SeveralQueriesWindowsSoftcapSinksAndTrees) {
  const EmulatedGpu on(89);
  Filled f = fill(mixed(), 700);
  ASSERT_TRUE(f.cache.evict(f.id, 0, -1, 100, 133).ok());
  ASSERT_TRUE(f.cache.evict(f.id, 0, 1, 401, 402).ok());
  test::expect_same_with_every_feature(f);
}

TEST(SmallDecode, OptionsOfTheCache) {
  const EmulatedGpu on(89);
  test::expect_same_under_every_option(uniform(8, 3), 300);
}

TEST(SmallDecode, BadTokensSpoilExactlyTheRowsThatSeeThem) {
  const EmulatedGpu on(89);
  int turn = 0;
  for (const bool in_v : {false, true}) {
    for (const std::int64_t bad : {5, 200, 397}) {  // a sink, a quantised token, the window
      test::expect_spoilt_by(uniform(4, 4, 2), in_v, bad, true, turn);
      turn += 2;
    }
  }
}

TEST(SmallDecode, ABatchOfDifferentLengths) {
  const EmulatedGpu on(89);
  const KvCacheOptions o = mixed();
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

}  // namespace
}  // namespace qattn
