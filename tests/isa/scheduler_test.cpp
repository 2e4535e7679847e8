// Lanes, barriers and what orders what: the emulator itself.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <utility>

#include "emulate.hpp"

namespace qattn::isa_test {
namespace {

using namespace isa;

SharedAddress word_of(int index) { return shared_base() + static_cast<SharedAddress>(4 * index); }

std::vector<int> order_of_threads(const Options& options) {
  std::vector<int> order;
  emu::run({1, 1, 1}, 128, 0, options, [&] { order.push_back(thread()); });
  return order;
}

TEST(Scheduler, ForwardReverseAndSeededRandomOrders) {
  const std::vector<int> forward = order_of_threads({.order = LaneOrder::forward});
  std::vector<int> reverse = order_of_threads({.order = LaneOrder::reverse});
  ASSERT_EQ(forward.size(), 128u);
  EXPECT_TRUE(std::is_sorted(forward.begin(), forward.end()));
  std::reverse(reverse.begin(), reverse.end());
  EXPECT_EQ(forward, reverse);

  std::set<std::vector<int>> orders;
  for (std::uint64_t seed = 1; seed <= 5; ++seed) {
    const Options random{.order = LaneOrder::random, .seed = seed};
    orders.insert(order_of_threads(random));
    EXPECT_EQ(order_of_threads(random), order_of_threads(random));
  }
  EXPECT_EQ(orders.size(), 5u);
}

TEST(Scheduler, WorkersRunEveryBlockOnce) {
  for (const int workers : {1, 2, 5}) {
    std::vector<std::uint32_t> runs(1000);
    const emu::Stats stats = emu::run({10, 20, 5}, 32, 64, Options{.workers = workers}, [&] {
      const Index3 b = block();
      if (lane() == 0)
        atomic_add_global(&runs[static_cast<std::size_t>((b.z * 20 + b.y) * 10 + b.x)], 1);
      sync_threads();
    });
    EXPECT_EQ(stats.blocks, 1000u);
    EXPECT_EQ(std::count(runs.begin(), runs.end(), 1u), 1000);
  }
}

TEST(Scheduler, RefusesImpossibleLaunches) {
  EXPECT_NE(error_of(33, 0, Options{}, [] {}).find("launch of 33 threads"), std::string::npos);
  EXPECT_NE(error_of(2048, 0, Options{}, [] {}).find("launch of 2048 threads"), std::string::npos);
  for (const auto& [gpu, most] :
       {std::pair{80, 166912}, {89, 101376}, {90, 232448}, {120, 101376}}) {
    const Options options{.architecture = gpu};
    EXPECT_EQ(error_of(32, most, options, [] {}), "");
    EXPECT_EQ(error_of(32, most + 1, options, [] {}),
              emu::text("launch with %d bytes of shared memory a block; sm_%d has %d", most + 1,
                        gpu, most));
  }
}

TEST(Scheduler, NamesTheThreadThatFailed) {
  const std::string error = error_of(64, 0, Options{}, [] {
    if (thread() == 40) throw emu::Error("by design");
  });
  EXPECT_EQ(error, "block (0,0,0): thread 40 (warp 1 lane 8): by design");
}

struct Failing {
  struct Params {
    int thread;
  };
  static constexpr int threads = 32, shared_bytes = 16;
  [[maybe_unused]] static constexpr int min_blocks = 1;
  static void run(const Params& p) {
    if (thread() == p.thread) load_shared<std::uint32_t>(shared_base() + 16);
  }
};

TEST(Launch, ReturnsTheErrorAsText) {
  EXPECT_EQ(launch<Failing>({-1}, {2, 1, 1}, nullptr), "");
  EXPECT_EQ(emu::last_stats().blocks, 2u);
  EXPECT_NE(launch<Failing>({3}, {1, 1, 1}, nullptr).find("out of bounds"), std::string::npos);
  EXPECT_EQ(launch<Failing>({-1}, {1, 1, 1}, nullptr), "") << "the block is usable again";
}

// ---- Order
// ---------------------------------------------------------------------------------------------

TEST(Order, NamedBarriersSyncSomeWarpsAndArriveDoesNotWait) {
  for (const Options& options : all_schedules()) {
    EXPECT_EQ(error_of(96, 512, options,
                       [] {
                         if (warp() == 0) {  // produces, does not wait
                           store_shared(word_of(lane()), static_cast<std::uint32_t>(lane()));
                           barrier_arrive(3, 64);
                         } else if (warp() == 1) {
                           barrier_sync(3, 64);
                           ASSERT_EQ(load_shared<std::uint32_t>(word_of(31 - lane())),
                                     static_cast<std::uint32_t>(31 - lane()));
                         } else {
                           barrier_sync(4, 32);
                         }
                       }),
              "");
  }
}

TEST(Order, BarriersCanBeUsedAgain) {
  for (const Options& options : all_schedules()) {
    EXPECT_EQ(error_of(128, 512, options,
                       [] {
                         for (std::uint32_t round = 0; round < 5; ++round) {
                           store_shared(word_of(thread()), round);
                           sync_threads();
                           ASSERT_EQ(load_shared<std::uint32_t>(word_of(127 - thread())), round);
                           sync_threads();
                         }
                       }),
              "");
  }
}

TEST(Order, BytesOfOneWordBelongToDifferentLanes) {
  for (const Options& options : all_schedules()) {
    EXPECT_EQ(error_of(64, 256, options,
                       [] {
                         const auto at = shared_base() + static_cast<SharedAddress>(thread());
                         for (int round = 0; round < 3; ++round) {
                           store_shared(at, static_cast<std::uint8_t>(thread() + round));
                           sync_threads();
                           const auto half = load_shared<std::uint16_t>(
                               shared_base() + static_cast<SharedAddress>(2 * lane()));
                           ASSERT_EQ(half & 0xff, 2 * lane() + round);
                           sync_threads();
                           if (lane() % 4 == 0)
                             store_shared(at, 0u);  // the whole word: split no more
                           sync_threads();
                         }
                       }),
              "");
  }
}

TEST(Order, LanesThatWriteTheSameByteRace) {
  for (const Options& options : all_schedules()) {
    const std::string error = error_of(32, 256, options, [] {
      store_shared(shared_base() + static_cast<SharedAddress>(lane() / 2), std::uint8_t{1});
    });
    EXPECT_NE(error.find("race: thread"), std::string::npos) << describe(options) << error;
  }
}

TEST(Order, ByteStoresRaceWithTheWord) {
  for (const Options& options : all_schedules()) {
    const std::string error = error_of(64, 256, options, [] {
      if (thread() == 0) store_shared(word_of(0), 0u);
      sync_threads();
      if (thread() == 1) store_shared(shared_base() + 3, std::uint8_t{1});
      if (thread() == 33) load_shared<std::uint32_t>(word_of(0));
    });
    EXPECT_NE(error.find("race: thread"), std::string::npos) << describe(options) << error;
  }
}

TEST(Order, AtomicsRaceWithPlainAccessesOnly) {
  const auto kernel = [](bool synced) {
    if (thread() == 0) store_shared(word_of(0), 0u);
    sync_threads();
    atomic_add_shared(word_of(0), 1);
    if (synced) sync_threads();
    if (thread() != 63) return;
    const auto sum = load_shared<std::uint32_t>(word_of(0));
    ASSERT_TRUE(!synced || sum == 64);
  };
  for (const Options& options : all_schedules()) {
    EXPECT_EQ(error_of(64, 256, options, [&] { kernel(true); }), "");
    const std::string error = error_of(64, 256, options, [&] { kernel(false); });
    EXPECT_NE(error.find("race: thread"), std::string::npos) << describe(options) << error;
  }
}

TEST(Order, ReaderMeetsTheAtomicOperationsOfOthers) {
  // Lane 30 runs last in this order: the one that arrives last at sync_warp goes on first.
  const std::string error = error_of(32, 256, {.order = LaneOrder::forward}, [] {
    if (lane() == 0) store_shared(word_of(0), 0u);
    sync_warp();
    if (lane() != 30) atomic_add_shared(word_of(0), 1);
    if (lane() == 30) load_shared<std::uint32_t>(word_of(0));
  });
  EXPECT_NE(error.find("thread 30 reads shared memory +0x0"), std::string::npos) << error;
  EXPECT_NE(error.find("not ordered after the atomic operation of thread"), std::string::npos);
}

TEST(Order, EveryReaderIsRemembered) {
  // All lanes of warp 0 read a word; 31 of them tell thread 32, which overwrites it. The one that
  // does not is ordered before the write only by a sync_warp.
  const auto kernel = [](int silent, bool later, bool synced) {
    if (thread() == 0) store_shared(word_of(0), 1u);
    sync_threads();
    if (warp() == 0) {
      if (later && lane() != silent) barrier_arrive(3, 64);  // their clocks go on
      load_shared<std::uint32_t>(word_of(0));
      if (synced) sync_warp();
      if (lane() != silent) barrier_arrive(1, 32);
    } else if (lane() == 0) {
      barrier_sync(1, 32);
      store_shared(word_of(0), 2u);
    }
  };
  for (const Options& options : all_schedules()) {
    for (const int silent : {0, 5, 31}) {
      for (const bool later : {false, true}) {
        EXPECT_EQ(error_of(64, 256, options, [&] { kernel(silent, later, true); }), "");
        const std::string error = error_of(64, 256, options, [&] { kernel(silent, later, false); });
        EXPECT_NE(error.find("race: thread"), std::string::npos) << describe(options) << error;
      }
    }
  }
}

TEST(Order, ShufflesOrderNothing) {
  for (const Options& options : all_schedules()) {
    const std::string error = error_of(32, 256, options, [] {
      if (lane() == 0) store_shared(word_of(0), 1u);
      shuffle_xor(lane(), 1);
      load_shared<std::uint32_t>(word_of(0));
    });
    EXPECT_NE(error.find("race: thread"), std::string::npos) << describe(options) << error;
  }
}

TEST(Order, RaceCheckingCanBeLeftOut) {
  EXPECT_EQ(error_of(32, 256, {.races = false},
                     [] {
                       if (lane() == 0) store_shared(word_of(0), 1u);
                       shuffle_xor(lane(), 1);
                       load_shared<std::uint32_t>(word_of(0));
                     }),
            "");
}

}  // namespace
}  // namespace qattn::isa_test
