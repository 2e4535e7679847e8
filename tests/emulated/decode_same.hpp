// A filled cache decoded by the CPU and by the GPU's kernels in the emulator, and how near the two
// must be.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "emulated/device_cache.hpp"
#include "emulated/device_call.hpp"
#include "kvcache/decode_case.hpp"

namespace qattn::test {

inline constexpr double tight = 2e-3;  // docs/NUMERICS.md

/// How near f16 Q and P must come to the CPU's fixed point.
inline void expect_near(const std::vector<float>& got, const std::vector<float>& want, double most,
                        const std::string& what) {
  ASSERT_EQ(got.size(), want.size());
  for (std::size_t i = 0; i < want.size(); ++i) {
    if (std::isnan(want[i]) || std::isinf(want[i])) {
      ASSERT_TRUE(got[i] == want[i] || (std::isnan(want[i]) && std::isnan(got[i])))
          << what << i << ": " << got[i] << " is not " << want[i];
    } else {
      ASSERT_LE(std::abs(got[i] - want[i]), most) << what << i << ": " << got[i] << ", " << want[i];
    }
  }
}

/// Of what is a number in both; NaN must be in the same places.
inline double nrmse(const std::vector<float>& got, const std::vector<float>& want) {
  double error = 0, norm = 0;
  for (std::size_t i = 0; i < want.size(); ++i) {
    if (std::isnan(want[i]) && std::isnan(got[i])) continue;
    const double e = static_cast<double>(got[i]) - static_cast<double>(want[i]);
    error += e * e;
    norm += static_cast<double>(want[i]) * static_cast<double>(want[i]);
  }
  return norm == 0 && error == 0 ? 0 : std::sqrt(error / norm);
}

/// Runs both; `turn` chooses the schedule, negative: all.
inline void expect_same(DecodeCase& c, const KvCache& cache, const std::vector<std::int64_t>& ids,
                        const std::string& what, int turn) {
  ASSERT_TRUE(c.run(cache, ids).ok()) << what;
  MirroredCache mirror(cache, ids);
  std::vector<std::int32_t> slots;
  for (std::size_t i = 0; i < ids.size(); ++i) slots.push_back(static_cast<std::int32_t>(i));
  const auto blocks =
      static_cast<std::int64_t>(c.mass.size() / (ids.size() * static_cast<std::size_t>(c.heads_q)));
  DecodeResults first;
  bool is_first = true;
  for (int i = 0; i < 3; ++i) {
    if (turn >= 0 && i != turn % 3) continue;
    DeviceCall device(c, mirror.view(), slots, blocks);
    const Status s = device.run(timings[i]);
    ASSERT_TRUE(s.ok()) << what << s.message();
    if (is_first) first = device.results();
    is_first = false;
    ASSERT_TRUE(std::memcmp(first.out.data(), device.results().out.data(),
                            first.out.size() * sizeof(float)) == 0)
        << what << "schedule " << i << " changes the result";
  }
  if (std::getenv("QATTN_PRINT_ERRORS") != nullptr) {
    std::printf("%snrmse %.2e\n", what.c_str(), nrmse(first.out, c.out));
  }
  EXPECT_LE(nrmse(first.out, c.out), tight) << what;
  expect_near(first.lse, c.lse, 4e-3, what + "lse ");
  expect_near(first.mass, c.mass, 1e-3, what + "mass ");
  for (std::size_t i = 0; i < c.out.size(); ++i) {
    ASSERT_EQ(std::isnan(c.out[i]), std::isnan(first.out[i])) << what << "out " << i;
  }
}

inline KvCacheOptions uniform(int k_bits, int v_bits, std::int64_t heads = 1,
                              std::int64_t d = 128) {
  KvCacheOptions o;
  o.heads_kv = heads;
  o.d = o.dv = d;
  o.window = 32;
  o.tiers = {{k_bits, v_bits}};
  return o;
}

inline KvCacheOptions mixed(std::int64_t heads = 2, std::int64_t d = 128) {
  KvCacheOptions o;
  o.heads_kv = heads;
  o.d = o.dv = d;
  o.window = 32;
  o.average_bits = 5;
  o.budget_from = *KvCache::shortest_length(o);
  return o;
}

/// With a scale a channel for K, in pages of that many tokens.
inline KvCacheOptions by_channel(KvCacheOptions o, std::int64_t page = 32) {
  o.k_granularity = Granularity::per_channel;
  o.page_size = page;
  o.window = o.sinks = page;
  if (o.average_bits > 0) o.budget_from = *KvCache::shortest_length(o);
  return o;
}

/// NaN or -Inf in token `bad` of 400, of two heads' second: exactly who sees it is spoilt, until it
/// is evicted. 8 queries, at 392 to 399.
inline void expect_spoilt_by(const KvCacheOptions& o, bool in_v, std::int64_t bad, bool debias,
                             int turn) {
  Result<KvCache> cache = KvCache::create(o);
  const std::int64_t id = *cache->add_sequence();
  KvRows rows = normal_rows(400, 2, 128, 128, 1);
  std::vector<float>& x = in_v ? rows.v : rows.k;
  x[static_cast<std::size_t>((bad * 2 + 1) * 128 + 17)] =
      bad == 200 ? -std::numeric_limits<float>::infinity() : NAN;
  append_rows(*cache, id, 0, rows);
  DecodeCase c = queries_for(o, 2, 8);
  c.options.debias = debias;
  expect_same(c, *cache, {id}, "bad " + std::to_string(bad) + ": ", turn);
  std::int64_t spoilt = 0;
  for (const float v : c.out) spoilt += std::isnan(v) ? 1 : 0;
  EXPECT_EQ(spoilt, 2 * 128 * (bad == 397 ? 3 : 8));
  ASSERT_TRUE(cache->evict(id, 0, -1, bad, bad + 1).ok());
  expect_same(c, *cache, {id}, "after its eviction ", turn + 1);
}

/// Several queries, windows, softcap, sinks, debias and trees, in every combination.
inline void expect_same_with_every_feature(const Filled& f) {
  for (int features = 0; features < 32; ++features) {
    const std::int64_t queries = std::array<std::int64_t, 4>{1, 3, 8, 2}[features % 4];
    DecodeCase c = queries_for(f.cache.options(), features % 3 == 0 ? 1 : 4, queries);
    c.options.causal = (features & 1) == 0;
    if (features & 2) c.options.window_left = queries == 2 ? 3 : 317;
    if (features & 4) c.options.softcap = 2.5f;
    c.options.debias = (features & 5) == 1;
    if (features & 8) c.sinks = normal_values(c.heads_q, 5, 3.0f);
    if (features & 16) {
      std::mt19937 random(static_cast<unsigned>(features));
      for (std::int64_t i = 0; i < queries * queries; ++i) {
        c.tree.push_back(static_cast<std::uint8_t>(random() % 2));
      }
    }
    expect_same(
        c, f.cache, {f.id},
        "queries " + std::to_string(queries) + " features " + std::to_string(features) + ": ",
        features);
  }
}

/// With and without rotation and means, in either format of the window.
inline void expect_same_under_every_option(KvCacheOptions o, std::int64_t length) {
  int turn = 0;
  for (const bool rotate : {false, true}) {
    for (const bool smooth : {false, true}) {
      for (const Format format : {Format::f16, Format::bf16}) {
        o.rotate = rotate;
        o.smooth_k = smooth;
        o.window_format = format;
        o.budget_from = 0;
        if (o.average_bits > 0) o.budget_from = *KvCache::shortest_length(o);
        const Filled f = fill(o, length, 8.0f);
        DecodeCase c = queries_for(o, 2, 3);
        c.options.softmax_scale = 0.05f;
        expect_same(c, f.cache, {f.id}, "turn " + std::to_string(turn) + ": ", turn);
        ++turn;
      }
    }
  }
}

}  // namespace qattn::test
