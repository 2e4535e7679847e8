// Forks share their pages until one of them writes: fork(), and what appends, truncations,
// evictions and releases make of pages with several holders. Pair::compare() holds contents and the
// numbers of holders against the host's cache and looks for lost pages.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>

#include "pair.hpp"
#include "support/thorough.hpp"

namespace qattn {
namespace {

using test::KvBackend;
using test::memory_of;
using test::Pair;
using test::PairOptions;
using test::Step;

/// Two heads, pages of 16 tokens. 200 tokens are 8 pages in 16 bits, the last ones half full, and
/// 18 in the only tier.
PairOptions one_tier() {
  PairOptions o;
  o.cache.heads_kv = 2;
  o.cache.d = o.cache.dv = 32;
  o.cache.page_size = 16;
  o.cache.window = 32;
  o.cache.sinks = 16;
  o.cache.tiers = {{4, 4}};
  o.capacity.sequences = 4;
  o.capacity.tokens = 1000;
  return o;
}
/// Several tiers under a budget, so that appends demote pages.
PairOptions mixed() {
  PairOptions o = one_tier();
  o.cache.tiers = KvCacheOptions{}.tiers;
  o.cache.average_bits = 5;
  o.cache.budget_from = *KvCache::shortest_length(o.cache);
  return o;
}

void append(Pair& pair, const std::vector<std::int64_t>& slots, std::int32_t count,
            const std::vector<std::int64_t>& refused = {}, std::int64_t layer = 0) {
  Step step;
  step.layer = layer;
  step.slots = slots;
  step.counts.assign(slots.size(), count);
  step.refused = refused;
  pair.append(step);
}

/// What a slot holds in layer 0.
struct Held {
  std::vector<float> k, v;
  std::vector<std::int32_t> tiers;
  bool operator==(const Held&) const = default;
};
Held held(const GpuKvCache& cache, std::int64_t slot) {
  const KvCacheOptions& o = cache.options();
  const std::int64_t length = *cache.length(slot, 0), rows = o.heads_kv * length;
  Held h{std::vector<float>(static_cast<std::size_t>(rows * o.d)),
         std::vector<float>(static_cast<std::size_t>(rows * o.dv)),
         std::vector<std::int32_t>(static_cast<std::size_t>(rows))};
  const Status s =
      cache.read(slot, 0, TensorView::dense(h.k.data(), Format::f32, {o.heads_kv, length, o.d}),
                 TensorView::dense(h.v.data(), Format::f32, {o.heads_kv, length, o.dv}),
                 TensorView::dense(h.tiers.data(), Format::s32, {o.heads_kv, length}));
  EXPECT_TRUE(s.ok()) << s.message();
  return h;
}

TEST(KvDeviceFork, TakesNoPages) {
  PairOptions o = one_tier();
  o.capacity.pages = {8, 18};
  Pair pair(o);
  pair.add();
  append(pair, {0}, 200);
  const std::int64_t calls = KvBackend::calls();
  for (const std::int64_t from : {0, 1, 0}) {
    const std::int64_t copy = pair.fork(from);
    EXPECT_TRUE(pair.device().status(copy).ok());
    EXPECT_EQ(*pair.device().length(copy, 0), 200);
    pair.compare();
  }
  EXPECT_EQ(KvBackend::calls(), calls);
  EXPECT_TRUE(device_errors({}).ok());
  EXPECT_NE(pair.device().fork(0).status().message().find("all 4 slots are in use"),
            std::string::npos);
  EXPECT_NE(pair.device().fork(7).status().message().find("slot: 7"), std::string::npos);
  pair.truncate(1, 100);
  pair.release(0);
  pair.compare();
}

TEST(KvDeviceFork, TheFirstWriteWithoutAPageIsThatForksError) {
  PairOptions o = one_tier();
  for (const std::int64_t room : {8, 9, 10}) {  // pages in 16 bits: both tails' copies fit in 10
    SCOPED_TRACE(room);
    o.capacity.pages = {room, 18};
    Pair pair(o);
    pair.add();
    append(pair, {0}, 200);
    pair.fork(0);
    const Held before = held(pair.device(), 0);
    const std::vector<std::uint8_t> memory = memory_of(pair.device());
    const bool fits = room == 10;
    append(pair, {1}, 1, fits ? std::vector<std::int64_t>{} : std::vector<std::int64_t>{1});
    EXPECT_EQ(device_errors({}).ok(), fits);
    if (!fits) {
      EXPECT_EQ(memory_of(pair.device()), memory);
    }
    EXPECT_TRUE(pair.device().status(0).ok());
    EXPECT_EQ(held(pair.device(), 0), before);
    pair.compare();
    if (HasFatalFailure()) return;
    // Alone with its pages, the other one writes in place.
    pair.release(1);
    append(pair, {0}, 3);
    pair.compare();
  }
}

TEST(KvDeviceFork, SlotsOfACallAreGrantedTheirCopiesInItsOrder) {
  PairOptions o = one_tier();
  o.capacity.pages = {10, 18};
  Pair pair(o);
  pair.add();
  append(pair, {0}, 200);
  pair.fork(0);
  pair.fork(1);
  append(pair, {2, 0, 1}, 1, {0, 1});
  EXPECT_FALSE(device_errors({}).ok());
  pair.compare();
  EXPECT_EQ(*pair.device().length(2, 0), 201);
  EXPECT_EQ(*pair.device().length(0, 0), 200);
}

TEST(KvDeviceFork, WhatOneWritesTheOthersDoNotSee) {
  using Change = std::function<void(Pair&, std::int64_t)>;
  const Change changes[] = {
      [](Pair& p, std::int64_t s) { append(p, {s}, 1); },
      [](Pair& p, std::int64_t s) { append(p, {s}, 8); },  // fills the open page
      [](Pair& p, std::int64_t s) { append(p, {s}, 150); },
      [](Pair& p, std::int64_t s) { p.truncate(s, 195); },
      [](Pair& p, std::int64_t s) { p.truncate(s, 101); },  // into a quantised page
      [](Pair& p, std::int64_t s) { p.truncate(s, 5); },
      [](Pair& p, std::int64_t s) { p.evict(s, 0, 1, 193, 197); },
      [](Pair& p, std::int64_t s) { p.evict(s, 0, -1, 20, 90); },
      [](Pair& p, std::int64_t s) { p.observe(0, {s}, 5.0f); },
  };
  unsigned n = 0;
  for (const PairOptions& o : {one_tier(), mixed()}) {
    for (const Change& change : changes) {
      for (const std::int64_t who : {0, 1}) {  // the first one, and one from which another comes
        SCOPED_TRACE(n);
        const test::Timing timing(n++);
        // Each of both meets every other change, in the two caches another one.
        if (!test::thorough() && (n - 1) / 2 % 2 != static_cast<unsigned>(who)) continue;
        Pair pair(o);
        pair.add();
        append(pair, {0}, 200);
        pair.fork(0);
        pair.fork(1);
        change(pair, who);
        pair.compare();
        append(pair, {who}, 60);
        append(pair, {0, 2, 1}, 20);
        pair.compare();
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST(KvDeviceFork, APageKeepsItsTierWhereTheOthersDemoteIt) {
  Pair pair(mixed());
  pair.add();
  append(pair, {0}, 300);
  pair.fork(0);
  const Held before = held(pair.device(), 0);
  pair.observe(0, {1}, 5.0f);
  append(pair, {1}, 500);
  pair.compare();
  EXPECT_EQ(held(pair.device(), 0), before);
  const Held after = held(pair.device(), 1);
  int demoted = 0;
  for (std::size_t i = 0; i < 300; ++i) demoted += after.tiers[i] > before.tiers[i] ? 1 : 0;
  EXPECT_GT(demoted, 100);
}

/// Pages that all their holders drop in one launch are free once, and in the same order whatever
/// the order of lanes was.
TEST(KvDeviceFork, PagesThatAllDropAtOnceAreFreedOnce) {
  std::vector<std::uint8_t> first;
  for (unsigned n = 0; n < (test::thorough() ? 4u : 2u); ++n) {
    SCOPED_TRACE(n);
    const test::Timing timing(n);
    PairOptions o = mixed();
    o.cache.heads_kv = 7;  // 35 heads in a call: more than a warp looks at together
    o.capacity.sequences = 5;
    Pair pair(o);
    pair.add();
    append(pair, {0}, 200);
    for (std::int64_t s = 1; s < 5; ++s) pair.fork(s / 2);
    append(pair, {3, 1, 0, 2, 4}, 1);  // the open page
    pair.compare();
    append(pair, {0, 1, 2, 3, 4}, 60);  // the window's and demoted ones
    pair.compare();
    for (std::int64_t s = 1; s < 5; ++s) pair.release(s);
    for (std::int64_t s = 1; s < 5; ++s) pair.fork(0);
    append(pair, {4, 2}, 50);
    append(pair, {0, 1, 3}, 50);
    pair.compare();
    if (HasFatalFailure()) return;
    std::vector<std::uint8_t> memory = memory_of(pair.device());
    if (n == 0) first = memory;
    EXPECT_EQ(memory, first);
  }
}

TEST(KvDeviceFork, EveryOrderOfReleasesGivesAllPagesBack) {
  std::vector<std::int64_t> order{0, 1, 2, 3};
  PairOptions o = mixed();
  o.cache.layers = 2;
  o.cache.heads_kv = 1;
  do {
    Pair pair(o);
    pair.add();
    append(pair, {0}, 150);
    append(pair, {0}, 40, {}, 1);
    pair.fork(0);
    append(pair, {0, 1}, 20);
    pair.fork(1);
    pair.fork(2);
    append(pair, {2}, 30);
    pair.truncate(3, 70);
    pair.evict(3, 0, 0, 30, 50);
    for (const std::int64_t slot : order) {
      pair.release(slot);
      pair.compare();
      if (HasFatalFailure()) return;
    }
    const kv::AppendState& s = pair.device().data().state;
    for (int t = 0; t < s.cache.pools; ++t) {
      ASSERT_EQ(s.rings[t].count, s.cache.pool[t].capacity);
      ASSERT_EQ(std::count(s.shares[t], s.shares[t] + s.cache.pool[t].capacity, 0u),
                s.cache.pool[t].capacity);
    }
  } while (std::next_permutation(order.begin(), order.end()));
}

/// Every copy of an open page finds its page where the caller names no numbers of pages.
TEST(KvDeviceFork, CopiesFitInTheDefaultPools) {
  for (const std::int32_t length : {5, 16, 23, 47, 90}) {
    for (const std::int32_t count : {1, 30, 100}) {
      SCOPED_TRACE(std::to_string(length) + " and " + std::to_string(count));
      PairOptions o = one_tier();
      o.cache.heads_kv = 1;
      o.capacity.sequences = 3;
      o.capacity.tokens = length + count;
      Pair pair(o);
      pair.add();
      append(pair, {0}, length);
      pair.fork(0);
      pair.fork(1);
      append(pair, {1, 0, 2}, count);
      pair.compare();
      if (HasFatalFailure()) return;
    }
  }
}

/// Beams as a search drives them, with no more pages than are ever needed.
TEST(KvDeviceFork, BeamsInTheDefaultPools) {
  for (unsigned n = 0; n < 2; ++n) {
    const test::Timing timing(n);
    PairOptions o = mixed();
    o.seed = n;
    o.cache.importance = n % 2 ? KvImportance::key_norm : KvImportance::uniform;
    o.capacity.tokens = 320;
    Pair pair(o);
    std::mt19937& random = pair.random();
    pair.add();
    append(pair, {0}, 1 + static_cast<std::int32_t>(random() % 180));
    for (int i = 1; i < 4; ++i) pair.fork(0);
    for (int step = 0; step < 40; ++step) {
      SCOPED_TRACE(step);
      append(pair, {0, 1, 2, 3}, step % 9 == 8 ? 7 : 1);
      if (step % 3 == 0) pair.observe(0, {0, 1, 2, 3}, 3.0f);
      for (std::int64_t slot = 0; slot < 4; ++slot) {
        if (random() % 3 != 0) continue;
        pair.release(slot);
        ASSERT_EQ(pair.fork((slot + 1 + random() % 3) % 4), slot);
      }
      pair.compare();
      if (HasFatalFailure()) return;
    }
  }
}

}  // namespace
}  // namespace qattn
