// Kernels of sm_80 words that are broken in one place each (see broken.hpp).
#include "broken.hpp"

#include <gtest/gtest.h>

#include <utility>

namespace qattn::isa_test {
namespace {

using namespace isa;

alignas(16) const std::uint32_t kSource[512] = {1, 2, 3, 4, 5, 6, 7, 8};

// ---- Asynchronous copies
// -------------------------------------------------------------------------

TEST(Broken, MissingCopyAsyncWait) {
  expect_caught({32, 512,
                 [](bool broken, Words& out) {
                   const auto mine = word_of(4 * lane());
                   copy_async16(mine, kSource + 4 * lane(), 16);
                   copy_async_commit();
                   if (!broken) copy_async_wait<0>();
                   out[number(lane())] = load_shared<std::uint32_t>(mine);
                 }},
                "load_shared: read of bytes with a copy in flight, shared memory +0x");
}

TEST(Broken, WaitLeavesOneGroupTooMany) {
  expect_caught({32, 1024,
                 [](bool broken, Words& out) {
                   for (int group = 0; group < 2; ++group) {
                     copy_async16(word_of(4 * (32 * group + lane())), kSource, 16);
                     copy_async_commit();
                   }
                   if (broken) copy_async_wait<1>();
                   if (!broken) copy_async_wait<0>();
                   out[number(lane())] = load_shared<std::uint32_t>(word_of(4 * (32 + lane())));
                 }},
                "read of bytes with a copy in flight");
}

TEST(Broken, BarrierBeforeTheWaitOrdersNothing) {
  // Others may read a copy only after its lane has waited and then met them.
  expect_caught({64, 1024,
                 [](bool broken, Words& out) {
                   copy_async16(word_of(4 * thread()), kSource, 16);
                   copy_async_commit();
                   if (broken) sync_threads();
                   copy_async_wait<0>();
                   if (!broken) sync_threads();
                   out[number(thread())] = load_shared<std::uint32_t>(word_of(4 * (63 - thread())));
                 }},
                [](const Options&) -> std::vector<std::string> {
                  return {"not ordered after the write of thread",
                          "read of bytes with a copy in flight",
                          "not ordered after the read of thread"};
                });
}

TEST(Broken, CopyIsReadAfterItsWaitButNotOrderedAfterIt) {
  // Warp 1 copies, meets warp 0, and only then waits. Whether it has waited when warp 0 reads is up
  // to the lane order alone.
  const Kernel kernel = [](bool broken, Words& out) {
    if (thread() >= 32) {
      copy_async16(word_of(4 * lane()), kSource, 16);
      copy_async_commit();
    }
    sync_threads();
    if (thread() >= 32) copy_async_wait<0>();
    if (!broken) sync_threads();
    if (thread() < 32) out[number(lane())] = load_shared<std::uint32_t>(word_of(4 * lane()));
  };
  expect_twin_passes({64, 1024, kernel});
  const auto caught = [&](const Options& options) {
    Words out(1024);
    return error_of(64, 1024, options, [&] { kernel(true, out); });
  };
  const auto has = [](const std::string& error, const char* text) {
    return error.find(text) != std::string::npos;
  };
  const auto is_race = [&](const std::string& error) {
    return has(error, "race: thread ") && has(error, " reads shared memory +0x") &&
           has(error, "not ordered after the write of thread ");
  };
  const auto is_early = [&](const std::string& error) {
    return has(error, "load_shared: read of bytes with a copy in flight");
  };
  // In a random order a lane's copy is seldom waited for when it is read: one in 32 or so.
  constexpr int seeds = 200;
  for (const Schedule schedule : {Schedule::early, Schedule::late, Schedule::random}) {
    int races = 0;
    for (std::uint64_t seed = 1; seed <= seeds; ++seed) {
      // Warp 1 meets last, goes on at once and waits before warp 0 runs.
      Options options{.schedule = schedule, .order = LaneOrder::forward, .seed = seed};
      std::string error = caught(options);
      EXPECT_TRUE(is_race(error)) << describe(options) << "\n" << error;
      EXPECT_TRUE(has(error, "thread 0 reads shared memory +0x0 at broken_test.cpp:") &&
                  has(error, "not ordered after the write of thread 32 at broken_test.cpp:"))
          << describe(options) << "\n"
          << error;
      // Warp 0 meets last and reads before warp 1 has waited.
      options.order = LaneOrder::reverse;
      error = caught(options);
      EXPECT_TRUE(is_early(error)) << describe(options) << "\n" << error;
      // The two in any mixture, but one of them always.
      options.order = LaneOrder::random;
      error = caught(options);
      EXPECT_TRUE(is_race(error) || is_early(error)) << describe(options) << "\n" << error;
      races += is_race(error);
    }
    EXPECT_GT(races, 0) << "no random order in which a lane waits before its copy is read";
    EXPECT_LT(races, seeds) << "no random order in which a copy is read before its lane waits";
  }
}

TEST(Broken, StageIsOverwrittenWhileOthersRead) {
  expect_caught({64, 2048,
                 [](bool broken, Words& out) {
                   std::uint32_t sum = 0;
                   for (int tile = 0; tile < 4; ++tile) {
                     copy_async16(word_of(4 * thread()), kSource + 4 * (tile + thread()), 16);
                     copy_async_commit();
                     copy_async_wait<0>();
                     sync_threads();
                     sum += load_shared<std::uint32_t>(word_of(4 * (63 - thread())));
                     if (!broken) sync_threads();
                   }
                   out[number(thread())] = sum;
                 }},
                [](const Options&) -> std::vector<std::string> {
                  return {"not ordered after the read of thread",
                          "read of bytes with a copy in flight",
                          "not ordered after the write of thread"};
                });
}

// ---- Order
// ---------------------------------------------------------------------------------------------

TEST(Broken, MissingSyncThreads) {
  expect_caught({64, 512,
                 [](bool broken, Words& out) {
                   store_shared(word_of(thread()), number(thread()));
                   if (!broken) sync_threads();
                   out[number(thread())] = load_shared<std::uint32_t>(word_of(63 - thread()));
                 }},
                // Whoever runs first finds nothing; only its order makes it another error.
                "load_shared: read of uninitialised bytes");
}

TEST(Broken, MissingSyncThreadsOnMemoryThatHasOldValues) {
  expect_caught({64, 512,
                 [](bool broken, Words& out) {
                   store_shared(word_of(thread()), 0u);
                   sync_threads();
                   if (thread() < 32) store_shared(word_of(lane()), number(lane()));
                   if (!broken) sync_threads();
                   if (thread() >= 32) {
                     out[number(lane())] = load_shared<std::uint32_t>(word_of(lane()));
                   }
                 }},
                [](const Options& o) -> std::vector<std::string> {
                  // The last to arrive at a barrier goes on at once: here a reader, there a writer.
                  if (o.order == LaneOrder::forward) {
                    return {"thread 0 writes shared memory +0x0 at broken_test.cpp"};
                  }
                  if (o.order == LaneOrder::reverse) {
                    return {"thread 63 reads shared memory +0x7c at broken_test.cpp"};
                  }
                  return {"race: thread"};
                });
}

TEST(Broken, MissingSyncWarpBetweenProducerAndConsumers) {
  expect_caught({32, 64,
                 [](bool broken, Words& out) {
                   if (lane() == 0) store_shared(word_of(0), 7u);
                   sync_warp();
                   for (std::uint32_t round = 1; round < 4; ++round) {
                     out[number(lane())] = load_shared<std::uint32_t>(word_of(0));
                     if (!broken) sync_warp();
                     if (lane() == 0) store_shared(word_of(0), round);
                     sync_warp();
                   }
                 }},
                [](const Options& o) -> std::vector<std::string> {
                  if (o.order == LaneOrder::forward) {
                    return {"thread 0 writes shared memory +0x0 at broken_test.cpp"};
                  }
                  if (o.order == LaneOrder::reverse) {
                    return {"thread 31 reads shared memory +0x0 at broken_test.cpp"};
                  }
                  return {"race: thread"};
                });
}

// ---- Shared memory
// -------------------------------------------------------------------------------------

TEST(Broken, UninitialisedRead) {
  expect_caught({32, 512,
                 [](bool broken, Words& out) {
                   if (!broken || lane() != 9) store_shared(word_of(lane()), 1u);
                   sync_warp();
                   out[number(lane())] = load_shared<std::uint32_t>(word_of(31 - lane()));
                 }},
                "load_shared: read of uninitialised bytes, shared memory +0x24");
}

TEST(Broken, FragmentBeyondSharedMemory) {
  expect_caught(
      {32, 1024,
       [](bool broken, Words& out) {
         for (int i = 0; i < 8; ++i) store_shared(word_of(32 * i + lane()), number(i));
         sync_warp();
         std::uint32_t r[2][4];
         const auto row = shared_base() + number(16 * lane() + (broken ? 16 : 0));
         load_matrix(r, {row, row + 512});
         out[number(lane())] = r[1][3];
       }},
      "load_matrix: 16 bytes at shared memory +1024 are out of bounds (the block has 1024 "
      "bytes), at broken_test.cpp");
}

TEST(Broken, ForgottenSharedBase) {
  expect_caught({32, 512,
                 [](bool broken, Words&) {
                   store_shared((broken ? 0u : shared_base()) + number(4 * lane()), 1u);
                 }},
                "store_shared: 4 bytes at shared memory -");
}

TEST(Broken, MisalignedSharedAccess) {
  expect_caught(
      {32, 512,
       [](bool broken, Words&) { store_shared(word_of(2 * lane() + (broken ? 1 : 0)), Words2{}); }},
      "store_shared: misaligned shared address 0x");
}

TEST(Broken, MisalignedCopySource) {
  expect_caught({32, 512,
                 [](bool broken, Words&) {
                   copy_async16(word_of(4 * lane()), kSource + (broken ? 2 : 0), 16);
                 }},
                "copy_async16: misaligned source");
}

TEST(Broken, MisalignedGlobalLoad) {
  expect_caught({32, 0,
                 [](bool broken, Words& out) {
                   const auto* bytes = reinterpret_cast<const std::uint8_t*>(kSource);
                   const auto* p = bytes + (broken ? 2 : 0);
                   out[0] = load_global(reinterpret_cast<const std::uint32_t*>(p));
                 }},
                "load_global: misaligned address");
}

TEST(Broken, WrongSwizzleGivesOtherValues) {
  // Rows of 128 bytes, chunk c of row r at c ^ r % 8; the broken reader forgets the swizzle.
  const Kernel kernel = [](bool broken, Words& out) {
    for (int chunk = 0; chunk < 8; ++chunk) {
      const int row = lane() % 16, at = 8 * row + (chunk ^ row % 8);
      if (lane() < 16) store_shared(word_of(4 * at), Words4{{number(row), number(chunk), 0, 0}});
    }
    sync_warp();
    const int row = lane() % 16, chunk = 2 + lane() / 16;
    std::uint32_t r[1][4];
    load_matrix<1>(r, {word_of(4 * (8 * row + (broken ? chunk : chunk ^ row % 8)))});
    for (int m = 0; m < 4; ++m) out[number(4 * lane() + m)] = r[0][m];
  };
  expect_twin_passes({32, 2048, kernel});
  for (const Options& options : all_schedules()) {
    Words right(1024), wrong(1024);
    EXPECT_EQ(error_of(32, 2048, options, [&] { kernel(false, right); }), "");
    EXPECT_EQ(error_of(32, 2048, options, [&] { kernel(true, wrong); }), "");
    EXPECT_NE(right, wrong);
    EXPECT_EQ(right[4 * 5 + 1], 2u);  // lane 5: row 1, second word of a chunk, its number
  }
}

TEST(Broken, WrongSwizzleOfAPartlyFilledTileReadsNothing) {
  expect_caught({32, 2048,
                 [](bool broken, Words& out) {
                   // Only chunks 0 to 3 of each row are filled.
                   const int row = lane() % 8;
                   const auto at = [&](int chunk) {
                     return word_of(4 * (8 * row + (chunk ^ row % 4)));
                   };
                   store_shared(at(lane() / 8), Words4{{1, 2, 3, 4}});
                   sync_warp();
                   std::uint32_t r[1][1];
                   load_matrix1<1>(r, {broken ? word_of(4 * (8 * row + (0 ^ row))) : at(0)});
                   out[number(lane())] = r[0][0];
                 }},
                "load_matrix: read of uninitialised bytes");
}

/// Of 16 bytes all are written but byte kByte, and a word of kSize has it.
template <int kByte, class Words_>
void expect_missing_byte_caught() {
  SCOPED_TRACE(kByte);
  expect_caught({32, 512,
                 [](bool broken, Words& out) {
                   const auto mine = word_of(4 * lane());
                   for (unsigned n = 0; n < 16; ++n) {
                     if (broken && n == kByte) continue;
                     store_shared(mine + n, static_cast<std::uint8_t>(n));
                   }
                   const unsigned size = sizeof(Words_);
                   const auto read = load_shared<Words_>(mine + kByte / size * size);
                   out[number(lane())] = reinterpret_cast<const std::uint32_t&>(read);
                 }},
                "load_shared: read of uninitialised bytes");
}
template <class Words_, int... kBytes>
void expect_missing_bytes_caught(std::integer_sequence<int, kBytes...>) {
  (expect_missing_byte_caught<kBytes, Words_>(), ...);
}

TEST(Broken, NoByteOfAWordMayBeMissing) {
  const std::make_integer_sequence<int, 16> bytes;
  expect_missing_bytes_caught<std::uint32_t>(bytes);
  expect_missing_bytes_caught<Words2>(bytes);
  expect_missing_bytes_caught<Words4>(bytes);
}

// ---- Collectives, barriers
// -----------------------------------------------------------------------------

TEST(Broken, DivergentCollective) {
  expect_caught({32, 0,
                 [](bool broken, Words& out) {
                   int v = lane();
                   if (broken && lane() < 16) {
                     v = shuffle_xor(v, 1);
                   } else {
                     v = shuffle_xor(v, 1);
                   }
                   out[number(lane())] = number(v);
                 }},
                "divergent collective: shuffle at broken_test.cpp:");
}

// warp() is a shuffle on GPUs, and hangs where one lane asks alone.
TEST(Broken, DivergentWarpNumber) {
  expect_caught({32, 0,
                 [](bool broken, Words& out) {
                   int number_of_warp = broken ? 0 : warp();
                   if (lane() == 0 && broken) number_of_warp = warp();
                   sync_warp();
                   out[number(lane())] = number(number_of_warp);
                 }},
                [](const Options&) -> std::vector<std::string> {
                  return {"divergent collective: warp at broken_test.cpp:",
                          "while other lanes of the warp are in warp at broken_test.cpp:"};
                });
}

TEST(Broken, DifferentCollectives) {
  expect_caught({32, 0,
                 [](bool broken, Words&) {
                   if (broken && lane() == 3) {
                     ballot(true);
                   } else {
                     sync_warp();
                   }
                   if (broken && lane() != 3) sync_warp();
                 }},
                [](const Options&) -> std::vector<std::string> {
                  return {"divergent collective: vote at broken_test.cpp:",
                          "divergent collective: sync_warp at broken_test.cpp:"};
                });
}

TEST(Broken, LaneThatLeftEarly) {
  expect_caught(
      {64, 0,
       [](bool broken, Words&) {
         if (broken && thread() == 35) return;
         sync_warp();
       }},
      "deadlock\n  threads 0 to 31: finished\n  threads 32 to 34: wait in sync_warp, 31 of "
      "32 lanes arrived, at broken_test.cpp:");
}

TEST(Broken, BarrierThatNeverFills) {
  expect_caught(
      {96, 0,
       [](bool broken, Words&) {
         if (warp() == 2) return;
         if (warp() == 1) {
           barrier_sync(5, 64);
         } else {
           barrier_arrive(broken ? 6 : 5, 64);
         }
       }},
      "deadlock\n  threads 0 to 31: finished\n  threads 32 to 63: wait at barrier 5, 32 of "
      "64 threads arrived, at broken_test.cpp:");
}

TEST(Broken, BarriersInAnotherOrder) {
  expect_caught({64, 0,
                 [](bool broken, Words&) {
                   const int first = broken && warp() == 1 ? 2 : 1;
                   barrier_sync(first, 64);
                   barrier_sync(3 - first, 64);
                 }},
                [](const Options&) -> std::vector<std::string> {
                  return {
                      "threads 0 to 31: wait at barrier 1, 32 of 64 threads arrived, at "
                      "broken_test.cpp:"};
                });
}

TEST(Broken, BarrierCountsThatDiffer) {
  expect_caught(
      {96, 0, [](bool broken, Words&) { barrier_sync(1, broken && warp() == 1 ? 64 : 96); }},
      "barrier 1: ");
}

TEST(Broken, WarpThatDivergesAtABarrier) {
  expect_caught({32, 0,
                 [](bool broken, Words&) {
                   if (broken && lane() >= 8) {
                     sync_threads();
                   } else {
                     sync_threads();
                   }
                 }},
                "while other lanes of the warp are at broken_test.cpp:");
}

TEST(Broken, WarpsThatMeetAtTwoSyncThreads) {
  expect_caught({64, 0,
                 [](bool broken, Words&) {
                   if (broken && warp() == 1) {
                     sync_threads();
                   } else {
                     sync_threads();
                   }
                 }},
                "while another warp is at broken_test.cpp:");
}

TEST(Broken, WarpsThatMeetAtTwoNamedBarriers) {
  expect_caught({64, 0,
                 [](bool broken, Words&) {
                   if (warp() == 1) {
                     broken ? barrier_sync(1, 64) : barrier_sync_anywhere(1, 64);
                   } else {
                     broken ? barrier_sync(1, 64) : barrier_sync_anywhere(1, 64);
                   }
                 }},
                "divergent barrier 1: at broken_test.cpp:");
}

}  // namespace
}  // namespace qattn::isa_test
