// Warps of 64 lanes, as GPUs of AMD have them: what lanes tell each other there.
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
           "ballot: gfx942 has no such word, which exists from sm_80 on");
  contains(error_of(threads, 0, wide(), [] { transpose_matrix(1); }),
           "transpose_matrix: gfx942 has no such word");
  contains(error_of(threads, 0, {}, [] { ballot64(true); }),
           "ballot64: sm_90a has no such word, which exists on GPUs of AMD alone");
  contains(error_of(96, 0, wide(), [] {}), "launch of 96 threads");
}

TEST(WideWarp, CountsInstructionsOfItsSize) {
  const emu::Stats stats =
      emu::run({1, 1, 1}, threads, 0, wide(), [] { shuffle_xor(thread(), 1); });
  EXPECT_EQ(stats.warp_instructions(emu::Word::shuffle), 2.0);
}

}  // namespace
}  // namespace qattn::isa_test
