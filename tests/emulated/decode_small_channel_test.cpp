// As decode_small_test.cpp, where K has a scale a channel: rings then leave no room for queries,
// and products read them where they are in the workspace.
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
using test::normal_rows;
using test::queries_for;
using test::timings;

KvCacheOptions uniform(int k_bits, int v_bits, std::int64_t heads = 1) {
  return by_channel(test::uniform(k_bits, v_bits, heads));
}

/// The one predicate: which GPU has which kernel. Large rings leave two blocks on a multiprocessor
/// of an sm_90 alone.
TEST(SmallDecodeByChannel, IsChosenWhereLargeRingsDoNotFit) {
  const Filled f = fill(uniform(4, 4), 100);
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

/// Where queries are and how deep rings are does not reach the result: with as many blocks, the
/// bits of the large kernel.
TEST(SmallDecodeByChannel, GivesTheBitsOfTheLargeOne) {
  for (const int k_bits : {2, 3, 4, 8}) {
    for (const int v_bits : {2, 3, 4, 8}) {
      SCOPED_TRACE(std::to_string(k_bits) + "/" + std::to_string(v_bits));
      const Filled f = fill(uniform(k_bits, v_bits), 500);
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

TEST(SmallDecodeByChannel, EveryPairOfBitsUnderEverySchedule) {
  const EmulatedGpu on(120);
  for (const int k_bits : {2, 3, 4, 8}) {
    for (const int v_bits : {2, 3, 4, 8}) {
      const Filled f = fill(uniform(k_bits, v_bits), 500);
      DecodeCase c = queries_for(f.cache.options(), 4, 1);
      const std::string bits = std::to_string(k_bits) + "/" + std::to_string(v_bits) + ": ";
      expect_same(c, f.cache, {f.id}, bits, -1);
    }
  }
}

/// 16 to 128 rows are units of 8, each with queries of its own.
TEST(SmallDecodeByChannel, MixedTiersAtEveryGroup) {
  const EmulatedGpu on(89);
  int turn = 0;
  for (const std::int64_t page : {16, 64}) {
    KvCacheOptions o = test::mixed();
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
  Result<KvCache> cache = KvCache::create(uniform(3, 3));
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

TEST(SmallDecodeByChannel, LengthsAcrossPagesAndTiles) {
  const EmulatedGpu on(121);
  int turn = 0;
  for (const std::int64_t page : {16, 32, 64}) {
    const KvCacheOptions o = by_channel(test::uniform(8, 3), page);
    for (const std::int64_t length : {1, 16, 17, 65, 129, 257}) {
      const Filled f = fill(o, length);
      DecodeCase c = queries_for(o, 2, 1);
      expect_same(c, f.cache, {f.id},
                  "page " + std::to_string(page) + " length " + std::to_string(length) + ": ",
                  turn++);
    }
  }
}

TEST(SmallDecodeByChannel, OptionsOfTheCache) {
  const EmulatedGpu on(89);
  test::expect_same_under_every_option(uniform(8, 3), 300);
}

TEST(SmallDecodeByChannel, BadTokensSpoilExactlyTheRowsThatSeeThem) {
  const EmulatedGpu on(89);
  int turn = 0;
  for (const bool in_v : {false, true}) {
    for (const std::int64_t bad : {5, 200, 397}) {  // a sink, a quantised token, the window
      test::expect_spoilt_by(uniform(4, 4, 2), in_v, bad, false, turn);
      turn += 2;
    }
  }
}

TEST(SmallDecodeByChannel, ABatchOfDifferentLengths) {
  const EmulatedGpu on(120);
  const KvCacheOptions o = by_channel(test::mixed());
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

}  // namespace
}  // namespace qattn
