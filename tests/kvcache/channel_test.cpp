// K with a scale a channel over the tokens of a page: what it gains and costs beside a scale a
// token, which tokens a bad one spoils, and that the scales are those of the page that was frozen.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <limits>

#include "formats/f16.hpp"
#include "formats/hadamard.hpp"
#include "kvcache/decode_case.hpp"

namespace qattn {
namespace {

using test::append_rows;
using test::Contents;
using test::KvRows;
using test::normal_rows;

constexpr float inf = std::numeric_limits<float>::infinity();
constexpr std::int64_t d = 128, tokens = 4112;  // 16 sinks, 3968 in tiers, 128 of window

KvCacheOptions options(Granularity k, std::int64_t page, KvTier tier) {
  KvCacheOptions o;
  o.k_granularity = k;
  o.page_size = o.sinks = page;
  o.tiers = {tier};
  o.balance_k = false;  // balance_test.cpp has that
  return o;
}

/// Channels that vary ten times as much as the others: at random, or slowly, as rotary embeddings
/// make them.
enum class Keys { normal, loud, slow };

KvRows keys(Keys kind) {
  KvRows rows = normal_rows(tokens, 1, d, d, 31);
  for (std::int64_t j = 0; j < tokens; ++j) {
    for (std::int64_t c = 5; c < d && kind != Keys::normal; c += 32) {
      float& x = rows.k[static_cast<std::size_t>(j * d + c)];
      const double turn = 0.003 * static_cast<double>((c / 32 + 1) * j + c);
      x = kind == Keys::loud ? 10 * x : x + static_cast<float>(10 * std::cos(turn));
    }
  }
  return rows;
}

struct Errors {
  double all = 0;      ///< relative RMS error of K
  double channel = 0;  ///< root mean square over channels of the relative one of each
};

/// With `turned`, of keys that are rotated before they are appended and back when they are read.
Errors errors_of(const KvRows& rows, const KvCacheOptions& o, bool turned = false) {
  KvRows given = rows;
  for (std::int64_t j = 0; turned && j < tokens; ++j) formats::rotate(given.k.data() + j * d, d);
  Result<KvCache> cache = KvCache::create(o);
  if (!cache.ok()) ADD_FAILURE() << cache.status().message();
  const std::int64_t id = *cache->add_sequence();
  append_rows(*cache, id, 0, given);
  Contents got = test::read_contents(*cache, id);
  for (std::int64_t j = 0; turned && j < tokens; ++j) formats::unrotate(got.k.data() + j * d, d);
  Errors errors;
  double error = 0, norm = 0;
  for (std::int64_t c = 0; c < d; ++c) {
    double own_error = 0, own_norm = 0, mean = 0;
    const std::int64_t begin = o.sinks, end = (tokens - o.window) / o.page_size * o.page_size;
    for (std::int64_t j = begin; j < end; ++j) {
      mean += static_cast<double>(rows.k[static_cast<std::size_t>(j * d + c)]);
    }
    mean /= static_cast<double>(end - begin);
    for (std::int64_t j = begin; j < end; ++j) {
      const auto at = static_cast<std::size_t>(j * d + c);
      const double want = static_cast<double>(rows.k[at]);
      own_error += std::pow(static_cast<double>(got.k[at]) - want, 2);
      own_norm += std::pow(want - mean, 2);  // the mean is exact in either mode
    }
    error += own_error;
    norm += own_norm;
    errors.channel += own_error / own_norm / static_cast<double>(d);
  }
  errors.all = std::sqrt(error / norm);
  errors.channel = std::sqrt(errors.channel);
  return errors;
}

TEST(KvChannels, ErrorsBesideAScaleAToken) {
  const struct {
    std::int64_t page;
    double bound[4];  // 2, 3, 4, 8 bits, N(0,1)
  } table[] = {{16, {0.32, 0.165, 0.083, 0.0075}},
               {32, {0.335, 0.177, 0.090, 0.0075}},
               {64, {0.345, 0.187, 0.098, 0.0075}}};
  for (const auto& row : table) {
    for (int b = 0; b < 4; ++b) {
      const int bits = b == 3 ? 8 : b + 2;
      for (const Keys kind : {Keys::normal, Keys::loud, Keys::slow}) {
        const KvRows rows = keys(kind);
        const KvTier tier{bits, bits};
        const Errors by_token = errors_of(rows, options(Granularity::per_token, row.page, tier));
        const Errors own = errors_of(rows, options(Granularity::per_channel, row.page, tier));
        const char* const names[] = {"normal", "loud", "slow"};
        std::printf(
            "page %2d  %d bits  %-6s  a token %.4f (channels %.4f)  a channel %.4f (%.4f)\n",
            static_cast<int>(row.page), bits, names[static_cast<int>(kind)], by_token.all,
            by_token.channel, own.all, own.channel);
        // Whatever the other channels do, a channel's error is what N(0,1) has.
        EXPECT_LE(own.channel, row.bound[b]) << row.page << " " << bits;
        if (kind == Keys::normal) {
          EXPECT_LE(own.all, 1.01 * by_token.all);
        } else if (bits < 8) {
          // At equal bits of codes, and at equal bits in all: a bit more halves the error at most.
          EXPECT_LE(own.channel, 0.70 * by_token.channel) << row.page << " " << bits;
        }
        if (kind == Keys::slow && bits < 8) {
          EXPECT_LE(own.all, 0.80 * by_token.all) << row.page << " " << bits;
        }
      }
    }
  }
}

TEST(KvChannels, RotatedTheyWouldGainLess) {
  for (const Keys kind : {Keys::normal, Keys::loud, Keys::slow}) {
    const KvRows rows = keys(kind);
    const KvCacheOptions o = options(Granularity::per_channel, 64, {2, 2});
    const Errors own = errors_of(rows, o), turned = errors_of(rows, o, true);
    std::printf("%d: %.4f (channels %.4f), rotated %.4f (%.4f)\n", static_cast<int>(kind), own.all,
                own.channel, turned.all, turned.channel);
    EXPECT_LE(own.all, 1.01 * turned.all);
    EXPECT_LE(own.channel, (kind == Keys::normal ? 1.01 : 0.80) * turned.channel);
  }
}

/// Which tokens read as NaN in K; every other one must be within `most` of what was appended.
std::vector<std::int64_t> bad_rows(const KvCache& cache, std::int64_t id, const KvRows& rows,
                                   float most) {
  const Contents got = test::read_contents(cache, id);
  std::vector<std::int64_t> bad;
  for (std::int64_t j = 0; j < got.length; ++j) {
    std::int64_t nans = 0;
    for (std::int64_t c = 0; c < d; ++c) {
      const auto at = static_cast<std::size_t>(j * d + c);
      nans += std::isnan(got.k[at]) ? 1 : 0;
      if (!std::isnan(got.k[at]) && !(std::abs(got.k[at] - rows.k[at]) <= most)) {
        ADD_FAILURE() << "token " << j << " channel " << c << " is " << got.k[at];
        return bad;
      }
    }
    EXPECT_TRUE(nans == 0 || nans == d) << "half a token is bad";
    if (nans > 0) bad.push_back(j);
  }
  return bad;
}

TEST(KvChannels, ABadTokenSpoilsItselfAlone) {
  for (const std::int64_t page : {16, 32, 64}) {
    KvCacheOptions o = options(Granularity::per_channel, page, {4, 4});
    o.window_format = Format::bf16;
    Result<KvCache> cache = KvCache::create(o);
    const std::int64_t id = *cache->add_sequence();
    KvRows rows = slice(normal_rows(tokens, 1, d, d, 8), 0, 1024);
    const auto put = [&](std::int64_t token, std::int64_t channel, float x) {
      rows.k[static_cast<std::size_t>(token * d + channel)] = x;
    };
    put(130, 0, NAN);
    put(131, 127, inf);
    put(200, 3, -inf);
    put(300, 40, 3e38f);  // no f16 scale holds it
    put(301, 41, 1e6f);
    for (std::int64_t j = 512; j < 576; ++j) put(j, j % d, NAN);  // nothing of a page is left
    append_rows(*cache, id, 0, slice(rows, 0, 260));              // freezes the mean
    append_rows(*cache, id, 0, slice(rows, 260, 1024));
    std::vector<std::int64_t> want{130, 131, 200, 300, 301};
    for (std::int64_t j = 512; j < 576; ++j) want.push_back(j);
    EXPECT_EQ(bad_rows(*cache, id, rows, 1.5f), want) << page;
  }
}

TEST(KvChannels, WhatAWorseTierCannotHoldBecomesBadThere) {
  // 8 bits hold |x| up to 65504 * 128, 2 bits up to twice 65504: about the mean of all keys.
  KvCacheOptions o = options(Granularity::per_channel, 16, {8, 8});
  o.window_format = Format::bf16;
  o.smooth_k = false;
  o.tiers = {{8, 8}, {2, 2}};
  o.average_bits = 4;
  o.budget_from = *KvCache::shortest_length(o);
  Result<KvCache> cache = KvCache::create(o);
  const std::int64_t id = *cache->add_sequence();
  KvRows rows = slice(normal_rows(tokens, 1, d, d, 8), 0, o.budget_from + 400);
  rows.k[200 * d + 7] = 262144.0f;
  std::int64_t at = 0;
  int seen[3] = {};
  for (; at + 16 <= rows.count; at += 16) {
    append_rows(*cache, id, 0, slice(rows, at, at + 16));
    if (at + 16 <= 200) continue;
    std::vector<std::int32_t> tiers(static_cast<std::size_t>(at + 16));
    ASSERT_TRUE(
        cache->read(id, 0, {}, {}, TensorView::dense(tiers.data(), Format::s32, {1, at + 16}))
            .ok());
    const Contents got = test::read_contents(*cache, id);
    ++seen[tiers[200]];
    for (std::int64_t c = 0; c < d; ++c) {
      EXPECT_EQ(std::isnan(got.k[static_cast<std::size_t>(200 * d + c)]), tiers[200] == 2);
      EXPECT_FALSE(std::isnan(got.k[static_cast<std::size_t>(201 * d + c)]));
    }
  }
  EXPECT_TRUE(seen[0] > 0 && seen[1] > 0 && seen[2] > 0) << "every tier is passed";
}

TEST(KvChannels, EvictionAndTruncationLeaveTheScales) {
  KvCacheOptions o = options(Granularity::per_channel, 32, {3, 3});
  Result<KvCache> cache = KvCache::create(o);
  const std::int64_t id = *cache->add_sequence();
  const KvRows rows = slice(keys(Keys::slow), 0, 700);
  append_rows(*cache, id, 0, rows);
  const Contents before = test::read_contents(*cache, id);
  ASSERT_TRUE(cache->evict(id, 0, 0, 101, 117).ok());
  ASSERT_TRUE(cache->truncate(id, 331).ok());
  append_rows(*cache, id, 0, slice(rows, 331, 700));  // the cut page grows: its scales are new
  const Contents after = test::read_contents(*cache, id);
  ASSERT_EQ(after.length, 700);
  for (std::int64_t i = 0; i < 331 * d; ++i) {
    const float x = after.k[static_cast<std::size_t>(i)];
    if (i / d >= 320) {
      ASSERT_NEAR(x, before.k[static_cast<std::size_t>(i)], 4.0f) << i / d;
    } else if (i / d >= 101 && i / d < 117) {
      ASSERT_TRUE(std::isnan(x));
    } else {
      ASSERT_EQ(x, before.k[static_cast<std::size_t>(i)]) << i / d;
    }
  }
}

/// The place of the scales that docs/internals/kv-cache.md gives, read from a file's bytes.
TEST(KvChannels, ScalesAndFlagsEndAPage) {
  for (const std::int64_t page : {16, 64}) {
    KvCacheOptions o = options(Granularity::per_channel, page, {4, 4});
    o.smooth_k = o.smooth_v = false;
    Result<KvCache> cache = KvCache::create(o);
    const std::int64_t id = *cache->add_sequence();
    KvRows rows = slice(keys(Keys::loud), 0, 320);
    rows.k[static_cast<std::size_t>(189 * d)] = NAN;
    append_rows(*cache, id, 0, rows);  // tokens up to 192 are in tiers
    const std::string path = testing::TempDir() + "qattn_kv_channels.safetensors";
    ASSERT_TRUE(cache->save(path).ok());
    std::ifstream in(path, std::ios::binary);
    const std::string file{std::istreambuf_iterator<char>(in), {}};
    std::remove(path.c_str());
    const char* end = file.data() + file.size() - 1;  // behind the pages: one flag of a mean
    std::uint64_t flags[2];
    std::memcpy(flags, end - sizeof flags, sizeof flags);
    EXPECT_EQ(flags[0], std::uint64_t{1} << (page - 3));
    EXPECT_EQ(flags[1], 0u);
    std::uint16_t scales[d];
    std::memcpy(scales, end - sizeof flags - sizeof scales, sizeof scales);
    const Contents got = test::read_contents(*cache, id);
    for (std::int64_t j = 192 - page; j < 192; ++j) {
      for (std::int64_t c = 0; c < d && j != 189; ++c) {
        const double scale = static_cast<double>(formats::F16::decode(scales[c]));
        const double x = static_cast<double>(got.k[static_cast<std::size_t>(j * d + c)]);
        const double code = x / scale + 7.5;
        ASSERT_EQ(code, std::round(code)) << j << " " << c;
        ASSERT_TRUE(code >= 0 && code <= 15) << j << " " << c;
      }
    }
  }
}

TEST(KvChannels, BytesAreThoseOfAScaleAChannel) {
  for (const std::int64_t page : {16, 32, 64}) {
    KvCacheOptions o = options(Granularity::per_channel, page, {4, 2});
    o.heads_kv = 2;
    o.dv = 64;
    Result<KvCache> cache = KvCache::create(o);
    const std::int64_t id = *cache->add_sequence();
    append_rows(*cache, id, 0, normal_rows(1024, 2, d, 64, 1));
    const std::int64_t in_tiers = (1024 - 128) / page - 1, heads = 2;
    const KvBytes b = cache->bytes();
    EXPECT_EQ(b.codes, heads * in_tiers * page * (d * 4 + 64 * 2) / 8);
    EXPECT_EQ(b.scales, heads * in_tiers * (page * 2 + d * 2 + 16));
    EXPECT_EQ(b.window, heads * (128 + page) * (d + 64) * 2);
    EXPECT_EQ(b.tables, heads * (1024 / page) * 24);
    EXPECT_EQ(cache->usage(id, 0)->bytes, b.codes + b.scales + b.window + b.tables + b.means);
  }
}

}  // namespace
}  // namespace qattn
