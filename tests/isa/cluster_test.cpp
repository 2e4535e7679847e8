// Blocks of a cluster: they run together, meet, and reach each other's shared memory.
#include "broken.hpp"

namespace qattn::isa_test {
namespace {

constexpr int blocks = 4, lanes = 64;

/// What a block leaves out.
enum class Missing { nothing, first_sync, last_sync, sync_of_one, sync_before_reuse };

struct ExchangeParams {
  std::uint32_t* out;
  Missing missing;
};

/// Each lane of a block gives its number to the next block's lane, and takes the sum of what all
/// blocks got.
struct Exchange {
  using Params = ExchangeParams;
  static constexpr int threads = lanes, min_blocks = 1, shared_bytes = 8 * lanes;
  static constexpr int cluster = blocks;
  static constexpr Target target = sm_90;

  static void run(const Params& p) {
    const int rank = cluster_rank(), next = (rank + 1) % cluster_blocks();
    const SharedAddress mine = word_of(thread()), spare = word_of(lanes + thread());
    store_cluster(map_shared(spare, next), number(1000 * block().x + thread()));
    if (p.missing != Missing::first_sync && (p.missing != Missing::sync_of_one || rank != 1)) {
      cluster_sync();
    }
    store_shared(mine, 2 * load_shared<std::uint32_t>(spare));
    cluster_sync();
    std::uint32_t sum = 0;
    for (int other = 0; other < cluster_blocks(); ++other) {
      sum += load_cluster<std::uint32_t>(map_shared(mine, other));
    }
    if (p.missing != Missing::sync_before_reuse) cluster_sync();
    store_shared(mine, sum);
    store_global(p.out + block().x * lanes + thread(), load_shared<std::uint32_t>(mine));
    load_cluster<std::uint32_t>(map_shared(spare, next));
    if (p.missing != Missing::last_sync) cluster_sync();
  }
};

std::string run_exchange(const Options& options, Words& out, Missing missing = Missing::nothing) {
  const Options before = emu::options();
  emu::options() = options;
  out.assign(2 * blocks * lanes, 0);
  std::string error = launch<Exchange>({out.data(), missing}, {2 * blocks, 1, 1}, nullptr);
  emu::options() = before;
  return error;
}

TEST(Cluster, ExchangesThroughSharedMemory) {
  for (const Options& options : all_schedules()) {
    Words out;
    EXPECT_EQ(run_exchange(options, out), "") << describe(options);
    for (int b = 0; b < 2 * blocks; ++b) {
      const int first = b / blocks * blocks;
      for (int l = 0; l < lanes; ++l) {
        const int sum = 2 * (1000 * (4 * first + 6) + 4 * l);
        ASSERT_EQ(out[static_cast<std::size_t>(b * lanes + l)], number(sum)) << describe(options);
      }
    }
  }
}

TEST(Cluster, FindsAMissingBarrierBeforeARead) {
  for (const Options& options : all_schedules()) {
    Words out;
    const std::string error = run_exchange(options, out, Missing::first_sync);
    const bool early = error.find("read of uninitialised bytes") != std::string::npos;
    const bool race = error.find("race: thread") != std::string::npos;
    EXPECT_TRUE(early || race) << describe(options) << error;
    EXPECT_NE(error.find("cluster_test.cpp:"), std::string::npos) << error;
  }
}

/// Clocks of the whole cluster show it whoever is first.
TEST(Cluster, FindsAMissingBarrierBeforeAWrite) {
  for (const Options& options : all_schedules()) {
    Words out;
    const std::string error = run_exchange(options, out, Missing::sync_before_reuse);
    EXPECT_NE(error.find("race: thread"), std::string::npos) << describe(options) << error;
    EXPECT_NE(error.find("of the cluster"), std::string::npos) << error;
    EXPECT_NE(error.find("cluster_test.cpp:"), std::string::npos) << error;
  }
}

/// A block that has ended has no shared memory, which one that is late finds out.
TEST(Cluster, FindsABlockThatEndsTooSoon) {
  int found = 0;
  for (const Options& options : all_schedules()) {
    Words out;
    const std::string error = run_exchange(options, out, Missing::last_sync);
    if (error.empty()) continue;
    EXPECT_NE(error.find("has ended, and its shared memory with it, at cluster_test.cpp:"),
              std::string::npos)
        << error;
    ++found;
  }
  EXPECT_GT(found, 0);
}

TEST(Cluster, FindsABarrierThatOneBlockMisses) {
  for (const Options& options : all_schedules()) {
    Words out;
    const std::string error = run_exchange(options, out, Missing::sync_of_one);
    EXPECT_FALSE(error.empty()) << describe(options);
  }
}

TEST(Cluster, RefusesAddressesOfOthersInOrdinaryWords) {
  Options options{.cluster = 2};
  const auto error_with = [&](const std::function<void()>& kernel) {
    try {
      emu::run({2, 1, 1}, 32, 64, options, kernel);
    } catch (const emu::Error& e) {
      return std::string(e.what());
    }
    return std::string();
  };
  const auto contains = [](const std::string& text, const char* part) {
    EXPECT_NE(text.find(part), std::string::npos) << text;
  };
  contains(error_with([] { load_shared<std::uint32_t>(map_shared(shared_base(), 1)); }),
           "load_shared: 4 bytes at shared memory");
  contains(error_with([] { map_shared(shared_base(), 2); }),
           "map_shared: block 2 of a cluster of 2");
  contains(error_with([] { store_cluster(map_shared(shared_base() + 64, 1), 0u); }),
           "store_cluster: 4 bytes at shared memory +64 are out of bounds");
  contains(error_with([] { load_cluster<std::uint32_t>(map_shared(shared_base(), 1)); }),
           "load_cluster: read of uninitialised bytes");
  contains(error_with([] {
             if (cluster_rank() == 0) cluster_sync();
           }),
           "wait in cluster_sync, 32 of 64 threads arrived");
}

}  // namespace
}  // namespace qattn::isa_test
