// Chains of dependent launches: the emulator catches kernels that break the rules of launch.hpp,
// and lets correct ones pass.
#include "emulate.hpp"

namespace qattn::isa_test {
namespace {

using namespace isa;

/// What a step of a chain does with the words of a buffer, before and after it waits.
enum class Do { nothing, read, write, count };
struct StepParams {
  std::uint32_t* word = nullptr;
  Do before = Do::nothing, after = Do::nothing;
  bool wait = true;
};

inline void act(Do what, std::uint32_t* word) {
  if (what == Do::read) load_global(word);
  if (what == Do::write) store_global(word, 1u);
  if (what == Do::count) atomic_add_global(word, 1u);
}

struct Step {
  using Params = StepParams;
  static constexpr int threads = 32, min_blocks = 1, shared_bytes = 16;
  static constexpr bool dependent = true;

  static void run(const Params& p) {
    grid_dependency_launch();
    std::uint32_t* mine = p.word + thread();
    act(p.before, mine);
    if (p.wait || thread() > 0) grid_dependency_wait();
    act(p.after, mine);
  }
};

static_assert(Dependent<Step>);

/// The same without a place in a chain.
struct PlainStep {
  using Params = StepParams;
  static constexpr int threads = 32, min_blocks = 1, shared_bytes = 16;
  static void run(const Params& p) { act(p.after, p.word + thread()); }
};
static_assert(!Dependent<PlainStep>);

/// Two blocks that are launched together; sums up in a word.
template <bool Meets>
struct Neighbours {
  using Params = std::uint32_t*;
  static constexpr int threads = 32, min_blocks = 1, shared_bytes = 16, cluster = 2;
  static constexpr Target target = sm_90;
  static void run(const Params& p) {
    atomic_add_global(p, 1u);
    if (Meets) cluster_sync();
  }
};

TEST(Cluster, DividesTheGrid) {
  std::uint32_t count = 0;
  EXPECT_EQ(launch<Neighbours<false>>(&count, {4, 1, 1}, nullptr), "");
  EXPECT_EQ(count, 4u * 32);
  EXPECT_EQ(launch<Neighbours<false>>(&count, {3, 1, 1}, nullptr),
            "grid of 3 blocks: no multiple of clusters of 2");
  EXPECT_EQ(count, 4u * 32);
  EXPECT_EQ(launch<Neighbours<true>>(&count, {2, 1, 1}, nullptr), "");
}

struct Buffers {
  std::uint32_t a[32] = {}, b[32] = {};
};

LaunchError first(const StepParams& p) { return launch<Step>(p, {2, 1, 1}, nullptr); }
LaunchError early(const StepParams& p) { return launch<Step>(p, {2, 1, 1}, nullptr, Start::early); }

TEST(Chain, OrderMattersBetweenTouchesOfOneWordUnlessBothReadOrBothCount) {
  for (const Do before : {Do::read, Do::write, Do::count}) {
    for (const Do after : {Do::read, Do::write, Do::count}) {
      Buffers x;
      ASSERT_EQ(first({.word = x.a, .after = before}), "");
      const bool conflict = before != after || before == Do::write;
      const LaunchError e = early({.word = x.a, .before = after});
      EXPECT_EQ(e.find("before grid_dependency_wait()") != e.npos, conflict) << e;
      EXPECT_EQ(e.find("chain_test.cpp:") != e.npos, conflict) << e;
      ASSERT_EQ(first({.word = x.a, .after = before}), "");
      EXPECT_EQ(early({.word = x.a, .after = after}), "");   // it waits first
      EXPECT_EQ(early({.word = x.b, .before = after}), "");  // another place
    }
  }
}

TEST(Chain, TheKernelBeforeTheLastCountsToo) {
  Buffers x;
  ASSERT_EQ(first({.word = x.a, .after = Do::write}), "");
  ASSERT_EQ(early({.word = x.b, .after = Do::write}), "");
  EXPECT_NE(early({.word = x.a, .before = Do::read}), "");
}

TEST(Chain, WhatAKernelTouchesBeforeItsWaitCountsForTheNext) {
  Buffers x;
  ASSERT_EQ(first({.word = x.a, .after = Do::write}), "");
  ASSERT_EQ(early({.word = x.b, .before = Do::write}), "");
  EXPECT_NE(early({.word = x.b, .before = Do::read}), "");
}

TEST(Chain, EveryThreadOfAnEarlyKernelWaits) {
  Buffers x;
  ASSERT_EQ(first({.word = x.a, .after = Do::write}), "");
  const LaunchError e = early({.word = x.b, .wait = false});
  EXPECT_NE(e.find("thread 0 (warp 0 lane 0): ends without grid_dependency_wait()"), e.npos) << e;
  EXPECT_EQ(first({.word = x.b, .wait = false}), "");
}

TEST(Chain, AStartAfterAllBeginsAnew) {
  Buffers x;
  ASSERT_EQ(first({.word = x.a, .after = Do::write}), "");
  ASSERT_EQ(first({.word = x.b, .after = Do::write}), "");
  EXPECT_EQ(early({.word = x.a, .before = Do::read}), "");
}

TEST(Chain, AKernelOutsideOfChainsEndsThem) {
  Buffers x;
  ASSERT_EQ(first({.word = x.a}), "");
  ASSERT_EQ(launch<PlainStep>({.word = x.a, .after = Do::write}, {1, 1, 1}, nullptr, Start::early),
            "");
  EXPECT_EQ(early({.word = x.b}), "starts early behind a kernel that is not of a chain");
}

/// Reads what the kernel before has written, once it is told.
struct Follower {
  struct Params {
    const std::uint32_t *count, *word;
    std::uint32_t least, *seen;
    bool wait;
  };
  static constexpr int threads = 64, min_blocks = 1, shared_bytes = 16;
  static constexpr bool dependent = true;
  static constexpr Target target = sm_90;

  static void run(const Params& p) {
    if (thread() == 0) {
      wait_global(p.count, p.least);
      fence_async_global();
      store_global(p.seen, load_global(p.word));
    }
    if (p.wait && warp() == 1) grid_dependency_wait();
  }
};
struct Leader {
  struct Params {
    std::uint32_t *count, *word;
  };
  static constexpr int threads = 32, min_blocks = 1, shared_bytes = 16;
  static constexpr bool dependent = true;

  static void run(const Params& p) {
    grid_dependency_launch();
    if (thread() != 0) return;
    store_global(p.word, 7u);
    atomic_add_ordered(p.count, 1u);
  }
};

TEST(Chain, AKernelBesideAnotherReadsWhatItIsToldOf) {
  std::uint32_t count = 0, word = 0, seen = 0;
  const auto beside = [&](bool wait) {
    return launch<Follower>({&count, &word, count, &seen, wait}, {1, 1, 1}, nullptr, Start::beside);
  };
  ASSERT_EQ(launch<Leader>({&count, &word}, {3, 1, 1}, nullptr), "");
  EXPECT_EQ(count, 3u);
  EXPECT_EQ(beside(true), "");
  EXPECT_EQ(seen, 7u);
  ASSERT_EQ(launch<Leader>({&count, &word}, {1, 1, 1}, nullptr), "");
  EXPECT_NE(beside(false).find("ends without grid_dependency_wait() in any thread"),
            std::string::npos);
}

/// Another block, on another thread, brings what is waited for.
struct Pair {
  struct Params {
    std::uint32_t *count, *word, *seen;
  };
  static constexpr int threads = 32, min_blocks = 1, shared_bytes = 16;
  static void run(const Params& p) {
    if (thread() != 0) return;
    if (block().x == 0) {
      wait_global(p.count, 1);
      store_global(p.seen, load_global(p.word));
    } else {
      store_global(p.word, 5u);
      atomic_add_ordered(p.count, 1u);
    }
  }
};
TEST(Chain, BlocksWaitForOthers) {
  emu::options().workers = 2;
  std::uint32_t count = 0, word = 0, seen = 0;
  EXPECT_EQ(launch<Pair>({&count, &word, &seen}, {2, 1, 1}, nullptr), "");
  EXPECT_EQ(seen, 5u);
  emu::options() = {};
}

/// Copies of whole rows count as much as single words.
struct Copies {
  struct Params {
    std::uint32_t *from, *to;
    bool wait_first, bulk;
  };
  static constexpr int threads = 32, min_blocks = 1, shared_bytes = 512;
  static constexpr bool dependent = true;
  static constexpr Target target = sm_90;

  static void run(const Params& p) {
    if (p.wait_first) grid_dependency_wait();
    if (!p.bulk) {
      copy_async16(shared_base() + static_cast<SharedAddress>(16 * lane()), p.from + lane() % 8 * 4,
                   lane() < 8 ? 16 : 0);
      copy_async_commit();
      copy_async_wait<0>();
    } else if (lane() == 0) {
      store_shared(shared_base(), Words4{});
      fence_async_proxy();
      bulk_store(p.to, shared_base(), 16);
      bulk_commit();
      bulk_wait<0>();
    }
    grid_dependency_wait();
  }
};

TEST(Chain, CopiesCount) {
  alignas(16) std::uint32_t words[32] = {}, others[32] = {};
  for (const bool bulk : {false, true}) {
    for (const Schedule schedule : {Schedule::early, Schedule::late}) {
      emu::options().schedule = schedule;
      for (const bool wait_first : {false, true}) {
        ASSERT_EQ(first({.word = words, .after = Do::write}), "");
        const Copies::Params p{words, words, wait_first, bulk};
        const LaunchError e = launch<Copies>(p, {1, 1, 1}, nullptr, Start::early);
        EXPECT_EQ(e.empty(), wait_first) << e;
        ASSERT_EQ(first({.word = others, .after = Do::write}), "");
        EXPECT_EQ(launch<Copies>(p, {1, 1, 1}, nullptr, Start::early), "");
      }
    }
  }
  emu::options() = {};
}

TEST(Chain, WorkersShareTheRecord) {
  emu::options().workers = 3;
  Buffers x;
  ASSERT_EQ(first({.word = x.a, .after = Do::count}), "");
  EXPECT_NE(early({.word = x.a, .before = Do::read}), "");
  emu::options() = {};
}

}  // namespace
}  // namespace qattn::isa_test
