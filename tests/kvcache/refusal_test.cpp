// Every refusal of the KV cache names what was wrong, and leaves cache and outputs as they were.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "kvcache/decode_case.hpp"

namespace qattn {
namespace {

using test::append_rows;
using test::normal_rows;

void expect_refusal(const Status& s, const std::string& words, Code code = Code::invalid_argument) {
  EXPECT_FALSE(s.ok()) << "should say: " << words;
  EXPECT_NE(s.message().find(words), std::string::npos) << s.message() << "\nshould say: " << words;
  EXPECT_EQ(s.code(), code) << s.message();
}

TEST(KvRefusal, Options) {
  const struct {
    std::function<void(KvCacheOptions&)> change;
    const char* words;
  } rows[] = {
      {[](KvCacheOptions& o) { o.layers = 0; }, "layers: 0 is not from 1 to 65536"},
      {[](KvCacheOptions& o) { o.heads_kv = -1; }, "heads_kv: -1"},
      {[](KvCacheOptions& o) { o.d = 577; }, "d: 577 is not from 1 to 576"},
      {[](KvCacheOptions& o) { o.dv = 513; }, "dv: 513 is not from 1 to 512"},
      {[](KvCacheOptions& o) { o.page_size = 48; }, "page_size: 48 is not 16, 32 or 64"},
      {[](KvCacheOptions& o) { o.window = 0; }, "window: 0 is not a multiple of page_size 16"},
      {[](KvCacheOptions& o) { o.window = 100; }, "window: 100"},
      {[](KvCacheOptions& o) { o.sinks = 8; }, "sinks: 8"},
      {[](KvCacheOptions& o) { o.window_format = Format::f32; },
       "window_format: f32 is neither f16 nor bf16"},
      {[](KvCacheOptions& o) { o.tiers.clear(); }, "tiers: there are 0"},
      {[](KvCacheOptions& o) { o.tiers = {{5, 4}}; }, "tiers[0]: 5 bits of K and 4 of V"},
      {[](KvCacheOptions& o) { o.tiers = {{4, 2}, {2, 4}}; }, "tiers[1]: should have fewer bits"},
      {[](KvCacheOptions& o) { o.tiers = {{4, 4}, {4, 4}}; }, "tiers[1]: should have fewer bits"},
      {[](KvCacheOptions& o) { o.k_granularity = Granularity::per_head; },
       "k_granularity: per_head is neither per_token nor per_channel"},
      {[](KvCacheOptions& o) { o.k_granularity = static_cast<Granularity>(99); },
       "k_granularity: 99 is neither per_token nor per_channel"},
      {[](KvCacheOptions& o) {
         o.k_granularity = Granularity::per_channel;
         o.average_bits = 2.6;
       },
       "average_bits: 2.6 hold at no length up to 2^30 tokens: a page of the last tier takes "
       "2.640625 with its scales"},
      {[](KvCacheOptions& o) { o.average_bits = -1; }, "average_bits: -1.0 is not from 0 to 64"},
      {[](KvCacheOptions& o) { o.average_bits = NAN; }, "average_bits: nan"},
      {[](KvCacheOptions& o) { o.average_bits = 2.1; },
       "average_bits: 2.1 hold at no length up to 2^30 tokens: a page of the last tier takes "
       "2.171875 with its "
       "scales"},
      {[](KvCacheOptions& o) { o.budget_from = std::int64_t{1} << 31; },
       "budget_from: 2147483648 is not from 0 to 2^30 tokens"},
      {[](KvCacheOptions& o) { o.average_bits = 0; }, "tiers: more than one without average_bits"},
      {[](KvCacheOptions& o) { o.importance_decay = 1; }, "importance_decay: 1.0 is not in [0, 1)"},
      {[](KvCacheOptions& o) { o.hysteresis = -1; }, "hysteresis: -1.0"},
      {[](KvCacheOptions& o) { o.threads = -2; }, "threads: -2 is not in [0, 4096]"},
      {[](KvCacheOptions& o) { o.budget_from = 1000; },
       "budget_from: the budget cannot hold from 1000 tokens on; with a window of 128 and 16 sinks "
       "in 16 bits it holds from "},
  };
  for (const auto& row : rows) {
    KvCacheOptions o;
    o.average_bits = 3;
    row.change(o);
    const Result<KvCache> cache = KvCache::create(o);
    expect_refusal(cache.status(), row.words);
  }
}

TEST(KvRefusal, TheShortestLengthOfLargeWindowsAndScarceBudgets) {
  KvCacheOptions o;
  o.average_bits = 8;
  o.window = 1 << 25;
  Result<std::int64_t> large = KvCache::shortest_length(o);
  ASSERT_TRUE(large.ok()) << large.status().message();
  EXPECT_GT(*large, o.window);
  EXPECT_LT(*large, 4 * o.window);
  o.window = 128;
  o.average_bits = 2.173;  // hardly above the last tier's
  const Result<std::int64_t> scarce = KvCache::shortest_length(o);
  ASSERT_TRUE(scarce.ok()) << scarce.status().message();
  EXPECT_GT(*scarce, 1 << 20);
}

TEST(KvRefusal, TheShortestLengthIsTheFirstThatHolds) {
  using enum Granularity;
  for (const auto& [bits, k] :
       {std::pair{2.5, per_token}, std::pair{3.0, per_token}, std::pair{4.0, per_token},
        std::pair{6.0, per_token}, std::pair{20.0, per_token}, std::pair{3.0, per_channel},
        std::pair{6.0, per_channel}}) {
    KvCacheOptions o;
    o.heads_kv = 2;
    o.average_bits = bits;
    o.k_granularity = k;
    const std::int64_t shortest = *KvCache::shortest_length(o);
    o.budget_from = shortest;
    Result<KvCache> cache = KvCache::create(o);
    ASSERT_TRUE(cache.ok()) << cache.status().message();
    if (shortest > 1) {
      o.budget_from = shortest - 1;
      expect_refusal(KvCache::create(o).status(), "holds from " + std::to_string(shortest));
    }
    // It does hold there and at the lengths behind, whatever the window holds.
    const std::int64_t id = *cache->add_sequence();
    append_rows(*cache, id, 0, normal_rows(shortest, 2, 128, 128, 1));
    for (int i = 0; i < 40; ++i) {
      append_rows(*cache, id, 0, normal_rows(1, 2, 128, 128, 2));
      const Result<KvUsage> u = cache->usage(id, 0);
      ASSERT_LE(u->bytes, u->allowed_bytes) << bits << " bits at length " << u->length;
    }
  }
}

class KvCalls : public testing::Test {
 protected:
  void SetUp() override {
    KvCacheOptions o;
    o.layers = 2;
    o.heads_kv = 2;
    o.d = o.dv = 64;
    o.tiers = {{4, 4}};
    cache_ = std::make_unique<KvCache>(std::move(*KvCache::create(o)));
    id_ = *cache_->add_sequence();
    append_rows(*cache_, id_, 0, normal_rows(300, 2, 64, 64, 1));
    k_ = test::normal_values(2 * 3 * 2 * 64, 1);
    t_.k = TensorView::dense(k_.data(), Format::f32, {1, 3, 2, 64});
    t_.v = t_.k;
    out_.assign(8 * 4 * 64, 7.0f);
    mass_.assign(4 * 19, 7.0f);
    d_.q = TensorView::dense(k_.data(), Format::f32, {1, 1, 4, 64});
    d_.out = TensorView::dense(out_.data(), Format::f32, {1, 1, 4, 64});
  }

  void expect_append(const std::string& words, std::int64_t layer = 0,
                     std::vector<std::int64_t> ids = {}) {
    if (ids.empty()) ids = {id_};
    const KvBytes before = cache_->bytes();
    expect_refusal(cache_->append(layer, ids, t_), words);
    EXPECT_EQ(*cache_->length(id_, 0), 300);
    EXPECT_EQ(cache_->bytes().total, before.total);
  }
  void expect_decode(const std::string& words, const KvDecodeOptions& options = {}) {
    expect_refusal(decode(*cache_, 0, {&id_, 1}, d_, options), words);
    for (const float x : out_) ASSERT_EQ(x, 7.0f) << words;
    for (const float x : mass_) ASSERT_EQ(x, 7.0f) << words;
  }

  std::unique_ptr<KvCache> cache_;
  std::int64_t id_ = 0;
  std::vector<float> k_, out_, mass_;
  KvAppendTensors t_;
  KvDecodeTensors d_;
};

TEST_F(KvCalls, Append) {
  expect_append("layer: 2 is not from 0 to 1", 2);
  expect_append("sequence: 99 is not one of this cache", 0, {99});
  expect_append("sequences: 0 is there twice", 0, {id_, id_});
  const KvAppendTensors good = t_;
  t_.k.shape[3] = 32;
  expect_append("k: shape");
  t_ = good;
  t_.v = {};
  expect_append("v: is missing");
  t_ = good;
  t_.v.format = Format::s32;
  expect_append("v: format s32 is not f32, f16 or bf16");
  t_ = good;
  t_.v = TensorView::dense(k_.data(), Format::f16, {1, 3, 2, 64});
  expect_append("v: format f16 differs from k's f32");
  t_ = good;
  t_.k.data = nullptr;
  expect_append("k: data pointer is null");
  t_ = good;
  const std::int32_t cu[] = {0, 4};
  t_.k = t_.v = TensorView::dense(k_.data(), Format::f32, {3, 2, 64});
  t_.cu_seqlens = TensorView::dense(cu, Format::s32, {2});
  expect_append("cu_seqlens: entry 1 is 4");
  t_ = good;
  const float weights[2 * 19] = {-1};
  t_.importance = TensorView::dense(weights, Format::f32, {1, 2, 19});
  expect_append("importance: element 0 is -1");
  t_.importance = TensorView::dense(weights, Format::f32, {1, 2, 18});
  expect_append("importance: shape (1, 2, 18) should be (1, 2, 19)");
}

TEST_F(KvCalls, SequencesAndContents) {
  expect_refusal(cache_->fork(7).status(), "sequence: 7");
  expect_refusal(cache_->release(7), "sequence: 7");
  expect_refusal(cache_->truncate(id_, -1), "length: -1 is below 0");
  expect_refusal(cache_->evict(id_, 2, 0, 0, 1), "layer: 2 is not from -1 to 1");
  expect_refusal(cache_->evict(id_, 0, 2, 0, 1), "head: 2 is not from -1 to 1");
  expect_refusal(cache_->evict(id_, 0, 0, 5, 4), "begin: tokens 5 to 4 are no range");
  const TensorView wrong = TensorView::dense(mass_.data(), Format::f32, {1, 4, 18});
  expect_refusal(cache_->observe(0, {&id_, 1}, wrong), "mass: 18 blocks should be 19");
  mass_[5] = NAN;
  const TensorView nan = TensorView::dense(mass_.data(), Format::f32, {1, 4, 19});
  expect_refusal(cache_->observe(0, {&id_, 1}, nan), "mass: element 5 is");
  const TensorView odd = TensorView::dense(mass_.data(), Format::f32, {1, 3, 19});
  expect_refusal(cache_->observe(0, {&id_, 1}, odd), "mass: 3 query heads");
  expect_refusal(cache_->read(id_, 0, odd, {}, {}), "k: shape");
}

TEST_F(KvCalls, Decode) {
  const KvDecodeTensors good = d_;
  d_.q = TensorView::dense(k_.data(), Format::f32, {1, 1, 3, 64});
  expect_decode("q: 3 heads should be a multiple of heads_kv 2");
  d_.q = TensorView::dense(k_.data(), Format::f32, {1, 9, 4, 16});
  expect_decode("q: shape");
  std::vector<float> many(9 * 2 * 64);
  d_.q = TensorView::dense(many.data(), Format::f32, {1, 9, 2, 64});
  expect_decode("q: 9 queries of a sequence, should be 1 to 8");
  d_ = good;
  d_.out = TensorView::dense(out_.data(), Format::f32, {1, 1, 4, 32});
  expect_decode("out: shape");
  d_ = good;
  d_.out.data = k_.data();
  expect_decode("out: overlaps the memory of q");
  d_ = good;
  d_.out.device.type = DeviceType::cuda;
  expect_refusal(decode(*cache_, 0, {&id_, 1}, d_, {}), "out: lies on cuda:0", Code::unsupported);
  d_ = good;
  d_.out.device.index = 3;  // host memory has index 0
  expect_refusal(decode(*cache_, 0, {&id_, 1}, d_, {}), "out: lies on cpu:3", Code::unsupported);
  d_ = good;
  d_.mass = TensorView::dense(mass_.data(), Format::f32, {1, 4, 18});
  expect_decode("mass: shape (1, 4, 18) should be (1, 4, 19)");
  d_ = good;
  KvDecodeOptions o;
  o.softcap = -1;
  expect_decode("softcap: -1", o);
  o.softcap = 30;
  o.debias = true;
  expect_decode("debias: should be off with a softcap, here 30.0", o);
  o = {};
  o.window_left = -2;
  expect_decode("window_left: -2 is below -1", o);
  o = {};
  o.softmax_scale = NAN;
  expect_decode("softmax_scale: nan is not finite", o);
  const std::int64_t fresh = *cache_->add_sequence();
  expect_refusal(decode(*cache_, 0, {&fresh, 1}, d_, {}),
                 "q: 1 queries, but sequence 1 has 0 tokens");
}

}  // namespace
}  // namespace qattn
