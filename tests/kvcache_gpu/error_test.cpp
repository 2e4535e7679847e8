// What a device cache refuses, at once or in a slot's error word, and that nothing else changes.
#include <gtest/gtest.h>

#include "pair.hpp"

namespace qattn {
namespace {

using test::memory_of;
using test::Pair;
using test::PairOptions;
using test::Step;

PairOptions small() {
  PairOptions o;
  o.cache.heads_kv = 2;
  o.cache.d = o.cache.dv = 64;
  o.cache.window = 32;
  o.cache.sinks = 16;
  o.cache.average_bits = 4;
  o.capacity.sequences = 2;
  o.capacity.tokens = 800;
  return o;
}

/// One append of `count` rows of zeros to each of the slots.
struct Call {
  std::vector<std::int32_t> slots;
  std::int64_t count = 1;
  std::vector<std::int32_t> counts;
  std::vector<float> importance;
  std::int64_t blocks = 0;
  std::vector<std::uint16_t> zeros;
  KvGpuAppendTensors t;

  Status run(GpuKvCache& cache) {
    const KvCacheOptions& o = cache.options();
    const auto batch = static_cast<std::int64_t>(slots.size());
    zeros.assign(static_cast<std::size_t>(batch * count * o.heads_kv * o.d), 0);
    t.slots = TensorView::dense(slots.data(), Format::s32, {batch});
    t.k = TensorView::dense(zeros.data(), Format::f16, {batch, count, o.heads_kv, o.d});
    t.v = t.k;
    if (!counts.empty()) t.counts = TensorView::dense(counts.data(), Format::s32, {batch});
    if (!importance.empty()) {
      t.importance = TensorView::dense(importance.data(), Format::f32, {batch, o.heads_kv, blocks});
    }
    return cache.append(0, t);
  }
};

void expect_refused(Pair& pair, Call call, std::int64_t slot, Code code, const char* why) {
  const std::vector<std::uint8_t> before = memory_of(pair.device());
  const Status s = call.run(pair.device());
  ASSERT_TRUE(s.ok()) << s.message();
  const Status refused = pair.device().status(slot);
  EXPECT_EQ(refused.code(), code);
  EXPECT_NE(refused.message().find(why), std::string::npos) << refused.message();
  EXPECT_EQ(before, memory_of(pair.device())) << why;
  EXPECT_NE(device_errors({}).message().find("KV cache"), std::string::npos);
  EXPECT_TRUE(device_errors({}).ok());
  // It stays refused.
  Call next;
  next.slots = {static_cast<std::int32_t>(slot)};
  ASSERT_TRUE(next.run(pair.device()).ok());
  EXPECT_EQ(before, memory_of(pair.device()));
  EXPECT_EQ(pair.device().status(slot).message(), refused.message());
  (void)device_errors({});
}

void fill(Pair& pair, std::int64_t slot, std::int32_t count) {
  Step step;
  step.slots = {slot};
  step.counts = {count};
  pair.append(step);
}

TEST(KvDeviceErrors, AnEmptyPoolLeavesTheSlotAsItWas) {
  PairOptions o = small();
  for (int pool = 0; pool < 2; ++pool) {
    // 60 tokens are 8 pages in 16 bits; 100 more need 4 new ones there and 14 in tiers.
    o.capacity.pages = {60, 60, 200, 200, 200};
    o.capacity.pages[pool] = pool == 0 ? 19 : 9;
    Pair pair(o);
    pair.add();
    pair.add();
    fill(pair, 0, 60);
    if (pool == 0) fill(pair, 1, 60);
    Call call;
    call.slots = {0};
    call.count = 100;
    expect_refused(pair, call, 0, Code::out_of_memory, "pool");
    if (HasFatalFailure()) return;
    pair.compare();
    // The other slot goes on, and the slot itself after its release.
    fill(pair, 1, 3);
    pair.renew(0);
    fill(pair, 0, 33);
    pair.compare();
  }
}

TEST(KvDeviceErrors, OneSlotsLackDoesNotStopTheOthers) {
  PairOptions o = small();
  o.cache.average_bits = 0;
  o.cache.tiers = {{4, 4}};
  o.capacity.pages = {40, 24};
  Pair pair(o);
  pair.add();
  pair.add();
  Call call;
  call.slots = {0, 1};
  call.counts = {500, 150};
  call.count = 500;
  ASSERT_TRUE(call.run(pair.device()).ok());
  EXPECT_EQ(pair.device().status(0).code(), Code::out_of_memory);
  EXPECT_TRUE(pair.device().status(1).ok());
  EXPECT_EQ(*pair.device().length(0, 0), 0);
  EXPECT_EQ(*pair.device().length(1, 0), 150);
  (void)device_errors({});
}

TEST(KvDeviceErrors, WhatOnlyTheDeviceSees) {
  const auto filled = [] {
    auto pair = std::make_unique<Pair>(small());
    pair->add();
    fill(*pair, 0, 100);
    return pair;
  };
  const auto refused = [&](Call call, Code code, const char* why) {
    auto pair = filled();
    expect_refused(*pair, call, 0, code, why);
  };
  Call c;
  c.slots = {0};
  c.count = 701;
  refused(c, Code::out_of_memory, "more tokens than its capacity");
  c.count = 3;
  c.counts = {4};
  refused(c, Code::invalid_argument, "counts");
  c.counts = {-1};
  refused(c, Code::invalid_argument, "counts");
  c.counts = {};
  c.slots = {0, 0};
  refused(c, Code::invalid_argument, "twice");
  c.slots = {0};
  c.blocks = 7;  // 103 tokens
  for (const float bad : {-1.0f, NAN, INFINITY, 2e15f}) {
    for (const std::int64_t count : {1, 20}) {  // one that only fills tails, one that does not
      c.count = count;
      c.blocks = 8;
      c.importance.assign(16, 1.0f);
      c.importance[8 + 6] = bad;
      refused(c, Code::invalid_argument, "importance");
    }
  }
  c.count = 20;
  c.blocks = 7;
  c.importance.assign(14, 1.0f);
  refused(c, Code::invalid_argument, "too few blocks");
}

TEST(KvDeviceErrors, SlotsThatHoldNothing) {
  Pair pair(small());
  pair.add();
  fill(pair, 0, 50);
  const auto before = memory_of(pair.device());
  for (const std::int32_t slot : {-1, 1, 2, 1 << 30}) {
    Call call;
    call.slots = {slot};
    call.count = 20;
    ASSERT_TRUE(call.run(pair.device()).ok());
    EXPECT_EQ(before, memory_of(pair.device())) << slot;
    EXPECT_FALSE(device_errors({}).ok());
  }
  EXPECT_TRUE(pair.device().status(0).ok());
}

TEST(KvDeviceErrors, AMassOutOfRangeChangesNothing) {
  Pair pair(small());
  pair.add();
  fill(pair, 0, 100);
  const auto before = memory_of(pair.device());
  std::int32_t slot = 0;
  const TensorView slots = TensorView::dense(&slot, Format::s32, {1});
  for (const float bad : {-1.0f, NAN, INFINITY, 2e15f}) {
    std::vector<float> mass(4 * 7, 0.5f);
    mass[3 * 7 + 6] = bad;
    const Status s =
        pair.device().observe(0, slots, TensorView::dense(mass.data(), Format::f32, {1, 4, 7}));
    ASSERT_TRUE(s.ok()) << s.message();
    EXPECT_EQ(before, memory_of(pair.device()));
    EXPECT_FALSE(device_errors({}).ok());
    EXPECT_TRUE(pair.device().status(0).ok());
  }
}

TEST(KvDeviceErrors, AnImportanceOutOfRangeChangesNothing) {
  Pair pair(small());
  pair.add();
  pair.add();
  fill(pair, 0, 100);
  const auto before = memory_of(pair.device());
  const auto told = [&](std::int64_t slot, std::vector<float> values, std::int64_t blocks) {
    const Status s = pair.device().set_importance(
        slot, 0, TensorView::dense(values.data(), Format::f32, {2, blocks}));
    EXPECT_TRUE(s.ok()) << s.message();
    return device_errors({}).ok();
  };
  for (const float bad : {-1.0f, -1e-45f, NAN, INFINITY, 2e15f}) {
    for (const std::size_t at : {0u, 6u, 8u, 14u}) {
      std::vector<float> values(2 * 8, 0.5f);
      values[at] = bad;
      EXPECT_FALSE(told(0, values, 8)) << bad << " at " << at;
    }
  }
  EXPECT_FALSE(told(0, std::vector<float>(2 * 6, 0.5f), 6)) << "too few blocks";
  EXPECT_EQ(before, memory_of(pair.device()));
  EXPECT_TRUE(pair.device().status(0).ok());
  // Behind the sequence anything may lie.
  std::vector<float> values(2 * 8, 0.5f);
  values[7] = values[15] = NAN;
  EXPECT_TRUE(told(0, values, 8));
  EXPECT_NE(before, memory_of(pair.device()));
  EXPECT_TRUE(told(1, {}, 0)) << "nothing to tell of an empty sequence";
  // Of a slot that an append has spoilt nothing is told any more.
  Call call;
  call.slots = {0};
  call.count = 701;
  ASSERT_TRUE(call.run(pair.device()).ok());
  EXPECT_FALSE(device_errors({}).ok());
  const auto after = memory_of(pair.device());
  EXPECT_FALSE(told(0, std::vector<float>(2 * 8, 0.25f), 8));
  EXPECT_EQ(after, memory_of(pair.device()));
}

TEST(KvDeviceErrors, RefusalsNameTheValueAndTheRule) {
  KvCacheOptions o = small().cache;
  const auto created = [&](KvGpuCapacity c) {
    return GpuKvCache::create(o, c, {}).status().message();
  };
  EXPECT_NE(created({1, 100, {}}).find("no kernels for a KV cache"), std::string::npos);
  const test::KvBackend backend;
  EXPECT_EQ(created({0, 100, {}}), "capacity.sequences: 0 is not from 1 to 65535");
  EXPECT_EQ(created({1, 0, {}}), "capacity.tokens: 0 is not from 1 to 1073741824");
  EXPECT_EQ(created({1, 100, {1, 2}}),
            "capacity.pages: there are 2 numbers, should be none or 5: of the window and of every "
            "tier");
  EXPECT_EQ(created({1, 100, {1, 2, 3, 4, -5}}), "capacity.pages[4]: -5 is not from 0 to 2^30");
  o.k_granularity = Granularity::per_block;
  EXPECT_EQ(created({1, 100, {}}), "k_granularity: per_block is neither per_token nor per_channel");
  Pair pair(small());
  pair.add();
  Call call;
  call.slots = {0};
  call.count = 801;
  EXPECT_EQ(call.run(pair.device()).message(), "k: 801 tokens are more than the capacity of 800");
  call.count = 2;
  call.slots = {0, 1, 0};
  EXPECT_EQ(call.run(pair.device()).message(),
            "slots: there are 3, should be 1 to the capacity of 2 sequences");
  EXPECT_EQ(pair.device().status(1).message(), "slot: 1 holds no sequence of this cache");
  EXPECT_EQ(pair.device().release(7).message(), "slot: 7 holds no sequence of this cache");
  EXPECT_EQ(pair.device().usage(1, 0).status().message(),
            "slot: 1 holds no sequence of this cache");
  std::vector<float> told(3 * 2, 1.0f);
  const auto refused = [&](std::int64_t slot, std::int64_t layer, const TensorView& importance) {
    return pair.device().set_importance(slot, layer, importance).message();
  };
  const TensorView right = TensorView::dense(told.data(), Format::f32, {2, 3});
  EXPECT_EQ(refused(1, 0, right), "slot: 1 holds no sequence of this cache");
  EXPECT_EQ(refused(0, 1, right), "layer: 1 is not from 0 to 0");
  EXPECT_EQ(refused(0, 0, {}), "importance: is missing");
  EXPECT_EQ(refused(0, 0, TensorView::dense(told.data(), Format::f32, {3, 2})),
            "importance: shape (3, 2) should be (2, -1) (-1: any)");
  EXPECT_EQ(refused(0, 0, TensorView::dense(told.data(), Format::s32, {2, 3})),
            "importance: format s32 is not f32");
  EXPECT_TRUE(refused(0, 0, right).empty());
  EXPECT_EQ(pair.device().usage(0, -1).status().message(), "layer: -1 is not from 0 to 0");
}

}  // namespace
}  // namespace qattn
