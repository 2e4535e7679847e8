// What pages weigh: a plain model's numbers, which do not depend on how tokens came or on who
// shares a call. Equal caches save equal files, importance included.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <map>
#include <random>

#include "kvcache/data.hpp"
#include "kvcache/decode_case.hpp"

namespace qattn {
namespace {

using test::append_rows;
using test::KvRows;
using test::normal_rows;
using test::slice;

std::string file_of(const KvCache& cache) {
  const std::string path = testing::TempDir() + "kv-importance-" + std::to_string(getpid());
  EXPECT_TRUE(cache.save(path).ok());
  std::ifstream in(path, std::ios::binary);
  std::string bytes{std::istreambuf_iterator<char>(in), {}};
  std::remove(path.c_str());
  return bytes;
}

KvCache made(std::int64_t page_size) {
  KvCacheOptions o;
  o.heads_kv = 1;
  o.d = o.dv = 32;
  o.page_size = page_size;
  o.window = 64;
  o.sinks = 0;
  o.average_bits = 6;
  return std::move(*KvCache::create(o));
}

void append(KvCache& cache, std::int64_t id, const KvRows& rows, std::vector<float> importance) {
  KvAppendTensors t;
  t.k = TensorView::dense(rows.k.data(), Format::f32, {1, rows.count, 1, 32});
  t.v = TensorView::dense(rows.v.data(), Format::f32, {1, rows.count, 1, 32});
  t.importance = TensorView::dense(importance.data(), Format::f32,
                                   {1, 1, static_cast<std::int64_t>(importance.size())});
  const std::int64_t ids[] = {id};
  const Status s = cache.append(0, ids, t);
  ASSERT_TRUE(s.ok()) << s.message();
}

TEST(KvImportance, OfATailIsTakenWhereverItsTokensComeFrom) {
  const KvRows rows = normal_rows(16, 1, 32, 32, 1);
  KvCache whole = made(16), split = made(16);
  const std::int64_t a = *whole.add_sequence(), b = *split.add_sequence();
  append(whole, a, rows, {5.0f});
  append_rows(split, b, 0, slice(rows, 0, 1));
  append(split, b, slice(rows, 1, 16), {5.0f});
  EXPECT_TRUE(file_of(whole) == file_of(split));
  KvCache untold = made(16);
  append_rows(untold, *untold.add_sequence(), 0, rows);
  EXPECT_FALSE(file_of(whole) == file_of(untold)) << "files do not tell importance apart";
}

TEST(KvImportance, ObservedTogetherOrAlone) {
  constexpr std::int64_t lengths[] = {17, 200}, blocks[] = {2, 13};
  KvCache together = made(64), alone = made(64);
  std::vector<std::int64_t> ids;
  for (KvCache* cache : {&together, &alone}) {
    ids = {*cache->add_sequence(), *cache->add_sequence()};
    for (int i = 0; i < 2; ++i) {
      append_rows(*cache, ids[static_cast<std::size_t>(i)], 0,
                  normal_rows(lengths[i], 1, 32, 32, static_cast<unsigned>(i)));
    }
  }
  std::vector<float> mass(2 * 13);
  for (std::size_t i = 0; i < mass.size(); ++i) mass[i] = 0.01f * static_cast<float>(i + 1);
  ASSERT_TRUE(
      together.observe(0, ids, TensorView::dense(mass.data(), Format::f32, {2, 1, 13})).ok());
  for (std::size_t i = 0; i < 2; ++i) {
    const std::int64_t id[] = {ids[i]};
    const Status s = alone.observe(
        0, id, TensorView::dense(mass.data() + 13 * i, Format::f32, {1, 1, blocks[i]}));
    ASSERT_TRUE(s.ok()) << s.message();
  }
  EXPECT_TRUE(file_of(together) == file_of(alone));
}

/// Importance of one head of a (sequence, layer) as docs/internals/kv-cache.md has it, in float64.
class PlainImportance {
 public:
  struct Page {
    double value = -1;  ///< -1: nothing is known
    bool guessed = false;
  };

  explicit PlainImportance(const KvCacheOptions& o) : o_(o) {}

  /// `keys`: rows of the new tokens; `told`: a value a block, or empty.
  void append(const std::vector<std::vector<double>>& keys, const std::vector<double>& told) {
    const auto old = length();
    keys_.insert(keys_.end(), keys.begin(), keys.end());
    for (std::int64_t first = 0; first < length(); first += o_.page_size) {
      const bool brings = std::min(first + o_.page_size, length()) > old;
      const bool leaves = !in_window(first, length()) && (brings || in_window(first, old));
      if (!brings && !leaves) continue;
      Page& page = pages_[first];
      if (!told.empty()) {
        page = {mean(first, told), false};
      } else if (leaves && o_.importance == KvImportance::key_norm && page.value < 0) {
        page = {1 / mean_square(first), true};
      }
    }
  }
  /// `mass`: a row a query head.
  void observe(const std::vector<std::vector<double>>& mass) {
    std::vector<double> squares(mass[0].size());
    for (const std::vector<double>& row : mass) {
      for (std::size_t i = 0; i < row.size(); ++i) {
        squares[i] += row[i] * row[i] / static_cast<double>(mass.size());
      }
    }
    const auto decay = static_cast<double>(o_.importance_decay);
    for (auto& [first, page] : pages_) {
      const double now = std::sqrt(mean(first, squares));
      const bool measured = page.value >= 0 && !page.guessed;
      page = {measured ? decay * page.value + (1 - decay) * now : now, false};
    }
  }
  void set(const std::vector<double>& told) {
    for (auto& [first, page] : pages_) page = {mean(first, told), false};
  }

  std::int64_t length() const { return static_cast<std::int64_t>(keys_.size()); }
  std::int64_t blocks() const { return (length() + 15) / 16; }
  const std::map<std::int64_t, Page>& pages() const { return pages_; }

 private:
  bool in_window(std::int64_t first, std::int64_t length) const {
    return first < o_.sinks || first + o_.page_size > length - o_.window;
  }
  double mean(std::int64_t first, const std::vector<double>& values) const {
    double sum = 0, count = 0;
    for (std::int64_t at = first; at < std::min(first + o_.page_size, length()); at += 16) {
      sum += values[static_cast<std::size_t>(at / 16)];
      ++count;
    }
    return sum / count;
  }
  double mean_square(std::int64_t first) const {
    double sum = 0, count = 0;
    for (std::int64_t at = first; at < std::min(first + o_.page_size, length()); ++at) {
      for (const double x : keys_[static_cast<std::size_t>(at)]) sum += x * x;
      count += static_cast<double>(o_.d);
    }
    return sum / count;
  }

  KvCacheOptions o_;
  std::vector<std::vector<double>> keys_;
  std::map<std::int64_t, Page> pages_;  ///< by first token
};

/// A cache with one sequence and layer, and the model of each of its heads.
class Weighed {
 public:
  explicit Weighed(const KvCacheOptions& o, unsigned seed)
      : o_(o), cache_(std::move(*KvCache::create(o))), random_(seed) {
    id_ = *cache_.add_sequence();
    for (std::int64_t h = 0; h < o.heads_kv; ++h) heads_.emplace_back(o);
  }

  void append(std::int64_t count, bool tells) {
    KvRows rows = normal_rows(count, o_.heads_kv, o_.d, o_.dv, static_cast<unsigned>(random_()));
    for (float& x : rows.k) x = std::nearbyint(x * 16) / 16;  // f16 has these
    const std::int64_t blocks = (heads_[0].length() + count + 15) / 16;
    const std::vector<float> told = tells ? values(o_.heads_kv * blocks) : std::vector<float>{};
    KvAppendTensors t;
    t.k = TensorView::dense(rows.k.data(), Format::f32, {1, count, o_.heads_kv, o_.d});
    t.v = TensorView::dense(rows.v.data(), Format::f32, {1, count, o_.heads_kv, o_.dv});
    if (tells) t.importance = TensorView::dense(told.data(), Format::f32, {1, o_.heads_kv, blocks});
    const Status s = cache_.append(0, {&id_, 1}, t);
    ASSERT_TRUE(s.ok()) << s.message();
    for (std::int64_t h = 0; h < o_.heads_kv; ++h) {
      std::vector<std::vector<double>> keys;
      for (std::int64_t i = 0; i < count; ++i) {
        const float* row = rows.k.data() + (i * o_.heads_kv + h) * o_.d;
        keys.emplace_back(row, row + o_.d);
      }
      head(h).append(keys, row_of(told, h, tells ? blocks : 0));
    }
  }
  void observe(std::int64_t group) {
    const std::int64_t blocks = heads_[0].blocks(), heads = o_.heads_kv * group;
    const std::vector<float> mass = values(heads * blocks);
    const Status s = cache_.observe(
        0, {&id_, 1}, TensorView::dense(mass.data(), Format::f32, {1, heads, blocks}));
    ASSERT_TRUE(s.ok()) << s.message();
    for (std::int64_t h = 0; h < o_.heads_kv; ++h) {
      std::vector<std::vector<double>> rows;
      for (std::int64_t g = 0; g < group; ++g) rows.push_back(row_of(mass, h * group + g, blocks));
      head(h).observe(rows);
    }
  }
  void set() {
    const std::int64_t blocks = heads_[0].blocks();
    const std::vector<float> told = values(o_.heads_kv * blocks);
    const Status s = cache_.set_importance(
        id_, 0, TensorView::dense(told.data(), Format::f32, {o_.heads_kv, blocks}));
    ASSERT_TRUE(s.ok()) << s.message();
    for (std::int64_t h = 0; h < o_.heads_kv; ++h) head(h).set(row_of(told, h, blocks));
  }
  /// Through a file: what is a guess must still be one.
  void reload() {
    const std::string path = testing::TempDir() + "kv-weighed-" + std::to_string(getpid());
    ASSERT_TRUE(cache_.save(path).ok());
    Result<KvCache> loaded = KvCache::load(path);
    std::remove(path.c_str());
    ASSERT_TRUE(loaded.ok()) << loaded.status().message();
    cache_ = std::move(*loaded);
  }
  void fork() {
    const std::int64_t copy = *cache_.fork(id_);
    ASSERT_TRUE(cache_.release(id_).ok());
    id_ = copy;
  }

  void compare() {
    const kv::Layer& layer = cache_.data().find(id_)->layers[0];
    for (std::int64_t h = 0; h < o_.heads_kv; ++h) {
      const auto& pages = head(h).pages();
      const kv::Table& table = layer.tables[static_cast<std::size_t>(h)];
      ASSERT_EQ(table.size(), pages.size());
      for (const kv::Entry& e : table) {
        const double want = pages.at(e.first).value;
        ASSERT_NEAR(static_cast<double>(e.importance), want, 1e-5 * std::abs(want))
            << "head " << h << " page at " << e.first << " guessed " << pages.at(e.first).guessed;
      }
    }
  }
  std::mt19937& random() { return random_; }

 private:
  PlainImportance& head(std::int64_t h) { return heads_[static_cast<std::size_t>(h)]; }
  std::vector<float> values(std::int64_t count) {
    std::uniform_real_distribution<float> exponent(-4, 0);
    std::vector<float> x(static_cast<std::size_t>(count));
    for (float& v : x) v = std::pow(10.0f, exponent(random_));
    return x;
  }
  static std::vector<double> row_of(const std::vector<float>& x, std::int64_t row,
                                    std::int64_t width) {
    const auto begin = x.begin() + row * width;
    return {begin, begin + width};
  }

  KvCacheOptions o_;
  KvCache cache_;
  std::int64_t id_ = 0;
  std::vector<PlainImportance> heads_;
  std::mt19937 random_;
};

KvCacheOptions weighing(KvImportance importance, std::int64_t page_size = 16) {
  KvCacheOptions o;
  o.heads_kv = 2;
  o.d = 64;
  o.dv = 32;
  o.page_size = page_size;
  o.window = 64;
  o.sinks = page_size == 32 ? 32 : 0;
  o.average_bits = 7;
  o.importance = importance;
  o.importance_decay = 0.75f;
  return o;
}

TEST(KvImportance, TheFirstObservationReplacesAGuessAndLaterOnesAverage) {
  for (const bool detour : {false, true}) {
    Weighed w(weighing(KvImportance::key_norm), 1);
    w.append(200, false);
    w.compare();
    if (detour) {
      w.reload();
      w.fork();
    }
    for (int i = 0; i < 3; ++i) {
      w.observe(2);
      w.compare();
    }
  }
}

TEST(KvImportance, WhatTheCallerTellsIsAveragedInto) {
  for (const bool at_append : {false, true}) {
    Weighed w(weighing(KvImportance::key_norm), 2);
    w.append(200, at_append);
    if (!at_append) w.set();
    w.compare();
    w.observe(1);
    w.compare();
  }
}

TEST(KvImportance, EqualsAPlainModel) {
  for (unsigned seed = 0; seed < 24 && !testing::Test::HasFailure(); ++seed) {
    SCOPED_TRACE(seed);
    const auto kind = seed % 2 ? KvImportance::key_norm : KvImportance::uniform;
    Weighed w(weighing(kind, 16 << seed % 3), seed);
    std::mt19937& random = w.random();
    for (int step = 0; step < 25 && !testing::Test::HasFatalFailure(); ++step) {
      w.append(1 + random() % (random() % 3 ? 20 : 300), random() % 4 == 0);
      w.compare();
      if (random() % 4 == 0) w.observe(1 + random() % 3);
      if (random() % 12 == 0) w.set();
      if (random() % 8 == 0) w.fork();
      if (random() % 8 == 0) w.reload();
      w.compare();
    }
  }
}

}  // namespace
}  // namespace qattn
