// Concurrent calls: shared inputs and shared plans from many threads, each call with one OpenMP
// thread of its own (ThreadSanitizer then judges qattn's code and not the OpenMP runtime's) or two.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <memory>
#include <span>
#include <thread>

#include "hardening/small_call.hpp"
#include "isa/emu/sanitizers.hpp"

namespace qattn::test {
namespace {

/// Runs `work(thread)` on `count` threads that start together.
template <class Work>
void at_once(int count, Work work) {
  std::atomic<int> ready{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < count; ++i) {
    threads.emplace_back([&, i] {
      ++ready;
      while (ready < count) std::this_thread::yield();
      work(i);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

void attention_at_once(int omp_threads) {
  const SmallCall call;
  for (const char* recipe : {"f32", "int8_full", "int8", "fp8", "nvfp4", "auto"}) {
    SCOPED_TRACE(recipe);
    std::vector<float> expected = call.output();
    ASSERT_TRUE(attention(call.tensors(expected), options_of(recipe, omp_threads)).ok());
    std::atomic<int> wrong{0};
    at_once(8, [&](int) {
      for (int n = 0; n < 4; ++n) {
        std::vector<float> out = call.output();
        const Status s = attention(call.tensors(out), options_of(recipe, omp_threads));
        if (!s.ok() || out != expected) ++wrong;
      }
    });
    EXPECT_EQ(wrong, 0);
  }
}

// Must be the first test of the process: what is initialised on first use is so here, at once.
TEST(Threads, FirstUse) {
  const SmallCall call;
  std::vector<std::vector<float>> outs(8, call.output());
  at_once(8, [&](int i) {
    auto& out = outs[static_cast<std::size_t>(i)];
    if (!attention(call.tensors(out), options_of("int8_full", 1)).ok()) out.clear();
  });
  for (const auto& out : outs) EXPECT_EQ(out, outs[0]);
  EXPECT_EQ(outs[0].size(), call.q.size());
}

TEST(Threads, SharedInputs) { attention_at_once(1); }

TEST(Threads, SharedPlan) {
  const SmallCall call(1, 5000);  // decode: keys are split
  const AttentionOptions options = options_of("int8_full", 1);
  std::vector<float> expected = call.output();
  const Result<Plan> made = plan(call.tensors(expected), options);
  ASSERT_TRUE(made.ok());
  ASSERT_TRUE(attention(call.tensors(expected), options).ok());
  std::atomic<int> wrong{0};
  at_once(8, [&](int) {
    const Plan mine = *made;
    const std::size_t bytes = (mine.workspace_bytes() + 63) / 64 * 64;
    const std::unique_ptr<void, decltype(&std::free)> memory(std::aligned_alloc(64, bytes),
                                                             &std::free);
    for (int n = 0; n < 8; ++n) {
      std::vector<float> out = call.output();
      const Status s = run(mine, call.tensors(out), options, memory.get(), bytes);
      if (!s.ok() || out != expected || mine.hash() != made->hash()) ++wrong;
    }
  });
  EXPECT_EQ(wrong, 0);
}

/// One answer of a cache: queries `step` of every sequence.
std::vector<float> decoded(const KvCache& cache, const SmallCall& call,
                           std::span<const std::int64_t> sequences, std::int64_t step) {
  constexpr std::int64_t heads = SmallCall::heads, dim = SmallCall::dim;
  const auto batch = static_cast<std::int64_t>(sequences.size());
  std::vector<float> out(static_cast<std::size_t>(batch * heads * dim));
  std::vector<float> mass(static_cast<std::size_t>(batch * heads * ((call.keys + 15) / 16)));
  KvDecodeTensors t;
  t.q = TensorView::dense(call.q.data() + step * batch * heads * dim, Format::f32,
                          {batch, 1, heads, dim});
  t.out = TensorView::dense(static_cast<void*>(out.data()), Format::f32, {batch, 1, heads, dim});
  t.mass = TensorView::dense(static_cast<void*>(mass.data()), Format::f32,
                             {batch, heads, (call.keys + 15) / 16});
  KvDecodeOptions options;
  options.threads = 1;
  if (!decode(cache, 0, sequences, t, options).ok()) return {};
  out.insert(out.end(), mass.begin(), mass.end());
  return out;
}

TEST(Threads, OneKvCache) {
  // decode() of several threads may read one cache: pages of every tier, shared ones too.
  const SmallCall call(64, 2600);
  constexpr std::int64_t steps = 16;
  KvCacheOptions o;
  o.heads_kv = SmallCall::heads;
  o.d = o.dv = SmallCall::dim;
  o.average_bits = 5;
  o.budget_from = *KvCache::shortest_length(o);
  o.threads = 1;
  Result<KvCache> made = KvCache::create(o);
  ASSERT_TRUE(made.ok()) << made.status().message();
  KvCache& cache = *made;
  std::vector<std::int64_t> sequences = {*cache.add_sequence()};
  KvAppendTensors t;
  t.k = TensorView::dense(call.k.data(), Format::f32,
                          {1, call.keys, SmallCall::heads, SmallCall::dim});
  t.v = TensorView::dense(call.v.data(), Format::f32,
                          {1, call.keys, SmallCall::heads, SmallCall::dim});
  ASSERT_TRUE(cache.append(0, sequences, t).ok());
  sequences.push_back(*cache.fork(sequences[0]));
  ASSERT_TRUE(cache.evict(sequences[1], 0, 0, 100, 133).ok());
  std::vector<std::vector<float>> expected;
  for (std::int64_t step = 0; step < steps; ++step) {
    expected.push_back(decoded(cache, call, sequences, step));
    ASSERT_FALSE(expected.back().empty());
  }
  std::atomic<int> wrong{0};
  at_once(8, [&](int i) {
    for (std::int64_t n = 0; n < steps; ++n) {
      const std::int64_t step = (n + i) % steps;
      const auto& want = expected[static_cast<std::size_t>(step)];
      if (decoded(cache, call, sequences, step) != want) ++wrong;
    }
  });
  EXPECT_EQ(wrong, 0);
}

TEST(Threads, EverythingElse) {
  const SmallCall call;
  std::atomic<int> wrong{0};
  at_once(8, [&](int i) {
    for (int n = 0; n < 8; ++n) {
      std::vector<float> out = call.output();
      AttentionTensors t = call.tensors(out);
      if (explain(t, options_of("fp8", 1)).find("chosen") == std::string::npos) ++wrong;
      if (!cpu_isa().ok() || recipes().empty() || all_formats().empty()) ++wrong;
      t.q.shape[3] = 24 + i;  // every thread has a refusal of its own
      if (attention(t, options_of("f32", 1)).ok()) ++wrong;
      std::vector<std::int8_t> codes(call.k.size());
      std::vector<float> scale(static_cast<std::size_t>(call.keys * SmallCall::heads));
      QuantizeTensors qt;
      qt.x = t.k;
      qt.codes = TensorView::dense(static_cast<void*>(codes.data()), Format::s8,
                                   {1, call.keys, SmallCall::heads, SmallCall::dim});
      qt.scale = TensorView::dense(static_cast<void*>(scale.data()), Format::f32,
                                   {1, SmallCall::heads, call.keys});
      QuantizeOptions o;
      o.threads = 1;
      if (!quantize(qt, o).ok()) ++wrong;
    }
  });
  EXPECT_EQ(wrong, 0);
}

#if !defined(QATTN_TSAN)
// Nested OpenMP teams, two threads a call. libgomp synchronises by futexes that ThreadSanitizer
// does not see.
TEST(Threads, TeamsOfTwo) { attention_at_once(2); }
#endif

}  // namespace
}  // namespace qattn::test
