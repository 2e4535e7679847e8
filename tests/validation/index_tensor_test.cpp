// Index tensors of 64 bits: read where they lie, with the results of 32 bits, and refused by name
// and value where they say what no index is.
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <string>
#include <vector>

#include "qattn/qattn.hpp"

namespace qattn {
namespace {

constexpr std::int64_t far = std::int64_t{1} << 32;  // its low half is 0

/// A call with index tensors; every other element of them belongs to nobody.
struct Indexed {
  std::vector<float> q, k, v, out, lse;
  std::vector<std::int32_t> narrow[5];
  std::vector<std::int64_t> wide[5];
  AttentionTensors t;
  AttentionOptions o;

  explicit Indexed(const char* recipe) { o.recipe = *recipe_named(recipe); }
  static std::vector<float> rows(std::int64_t count) {
    std::vector<float> x(static_cast<std::size_t>(count));
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = std::sin(0.37f * static_cast<float>(i));
    return x;
  }
  void operands(std::initializer_list<std::int64_t> of_q, std::initializer_list<std::int64_t> of_k,
                std::int64_t rows_of_q) {
    const auto size = [](std::initializer_list<std::int64_t> s) {
      return std::accumulate(s.begin(), s.end(), std::int64_t{1}, std::multiplies<>());
    };
    q = rows(size(of_q)), k = rows(size(of_k)), v = rows(size(of_k));
    out.assign(q.size(), -7.0f);
    lse.assign(static_cast<std::size_t>(rows_of_q), -7.0f);
    t.q = TensorView::dense(q.data(), Format::f32, of_q);
    t.k = TensorView::dense(k.data(), Format::f32, of_k);
    t.v = TensorView::dense(v.data(), Format::f32, of_k);
    t.out = TensorView::dense(out.data(), Format::f32, of_q);
  }
  TensorView index(int n, const std::vector<std::int64_t>& values,
                   std::initializer_list<std::int64_t> shape, bool of_64) {
    for (const std::int64_t x : values) {
      wide[n].insert(wide[n].end(), {x, -1});
      narrow[n].insert(narrow[n].end(), {static_cast<std::int32_t>(x), -1});
    }
    TensorView view = of_64 ? TensorView::dense(wide[n].data(), Format::s64, shape)
                            : TensorView::dense(narrow[n].data(), Format::s32, shape);
    for (int i = 0; i < view.rank; ++i) view.stride[i] *= 2;
    return view;
  }
  /// Sequences of 3 and 4 queries, 5 and 6 keys, of which 4 and 6 exist.
  void pack(bool of_64, std::int64_t last = 7) {
    operands({7, 2, 16}, {11, 2, 16}, 14);
    t.lse = TensorView::dense(lse.data(), Format::f32, {2, 7});
    t.cu_seqlens_q = index(0, {0, 3, last}, {3}, of_64);
    t.cu_seqlens_k = index(1, {0, 5, 11}, {3}, of_64);
    t.seqused_q = index(2, {3, 2}, {2}, of_64);
    t.seqused_k = index(3, {4, 6}, {2}, of_64);
  }
  /// Two sequences over five pages of four keys.
  void page(bool of_64, std::int64_t second = 0) {
    operands({2, 3, 2, 16}, {5, 4, 2, 16}, 12);
    t.lse = TensorView::dense(lse.data(), Format::f32, {2, 2, 3});
    t.page_table = index(4, {3, second, 1, 4}, {2, 2}, of_64);
    t.seqused_k = index(3, {7, 5}, {2}, of_64);
  }
};

void expect_same(void (*make)(Indexed&, bool), const char* recipe) {
  Indexed narrow(recipe), wide(recipe);
  make(narrow, false);
  make(wide, true);
  ASSERT_TRUE(attention(narrow.t, narrow.o).ok());
  const Status s = attention(wide.t, wide.o);
  ASSERT_TRUE(s.ok()) << s.message();
  EXPECT_EQ(wide.out, narrow.out) << recipe;
  EXPECT_EQ(wide.lse, narrow.lse) << recipe;
  std::vector<double> truth(wide.out.size()), same(wide.out.size());
  ASSERT_TRUE(reference_attention(narrow.t, narrow.o, truth).ok());
  ASSERT_TRUE(reference_attention(wide.t, wide.o, same).ok());
  EXPECT_EQ(same, truth);
}

TEST(WideIndex, GivesWhatNarrowOnesGive) {
  for (const char* recipe : {"f32", "bf16", "int8_full", "nvfp4"}) {
    expect_same([](Indexed& c, bool of_64) { c.pack(of_64); }, recipe);
    expect_same([](Indexed& c, bool of_64) { c.page(of_64); }, recipe);
  }
}

TEST(WideIndex, APlanServesBoth) {
  Indexed narrow("f32"), wide("f32");
  narrow.pack(false);
  wide.pack(true);
  const Result<Plan> made = plan(narrow.t, narrow.o);
  ASSERT_TRUE(made.ok());
  std::vector<std::byte> memory(made->workspace_bytes() + 64);
  const auto at = (reinterpret_cast<std::uintptr_t>(memory.data()) + 63) / 64 * 64;
  const Status s = run(*made, wide.t, wide.o, reinterpret_cast<void*>(at), made->workspace_bytes());
  EXPECT_TRUE(s.ok()) << s.message();
}

TEST(WideIndex, WhatDoesNotFitIsRefusedByNameAndValue) {
  const struct {
    void (*make)(Indexed&);
    const char* words;
  } cases[] = {
      {[](Indexed& c) { c.pack(true, 7 + far); },
       "cu_seqlens_q: last entry 4294967303 should be the number of packed tokens, 7"},
      {[](Indexed& c) { c.pack(true, std::numeric_limits<std::int64_t>::min()); },
       "cu_seqlens_q: entry 2 is -9223372036854775808"},
      {[](Indexed& c) {
         c.pack(true);
         c.wide[3][2] = 6 + far;
       },
       "seqused_k: entry 1 is 4294967302, not in [0, 6]"},
      {[](Indexed& c) { c.page(true, far); },
       "page_table: entry (0, 1) is 4294967296, not in [0, 5)"},
      {[](Indexed& c) {
         c.page(true);
         c.t.page_table.device = c.t.seqused_k.device = c.t.q.device = c.t.k.device = c.t.v.device =
             c.t.out.device = c.t.lse.device = {DeviceType::cuda, 0};
       },
       "page_table: format s64 lies on cuda:0, where kernels read s32"},
  };
  for (const auto& x : cases) {
    Indexed c("f32");
    x.make(c);
    const Status s = attention(c.t, c.o);
    EXPECT_EQ(s.code(), Code::invalid_argument);
    EXPECT_NE(s.message().find(x.words), std::string::npos) << s.message();
    EXPECT_EQ(c.out, std::vector<float>(c.out.size(), -7.0f));
  }
}

TEST(WideIndex, OfQuantize) {
  const std::vector<float> x = Indexed::rows(7 * 2 * 16);
  std::vector<std::int64_t> wide = {0, 3, 7};
  QuantizeTensors t;
  t.x = TensorView::dense(const_cast<float*>(x.data()), Format::f32, {7, 2, 16});
  t.cu_seqlens = TensorView::dense(wide.data(), Format::s64, {3});
  const Result<QuantizeShapes> shapes = quantize_shapes(t.x, {}, t.cu_seqlens);
  ASSERT_TRUE(shapes.ok()) << shapes.status().message();
  wide[2] = 7 + far;
  EXPECT_NE(quantize_shapes(t.x, {}, t.cu_seqlens).status().message().find("4294967303"),
            std::string::npos);
}

TEST(WideIndex, OfKvCache) {
  KvCacheOptions o;
  o.heads_kv = 2;
  o.d = o.dv = 16;
  o.tiers = {{4, 4}};
  Result<KvCache> cache = KvCache::create(o);
  ASSERT_TRUE(cache.ok()) << cache.status().message();
  const std::vector<std::int64_t> ids = {*cache->add_sequence(), *cache->add_sequence()};
  std::vector<float> x = Indexed::rows(7 * 2 * 16);
  std::vector<std::int64_t> wide = {0, 3, 7 + far};
  KvAppendTensors t;
  t.k = t.v = TensorView::dense(x.data(), Format::f32, {7, 2, 16});
  t.cu_seqlens = TensorView::dense(wide.data(), Format::s64, {3});
  EXPECT_NE(cache->append(0, ids, t).message().find("cu_seqlens: entry 2 is 4294967303"),
            std::string::npos);
  wide[2] = 7;
  EXPECT_TRUE(cache->append(0, ids, t).ok());
  EXPECT_EQ(*cache->length(ids[1], 0), 4);
}

}  // namespace
}  // namespace qattn
