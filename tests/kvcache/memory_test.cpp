// Memory that runs out: whichever allocation of a call is the first to fail, the call says so in a
// Status and the cache is as it was.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <functional>
#include <iterator>
#include <optional>

#include "kvcache/counted_new.hpp"
#include "kvcache/decode_case.hpp"
#include "qattn/qattn.h"

namespace qattn {
namespace {

using test::append_rows;
using test::KvRows;
using test::normal_rows;
using test::normal_values;

/// Everything that a cache holds, and what of its memory is used.
std::string state_of(const KvCache& cache) {
  const std::string path = testing::TempDir() + "kv-memory-" + std::to_string(getpid());
  EXPECT_TRUE(cache.save(path).ok());
  std::ifstream in(path, std::ios::binary);
  std::string state{std::istreambuf_iterator<char>(in), {}};
  std::remove(path.c_str());
  const KvBytes b = cache.bytes();
  for (const std::int64_t x : {b.codes, b.scales, b.window, b.tables, b.means}) {
    state += std::to_string(x);
    state += ' ';
  }
  return state;
}

/// Makes a call with room for 0, 1, 2, ... allocations until it needs no more; returns how many it
/// makes.
std::int64_t run_out_of_memory(const KvCache& cache, const std::function<Status()>& call) {
  const std::string before = state_of(cache);
  for (std::int64_t room = 0; room < 10000; ++room) {
    Status s;
    {
      const test::Counted counted;
      const test::MemoryLimit limit(room);
      s = call();
    }
    EXPECT_EQ(test::counted_bytes(), cache.bytes().total) << room << ": what is lost, or not told";
    if (s.ok()) return room;
    EXPECT_EQ(s.code(), Code::out_of_memory) << room << ": " << s.message();
    EXPECT_FALSE(s.message().empty()) << room;
    EXPECT_TRUE(state_of(cache) == before) << "allocation " << room << " failed";
    if (testing::Test::HasFailure()) break;
  }
  ADD_FAILURE() << "the call does not end";
  return 0;
}

class KvMemory : public testing::Test {
 protected:
  void SetUp() override {
    const test::Counted counted;
    KvCacheOptions o;
    o.layers = 2;
    o.heads_kv = 2;
    o.d = o.dv = 32;
    o.window = 32;
    o.average_bits = 6;
    o.importance = KvImportance::key_norm;
    cache_.emplace(std::move(*KvCache::create(o)));
    a_ = *cache_->add_sequence();
    b_ = *cache_->add_sequence();
    for (const std::int64_t layer : {0, 1}) {
      append_rows(*cache_, a_, layer, normal_rows(460, 2, 32, 32, 1));
      append_rows(*cache_, b_, layer, normal_rows(71, 2, 32, 32, 2));
    }
  }

  /// `count` tokens to every sequence of `ids`.
  std::function<Status()> append(std::vector<std::int64_t> ids, std::int64_t count) {
    const auto batch = static_cast<std::int64_t>(ids.size());
    rows_ = normal_rows(batch * count, 2, 32, 32, 3);
    KvAppendTensors t;
    t.k = TensorView::dense(rows_.k.data(), Format::f32, {batch, count, 2, 32});
    t.v = TensorView::dense(rows_.v.data(), Format::f32, {batch, count, 2, 32});
    return [this, ids, t] { return cache_->append(0, ids, t); };
  }
  template <class T>
  static std::function<Status()> status_of(T call) {
    return [call] { return call().status(); };
  }

  std::optional<KvCache> cache_;
  std::int64_t a_ = 0, b_ = 0;
  KvRows rows_;
};

TEST_F(KvMemory, Append) {
  // A step that only fills tails, one that opens pages and quantises, and many pages (and slabs).
  for (const std::int64_t count : {1, 20, 1500}) {
    EXPECT_GT(run_out_of_memory(*cache_, append({a_, b_}, count)), 5) << count;
  }
  EXPECT_EQ(*cache_->length(a_, 0), 460 + 1521);
}

TEST_F(KvMemory, AppendToSequencesThatSharePages) {
  std::int64_t copy = 0;
  {
    const test::Counted counted;
    copy = *cache_->fork(a_);
  }
  EXPECT_GT(run_out_of_memory(*cache_, append({copy, a_}, 1)), 5);
  EXPECT_GT(run_out_of_memory(*cache_, append({copy, a_}, 200)), 5);
}

TEST_F(KvMemory, AddForkAndRelease) {
  EXPECT_GT(run_out_of_memory(*cache_, status_of([&] { return cache_->add_sequence(); })), 0);
  EXPECT_GT(run_out_of_memory(*cache_, status_of([&] { return cache_->fork(a_); })), 4);
  EXPECT_EQ(run_out_of_memory(*cache_, [&] { return cache_->release(a_); }), 0);
  EXPECT_EQ(run_out_of_memory(*cache_, [&] { return cache_->release(b_); }), 0);
}

TEST_F(KvMemory, TruncateAndEvict) {
  EXPECT_EQ(run_out_of_memory(*cache_, [&] { return cache_->evict(a_, 0, -1, 30, 90); }), 0);
  EXPECT_EQ(run_out_of_memory(*cache_, [&] { return cache_->truncate(a_, 200); }), 0);
  EXPECT_GT(run_out_of_memory(*cache_, append({a_}, 100)), 5) << "behind a truncated page";
}

TEST_F(KvMemory, Importance) {
  std::vector<float> mass(4 * 29, 0.25f);
  const TensorView view = TensorView::dense(mass.data(), Format::f32, {1, 4, 29});
  const TensorView told = TensorView::dense(mass.data(), Format::f32, {2, 29});
  EXPECT_GT(run_out_of_memory(*cache_, [&] { return cache_->observe(0, {&a_, 1}, view); }), 0);
  run_out_of_memory(*cache_, [&] { return cache_->set_importance(a_, 0, told); });
}

TEST_F(KvMemory, DecodeLeavesItsOutputsAlone) {
  const std::vector<float> q = normal_values(2 * 8 * 4 * 32, 5);
  std::vector<float> out(2 * 8 * 4 * 32, 7.0f), lse(2 * 4 * 8, 7.0f), mass(2 * 4 * 29, 7.0f);
  KvDecodeTensors t;
  t.q = TensorView::dense(q.data(), Format::f32, {2, 8, 4, 32});
  t.out = TensorView::dense(out.data(), Format::f32, {2, 8, 4, 32});
  t.lse = TensorView::dense(lse.data(), Format::f32, {2, 4, 8});
  t.mass = TensorView::dense(mass.data(), Format::f32, {2, 4, 29});
  const std::int64_t ids[] = {a_, b_};
  const auto untouched = [](const std::vector<float>& x) {
    return std::all_of(x.begin(), x.end(), [](float v) { return v == 7.0f; });
  };
  const auto call = [&]() -> Status {
    Status s = decode(*cache_, 0, ids, t);
    EXPECT_EQ(s.ok(), !untouched(out));
    EXPECT_EQ(s.ok(), !untouched(lse));
    EXPECT_EQ(s.ok(), !untouched(mass));
    return s;
  };
  EXPECT_GT(run_out_of_memory(*cache_, call), 3);
}

/// Where not even the message of a refusal has room.
TEST_F(KvMemory, Refusals) {
  using Answer = Result<std::int64_t>;  // to copy a Status would take memory
  const std::function<Answer()> calls[] = {
      [&] { return Answer(cache_->release(99)); },
      [&] { return cache_->length(99, 0); },
      [&] { return cache_->length(a_, 7); },
      [&] { return Answer(cache_->truncate(99, 0)); },
      [&] { return Answer(cache_->truncate(a_, -1)); },
      [&] { return Answer(cache_->evict(99, 0, 0, 0, 1)); },
      [&] { return Answer(cache_->evict(a_, 9, 0, 0, 1)); },
      [&] { return Answer(cache_->evict(a_, 0, 9, 0, 1)); },
      [&] { return Answer(cache_->evict(a_, 0, 0, 5, 4)); },
      [&] { return cache_->fork(99); },
  };
  for (const auto& call : calls) {
    for (std::int64_t room = 0;; ++room) {
      ASSERT_LT(room, 100);
      Answer answer(std::int64_t{0});
      {
        const test::MemoryLimit limit(room);
        answer = call();
      }
      ASSERT_FALSE(answer.ok());
      ASSERT_FALSE(answer.status().message().empty());
      if (answer.status().code() == Code::invalid_argument) break;
      ASSERT_EQ(answer.status().code(), Code::out_of_memory);
    }
  }
}

/// The C interface's message is that of the call at hand, not of a failure before.
TEST(KvMemoryInC, TheMessageIsOfThisFailure) {
  qattn_kv_options o;
  qattn_kv_cache* cache = nullptr;
  std::int64_t room = 0;
  for (bool made = false; !made && room < 10000; ++room) {
    qattn_kv_options_init(&o);
    o.tier_count = 1;
    o.window = 100;
    ASSERT_EQ(qattn_kv_create(&o, &cache), QATTN_INVALID_ARGUMENT);
    ASSERT_NE(std::string(qattn_last_error()).find("window"), std::string::npos);
    o.window = 128;
    qattn_status status = QATTN_OK;
    {
      const test::Counted counted;
      const test::MemoryLimit limit(room);
      status = qattn_kv_create(&o, &cache);
    }
    made = status == QATTN_OK;
    if (made) break;
    EXPECT_EQ(status, QATTN_OUT_OF_MEMORY) << room;
    const std::string message = qattn_last_error();
    EXPECT_NE(message.find("memory"), std::string::npos) << room << ": " << message;
  }
  EXPECT_GT(room, 3);
  qattn_kv_destroy(cache);
}

}  // namespace
}  // namespace qattn
