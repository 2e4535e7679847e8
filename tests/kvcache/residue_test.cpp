// What went leaves nothing behind, and a key or value that is huge costs nobody but itself: caches
// that met one, beside caches that never did.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "kvcache/decode_case.hpp"

namespace qattn {
namespace {

using test::append_rows;
using test::Contents;
using test::contents_of;
using test::KvRows;
using test::normal_rows;
using test::slice;

constexpr float inf = std::numeric_limits<float>::infinity();
constexpr float huge_values[] = {1e30f, 3e38f, inf, NAN, -1e30f, 6e4f};
constexpr std::int64_t d = 64, tokens = 280, page = 16;

enum class Fate { evicted_from_window, evicted_from_codes, overwritten, released, forked, none };

struct Case {
  KvCacheOptions options;
  Fate fate;
  std::int64_t at;  ///< the token
  bool in_v;
};

/// A cache in which token `at` was `x` somewhere and is no more (but with Fate::none). `x` 0: it
/// was like the others.
struct Made {
  KvCache cache;
  std::int64_t id = 0;
  Contents truth;
};

Made make(const Case& c, float x) {
  Made m{std::move(*KvCache::create(c.options)), 0, {}};
  const KvRows clean = normal_rows(tokens, 1, d, d, 5, 3.0f);
  KvRows rows = clean;
  if (x != 0) (c.in_v ? rows.v : rows.k)[static_cast<std::size_t>(c.at * d + 5)] = x;
  m.id = *m.cache.add_sequence();
  const auto evict = [&] { EXPECT_TRUE(m.cache.evict(m.id, -1, -1, c.at, c.at + 1).ok()); };
  std::int64_t other = -1;
  switch (c.fate) {
    case Fate::evicted_from_window:
      append_rows(m.cache, m.id, 0, slice(rows, 0, c.at + 1));
      evict();
      append_rows(m.cache, m.id, 0, slice(rows, c.at + 1, tokens));
      break;
    case Fate::evicted_from_codes:
      append_rows(m.cache, m.id, 0, slice(rows, 0, tokens - 20));
      evict();
      append_rows(m.cache, m.id, 0, slice(rows, tokens - 20, tokens));
      break;
    case Fate::overwritten:
      append_rows(m.cache, m.id, 0, slice(rows, 0, tokens - 20));
      EXPECT_TRUE(m.cache.truncate(m.id, c.at).ok());
      append_rows(m.cache, m.id, 0, slice(clean, c.at, tokens));
      break;
    case Fate::released:
      append_rows(m.cache, m.id, 0, rows);
      EXPECT_TRUE(m.cache.release(m.id).ok());
      m.id = *m.cache.add_sequence();
      append_rows(m.cache, m.id, 0, clean);
      break;
    case Fate::forked:
      append_rows(m.cache, m.id, 0, slice(rows, 0, c.at + 20));
      other = m.id;
      m.id = *m.cache.fork(m.id);
      evict();
      append_rows(m.cache, other, 0, slice(rows, c.at + 20, tokens));
      append_rows(m.cache, m.id, 0, slice(rows, c.at + 20, tokens));
      break;
    case Fate::none:
      append_rows(m.cache, m.id, 0, rows);
      break;
  }
  m.truth = contents_of(clean, 1, d, d);
  const bool gone = c.fate != Fate::overwritten && c.fate != Fate::released;
  for (std::int64_t i = 0; gone && i < d; ++i) {
    m.truth.k[static_cast<std::size_t>(c.at * d + i)] = NAN;
  }
  return m;
}

/// Error of decode() against attention over what was appended and is alive.
double error_of(const Made& m, const KvCacheOptions& o) {
  test::DecodeCase call = test::queries_for(o, 16, 1);
  EXPECT_TRUE(call.run(m.cache, {m.id}).ok());
  for (const float x : call.out) {
    if (!std::isfinite(x)) return inf;
  }
  return test::nrmse(call.out, test::attend(call, o, {m.truth}).out);
}

KvCacheOptions options(int bits, Granularity k, Format window) {
  KvCacheOptions o;
  o.d = o.dv = d;
  o.page_size = page;
  o.window = 32;
  o.tiers = {{bits, bits}};
  o.k_granularity = k;
  o.window_format = window;
  return o;
}

std::string name_of(const Case& c, float x) {
  return "fate " + std::to_string(static_cast<int>(c.fate)) + ", " + std::to_string(x) + " in " +
         (c.in_v ? "V" : "K") + " of token " + std::to_string(c.at) + ", " +
         std::to_string(c.options.tiers[0].k_bits) + " bits, " +
         (c.options.k_granularity == Granularity::per_channel ? "a channel, " : "a token, ") +
         (c.options.window_format == Format::bf16 ? "bf16" : "f16");
}

class KvResidue : public testing::TestWithParam<int> {};

TEST_P(KvResidue, OfWhatIsGoneThereIsNone) {
  for (const Granularity k : {Granularity::per_token, Granularity::per_channel}) {
    for (const Format window : {Format::bf16, Format::f16}) {
      for (const Fate fate : {Fate::evicted_from_window, Fate::evicted_from_codes,
                              Fate::overwritten, Fate::released, Fate::forked}) {
        for (const std::int64_t at : {7, 40, 237}) {  // a sink; leaves the window; stays there
          for (const bool in_v : {false, true}) {
            const Case c{options(GetParam(), k, window), fate, at, in_v};
            const double clean = error_of(make(c, 0), c.options);
            for (const float x : huge_values) {
              const bool tells = k == Granularity::per_channel && x == 6e4f;
              if (tells) continue;  // below
              EXPECT_LE(error_of(make(c, x), c.options), 1.4 * clean + 1e-3) << name_of(c, x);
            }
          }
        }
      }
    }
  }
}
INSTANTIATE_TEST_SUITE_P(Bits, KvResidue, testing::Values(2, 3, 4, 8));

/// The others' K and V while a huge one that its own scale holds is there.
TEST_P(KvResidue, AHugeRowCostsNobodyElse) {
  for (const Format window : {Format::bf16, Format::f16}) {
    for (const bool in_v : {false, true}) {
      const Case c{options(GetParam(), Granularity::per_token, window), Fate::none, 40, in_v};
      const auto error = [&](float x) {
        const Made m = make(c, x);
        const Contents got = test::read_contents(m.cache, m.id);
        double all = 0;
        for (std::size_t i = 0; i < got.k.size(); ++i) {
          if (static_cast<std::int64_t>(i) / d == c.at) continue;
          const double k = static_cast<double>(got.k[i]) - static_cast<double>(m.truth.k[i]);
          const double v = static_cast<double>(got.v[i]) - static_cast<double>(m.truth.v[i]);
          all += k * k + v * v;
        }
        return std::sqrt(all);
      };
      const double clean = error(0);
      for (const float x : {100.0f, 6e4f, -3e4f}) {
        EXPECT_LE(error(x), 1.02 * clean) << name_of(c, x);
      }
    }
  }
}

/// One that holds nothing any more begins anew: with a mean of the keys that come now.
TEST(KvMeans, GoWithTheLastPageThatTheyServe) {
  KvCacheOptions o = options(4, Granularity::per_token, Format::f16);
  const KvRows first = normal_rows(tokens, 1, d, d, 3, 40.0f);
  const KvRows second = normal_rows(tokens, 1, d, d, 4, -40.0f);
  const auto contents = [&](bool begin_with_others, bool truncate) {
    Result<KvCache> cache = KvCache::create(o);
    const std::int64_t id = *cache->add_sequence();
    if (begin_with_others) {
      append_rows(*cache, id, 0, first);
      EXPECT_GT(cache->bytes().means, 0);
      EXPECT_TRUE((truncate ? cache->truncate(id, 0) : cache->evict(id, 0, -1, 0, tokens)).ok());
      EXPECT_EQ(cache->bytes().means, 0);
    }
    append_rows(*cache, id, 0, second);
    return test::read_contents(*cache, id);
  };
  const Contents clean = contents(false, false), cut = contents(true, true);
  EXPECT_EQ(cut.k, clean.k);
  EXPECT_EQ(cut.v, clean.v);
}

/// key_norm's guess of a page is that of its other keys.
TEST(KvImportance, IsNotGuessedFromOneKey) {
  KvCacheOptions o = options(4, Granularity::per_token, Format::bf16);
  o.tiers = {{8, 8}, {2, 2}};
  o.average_bits = 6;
  o.importance = KvImportance::key_norm;
  const auto tier_of = [&](float x) {
    KvRows rows = normal_rows(3000, 1, d, d, 6);
    // Small keys in one page, which therefore stays in the better tier.
    for (std::int64_t i = 64 * d; i < 80 * d; ++i) rows.k[static_cast<std::size_t>(i)] *= 0.1f;
    if (x != 0) rows.k[static_cast<std::size_t>(70 * d + 5)] = x;
    Result<KvCache> cache = KvCache::create(o);
    const std::int64_t id = *cache->add_sequence();
    append_rows(*cache, id, 0, rows);
    std::vector<std::int32_t> tiers(3000);
    EXPECT_TRUE(
        cache->read(id, 0, {}, {}, TensorView::dense(tiers.data(), Format::s32, {1, 3000})).ok());
    return tiers[66];
  };
  EXPECT_EQ(tier_of(0), 1);
  for (const float x : huge_values) EXPECT_EQ(tier_of(x), 1) << x;
}

/// Random truncations and appends keep the budget, and no append is refused for it.
TEST(KvBudget, HoldsAfterTruncationsIntoCodes) {
  for (const Granularity k : {Granularity::per_token, Granularity::per_channel}) {
    KvCacheOptions o = options(4, k, Format::f16);
    o.tiers = {{8, 8}, {4, 4}, {2, 2}};
    o.average_bits = k == Granularity::per_token ? 4 : 5;
    o.budget_from = *KvCache::shortest_length(o);
    Result<KvCache> cache = KvCache::create(o);
    const std::int64_t id = *cache->add_sequence();
    const auto check = [&] {
      const Result<KvUsage> u = cache->usage(id, 0);
      EXPECT_LE(u->bytes, u->allowed_bytes) << u->length;
    };
    const std::int64_t most = 3 * o.budget_from;
    append_rows(*cache, id, 0, normal_rows(most, 1, d, d, 1));
    check();
    for (std::int64_t n = most; n > 50; n -= 37) {
      ASSERT_TRUE(cache->truncate(id, n).ok());
      check();
      for (int i = 0; i < 3; ++i) {
        append_rows(*cache, id, 0, normal_rows(1, 1, d, d, 2));
        check();
      }
    }
  }
}

}  // namespace
}  // namespace qattn
