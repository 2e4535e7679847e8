// What pages are told they weigh does not depend on how tokens came or on who shares a call. Equal
// caches save equal files, importance included.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <iterator>

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

}  // namespace
}  // namespace qattn
