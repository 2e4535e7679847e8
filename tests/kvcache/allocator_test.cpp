// The allocator: the best assignment for the bytes it uses, demotion only, steady under importance
// that swings.
#include "kvcache/allocator.hpp"

#include <gtest/gtest.h>

#include <random>

#include "kvcache/decode_case.hpp"

namespace qattn {
namespace {

using kv::allocate;
using kv::Allocation;
using kv::Candidate;

const std::vector<KvTier> tiers = {{8, 8}, {4, 4}, {3, 3}, {2, 2}};
const std::vector<std::int64_t> bytes = {4184, 2136, 1624, 1112};

double cost_of(const Candidate& page, int tier) {
  double d = 0;
  for (int i = 1; i <= 4; ++i) {
    if ((page.path >> (i - 1) & 1) != 0 || i == tier) {
      d += kv::distortion(tiers[static_cast<std::size_t>(i) - 1]);
    }
  }
  return static_cast<double>(page.importance) * d;
}

TEST(KvAllocator, NoAssignmentOfAsFewBytesIsBetter) {
  std::mt19937 random(3);
  std::lognormal_distribution<float> weight(0.0f, 1.5f);
  for (int round = 0; round < 60; ++round) {
    std::vector<Candidate> pages;
    for (int i = 0; i < 6; ++i) {
      const auto tier = static_cast<std::uint8_t>(random() % 4);
      const auto path = static_cast<std::uint8_t>(tier == 0 ? 0 : 1u << (tier - 1));
      pages.push_back({weight(random), tier, path});
    }
    const std::int64_t allowed = 6 * 1112 + static_cast<std::int64_t>(random() % (6 * 3072));
    const Allocation a = allocate(pages, tiers, bytes, allowed, 0.0f);
    double cost = 0;
    std::int64_t used = 0;
    for (std::size_t i = 0; i < pages.size(); ++i) {
      ASSERT_GE(a.tier[i], pages[i].tier) << "promoted";
      ASSERT_GE(a.tier[i], 1);
      cost += cost_of(pages[i], a.tier[i]);
      used += bytes[a.tier[i] - std::size_t{1}];
    }
    ASSERT_EQ(used, a.bytes);
    ASSERT_EQ(a.fits, used <= allowed);
    for (int code = 0; code < 4096; ++code) {
      double other = 0;
      std::int64_t takes = 0;
      bool legal = true;
      for (std::size_t i = 0; i < pages.size(); ++i) {
        const int tier = (code >> (2 * i) & 3) + 1;
        legal &= tier >= pages[i].tier;
        other += cost_of(pages[i], tier);
        takes += bytes[static_cast<std::size_t>(tier) - 1];
      }
      if (!legal || takes > used) continue;
      ASSERT_GE(other, cost * (1 - 1e-9)) << "round " << round;
    }
  }
}

TEST(KvAllocator, StopsAtTheBudgetAndSaysWhereItCannotHold) {
  const std::vector<Candidate> pages(10, Candidate{1.0f, 0, 0});
  EXPECT_EQ(allocate(pages, tiers, bytes, -1, 0.25f).bytes, 10 * 4184) << "no budget";
  EXPECT_EQ(allocate(pages, tiers, bytes, 10 * 4184, 0.25f).bytes, 10 * 4184);
  const Allocation one = allocate(pages, tiers, bytes, 10 * 4184 - 1, 0.25f);
  EXPECT_TRUE(one.fits);
  EXPECT_EQ(one.tier[0], 2) << "ties go to the first page";
  for (std::size_t i = 1; i < 10; ++i) EXPECT_EQ(one.tier[i], 1);
  EXPECT_TRUE(allocate(pages, tiers, bytes, 10 * 1112, 0.25f).fits);
  EXPECT_FALSE(allocate(pages, tiers, bytes, 10 * 1112 - 1, 0.25f).fits);
}

TEST(KvAllocator, ADemotedPageIsHeldByTheHysteresis) {
  // Both in the second tier, the first one demoted there; it is a little less important.
  const std::vector<Candidate> pages = {{0.95f, 2, 0b11}, {1.0f, 2, 0b10}};
  const std::int64_t allowed = 2 * 2136 - 1;
  EXPECT_EQ(allocate(pages, tiers, bytes, allowed, 0.25f).tier, (std::vector<std::uint8_t>{2, 3}));
  EXPECT_EQ(allocate(pages, tiers, bytes, allowed, 0.0f).tier, (std::vector<std::uint8_t>{3, 2}));
}

/// Decodes 1500 tokens under importance that turns round at every step.
TEST(KvAllocator, NoTokenOscillatesUnderAdversarialImportance) {
  KvCacheOptions o;
  o.heads_kv = 2;
  o.d = o.dv = 64;
  o.window = 32;
  o.sinks = 16;
  o.average_bits = 4;
  o.budget_from = *KvCache::shortest_length(o);
  Result<KvCache> cache = KvCache::create(o);
  ASSERT_TRUE(cache.ok()) << cache.status().message();
  const std::int64_t id = *cache->add_sequence();
  const test::KvRows rows = test::normal_rows(1500, 2, 64, 64, 1);
  std::vector<std::int32_t> before;
  std::vector<int> moves(2 * 1500, 0);
  for (std::int64_t n = 1; n <= 1500; ++n) {
    test::append_rows(*cache, id, 0, test::slice(rows, n - 1, n));
    const std::int64_t blocks = (n + 15) / 16;
    std::vector<float> swing;
    for (std::int64_t i = 0; i < 2 * blocks; ++i) swing.push_back((i + n) % 2 == 0 ? 1.0f : 0.01f);
    std::vector<std::int32_t> tier(static_cast<std::size_t>(2 * n)), after = tier;
    const auto read = [&](std::vector<std::int32_t>& to) {
      return cache->read(id, 0, {}, {}, TensorView::dense(to.data(), Format::s32, {2, n}));
    };
    ASSERT_TRUE(read(tier).ok());
    const Status s =
        cache->set_importance(id, 0, TensorView::dense(swing.data(), Format::f32, {2, blocks}));
    ASSERT_TRUE(s.ok()) << s.message();
    ASSERT_TRUE(read(after).ok());
    ASSERT_EQ(tier, after) << "importance alone moves nothing";
    for (std::int64_t h = 0; h < 2 && n > 1; ++h) {
      for (std::int64_t j = 0; j < n - 1; ++j) {
        const int was = before[static_cast<std::size_t>(h * (n - 1) + j)];
        const int now = tier[static_cast<std::size_t>(h * n + j)];
        ASSERT_GE(now, was) << "token " << j << " was promoted at length " << n;
        moves[static_cast<std::size_t>(h * 1500 + j)] += now != was;
      }
    }
    before = tier;
    const Result<KvUsage> u = cache->usage(id, 0);
    ASSERT_LE(u->bytes, u->allowed_bytes) << n;
  }
  for (const int m : moves) EXPECT_LE(m, 4) << "once out of the window, then once a tier";
  const Result<KvUsage> u = cache->usage(id, 0);
  EXPECT_NEAR(u->average_bits, 4.0, 0.1) << "the budget is used";
}

TEST(KvAllocator, IsDeterministic) {
  std::vector<std::int32_t> first;
  for (int threads : {1, 2, 5}) {
    KvCacheOptions o;
    o.heads_kv = 2;
    o.average_bits = 3;
    o.threads = threads;
    o.importance = KvImportance::key_norm;
    Result<KvCache> cache = KvCache::create(o);
    const std::int64_t id = *cache->add_sequence();
    test::append_rows(*cache, id, 0, test::normal_rows(6000, 2, 128, 128, 1));
    std::vector<std::int32_t> tier(2 * 6000);
    ASSERT_TRUE(
        cache->read(id, 0, {}, {}, TensorView::dense(tier.data(), Format::s32, {2, 6000})).ok());
    if (first.empty()) first = tier;
    EXPECT_EQ(tier, first);
  }
}

}  // namespace
}  // namespace qattn
