// Keys and values that drift after the first page was quantised (kvcache/keys/drift.hpp).
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <functional>

#include "kvcache/data.hpp"
#include "kvcache/decode_case.hpp"

namespace qattn {
namespace {

using test::append_rows;
using test::contents_of;
using test::DecodeCase;
using test::KvRows;
using test::normal_rows;
using test::normal_values;
using test::slice;

constexpr std::int64_t heads = 2, d = 128, length = 2048, group = 2, turn = 704;
constexpr std::int64_t loud = 30;  ///< and the next channel, and their partners in RoPE's pairs

/// What is done to x, of K or V, at a position, of a channel.
using Change = std::function<void(float& x, bool value, std::int64_t at, std::int64_t channel)>;

bool is_loud(std::int64_t c) { return c % (d / 2) == loud || c % (d / 2) == loud + 1; }

KvRows changed(const Change& change) {
  KvRows rows = normal_rows(length, heads, d, d, 31);
  for (std::int64_t i = 0; i < length * heads * d; ++i) {
    const auto at = static_cast<std::size_t>(i);
    change(rows.k[at], false, i / (heads * d), i % d);
    change(rows.v[at], true, i / (heads * d), i % d);
  }
  return rows;
}

KvCacheOptions options(int bits) {
  KvCacheOptions o;
  o.heads_kv = heads;
  o.window = 64;
  o.tiers = {{bits, bits}};
  return o;
}

/// 150 tokens, then 16 at a time; or all at once.
std::int64_t fill(KvCache& cache, const KvRows& rows, bool stream = true) {
  const std::int64_t id = *cache.add_sequence();
  std::int64_t at = stream ? 150 : length;
  append_rows(cache, id, 0, slice(rows, 0, at));
  for (; at < length; at += 16) {
    append_rows(cache, id, 0, slice(rows, at, std::min(at + 16, length)));
  }
  return id;
}

DecodeCase queries() {
  DecodeCase c;
  c.queries = 8;
  c.heads_q = heads * group;
  c.options.causal = false;
  c.q = normal_values(c.queries * c.heads_q * d, 7, 2.0f);
  for (std::size_t i = 0; i < c.q.size(); ++i) {
    if (is_loud(static_cast<std::int64_t>(i) % d)) c.q[i] *= 0.02f;
  }
  return c;
}

/// Error of the output, and root mean square error of V as it reads: where V moves, K's noise is in
/// the output, too, which mixes what is far apart.
struct Error {
  double out, v;
};
Error error_of(const KvCache& cache, std::int64_t id, const KvRows& rows) {
  DecodeCase c = queries();
  if (const Status s = c.run(cache, {id}); !s.ok()) ADD_FAILURE() << s.message();
  const test::Contents given = contents_of(rows, heads, d, d),
                       read = test::read_contents(cache, id);
  double sum = 0;
  for (std::size_t i = 0; i < given.v.size(); ++i) {
    sum += std::pow(static_cast<double>(read.v[i]) - static_cast<double>(given.v[i]), 2);
  }
  return {test::nrmse(c.out, attend(c, cache.options(), {given}).out),
          std::sqrt(sum / static_cast<double>(given.v.size()))};
}

Error error_of(const KvCacheOptions& o, const KvRows& rows, bool stream = true) {
  Result<KvCache> cache = KvCache::create(o);
  if (!cache.ok()) ADD_FAILURE() << cache.status().message();
  const std::int64_t id = fill(*cache, rows, stream);
  return error_of(*cache, id, rows);
}

float offset(std::int64_t c) { return std::cos(static_cast<float>(c)); }

struct Drift {
  const char* name;
  Change change;
};
const Drift drifts[] = {
    {"K's means move by 6 sigma",
     [](float& x, bool v, std::int64_t at, std::int64_t c) {
       if (!v) x += 6 * offset(c) * static_cast<float>(at) / length;
     }},
    {"K's means jump by 20",
     [](float& x, bool v, std::int64_t at, std::int64_t c) {
       if (!v && at >= turn) x += 20 * offset(c);
     }},
    {"K's means go and come back",
     [](float& x, bool v, std::int64_t at, std::int64_t c) {
       if (!v && at / 256 % 2 == 1) x += 20 * offset(c);
     }},
    {"pairs of K 50 times as loud",
     [](float& x, bool v, std::int64_t at, std::int64_t c) {
       if (!v && at >= turn && is_loud(c)) x *= 50;
     }},
    {"pairs of K 400 times as loud",
     [](float& x, bool v, std::int64_t at, std::int64_t c) {
       if (!v && at >= turn && is_loud(c)) x *= 400;
     }},
    {"V's means come",
     [](float& x, bool v, std::int64_t at, std::int64_t c) {
       if (v && at >= turn) x += 30 * offset(c);
     }},
    {"V's means move by 10 sigma",
     [](float& x, bool v, std::int64_t at, std::int64_t c) {
       if (v) x += 10 * offset(c) * (1 + static_cast<float>(at) / length);
     }},
    {"V's means turn",
     [](float& x, bool v, std::int64_t at, std::int64_t c) {
       if (v) x += (at >= turn ? -30.0f : 30.0f) * offset(c);
     }},
};

TEST(KvDrift, OfKeysAndValuesIsAnswered) {
  for (const int bits : {4, 8}) {
    const Error normal = error_of(options(bits), normal_rows(length, heads, d, d, 31));
    for (const Drift& drift : drifts) {
      const KvRows rows = changed(drift.change);
      const Error error = error_of(options(bits), rows),
                  once = error_of(options(bits), rows, false);
      std::printf("%d bits, %-28s %.4f %.4f, at once %.4f %.4f, without %.4f %.4f\n", bits,
                  drift.name, error.out, error.v, once.out, once.v, normal.out, normal.v);
      EXPECT_LE(error.out, std::max(2 * normal.out, 1.3 * once.out)) << drift.name;
      EXPECT_LE(error.v, 2 * normal.v) << drift.name;
    }
  }
}

std::int64_t sets_of(const KvCache& cache, std::int64_t id) {
  return cache.data().find(id)->layers[0].sets.count;
}

/// Fewer sets than drifts: what is old must make room.
TEST(KvDrift, SetsGoWithTheirPages) {
  const KvCacheOptions o = options(4);
  Result<KvCache> cache = KvCache::create(o);
  const std::int64_t id = *cache->add_sequence();
  const KvRows normal = normal_rows(128, heads, d, d, 3);
  for (int phase = 0; phase < 3 * kv::most_sets; ++phase) {
    KvRows rows = normal;
    for (std::size_t i = 0; i < rows.k.size(); ++i) {
      rows.k[i] += 12 * std::cos(static_cast<float>((phase + 1) * static_cast<int>(i % d)));
    }
    append_rows(*cache, id, 0, rows);
    const std::int64_t end = *cache->length(id, 0);
    ASSERT_TRUE(cache->evict(id, 0, -1, 0, std::max<std::int64_t>(end - 512, 0)).ok());
    EXPECT_LE(sets_of(*cache, id), kv::most_sets);
    if (phase < 4) continue;
    const test::Contents read = test::read_contents(*cache, id);
    double sum = 0, count = 0;
    for (std::int64_t at = end - 256; at < end - 128; ++at) {  // of the phase before this one
      for (std::int64_t c = 0; c < d; ++c) {
        const float given = normal.k[static_cast<std::size_t>((at % 128 * heads) * d + c)] +
                            12 * std::cos(static_cast<float>(phase * static_cast<int>(c)));
        sum += std::pow(static_cast<double>(read.k[static_cast<std::size_t>(at * d + c)]) -
                            static_cast<double>(given),
                        2);
        ++count;
      }
    }
    EXPECT_LE(std::sqrt(sum / count), 0.2) << phase;
  }
  EXPECT_GT(sets_of(*cache, id), 1);
  ASSERT_TRUE(cache->truncate(id, 100).ok());
  EXPECT_EQ(sets_of(*cache, id), 0);
}

/// Sets cost bytes, and a budget that has no room for them has none.
TEST(KvDrift, ABudgetHolds) {
  for (const bool tight : {false, true}) {
    KvCacheOptions o = options(4);
    o.tiers = {{8, 8}, {4, 4}, {2, 2}};
    o.average_bits = 3;
    if (tight) o.budget_from = *KvCache::shortest_length(o);
    const KvRows rows = changed(drifts[2].change);
    Result<KvCache> cache = KvCache::create(o);
    ASSERT_TRUE(cache.ok());
    const std::int64_t id = *cache->add_sequence();
    std::int64_t most = 0;
    for (int round = 0; round < 2; ++round) {
      for (std::int64_t at = 0; at < length; at += 25) {
        append_rows(*cache, id, 0, slice(rows, at, std::min(at + 25, length)));
        const KvUsage u = *cache->usage(id, 0);
        ASSERT_LE(u.bytes, u.allowed_bytes) << at;
        most = std::max(most, sets_of(*cache, id));
      }
      ASSERT_TRUE(cache->truncate(id, 500).ok());
      const KvUsage u = *cache->usage(id, 0);
      ASSERT_LE(u.bytes, u.allowed_bytes);
    }
    EXPECT_EQ(most > 1, !tight);
  }
}

TEST(KvDrift, FilesHaveAllSets) {
  const std::string path = testing::TempDir() + "qattn_kv_drift.safetensors";
  const KvRows rows = changed(drifts[2].change);
  Result<KvCache> cache = KvCache::create(options(4));
  const std::int64_t id = fill(*cache, rows);
  ASSERT_GT(sets_of(*cache, id), 1);
  ASSERT_TRUE(cache->save(path).ok());
  Result<KvCache> loaded = KvCache::load(path);
  ASSERT_TRUE(loaded.ok()) << loaded.status().message();
  for (int step = 0; step < 3; ++step) {
    EXPECT_EQ(test::read_contents(*cache, id).k, test::read_contents(*loaded, id).k);
    EXPECT_EQ(error_of(*cache, id, rows).out, error_of(*loaded, id, rows).out);
    if (step == 2) break;
    for (KvCache* c : {&*cache, &*loaded}) {
      ASSERT_TRUE(c->truncate(id, 1500).ok());
      append_rows(*c, id, 0, slice(rows, 1500, length));
    }
  }
  ASSERT_TRUE(loaded->save(path).ok());
  std::ifstream in(path, std::ios::binary);
  const std::string good{std::istreambuf_iterator<char>(in), {}};
  EXPECT_NE(good.find("version=4 "), std::string::npos);
  const auto refused = [&](std::size_t at, char byte, const char* words) {
    std::string bad = good;
    bad[at] = byte;
    std::ofstream(path, std::ios::binary).write(bad.data(), static_cast<long>(bad.size()));
    const Result<KvCache> none = KvCache::load(path);
    ASSERT_FALSE(none.ok());
    EXPECT_NE(none.status().message().find(words), std::string::npos) << none.status().message();
  };
  std::uint64_t header = 0;
  std::memcpy(&header, good.data(), sizeof header);
  const std::size_t tables = 8 + header + 8 + 8 + 8 * heads;  // sequences, lengths, table_sizes
  refused(tables + 23, 1, "tables: entry 0");                 // a sink, in 16 bits
  refused(tables + 24 * 20 + 23, 100, "tables: entry 20");
  refused(8 + good.substr(8).find("version=4") + 8, '3', "mean_flags: do not fit k_means");
  std::remove(path.c_str());
}

}  // namespace
}  // namespace qattn
