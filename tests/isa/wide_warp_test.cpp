// Waves of 64 lanes, as GPUs of AMD have them, as one warp or as two: what lanes tell each other.
#include "broken.hpp"

namespace qattn::isa_test {
namespace {

constexpr int size = 64, threads = 2 * size;

Options wide(Options options = {}) {
  options.architecture = 942;
  return options;
}

TEST(WideWarp, ExchangesBetweenAllLanes) {
  for (const Options& options : all_schedules()) {
    const std::string error = error_of(threads, 0, wide(options), [] {
      const int l = thread() % size, first = thread() - l;
      ASSERT_EQ(warp_lanes(), size);
      ASSERT_EQ(lane(), l);
      ASSERT_EQ(warp(), thread() / size);
      ASSERT_EQ(shuffle_xor(thread(), 32), thread() ^ 32);
      ASSERT_EQ(shuffle(thread(), 63), first + 63);
      ASSERT_EQ(shuffle(thread(), 64 + 5), first + 5);
      ASSERT_EQ(shuffle_up(thread(), 40), l < 40 ? thread() : thread() - 40);
      ASSERT_EQ(shuffle_down(thread(), 40), l + 40 < size ? thread() + 40 : thread());
      ASSERT_EQ(ballot64(l % 2 == 1), 0xaaaaaaaaaaaaaaaaull);
      ASSERT_EQ(any(l == 63), true);
      ASSERT_EQ(any(l == 64), false);
      ASSERT_EQ(all(l < 63), false);
      ASSERT_EQ(all(l < 64), true);
    });
    EXPECT_EQ(error, "") << describe(options);
  }
}

/// Lanes 32 apart exchange numbers through shared memory: one warp of 64, two of 32.
TEST(WideWarp, MeetsInsideOneWarp) {
  const auto exchange = [](bool synced) {
    store_shared(word_of(thread()), number(thread()));
    if (synced) sync_warp();
    ASSERT_EQ(load_shared<std::uint32_t>(word_of(thread() ^ 32)), number(thread() ^ 32));
  };
  for (const Options& options : all_schedules()) {
    EXPECT_EQ(error_of(threads, 4 * threads, wide(options), [&] { exchange(true); }), "");
    for (const std::string& error :
         {error_of(threads, 4 * threads, wide(options), [&] { exchange(false); }),
          error_of(threads, 4 * threads, options, [&] { exchange(true); })}) {
      const bool race = error.find("race: thread") != std::string::npos;
      const bool early = error.find("uninitialised bytes") != std::string::npos;
      EXPECT_TRUE(race || early) << describe(options) << error;
    }
  }
}

TEST(WideWarp, MissesALane) {
  const std::string error = error_of(threads, 0, wide(), [] {
    if (thread() != 50) any(true);
  });
  EXPECT_NE(error.find("wait in vote, 63 of 64 lanes arrived"), std::string::npos) << error;
  const std::string barrier = error_of(threads, 0, wide(), [] {
    if (thread() != 100) sync_threads();
  });
  EXPECT_NE(barrier.find("wait at barrier 0, 127 of 128 threads arrived"), std::string::npos)
      << barrier;
}

TEST(WideWarp, HasWordsOfItsOwn) {
  const auto contains = [](const std::string& text, const char* part) {
    EXPECT_NE(text.find(part), std::string::npos) << text;
  };
  contains(error_of(threads, 0, wide(), [] { ballot(true); }),
           "ballot is for warps of 32 lanes, not of 64");
  contains(error_of(threads, 0, wide(), [] { transpose_matrix(1); }),
           "transpose_matrix: gfx942 has no such word");
  contains(error_of(threads, 0, {}, [] { ballot64(true); }),
           "ballot64: sm_90a has no such word, which exists on GPUs of AMD alone");
  contains(error_of(96, 0, wide(), [] {}), "launch of 96 threads");
  Options narrow;
  narrow.warp_lanes = 64;
  contains(error_of(threads, 0, narrow, [] {}),
           "launch in warps of 64 lanes; sm_90 has waves of 32");
  narrow = wide();
  narrow.warp_lanes = 32;
  contains(error_of(threads, 0, narrow, [] { ballot64(true); }),
           "ballot64 is for warps of 64 lanes, not of 32");
}

/// What a kernel that is launched sees: its own lanes, whatever the GPU's waves have.
struct Seen {
  int lanes, lane, warp, partner;
  std::uint32_t odd;
};
template <int Lanes>
struct Tells {
  using Params = Seen*;
  static constexpr int threads = 96, min_blocks = 1, shared_bytes = 0, warp_lanes = Lanes;
  static constexpr Target target = gfx942;
  static void run(Params out) {
    Seen& seen = out[thread()];
    seen = {isa::warp_lanes(), lane(), warp(), shuffle_xor(thread(), 31), 0};
    if constexpr (Lanes == 32) {
      if (warp() == 1) return;  // the halves of a wave part
      seen.odd = ballot(thread() % 2 == 1);
    }
  }
};

TEST(WideWarp, HoldsTwoWarpsOf32) {
  for (const Options& options : all_schedules()) {
    emu::options() = wide(options);
    std::vector<Seen> seen(96);
    ASSERT_EQ(launch<Tells<32>>(seen.data(), {1, 1, 1}, nullptr), "") << describe(options);
    for (int t = 0; t < 96; ++t) {
      const Seen& s = seen[static_cast<std::size_t>(t)];
      EXPECT_EQ(s.lanes, 32);
      EXPECT_EQ(s.lane, t % 32);
      EXPECT_EQ(s.warp, t / 32);
      EXPECT_EQ(s.partner, t ^ 31);
      EXPECT_EQ(s.odd, t / 32 == 1 ? 0u : 0xaaaaaaaau);
    }
    const std::string error = launch<Tells<64>>(seen.data(), {1, 1, 1}, nullptr);
    EXPECT_NE(error.find("launch of 96 threads"), std::string::npos) << error;
  }
  emu::options() = {};
}

TEST(WideWarp, CountsInstructionsOfItsSize) {
  const emu::Stats stats =
      emu::run({1, 1, 1}, threads, 0, wide(), [] { shuffle_xor(thread(), 1); });
  EXPECT_EQ(stats.warp_instructions(emu::Word::shuffle), 2.0);
}

}  // namespace
}  // namespace qattn::isa_test
