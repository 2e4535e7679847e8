// save() and load() of a GpuKvCache: the host's files, byte for byte, that go on as the host's
// cache does; what has no room is refused and leaves nothing behind. append_test.cpp takes the
// caches of its random operations through files, decode_test.cpp decodes them.
#include <gtest/gtest.h>

#include <cstdio>
#include <filesystem>
#include <fstream>

#include "kvcache/decode_case.hpp"
#include "pair.hpp"
#include "same_cache.hpp"

namespace qattn {
namespace {

using test::KvBackend;
using test::memory_of;
using test::Pair;
using test::PairOptions;
using test::Step;

class KvDeviceFile : public testing::Test {
 protected:
  void SetUp() override {
    path_ = testing::TempDir() + "qattn_kv_device_" +
            testing::UnitTest::GetInstance()->current_test_info()->name() + ".safetensors";
  }
  void TearDown() override { std::remove(path_.c_str()); }

  std::string bytes() const {
    std::ifstream in(path_, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
  }
  Result<GpuKvCache> load(const KvGpuCapacity& capacity) const {
    return GpuKvCache::load(path_, capacity, {});
  }

  std::string path_;
};

PairOptions mixed() {
  PairOptions o;
  o.cache.layers = 2;
  o.cache.heads_kv = 2;
  o.cache.d = 64;
  o.cache.dv = 32;
  o.cache.window = 32;
  o.cache.average_bits = 5;
  o.cache.budget_from = *KvCache::shortest_length(o.cache);
  o.cache.importance = KvImportance::key_norm;
  o.capacity.sequences = 4;
  o.capacity.tokens = 600;
  return o;
}

void append(Pair& pair, std::int64_t layer, const std::vector<std::int64_t>& slots,
            std::int32_t count, bool with_importance = false) {
  Step step;
  step.layer = layer;
  step.slots = slots;
  step.counts.assign(slots.size(), count);
  step.with_importance = with_importance;
  pair.append(step);
}

/// Three slots, a fork of the first among them, in all tiers; a layer that is empty in one.
void fill(Pair& pair) {
  pair.add();
  pair.add();
  append(pair, 0, {0, 1}, 300);
  append(pair, 1, {1}, 200, true);
  pair.observe(0, {0}, 3.0f);
  append(pair, 0, {0}, 150);
  ASSERT_EQ(pair.fork(0), 2);
  append(pair, 0, {2}, 70);
  pair.evict(1, -1, 1, 40, 90);
  pair.truncate(0, 433);
}

TEST_F(KvDeviceFile, IsTheHostsByteForByte) {
  Pair pair(mixed());
  fill(pair);
  pair.compare();
  ASSERT_TRUE(pair.host().save(path_).ok());
  const std::string host = bytes();
  std::filesystem::remove(path_);
  const std::vector<std::uint8_t> before = memory_of(pair.device());
  const std::int64_t calls = KvBackend::calls();
  const Status saved = pair.device().save(path_);
  ASSERT_TRUE(saved.ok()) << saved.message();
  EXPECT_TRUE(bytes() == host);
  EXPECT_EQ(before, memory_of(pair.device()));
  EXPECT_EQ(calls, KvBackend::calls());
  EXPECT_FALSE(std::filesystem::exists(path_ + ".part"));
  // Pages that the fork shares are there once.
  std::int64_t with_shared = 0;
  for (const std::int64_t slot : {0, 1, 2}) {
    with_shared += pair.device().usage(slot, 0)->bytes + pair.device().usage(slot, 1)->bytes;
  }
  EXPECT_GT(with_shared, static_cast<std::int64_t>(host.size()));
}

TEST_F(KvDeviceFile, OneOfNothing) {
  PairOptions o = mixed();
  o.capacity.pages = {0, 0, 3, 0, 7};
  Pair pair(o);
  ASSERT_TRUE(pair.device().save(path_).ok());
  Result<GpuKvCache> again = load(o.capacity);
  ASSERT_TRUE(again.ok()) << again.status().message();
  EXPECT_FALSE(again->holds(0));
  EXPECT_EQ(memory_of(*again), memory_of(pair.device()));
  ASSERT_EQ(*again->add_sequence(), 0);
  ASSERT_TRUE(again->save(path_).ok());
  const Result<KvCache> host = KvCache::load(path_);
  ASSERT_TRUE(host.ok()) << host.status().message();
  EXPECT_EQ(*host->length(0, 1), 0);
}

/// The host goes on from slot 2's number; the device takes the lowest that is free.
TEST_F(KvDeviceFile, SlotsAreTheSequencesNumbers) {
  Pair pair(mixed());
  fill(pair);
  pair.release(1);
  ASSERT_TRUE(pair.device().save(path_).ok());
  Result<KvCache> host = KvCache::load(path_);
  ASSERT_TRUE(host.ok()) << host.status().message();
  EXPECT_FALSE(host->length(1, 0).ok());
  EXPECT_EQ(*host->length(2, 0), 520);
  EXPECT_EQ(*host->add_sequence(), 3);
  ASSERT_TRUE(host->release(0).ok());
  ASSERT_TRUE(host->save(path_).ok());
  KvGpuCapacity capacity = pair.device().data().capacity;
  Result<GpuKvCache> device = load(capacity);
  ASSERT_TRUE(device.ok()) << device.status().message();
  EXPECT_EQ(test::difference(*host, {-1, -1, 2, 3}, *device), "");
  for (const std::int64_t slot : {-1, 0, 1, 4}) {
    EXPECT_FALSE(device->holds(slot));
    EXPECT_EQ(device->length(slot, 0).status().message(),
              "slot: " + std::to_string(slot) + " holds no sequence of this cache");
  }
  EXPECT_TRUE(device->holds(2));
  EXPECT_TRUE(device->status(3).ok());
  EXPECT_EQ(*device->add_sequence(), 0);
  EXPECT_EQ(*device->add_sequence(), 1);
  EXPECT_FALSE(device->add_sequence().ok());
}

/// Pools of just the file's pages: it loads, and the next page is the last one's error.
TEST_F(KvDeviceFile, FillsItsPools) {
  PairOptions o = mixed();
  o.cache.average_bits = 0;
  o.cache.budget_from = 0;
  o.cache.tiers = {{4, 4}};
  Pair pair(o);
  pair.add();
  append(pair, 0, {0}, 160);  // of each head: 3 pages and 1 of sinks in 16 bits, 7 in the tier
  ASSERT_TRUE(pair.host().save(path_).ok());
  const KvCacheOptions& c = pair.host().options();
  const std::int64_t window = 2 * (c.window + c.sinks) / c.page_size;
  const std::int64_t tier = 2 * 160 / c.page_size - window;
  for (const std::int64_t room : {0, 1}) {
    Result<GpuKvCache> device = load({1, 600, {window + 2 * room, tier + 2 * room}});
    ASSERT_TRUE(device.ok()) << device.status().message();
    pair.device() = std::move(*device);
    pair.compare();
    Step step;
    step.slots = {0};
    step.counts = {1};
    if (room == 0) step.refused = {0};
    pair.append(step);
    EXPECT_EQ(device_errors({}).ok(), room == 1);
    pair.compare();
  }
}

TEST_F(KvDeviceFile, WhatHasNoRoomIsRefusedAndLeavesNothing) {
  Pair pair(mixed());
  fill(pair);
  ASSERT_TRUE(pair.device().save(path_).ok());
  const KvGpuCapacity all = pair.device().data().capacity;
  const auto refused = [&](KvGpuCapacity capacity) {
    const std::size_t held = KvBackend::allocated();
    const std::int64_t calls = KvBackend::calls();
    const Result<GpuKvCache> made = load(capacity);
    EXPECT_EQ(made.status().code(), Code::invalid_argument);
    EXPECT_EQ(held, KvBackend::allocated());
    EXPECT_EQ(calls, KvBackend::calls());
    return made.status().message();
  };
  KvGpuCapacity c = all;
  c.sequences = 2;
  EXPECT_EQ(refused(c),
            "capacity.sequences: 2 should be above 2, the number of a sequence of the "
            "file");
  c.sequences = 0;
  EXPECT_EQ(refused(c), "capacity.sequences: 0 is not from 1 to 65535");
  c = all;
  c.tokens = 519;
  EXPECT_EQ(refused(c), "capacity.tokens: 519 are fewer than the 520 of sequence 2 of the file");
  for (std::size_t t = 0; t < all.pages.size(); ++t) {
    const auto used = pair.host().data().pools[t].pages_used();
    ASSERT_GT(used, 0) << "tier " << t << " is not tested";
    c = all;
    c.pages[t] = used - 1;
    EXPECT_EQ(refused(c), "capacity.pages[" + std::to_string(t) + "]: " + std::to_string(used - 1) +
                              " are fewer than the " + std::to_string(used) + " of the file");
    c.pages[t] = used;
    EXPECT_TRUE(load(c).ok());
  }
  c.pages = {1, 2};
  EXPECT_EQ(refused(c).rfind("capacity.pages: there are 2 numbers", 0), 0u);
  // A file that is damaged, and none.
  std::string damaged = bytes();
  damaged.resize(damaged.size() - 1);
  std::ofstream(path_, std::ios::binary) << damaged;
  EXPECT_EQ(refused(all).rfind("path: " + path_ + ": has ", 0), 0u);
  std::filesystem::remove(path_);
  EXPECT_EQ(refused(all), "path: " + path_ + " cannot be read");
}

/// Entries of a file of an earlier version may share their first token, and a table of the device
/// has room for sixteen more than its tokens need; the host has as many as it likes.
TEST_F(KvDeviceFile, TablesThatAreTooLong) {
  PairOptions o = mixed();
  o.cache.average_bits = 0;
  o.cache.budget_from = 0;
  o.cache.tiers = {{4, 4}};
  o.cache.layers = 1;
  Pair pair(o);
  pair.add();
  const std::vector<float> rows(static_cast<std::size_t>(500 * 2 * 64), 1.0f);
  KvAppendTensors t;
  t.k = TensorView::dense(rows.data(), Format::f32, {1, 500, 2, 64});
  t.v = TensorView::dense(rows.data(), Format::f32, {1, 500, 2, 32});
  const std::int64_t id = pair.id(0);
  ASSERT_TRUE(pair.host().append(0, {&id, 1}, t).ok());
  test::split_pages(pair.host(), id);
  const auto most =
      static_cast<std::int64_t>(pair.host().data().sequences[0].layers[0].tables[0].size());
  const std::int64_t length = *pair.host().length(0, 0);
  ASSERT_GT(most, (length + 15) / 16 + 16);
  ASSERT_TRUE(pair.host().save(path_).ok());
  EXPECT_EQ(load({1, length, {}}).status().message(),
            "capacity.tokens: " + std::to_string(length) + " make page tables of " +
                std::to_string((length + 15) / 16 + 16) +
                " entries, and sequence 0 of the file has one of " + std::to_string(most));
  KvGpuCapacity roomy{1, most * 16, {}};
  Result<GpuKvCache> device = load(roomy);
  ASSERT_TRUE(device.ok()) << device.status().message();
  EXPECT_EQ(test::difference(pair.host(), {0}, *device), "");
}

TEST_F(KvDeviceFile, WhatAFileCannotSayIsNotSaved) {
  PairOptions o = mixed();
  o.capacity.pages = {5, 60, 60, 60, 60};  // 400 tokens have six in 16 bits
  Pair pair(o);
  pair.add();
  pair.add();
  Step step;
  step.slots = {1};
  step.counts = {400};
  step.refused = {1};
  pair.append(step);
  EXPECT_FALSE(device_errors({}).ok());
  EXPECT_EQ(pair.device().save(path_).message(),
            "slot 1: a pool had no page left; it is as it was before that append, and nothing is "
            "appended any more, and a file cannot say so: release it first");
  EXPECT_FALSE(std::filesystem::exists(path_));
  pair.release(1);
  EXPECT_TRUE(pair.device().save(path_).ok());
  const Status nowhere = pair.device().save("/nowhere/at/all");
  EXPECT_EQ(nowhere.code(), Code::invalid_argument);
  EXPECT_EQ(nowhere.message(), "path: /nowhere/at/all.part cannot be written");
}

/// The same rows of ones to a sequence of both; its pages are then the same, or both refuse.
void append_to_both(KvCache& host, GpuKvCache& device, std::int64_t id, std::int64_t count) {
  const KvCacheOptions& o = host.options();
  const std::vector<float> rows(static_cast<std::size_t>(count * o.heads_kv * 256), 1.0f);
  const TensorView k = TensorView::dense(rows.data(), Format::f32, {1, count, o.heads_kv, o.d});
  const TensorView v = TensorView::dense(rows.data(), Format::f32, {1, count, o.heads_kv, o.dv});
  KvAppendTensors one;
  one.k = k;
  one.v = v;
  const Status appended = host.append(0, {&id, 1}, one);
  const auto slot = static_cast<std::int32_t>(id);
  KvGpuAppendTensors t;
  t.slots = TensorView::dense(&slot, Format::s32, {1});
  t.k = k;
  t.v = v;
  ASSERT_TRUE(device.append(0, t).ok());
  EXPECT_EQ(device.status(id).code(), appended.code()) << appended.message();
  (void)device_errors({});
}

/// Whatever is damaged: what the host refuses the device refuses with the same words, and what the
/// host takes goes on as it does there.
TEST_F(KvDeviceFile, DamagedOnesAreRefusedOrWhatTheyAreOnTheHost) {
  Pair pair(mixed());
  fill(pair);
  ASSERT_TRUE(pair.device().save(path_).ok());
  const std::string good = bytes();
  const std::size_t tables = good.find("]}}");
  std::mt19937 random(1);
  int loaded = 0, refused = 0;
  for (int i = 0; i < 240; ++i) {
    std::string bad = good;
    const std::size_t range = i % 4 != 0 ? std::min(good.size(), tables + 6000) : good.size();
    for (int n = 1 + static_cast<int>(random() % 2); n > 0; --n) {
      bad[random() % range] = static_cast<char>(random());
    }
    std::ofstream(path_, std::ios::binary) << bad;
    Result<KvCache> host = KvCache::load(path_);
    Result<GpuKvCache> device = load({5, 700, {}});
    if (!host.ok()) {
      EXPECT_EQ(device.status().message(), host.status().message());
      ++refused;
      continue;
    }
    if (!device.ok()) {
      EXPECT_EQ(device.status().message().rfind("capacity.", 0), 0u) << device.status().message();
      continue;
    }
    ++loaded;
    std::vector<std::int64_t> ids;
    for (std::int64_t slot = 0; slot < 5; ++slot) ids.push_back(device->holds(slot) ? slot : -1);
    ASSERT_EQ(test::difference(*host, ids, *device), "");
    for (std::int64_t slot = 0; slot < 3 && loaded % 3 == 0; ++slot) {
      if (ids[static_cast<std::size_t>(slot)] >= 0) append_to_both(*host, *device, slot, 40);
    }
    ASSERT_EQ(test::difference(*host, ids, *device), "") << "file " << i;
  }
  EXPECT_GT(refused, 60);
  EXPECT_GT(loaded, 60);
}

}  // namespace
}  // namespace qattn
