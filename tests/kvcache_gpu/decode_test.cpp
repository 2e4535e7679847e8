// decode() and fork() of a GpuKvCache with the kernels in the emulator, through the public calls:
// what the host's cache decodes to, and what is refused.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>

#include "kvcache/decode_case.hpp"
#include "pair.hpp"

namespace qattn {
namespace {

using test::DecodeCase;
using test::KvBackend;
using test::normal_values;
using test::Pair;
using test::PairOptions;
using test::Step;

constexpr double tight = 2e-3;  // docs/NUMERICS.md

/// Four tiers.
PairOptions mixed(std::int64_t d = 64, std::int64_t heads = 2) {
  PairOptions o;
  o.cache.layers = 2;
  o.cache.heads_kv = heads;
  o.cache.d = o.cache.dv = d;
  o.cache.window = 32;
  o.cache.average_bits = 5;
  o.loud = true;
  o.cache.budget_from = *KvCache::shortest_length(o.cache);
  o.capacity.sequences = 4;
  o.capacity.tokens = 1200;
  return o;
}

/// A call on the device with its memory; what it writes is 7 before.
struct DeviceDecode {
  std::vector<std::int32_t> slots;
  std::vector<float> out, lse, mass;
  KvDecodeTensors t;
  KvDecodeOptions options;
  std::int64_t layer = 0;

  DeviceDecode(DecodeCase& c, const GpuKvCache& cache, std::vector<std::int32_t> which,
               std::int64_t blocks)
      : slots(std::move(which)), options(c.options) {
    const KvCacheOptions& o = cache.options();
    const auto batch = static_cast<std::int64_t>(slots.size());
    out.assign(static_cast<std::size_t>(batch * c.queries * c.heads_q * o.dv), 7.0f);
    lse.assign(static_cast<std::size_t>(batch * c.heads_q * c.queries), 7.0f);
    t.q = TensorView::dense(c.q.data(), Format::f32, {batch, c.queries, c.heads_q, o.d});
    t.out = TensorView::dense(out.data(), Format::f32, {batch, c.queries, c.heads_q, o.dv});
    t.lse = TensorView::dense(lse.data(), Format::f32, {batch, c.heads_q, c.queries});
    if (!c.sinks.empty()) t.sinks = TensorView::dense(c.sinks.data(), Format::f32, {c.heads_q});
    if (!c.tree.empty()) {
      t.tree_mask = TensorView::dense(c.tree.data(), Format::b8, {batch, c.queries, c.queries});
    }
    if (!c.with_mass) return;
    mass.assign(static_cast<std::size_t>(batch * c.heads_q * blocks), 7.0f);
    t.mass = TensorView::dense(mass.data(), Format::f32, {batch, c.heads_q, blocks});
  }
  TensorView slot_view() const {
    return TensorView::dense(slots.data(), Format::s32, {static_cast<std::int64_t>(slots.size())});
  }
  Status run(const GpuKvCache& cache) {
    const Result<std::size_t> bytes = decode_workspace(cache, layer, slot_view(), t, options);
    if (!bytes.ok()) return bytes.status();
    const std::unique_ptr<void, decltype(&std::free)> memory(
        std::aligned_alloc(256, (*bytes + 255) / 256 * 256), &std::free);
    std::memset(memory.get(), 0xff, *bytes);
    return decode(cache, layer, slot_view(), t, options, memory.get(), *bytes);
  }
};

std::vector<double> doubles(const std::vector<float>& x) { return {x.begin(), x.end()}; }

/// Some queries with every feature that `kind`'s bits name.
DecodeCase queries_of(const KvCacheOptions& o, std::int64_t batch, unsigned kind) {
  DecodeCase c;
  c.queries = std::array<std::int64_t, 4>{1, 2, 8, 1}[kind % 4];
  c.heads_q = o.heads_kv * std::array<std::int64_t, 3>{1, 4, 2}[kind % 3];
  c.q = normal_values(batch * c.queries * c.heads_q * o.d, kind, 1.5f);
  for (std::size_t i = 5; i < c.q.size(); i += 32) c.q[i] *= 0.02f;  // where keys may be loud
  c.with_mass = true;
  c.options.causal = (kind & 16) == 0;
  if (kind & 1) c.options.window_left = 117;
  if (kind & 2) c.options.softcap = 2.5f;
  c.options.debias = (kind & 6) == 4 && o.k_granularity == Granularity::per_token;
  if (kind & 4) c.sinks = normal_values(c.heads_q, 5, 3.0f);
  if (kind & 8) {
    for (std::int64_t i = 0; i < batch * c.queries * c.queries; ++i) {
      c.tree.push_back(static_cast<std::uint8_t>((kind >> (i % 5) & 1) | (i % 3 == 0)));
    }
  }
  return c;
}

/// Both caches decode the same, up to f16 Q and P.
void expect_equal_decode(Pair& pair, const std::vector<std::int64_t>& slots, std::int64_t layer,
                         unsigned kind) {
  SCOPED_TRACE(kind);
  const KvCacheOptions& o = pair.host().options();
  const auto batch = static_cast<std::int64_t>(slots.size());
  DecodeCase c = queries_of(o, batch, kind);
  std::vector<std::int64_t> ids;
  std::int64_t longest = 0;
  for (const std::int64_t s : slots) {
    ids.push_back(pair.id(s));
    longest = std::max(longest, pair.length(s, layer));
  }
  const Status host = c.run(pair.host(), ids, layer);
  ASSERT_TRUE(host.ok()) << host.message();
  const std::int64_t own = formats::kv_blocks(longest), blocks = own + 3;
  DeviceDecode device(c, pair.device(), {slots.begin(), slots.end()}, blocks);
  device.layer = layer;
  const test::Timing timing(kind);
  const std::int64_t calls = KvBackend::calls();
  const Status s = device.run(pair.device());
  ASSERT_TRUE(s.ok()) << s.message();
  EXPECT_EQ(KvBackend::calls(), calls) << "decode() allocates";
  EXPECT_LE(test::nrmse(device.out, doubles(c.out)), tight);
  EXPECT_LE(test::largest_difference(device.lse, doubles(c.lse)), 4e-3);
  for (std::int64_t row = 0; row < batch * c.heads_q; ++row) {
    for (std::int64_t n = 0; n < blocks; ++n) {
      const float want = n < own ? c.mass[static_cast<std::size_t>(row * own + n)] : 0.0f;
      ASSERT_NEAR(device.mass[static_cast<std::size_t>(row * blocks + n)], want, 1e-3);
    }
  }
  ASSERT_TRUE(device_errors({}).ok());
}

void append(Pair& pair, std::int64_t layer, const std::vector<std::int64_t>& slots,
            const std::vector<std::int32_t>& counts) {
  Step step;
  step.layer = layer;
  step.slots = slots;
  step.counts = counts;
  step.with_importance = true;
  step.spread = 2;
  pair.append(step);
}

/// Through files, on and on: the same bits, from pages of other numbers.
TEST(KvDeviceDecode, ALoadedCacheDecodesTheSame) {
  Pair pair(mixed());
  for (int i = 0; i < 3; ++i) pair.add();
  append(pair, 1, {0, 1, 2}, {1100, 17, 130});
  pair.release(1);  // the page that it had in the middle of the others' is free
  pair.add();
  append(pair, 1, {1, 0}, {40, 9});
  pair.fork(0);
  const auto decoded = [&](unsigned kind) {
    DecodeCase c = queries_of(pair.host().options(), 3, kind);
    DeviceDecode call(c, pair.device(), {3, 1, 0}, 80);
    call.layer = 1;
    const Status s = call.run(pair.device());
    EXPECT_TRUE(s.ok()) << s.message();
    return std::array{call.out, call.lse, call.mass};
  };
  for (unsigned kind = 0; kind < 4; ++kind) {
    const auto before = decoded(kind);
    pair.through_files(testing::TempDir() + "qattn_kv_decode");
    ASSERT_FALSE(HasFatalFailure());
    EXPECT_EQ(before, decoded(kind));
    expect_equal_decode(pair, {3, 1, 0}, 1, kind);
    append(pair, 1, {3, 0}, {1, 20});
    pair.observe(1, {0, 1, 3}, 3.0f);
  }
}

TEST(KvDeviceDecode, EveryHeadDimensionGroupAndLength) {
  unsigned kind = 0;
  for (const std::int64_t d : {64, 128, 256}) {
    std::array<std::int64_t, 4> tested{};
    for (const std::int64_t page : {16, 64}) {
      PairOptions o = mixed(d);
      o.cache.page_size = page;
      o.cache.window = o.cache.sinks = 64;
      o.cache.budget_from = *KvCache::shortest_length(o.cache);
      Pair pair(o);
      for (int i = 0; i < 3; ++i) pair.add();
      append(pair, 1, {0, 1, 2}, {1100, 17, 130});
      append(pair, 1, {2, 0, 1}, {9, 8, 1});
      pair.compare();
      const Result<KvUsage> usage = pair.host().usage(pair.id(0), 1);
      for (std::size_t t = 0; t < tested.size(); ++t) tested[t] += usage->tier_tokens[t];
      for (int i = 0; i < 3; ++i, kind += 5) expect_equal_decode(pair, {2, 0, 1}, 1, kind);
      if (HasFailure()) return;
    }
    for (const std::int64_t tokens : tested) EXPECT_GT(tokens, 0) << "a tier is not tested";
  }
}

/// Where a block may have 99 KiB, head dimension 128 is decoded and 256 refused.
TEST(KvDeviceDecode, HeadDimension128InLessSharedMemory) {
  const int before = std::exchange(emu::options().architecture, 89);
  for (const bool by_channel : {false, true}) {
    PairOptions o = mixed(128);
    if (by_channel) {
      o.cache.k_granularity = Granularity::per_channel;
      o.cache.page_size = o.cache.sinks = 32;
      o.cache.budget_from = *KvCache::shortest_length(o.cache);
    }
    Pair pair(o);
    for (int i = 0; i < 3; ++i) pair.add();
    append(pair, 1, {0, 1, 2}, {1100, 17, 130});
    for (unsigned kind = 0; kind < 32; kind += 3) expect_equal_decode(pair, {2, 0, 1}, 1, kind);
  }
  const PairOptions o = mixed(256);
  Pair pair(o);
  for (int i = 0; i < 3; ++i) pair.add();
  append(pair, 1, {0, 1, 2}, {1100, 17, 130});
  DecodeCase c = queries_of(o.cache, 3, 3);
  DeviceDecode d(c, pair.device(), {2, 0, 1}, 80);
  d.layer = 1;
  const Status s = d.run(pair.device());
  EXPECT_EQ(s.code(), Code::unsupported);
  EXPECT_EQ(s.message(),
            "head dimension 256 needs 215296 bytes of shared memory a block; sm_89 has 101376");
  for (const float x : d.out) ASSERT_EQ(x, 7.0f);
  emu::options().architecture = before;
}

void stays_the_hosts(const PairOptions& options) {
  Pair pair(options);
  std::mt19937& random = pair.random();
  pair.add();
  pair.add();
  append(pair, 0, {0, 1}, {400, 9});
  append(pair, 1, {0, 1}, {400, 9});
  std::int64_t copy = -1;
  for (unsigned step = 0; step < 40; ++step) {
    SCOPED_TRACE(step);
    const std::int64_t slot = random() % 2, layer = random() % 2;
    const std::int64_t length = pair.length(slot, layer);
    if (length < 1000) append(pair, layer, {slot}, {static_cast<std::int32_t>(8 + random() % 60)});
    if (step % 7 == 3) pair.truncate(slot, length - length / 8);
    if (step % 5 == 2) pair.evict(slot, layer, -1, length / 4, length / 3);
    if (step % 4 == 1) pair.observe(layer, {slot}, 2);
    if (step % 10 == 5) {
      if (copy >= 0) pair.renew(copy);
      if (copy < 0) copy = pair.fork(slot);
    }
    pair.compare();
    expect_equal_decode(pair, {1 - slot, slot}, layer, step);
    if (copy >= 0 && pair.length(copy, layer) >= 8) expect_equal_decode(pair, {copy}, layer, step);
    if (::testing::Test::HasFailure()) return;
  }
}

TEST(KvDeviceDecode, StaysTheHostsThroughWhateverHappensToTheCache) { stays_the_hosts(mixed()); }

TEST(KvDeviceDecode, SoItDoesWithAScaleAChannelForK) {
  PairOptions o = mixed();
  o.cache.k_granularity = Granularity::per_channel;
  o.cache.page_size = o.cache.sinks = 32;
  o.cache.budget_from = *KvCache::shortest_length(o.cache);
  stays_the_hosts(o);
}

/// Sets of means and powers of two: pages of one part of a table name different ones.
TEST(KvDeviceDecode, SoItDoesWhereKeysAndValuesDrift) {
  for (const bool by_channel : {false, true}) {
    SCOPED_TRACE(by_channel ? "a scale a channel" : "a scale a token");
    PairOptions o = mixed(by_channel ? 64 : 128);
    if (by_channel) o.cache.k_granularity = Granularity::per_channel;
    o.cache.page_size = o.cache.sinks = 16;
    o.cache.average_bits = 6;
    o.cache.budget_from = 0;
    o.drift = true;
    // Q in f16 times scales, which are f16: where keys are 1000 times as loud, 1e-2 of a score.
    o.loud = !by_channel;
    Pair pair(o);
    pair.add();
    pair.add();
    for (int i = 0; i < 20; ++i) append(pair, 1, {0, 1}, {40, i % 3});
    pair.compare();
    const auto sets = [&] { return pair.host().data().find(pair.id(0))->layers[1].sets.count; };
    EXPECT_GE(sets(), 3);
    for (const unsigned kind : {0, 5, 12}) expect_equal_decode(pair, {0, 1}, 1, kind);
    pair.fork(0);
    pair.truncate(0, 300);
    pair.evict(1, 1, 0, 0, 30);
    for (int i = 0; i < 3; ++i) append(pair, 1, {2, 0}, {20, 40});
    pair.through_files(testing::TempDir() + "qattn_kv_drift");
    pair.compare();
    expect_equal_decode(pair, {2, 0}, 1, 4);
    pair.truncate(0, 16);  // no page of codes is left, and no set
    pair.compare();
    EXPECT_EQ(sets(), 0);
    if (HasFailure()) return;
  }
}

/// append, decode with mass, observe, again and again: what the device saw decides tiers in both.
TEST(KvDeviceDecode, WhatDecodeSawIsObserved) {
  Pair pair(mixed());
  pair.add();
  append(pair, 0, {0}, {500});
  for (unsigned step = 0; step < 60; ++step) {
    append(pair, 0, {0}, {1});
    DecodeCase c = queries_of(pair.host().options(), 1, 4);
    c.queries = 1;
    DeviceDecode device(c, pair.device(), {0}, formats::kv_blocks(1200));
    ASSERT_TRUE(device.run(pair.device()).ok());
    const TensorView mass = device.t.mass;
    ASSERT_TRUE(pair.device().observe(0, device.slot_view(), mass).ok());
    const std::int64_t own = formats::kv_blocks(pair.length(0, 0));
    std::vector<float> rows;
    for (std::int64_t h = 0; h < c.heads_q; ++h) {
      const float* row = device.mass.data() + h * mass.shape[2];
      rows.insert(rows.end(), row, row + own);
    }
    const std::int64_t id = pair.id(0);
    const TensorView same = TensorView::dense(rows.data(), Format::f32, {1, c.heads_q, own});
    ASSERT_TRUE(pair.host().observe(0, {&id, 1}, same).ok());
    pair.compare();
    if (HasFatalFailure()) return;
  }
}

TEST(KvDeviceDecode, SlotsInErrorAreNaNAndTheOthersAreNot) {
  PairOptions o = mixed();
  o.capacity.tokens = 100;
  Pair pair(o);
  pair.add();
  pair.add();
  append(pair, 0, {0, 1}, {90, 90});
  DecodeCase c = queries_of(o.cache, 1, 4);
  c.queries = 1;
  ASSERT_TRUE(c.run(pair.host(), {pair.id(1)}).ok());
  // More than the capacity: slot 0 keeps its tokens but may not be trusted.
  std::vector<float> zeros(static_cast<std::size_t>(20 * 2 * 64));
  std::vector<std::int32_t> slots{0};
  KvGpuAppendTensors t;
  t.slots = TensorView::dense(slots.data(), Format::s32, {1});
  t.k = t.v = TensorView::dense(zeros.data(), Format::f32, {1, 20, 2, 64});
  ASSERT_TRUE(pair.device().append(0, t).ok());
  EXPECT_FALSE(device_errors({}).ok());
  DecodeCase both = c;
  both.q.insert(both.q.end(), c.q.begin(), c.q.end());
  for (const std::int32_t bad : {0, 3, -1, 4}) {  // in error, in no use, no slots of this cache
    DeviceDecode device(both, pair.device(), {bad, 1}, 6);
    ASSERT_TRUE(device.run(pair.device()).ok());
    EXPECT_FALSE(device_errors({}).ok());
    const std::size_t half = device.out.size() / 2;
    for (std::size_t i = 0; i < half; ++i) ASSERT_TRUE(std::isnan(device.out[i]));
    for (std::size_t i = 0; i < device.mass.size() / 2; ++i) {
      ASSERT_TRUE(std::isnan(device.mass[i]));
    }
    const auto begin = device.out.begin() + static_cast<std::ptrdiff_t>(half);
    EXPECT_LE(test::nrmse({begin, device.out.end()}, doubles(c.out)), tight);
  }
  // A copy of it is no better.
  const Result<std::int64_t> copy = pair.device().fork(0);
  ASSERT_TRUE(copy.ok());
  EXPECT_EQ(pair.device().status(*copy).message().substr(8),
            pair.device().status(0).message().substr(8));
  EXPECT_FALSE(device_errors({}).ok());
}

TEST(KvDeviceFork, CopiesGoTheirOwnWay) {
  Pair pair(mixed());
  pair.add();
  append(pair, 0, {0}, {600});
  append(pair, 1, {0}, {333});
  const std::size_t held = KvBackend::allocated();
  const std::int64_t copy = pair.fork(0);
  EXPECT_NE(copy, 0);
  EXPECT_EQ(KvBackend::allocated(), held);
  pair.compare();
  append(pair, 0, {0, copy}, {70, 3});
  pair.truncate(0, 300);
  pair.evict(copy, 1, 0, 40, 90);
  pair.observe(0, {copy}, 2);
  append(pair, 1, {copy, 0}, {30, 30});
  pair.compare();
  const std::int64_t third = pair.fork(copy);
  pair.renew(0);
  pair.compare();
  expect_equal_decode(pair, {third, copy}, 0, 3);
}

TEST(KvDeviceDecode, RefusalsNameTheTensorTheValueAndTheRule) {
  Pair pair(mixed());
  pair.add();
  append(pair, 0, {0}, {100});
  DecodeCase c = queries_of(pair.host().options(), 1, 4);
  const auto expect = [&](auto change, const char* message) {
    DeviceDecode d(c, pair.device(), {0}, 7);
    change(d);
    const Status s = d.run(pair.device());
    EXPECT_FALSE(s.ok());
    EXPECT_NE(s.message().find(message), std::string::npos) << s.message();
    for (const auto* x : {&d.out, &d.lse, &d.mass}) {
      for (const float v : *x) ASSERT_EQ(v, 7.0f) << message;
    }
  };
  using D = DeviceDecode;
  expect([](D& d) { d.layer = 2; }, "layer: 2 is not from 0 to 1");
  expect([](D& d) { d.options.softcap = -1; }, "softcap: -1");
  expect([](D& d) { d.options.softcap = 2, d.options.debias = true; },
         "debias: should be off with a softcap, here 2.0");
  expect([](D& d) { d.options.window_left = -2; }, "window_left: -2 is below -1");
  expect([](D& d) { d.slots.resize(5); }, "slots: there are 5, should be 1 to the capacity of 4");
  expect([](D& d) { d.t.q.shape[1] = 9; }, "q: 9 queries of a sequence, should be 1 to 8");
  expect([](D& d) { d.t.q.shape[3] = 32; }, "q: shape");
  expect([](D& d) { d.t.q.device = {DeviceType::cuda, 1}; },
         "q: lies on cuda:1, and the KV cache lies in host memory");
  expect([](D& d) { d.t.mass.device = {DeviceType::cuda, 0}; }, "mass: lies on cuda:0");
  expect([](D& d) { d.t.out = {}; }, "out: is missing");
  expect([](D& d) { d.t.out = d.t.q; }, "out: overlaps the memory of q");
  expect([](D& d) { d.t.lse.data = d.slots.data(); }, "lse: overlaps the memory of");
  expect([](D& d) { d.t.mass.format = Format::f16; }, "mass: format f16 is not f32");

  DeviceDecode d(c, pair.device(), {0}, 7);
  const Result<std::size_t> bytes =
      decode_workspace(pair.device(), 0, d.slot_view(), d.t, d.options);
  ASSERT_TRUE(bytes.ok());
  std::vector<std::uint8_t> room(*bytes + 512);
  const auto run = [&](void* memory, std::size_t size) {
    return decode(pair.device(), 0, d.slot_view(), d.t, d.options, memory, size).message();
  };
  const std::string least = "should be at least " + std::to_string(*bytes);
  EXPECT_NE(run(room.data(), *bytes - 1).find(least), std::string::npos);
  EXPECT_NE(run(nullptr, *bytes).find("workspace: address"), std::string::npos);
  const auto at = reinterpret_cast<std::uintptr_t>(room.data());
  EXPECT_NE(run(room.data() + (256 - at % 256) % 256 + 64, *bytes).find("no multiple of 256"),
            std::string::npos);
}

TEST(KvDeviceDecode, HeadDimensionsWithoutAKernel) {
  Pair pair(mixed(96));
  pair.add();
  append(pair, 0, {0}, {50});
  DecodeCase c = queries_of(pair.host().options(), 1, 4);
  DeviceDecode d(c, pair.device(), {0}, 7);
  const Status s = d.run(pair.device());
  EXPECT_EQ(s.code(), Code::unsupported);
  EXPECT_EQ(s.message(),
            "no GPU kernel for K of head dimension 96 and V of 96; there are 64/64 128/128 "
            "256/256");
}

}  // namespace
}  // namespace qattn
