// The cache on a device holds what the cache on the host holds, bit for bit.
#include <gtest/gtest.h>

#include <algorithm>

#include "pair.hpp"
#include "support/thorough.hpp"

namespace qattn {
namespace {

using test::Pair;
using test::PairOptions;
using test::Step;

/// Options from a number, so that a list of cases covers them.
PairOptions shaped(unsigned i) {
  static const std::int64_t dims[] = {64, 128, 256, 32, 96};
  static const Format inputs[] = {Format::f16, Format::f32, Format::bf16};
  PairOptions o;
  o.seed = i + 1;
  o.cache.layers = 1 + i % 2;
  o.cache.heads_kv = 1 + i % 3;
  o.cache.d = dims[i % 5];
  o.cache.dv = dims[i / 2 % 5];
  o.cache.page_size = 16 << i % 3;
  o.cache.window = o.cache.page_size * (1 + i / 3 % 3);
  o.cache.sinks = o.cache.page_size * (i / 4 % 2);
  o.cache.window_format = i % 4 == 3 ? Format::bf16 : Format::f16;
  o.cache.smooth_k = i % 5 != 4;
  o.cache.rotate = i % 7 != 6;
  o.cache.balance_k = i % 4 != 0;
  o.cache.smooth_v = i % 5 != 1;
  o.loud = i % 3 != 0;
  o.drift = i % 5 > 1;
  o.cache.importance = i % 3 == 2 ? KvImportance::key_norm : KvImportance::uniform;
  o.cache.hysteresis = i % 2 ? 0.25f : 2.0f;
  if (i % 4 != 2) {
    o.cache.average_bits = 3.6 + 0.4 * (i % 3);
    if (i % 6 == 1) o.cache.tiers = {{8, 8}, {8, 4}, {4, 4}, {4, 2}, {3, 2}, {2, 2}};
  } else {
    o.cache.tiers = {{i % 8 == 2 ? 3 : 4, i % 8 == 2 ? 2 : 4}};
  }
  if (i % 7 == 1 || i % 7 == 3) {
    o.cache.k_granularity = Granularity::per_channel;
    if (o.cache.average_bits > 0) o.cache.average_bits += 1;  // scales take so much at most
  }
  if (i % 2 == 1 && o.cache.average_bits > 0) {  // truncations reach the budget
    o.cache.budget_from = *KvCache::shortest_length(o.cache);
  }
  o.input = inputs[i / 2 % 3];
  o.layout = i % 2 ? Layout::bhsd : Layout::bshd;
  o.capacity.sequences = 3;
  o.capacity.tokens = 1000;
  return o;
}

void run_sequence(unsigned i, int steps) {
  const test::Timing timing(i);
  Pair pair(shaped(i));
  const PairOptions o = shaped(i);
  for (int n = 0; n < 3; ++n) pair.add();
  std::mt19937& random = pair.random();
  for (int n = 0; n < steps; ++n) {
    SCOPED_TRACE("step " + std::to_string(n));
    Step step;
    step.layer = static_cast<std::int64_t>(random() % static_cast<unsigned>(o.cache.layers));
    step.slots = {0, 1, 2};
    std::shuffle(step.slots.begin(), step.slots.end(), random);
    step.slots.resize(1 + random() % 3);
    const unsigned kind = random() % 8;
    for (const std::int64_t slot : step.slots) {
      const std::int64_t left = o.capacity.tokens - pair.length(slot, step.layer);
      std::int64_t count = kind == 0   ? 1 + random() % 300
                           : kind < 3  ? 1 + random() % 40
                           : kind == 3 ? random() % 3
                                       : 1;
      if (kind != 3 && !step.counts.empty()) count = step.counts[0];
      step.counts.push_back(static_cast<std::int32_t>(std::min(count, left)));
    }
    step.with_importance = random() % 3 == 0;
    step.spread = random() % 2 ? 1.0f : 6.0f;
    step.bad_rows = i % 3 == 1 || i % 6 == 5;
    pair.append(step);
    if (testing::Test::HasFatalFailure()) return;
    if (random() % 4 == 0) pair.observe(step.layer, step.slots, random() % 2 ? 0.5f : 4.0f);
    const auto slot = static_cast<std::int64_t>(random() % 3);
    const std::int64_t length = pair.length(slot, 0);
    if (random() % 6 == 0) pair.set_importance(slot, step.layer, random() % 2 ? 0.5f : 4.0f);
    if (random() % 10 == 0 && length > 0) {
      const std::int64_t off = random() % 3 ? random() % 20 : random() % length;
      pair.truncate(slot, length > off ? length - off : 0);
    }
    if (random() % 8 == 0 && length > 0) {
      const std::int64_t begin = random() % length;
      pair.evict(slot, random() % 3 ? -1 : 0, random() % 3 ? -1 : 0, begin,
                 begin + random() % (random() % 2 ? 20 : 200));
    }
    if (random() % 25 == 0) pair.renew(static_cast<std::int64_t>(random() % 3));
    if (random() % 5 == 0) {  // one slot becomes a fork of another, often of a fork
      const auto old = static_cast<std::int64_t>(random() % 3);
      pair.release(old);
      ASSERT_EQ(pair.fork((old + 1 + random() % 2) % 3), old);
    }
    if (testing::Test::HasFatalFailure()) return;
    pair.compare();
    if (random() % 12 == 0) {
      pair.through_files(testing::TempDir() + "qattn_kv_pair_" + std::to_string(i));
    }
    if (testing::Test::HasFatalFailure()) return;
  }
}

class KvDeviceAppend : public testing::TestWithParam<unsigned> {};
TEST_P(KvDeviceAppend, HoldsWhatTheHostHolds) {
  run_sequence(GetParam(), test::thorough() ? 40 : 15);
}
INSTANTIATE_TEST_SUITE_P(Cases, KvDeviceAppend, testing::Range(0u, 30u));

/// K with a scale a channel where every token is bad, and pages with bad tokens that are demoted.
TEST(KvDevice, BadTokensUnderScalesOfChannels) {
  for (unsigned i = 0; i < 4; ++i) {
    SCOPED_TRACE(i);
    const test::Timing timing(i);
    PairOptions o = shaped(1);
    o.cache.layers = o.cache.heads_kv = 1;
    o.cache.d = o.cache.dv = 64;
    o.cache.page_size = o.cache.window = i % 2 ? 16 : 64;
    o.cache.sinks = 0;
    o.cache.rotate = i < 2;
    o.cache.k_granularity = Granularity::per_channel;
    o.cache.tiers = {{8, 8}, {4, 4}, {2, 2}};
    o.cache.average_bits = 6.5;
    o.cache.budget_from = 0;
    Pair pair(o);
    pair.add();
    Step step;
    step.slots = {0};
    for (const int count : {64, 200, 1, 300, 1, 300}) {
      step.counts = {count};
      step.bad_rows = true;
      step.all_bad = count == 64;
      step.with_importance = true;
      step.spread = 3;
      pair.append(step);
      pair.compare();
      if (testing::Test::HasFatalFailure()) return;
    }
    const Result<KvUsage> usage = pair.host().usage(pair.id(0), 0);
    EXPECT_GT(usage->tier_tokens[1] + usage->tier_tokens[2], 0) << "no page was demoted";
  }
}

/// Decode steps one by one over many pages, and importance that turns round.
TEST(KvDevice, DecodeStepsUnderSwingingImportance) {
  for (unsigned i = 0; i < 3; ++i) {
    const test::Timing timing(i);
    PairOptions o = shaped(0);
    o.cache.layers = 1;
    o.cache.heads_kv = 2;
    o.cache.d = o.cache.dv = 64;
    o.cache.average_bits = 4.4;
    o.seed = i;
    Pair pair(o);
    pair.add();
    Step step;
    step.slots = {0};
    step.counts = {700};
    pair.append(step);
    step.counts = {1};
    for (int n = 0; n < 120 && !testing::Test::HasFatalFailure(); ++n) {
      if (n % 9 == 0) pair.observe(0, {0}, 5.0f);
      pair.append(step);
      if (n % 5 == 0) pair.compare();
    }
    pair.compare();
  }
}

/// More slots than are granted pages at once, more heads than a block has warps.
TEST(KvDevice, ManySlotsAndManyHeads) {
  for (const bool slots : {true, false}) {
    const test::Timing timing(slots ? 2 : 1);
    PairOptions o = shaped(1);
    o.cache.layers = 1;
    o.cache.heads_kv = slots ? 1 : 19;
    o.cache.d = o.cache.dv = 32;
    o.cache.page_size = o.cache.window = 16;
    o.cache.average_bits = 6;
    o.capacity.sequences = slots ? 70 : 1;
    o.capacity.tokens = 200;
    Pair pair(o);
    Step step;
    for (std::int64_t n = 0; n < o.capacity.sequences; ++n) {
      pair.add();
      step.slots.push_back(n);
    }
    for (const std::int32_t count : {90, 1, 60}) {
      step.counts.assign(step.slots.size(), count);
      step.with_importance = count == 60;
      pair.append(step);
      pair.compare();
      if (testing::Test::HasFatalFailure()) return;
    }
  }
}

TEST(KvDevice, ReadsAsTheHost) {
  PairOptions o = shaped(1);
  Pair pair(o);
  pair.add();
  Step step;
  step.slots = {0};
  step.counts = {500};
  pair.append(step);
  const std::int64_t heads = o.cache.heads_kv, length = *pair.device().length(0, 0);
  ASSERT_EQ(length, 500);
  const auto read = [&](auto& cache) {
    std::vector<float> k(heads * length * o.cache.d), v(heads * length * o.cache.dv);
    std::vector<std::int32_t> tiers(heads * length);
    const Status s =
        cache.read(0, 0, TensorView::dense(k.data(), Format::f32, {heads, length, o.cache.d}),
                   TensorView::dense(v.data(), Format::f32, {heads, length, o.cache.dv}),
                   TensorView::dense(tiers.data(), Format::s32, {heads, length}));
    EXPECT_TRUE(s.ok()) << s.message();
    return std::tuple{k, v, tiers};
  };
  EXPECT_EQ(read(pair.host()), read(pair.device()));
}

TEST(KvDevice, TakesMemoryOnceAndSaysHowMuch) {
  PairOptions o = shaped(0);
  Pair pair(o);
  const KvBytes b = pair.device().bytes();
  EXPECT_EQ(b.total, static_cast<std::int64_t>(test::KvBackend::allocated()));
  EXPECT_EQ(b.total, b.codes + b.scales + b.window + b.tables + b.means + b.spare);
  const std::int64_t calls = test::KvBackend::calls();
  pair.add();
  Step step;
  step.slots = {0};
  step.counts = {600};
  pair.append(step);
  pair.observe(0, {0}, 1.0f);
  EXPECT_EQ(test::KvBackend::calls(), calls);
}

}  // namespace
}  // namespace qattn
