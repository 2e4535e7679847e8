// The allocator for a block of threads against the host's: the same tiers, page for page.
#include "kernels/kv_append/allocate.cuh"

#include <gtest/gtest.h>

#include <random>
#include <utility>
#include <vector>

#include "isa/launch.hpp"
#include "kv_backend.hpp"
#include "kvcache/allocator.hpp"

namespace qattn {
namespace {

struct AllocateParams {
  kernels::PageList list;
  kv::Prices prices;
  std::int64_t allowed;
  std::uint8_t* tiers;  ///< [heads][stride]
  std::uint32_t* fits;
};

/// The allocator alone.
struct AllocateOnly {
  using Params = AllocateParams;
  using A = kernels::Allocator;
  static constexpr int threads = A::threads, min_blocks = 1, shared_bytes = A::shared_bytes;
  static void run(const Params& p) {
    A allocator{p.prices, p.list};
    allocator.weigh();
    const bool fits = allocator.find(allocator.bytes() - p.allowed);
    p.list.candidates<threads>([&](const kv::Candidate& c, std::int64_t number) {
      const int tier = fits ? allocator.tier(c, number) : 0;
      isa::store_global(p.tiers + number, static_cast<std::uint8_t>(tier));
    });
    if (isa::thread() == 0) isa::store_global(p.fits, fits ? 1u : 0u);
  }
};

/// Descending tiers with their bytes.
struct TierList {
  std::vector<KvTier> tiers;
  std::vector<std::int64_t> bytes;
};
TierList random_tiers(std::mt19937& random) {
  static const int bits[] = {8, 4, 3, 2};
  TierList t;
  int k = 0, v = 0;
  const std::size_t most = 1 + random() % 7;
  while (t.tiers.size() < most) {
    t.tiers.push_back({bits[k], bits[v]});
    t.bytes.push_back(64 * (2 * (bits[k] + bits[v]) + 1) + 24);
    if (k == 3 && v == 3) break;
    const unsigned step = random() % 3;
    const int old_k = k, old_v = v;
    if (step != 1 && k < 3) ++k;
    if (step != 0 && v < 3) ++v;
    if (old_k == k && old_v == v) (k < 3 ? k : v) += 1;
  }
  return t;
}

struct Pages {
  std::vector<std::vector<kv::Candidate>> heads;
};
Pages random_pages(std::mt19937& random, std::size_t tiers) {
  std::lognormal_distribution<float> weight(0.0f, 2.0f);
  const unsigned style = random() % 6;
  Pages pages;
  pages.heads.resize(1 + random() % 3);
  for (auto& head : pages.heads) {
    head.resize(random() % (random() % 8 == 0 ? 700 : 40));
    for (kv::Candidate& c : head) {
      c.tier = static_cast<std::uint8_t>(random() % (tiers + 1));
      c.path = static_cast<std::uint8_t>(c.tier == 0 ? 0 : 1u << (c.tier - 1));
      if (c.tier > 1 && random() % 2) {
        c.path = static_cast<std::uint8_t>(c.path | random() % (1u << (c.tier - 1)));
      }
      if (random() % 16 == 0) c.path = static_cast<std::uint8_t>(random() % 128);
      c.importance = style == 0   ? 1.0f
                     : style == 1 ? static_cast<float>(random() % 3)
                     : style == 2 ? (random() % 2 ? 1e15f : 1e-30f)
                                  : weight(random);
      if (style > 3 && random() % 3 == 0) c.importance = -1.0f;
      c.kind = random() % 8 ? kv::page_candidate : kv::page_new;
    }
  }
  return pages;
}

class CpuAnswer {
 public:
  CpuAnswer(const Pages& pages, const TierList& t, std::int64_t allowed, float hysteresis) {
    // The average in the order that kvcache/prices.hpp states.
    std::vector<double> lanes(kv::importance_lanes);
    std::int64_t known = 0;
    for (const auto& head : pages.heads) {
      for (std::size_t i = 0; i < head.size(); ++i) {
        if (head[i].kind != kv::page_candidate) continue;
        list_.push_back(head[i]);
        if (head[i].importance < 0) continue;
        lanes[i % kv::importance_lanes] += static_cast<double>(head[i].importance);
        ++known;
      }
    }
    kv::add_in_halves<kv::importance_lanes>(lanes.data(), 1);
    const float average =
        known > 0 ? static_cast<float>(lanes[0] / static_cast<double>(known)) : 1.0f;
    for (kv::Candidate& c : list_) c.importance = c.importance < 0 ? average : c.importance;
    answer = kv::allocate(list_, t.tiers, t.bytes, allowed, hysteresis);
  }
  kv::Allocation answer;

 private:
  std::vector<kv::Candidate> list_;
};

void check_round(unsigned round, const TierList& t, const Pages& pages, std::mt19937& random) {
  const float hysteresis = round % 3 == 0 ? 0.0f : round % 3 == 1 ? 0.25f : 3.0f;
  std::size_t stride = 1, count = 0;
  for (const auto& head : pages.heads) stride = std::max(stride, head.size());
  std::vector<kv::Candidate> flat(stride * pages.heads.size());
  std::vector<kv::HeadPlan> heads(pages.heads.size());
  for (std::size_t h = 0; h < heads.size(); ++h) {
    heads[h].new_count = static_cast<std::int32_t>(pages.heads[h].size());
    std::copy(pages.heads[h].begin(), pages.heads[h].end(), flat.begin() + h * stride);
    for (const kv::Candidate& c : pages.heads[h]) count += c.kind == kv::page_candidate;
  }
  const std::int64_t least = static_cast<std::int64_t>(count) * t.bytes.back();
  const std::int64_t span = static_cast<std::int64_t>(count) * (t.bytes[0] - t.bytes.back());
  const std::int64_t allowed =
      random() % 10 == 0 ? least : least - 5 + static_cast<std::int64_t>(random() % (span + 30));
  const CpuAnswer host(pages, t, std::max<std::int64_t>(allowed, 0), hysteresis);

  std::vector<std::uint8_t> tiers(flat.size(), 99);
  std::uint32_t fits = 99;
  std::vector<kv::PageSteps> steps(flat.size());
  std::vector<std::uint64_t> prices(flat.size() * (t.tiers.size() - 1) + 1);
  AllocateParams p{{flat.data(), steps.data(), prices.data(), heads.data(),
                    static_cast<std::int32_t>(heads.size()), static_cast<std::int64_t>(stride)},
                   kv::make_prices(t.tiers, t.bytes, hysteresis),
                   std::max<std::int64_t>(allowed, 0),
                   tiers.data(),
                   &fits};
  const test::Timing timing(round);
  ASSERT_EQ(isa::launch<AllocateOnly>(p, {1, 1, 1}, nullptr), "");
  ASSERT_EQ(fits == 1, host.answer.fits);
  if (!host.answer.fits) return;
  std::size_t next = 0;
  for (std::size_t h = 0; h < heads.size(); ++h) {
    for (std::size_t i = 0; i < pages.heads[h].size(); ++i) {
      if (pages.heads[h][i].kind != kv::page_candidate) continue;
      ASSERT_EQ(tiers[h * stride + i], host.answer.tier[next++]) << "head " << h << " page " << i;
    }
  }
}

TEST(KvDeviceAllocator, ChoosesTheHostsTiers) {
  for (unsigned round = 0; round < 2000; ++round) {
    SCOPED_TRACE(round);
    std::mt19937 random(round);
    const TierList t = random_tiers(random);
    check_round(round, t, random_pages(random, t.tiers.size()), random);
    if (HasFatalFailure()) return;
  }
}

/// Sizes for which both steps of a hull cost the same up to rounding, so that the second is often
/// the cheaper one: bytes in the ratio of the errors, as a continued fraction has it.
TierList level_tiers(std::mt19937& random) {
  TierList t;
  t.tiers = {{8, 8}, {4, 4}, {random() % 2 ? 3 : 2, 2}};
  double d[3];
  for (int i = 0; i < 3; ++i) d[i] = kv::distortion(t.tiers[static_cast<std::size_t>(i)]);
  double x = (d[1] - d[0]) / (d[2] - d[1]);
  std::int64_t p = 1, q = 0, old_p = 0, old_q = 1;
  for (;;) {
    const auto digit = static_cast<std::int64_t>(x);
    const std::int64_t next_p = digit * p + old_p, next_q = digit * q + old_q;
    if (next_p + next_q > 800000000) break;  // five pages free less than 2^32 units
    old_p = std::exchange(p, next_p);
    old_q = std::exchange(q, next_q);
    x = 1 / (x - static_cast<double>(digit));
  }
  t.bytes = {64 + 8 * (p + q), 64 + 8 * q, 64};
  return t;
}

/// An importance whose second step is cheaper than its first one, if one is found.
float inverted_weight(const kv::Prices& prices, std::mt19937& random) {
  std::lognormal_distribution<float> weight(0.0f, 1.0f);
  kv::Candidate c;  // in 16 bits: its steps begin in tier 1
  for (int n = 0; n < 8000; ++n) {
    c.importance = weight(random);
    double first = 0, second = 0;
    if (prices.next(c, 1, first) == 2 && prices.next(c, 2, second) == 3 && second < first) break;
  }
  return c.importance;
}

TEST(KvDeviceAllocator, TakesStepsOfOnePriceInTheHostsOrder) {
  for (unsigned round = 0; round < 400; ++round) {
    SCOPED_TRACE(round);
    std::mt19937 random(round);
    std::lognormal_distribution<float> weight(0.0f, 1.0f);
    Pages pages;
    pages.heads.resize(1);
    pages.heads[0].resize(1 + random() % 5);
    const TierList t = level_tiers(random);
    const kv::Prices prices = kv::make_prices(t.tiers, t.bytes, 0.0f);
    const float all = round % 2 ? weight(random) : inverted_weight(prices, random);
    for (kv::Candidate& c : pages.heads[0]) {
      c = {random() % 2 ? all : weight(random), 0, 0, kv::page_candidate};
      if (random() % 4 == 0) c.tier = c.path = 1;
      if (round % 2 == 0 && random() % 2) c.importance = inverted_weight(prices, random);
    }
    check_round(round, t, pages, random);
    if (HasFatalFailure()) return;
  }
}

}  // namespace
}  // namespace qattn
