// A filled cache decoded by the CPU and by the GPU's kernels in the emulator, and how near the two
// must be.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
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

struct Filled {
  KvCache cache;
  std::int64_t id;
};

/// One sequence; importance at random so that every tier is used.
inline Filled fill(const KvCacheOptions& o, std::int64_t length, float key_shift = 3.0f) {
  Result<KvCache> made = KvCache::create(o);
  if (!made.ok()) ADD_FAILURE() << made.status().message();
  Filled f{std::move(*made), 0};
  f.id = *f.cache.add_sequence();
  const KvRows rows = normal_rows(length, o.heads_kv, o.d, o.dv, 7, key_shift);
  const std::int64_t first = (length + 1) / 2;
  append_rows(f.cache, f.id, 0, slice(rows, 0, first));
  std::vector<float> weights = normal_values(o.heads_kv * ((first + 15) / 16), 3);
  for (float& w : weights) w = std::exp(4 * w);
  const Status s = f.cache.set_importance(
      f.id, 0, TensorView::dense(weights.data(), Format::f32, {o.heads_kv, (first + 15) / 16}));
  EXPECT_TRUE(s.ok()) << s.message();
  if (first < length) append_rows(f.cache, f.id, 0, slice(rows, first, length));
  return f;
}

inline DecodeCase queries_for(const KvCacheOptions& o, std::int64_t group, std::int64_t queries,
                              std::int64_t batch = 1) {
  DecodeCase c;
  c.queries = queries;
  c.heads_q = o.heads_kv * group;
  c.q = normal_values(batch * queries * c.heads_q * o.d, 11, 1.5f);
  c.with_mass = true;
  return c;
}

}  // namespace qattn::test
