// fork(): a child computes what its parent does, whether or not the parent has used OpenMP. Where
// the thread that forked had a team, GNU's OpenMP runtime would wait for workers that do not exist
// in the child, so qattn runs on one thread there (core/threads.hpp).
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <thread>

#include "hardening/small_call.hpp"
#include "qattn/reference.hpp"

namespace qattn::test {
namespace {

enum class End { good, bad, hung };

/// Runs `work` in a child and says how it ended; a hanging child is killed.
template <class Work>
End in_child(Work work, std::chrono::seconds patience) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(work() ? 0 : 1);
  const auto end = std::chrono::steady_clock::now() + patience;
  int status = 0;
  while (::waitpid(child, &status, WNOHANG) == 0) {
    if (std::chrono::steady_clock::now() > end) {
      ::kill(child, SIGKILL);
      ::waitpid(child, &status, 0);
      return End::hung;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return WIFEXITED(status) && WEXITSTATUS(status) == 0 ? End::good : End::bad;
}

bool equals(const SmallCall& call, const char* recipe, int threads,
            const std::vector<float>& expected) {
  std::vector<float> out = call.output();
  return attention(call.tensors(out), options_of(recipe, threads)).ok() && out == expected;
}

TEST(Fork, BeforeAnyThread) {
  // The child is the first to use OpenMP: every number of threads works there.
  const SmallCall call;
  const auto work = [&call] {
    std::vector<float> one = call.output();
    return attention(call.tensors(one), options_of("int8_full", 1)).ok() &&
           equals(call, "int8_full", 3, one);
  };
  EXPECT_EQ(in_child(work, std::chrono::seconds(30)), End::good);
}

TEST(Fork, OneThreadAfterATeam) {
  const SmallCall call;
  for (const char* recipe : {"f32", "int8_full", "fp8"}) {
    std::vector<float> expected = call.output();
    ASSERT_TRUE(attention(call.tensors(expected), options_of(recipe, 3)).ok());
    const auto work = [&] { return equals(call, recipe, 1, expected); };
    ASSERT_EQ(in_child(work, std::chrono::seconds(30)), End::good) << recipe;
    EXPECT_TRUE(equals(call, recipe, 3, expected)) << "the parent is as it was";
  }
}

TEST(Fork, NewThreadOfTheChild) {
  // A thread that the child starts has no team yet, and gets a whole one.
  const SmallCall call;
  std::vector<float> expected = call.output();
  ASSERT_TRUE(attention(call.tensors(expected), options_of("int8_full", 3)).ok());
  const auto work = [&] {
    bool good = false;
    std::thread([&] { good = equals(call, "int8_full", 3, expected); }).join();
    return good;
  };
  EXPECT_EQ(in_child(work, std::chrono::seconds(30)), End::good);
}

/// A plan's line "threads: N".
int threads_of(const Plan& plan) {
  const std::string text = plan.to_string(), key = "\nthreads: ";
  return std::stoi(text.substr(text.find(key) + key.size()));
}

constexpr int counts[] = {0, 2, 3};  // 0: CTest sets OMP_NUM_THREADS=3

TEST(Fork, AttentionAfterATeam) {
  const SmallCall call;
  for (const char* recipe : {"f32", "int8_full", "fp8"}) {
    for (const int threads : counts) {
      SCOPED_TRACE(testing::Message() << recipe << ", threads " << threads);
      std::vector<float> expected = call.output();
      ASSERT_TRUE(attention(call.tensors(expected), options_of(recipe, 3)).ok());
      const auto work = [&] { return equals(call, recipe, threads, expected); };
      ASSERT_EQ(in_child(work, std::chrono::seconds(30)), End::good);
      EXPECT_TRUE(equals(call, recipe, threads, expected)) << "the parent is as it was";
    }
  }
}

TEST(Fork, APlanOfTheParent) {
  const SmallCall call(1, 5000);  // keys are split
  const AttentionOptions options = options_of("int8_full", 3);
  std::vector<float> expected = call.output(), out = call.output();
  ASSERT_TRUE(attention(call.tensors(expected), options).ok());
  const Result<Plan> made = plan(call.tensors(out), options);
  ASSERT_TRUE(made.ok());
  EXPECT_EQ(threads_of(*made), 3);
  const std::size_t bytes = (made->workspace_bytes() + 63) / 64 * 64;
  const std::unique_ptr<void, decltype(&std::free)> memory(std::aligned_alloc(64, bytes),
                                                           &std::free);
  const auto work = [&] {
    return run(*made, call.tensors(out), options, memory.get(), bytes).ok() && out == expected &&
           threads_of(*plan(call.tensors(out), options)) == 1;  // the child's own plans say so
  };
  ASSERT_EQ(in_child(work, std::chrono::seconds(30)), End::good);
  EXPECT_EQ(threads_of(*plan(call.tensors(out), options)), 3) << "the parent is as it was";
}

TEST(Fork, AGrandchild) {
  const SmallCall call;
  std::vector<float> expected = call.output();
  ASSERT_TRUE(attention(call.tensors(expected), options_of("int8_full", 3)).ok());
  const auto work = [&] {
    const auto again = [&] { return equals(call, "int8_full", 2, expected); };
    return in_child(again, std::chrono::seconds(20)) == End::good;
  };
  ASSERT_EQ(in_child(work, std::chrono::seconds(30)), End::good);
}

/// A cache's answer after two appends, the second of which quantises.
std::vector<float> decoded(const SmallCall& call, int threads) {
  KvCacheOptions o;
  o.heads_kv = SmallCall::heads;
  o.d = o.dv = SmallCall::dim;
  o.tiers = {{4, 4}};
  o.threads = threads;
  Result<KvCache> cache = KvCache::create(o);
  const std::int64_t id = *cache->add_sequence(), half = call.keys / 2;
  for (const std::int64_t first : {std::int64_t{0}, half}) {
    const std::int64_t offset = first * SmallCall::heads * SmallCall::dim;
    KvAppendTensors t;
    t.k = TensorView::dense(call.k.data() + offset, Format::f32,
                            {1, half, SmallCall::heads, SmallCall::dim});
    t.v = TensorView::dense(call.v.data() + offset, Format::f32,
                            {1, half, SmallCall::heads, SmallCall::dim});
    if (!cache->append(0, {&id, 1}, t).ok()) return {};
  }
  std::vector<float> out(SmallCall::heads * SmallCall::dim);
  KvDecodeTensors t;
  t.q = TensorView::dense(call.q.data(), Format::f32, {1, 1, SmallCall::heads, SmallCall::dim});
  t.out = TensorView::dense(static_cast<void*>(out.data()), Format::f32,
                            {1, 1, SmallCall::heads, SmallCall::dim});
  return decode(*cache, 0, {&id, 1}, t).ok() ? out : std::vector<float>{};
}

TEST(Fork, KvCacheAfterATeam) {
  const SmallCall call(1, 2000);
  const std::vector<float> expected = decoded(call, 3);
  ASSERT_FALSE(expected.empty());
  for (const int threads : counts) {
    const auto work = [&] { return decoded(call, threads) == expected; };
    ASSERT_EQ(in_child(work, std::chrono::seconds(30)), End::good) << threads;
  }
}

/// quantize()'s codes of K.
std::vector<std::int8_t> codes_of(const SmallCall& call, int threads) {
  std::vector<std::int8_t> codes(call.k.size());
  std::vector<float> scale(static_cast<std::size_t>(call.keys * SmallCall::heads)), out;
  QuantizeTensors t;
  t.x = call.tensors(out).k;
  t.codes = TensorView::dense(static_cast<void*>(codes.data()), Format::s8,
                              {1, call.keys, SmallCall::heads, SmallCall::dim});
  t.scale = TensorView::dense(static_cast<void*>(scale.data()), Format::f32,
                              {1, SmallCall::heads, call.keys});
  QuantizeOptions o;
  o.threads = threads;
  return quantize(t, o).ok() ? codes : std::vector<std::int8_t>{};
}

std::vector<double> exact(const SmallCall& call, int threads) {
  std::vector<float> unused = call.output();
  std::vector<double> out(call.q.size());
  const Status s = reference_attention(call.tensors(unused), options_of("f32", threads), out);
  return s.ok() ? out : std::vector<double>{};
}

TEST(Fork, QuantizeAndReferenceAfterATeam) {
  const SmallCall call;
  const std::vector<std::int8_t> codes = codes_of(call, 3);
  const std::vector<double> out = exact(call, 3);
  ASSERT_FALSE(codes.empty() || out.empty());
  for (const int threads : counts) {
    const auto work = [&] {
      return codes_of(call, threads) == codes && exact(call, threads) == out;
    };
    ASSERT_EQ(in_child(work, std::chrono::seconds(30)), End::good) << threads;
  }
}

/// A call whose tensors are said to lie on a GPU: each looks for the library that is not there.
bool looks_for_a_gpu(const SmallCall& call) {
  std::vector<float> out = call.output();
  AttentionTensors t = call.tensors(out);
  for (TensorView* x : {&t.q, &t.k, &t.v, &t.out}) x->device = {DeviceType::cuda, 0};
  AttentionOptions options = options_of("int8_full", 0);
  static_cast<void>(plan(t, options));
  return true;
}

/// Threads that call everything until it ends.
class Load {
 public:
  explicit Load(const SmallCall& call) {
    run([&call] { return equals(call, "int8_full", 3, {}); });
    run([&call] { return decoded(call, 2).empty(); });
    run([&call] { return codes_of(call, 2).empty() || exact(call, 1).empty(); });
    run([&call] { return looks_for_a_gpu(call); });
  }
  ~Load() {
    stop_ = true;
    for (std::thread& t : threads_) t.join();
  }
  Load(const Load&) = delete;
  Load& operator=(const Load&) = delete;

 private:
  template <class Work>
  void run(Work work) {
    threads_.emplace_back([this, work] {
      while (!stop_) work();
    });
  }
  std::atomic<bool> stop_ = false;
  std::vector<std::thread> threads_;
};

/// The child has none of the threads that were under way, whatever they held.
TEST(Fork, HundredUnderLoad) {
  const SmallCall call(20, 300);
  std::vector<float> expected = call.output();
  ASSERT_TRUE(attention(call.tensors(expected), options_of("int8_full", 1)).ok());
  const std::vector<float> from_cache = decoded(call, 1);
  const std::vector<std::int8_t> codes = codes_of(call, 1);
  const Load load(call);
  const auto work = [&] {
    return equals(call, "int8_full", 0, expected) && decoded(call, 0) == from_cache &&
           codes_of(call, 0) == codes && looks_for_a_gpu(call);
  };
  for (int n = 0; n < 50; ++n) {
    ASSERT_EQ(in_child(work, std::chrono::seconds(60)), End::good) << "fork " << n;
    End end = End::bad;  // of a thread that has had no team
    std::thread([&] { end = in_child(work, std::chrono::seconds(60)); }).join();
    ASSERT_EQ(end, End::good) << "fork " << n << " of a new thread";
  }
}

}  // namespace
}  // namespace qattn::test
