// Kernels of sm_90 words that are broken in one place each (see broken.hpp).
#include "broken_sm90.hpp"

#include <gtest/gtest.h>

namespace qattn::isa_test {
namespace {

// ---- mbarriers
// -------------------------------------------------------------------------------------

/// A producer thread and a consumer warp share one stage of 128 bytes.
struct Pipeline {
  bool sync_before_arrive = true, wrong_parity = false, skip_empty = false;
  int extra_bytes = 0;

  void run(Words& out) const {
    const SharedAddress full = shared_base() + 512, empty = full + 8;
    make_barriers(full, {1, 1});
    for (std::uint32_t tile = 0; tile < 4; ++tile) {
      const std::uint32_t round = tile % 2;
      if (warp() == 1) {
        if (lane() != 0) continue;
        if (!skip_empty) mbarrier_wait(empty, round ^ 1);
        mbarrier_arrive_expect(full, 128 + number(tile == 2 ? extra_bytes : 0));
        bulk_load(shared_base(), source.words + 32 * tile, 128, full);
      } else {
        mbarrier_wait(full, round ^ (wrong_parity ? 1 : 0));
        out[32 * tile + number(lane())] = load_shared<std::uint32_t>(word_of(lane()));
        if (sync_before_arrive) sync_warp();
        if (elect()) mbarrier_arrive(empty);
      }
    }
  }
};

Case pipeline(const Pipeline& broken) {
  return {64, 1024,
          [=](bool is_broken, Words& out) { (is_broken ? broken : Pipeline{}).run(out); }};
}

TEST(BrokenMbarrier, MissingSyncWarpBeforeTheElectedArrive) {
  expect_caught(pipeline({.sync_before_arrive = false}),
                [](const Options&) -> std::vector<std::string> {
                  return {"race: a bulk load writes shared memory +0x"};
                });
}

const std::string kConsumersStarve = "threads 0 to 31: wait at mbarrier +0x200 for parity ";

TEST(BrokenMbarrier, WrongParity) {
  expect_caught(pipeline({.wrong_parity = true}), [](const Options& o) -> std::vector<std::string> {
    if (o.schedule == Schedule::late && o.order == LaneOrder::forward) {
      return {"load_shared: read of uninitialised bytes", "load_shared: read of bytes with a copy"};
    }
    return {"load_shared: read of uninitialised bytes", "load_shared: read of bytes with a copy",
            "not ordered after the write of a bulk load", kConsumersStarve};
  });
}

TEST(BrokenMbarrier, StageIsFilledWithoutWaitingForItsReaders) {
  expect_caught(pipeline({.skip_empty = true}), [](const Options& o) -> std::vector<std::string> {
    // Late loads meet each other; early ones outrun the consumers, who then miss a phase.
    if (o.schedule == Schedule::late && o.order != LaneOrder::random) {
      return {"arrives twice in phase 0", "write over bytes with a copy in flight"};
    }
    if (o.schedule == Schedule::early && o.order != LaneOrder::random) return {kConsumersStarve};
    return {"arrives twice in phase",
            "write over bytes with a copy in flight",
            "not ordered after the read of thread",
            "read of bytes with a copy in flight",
            "not ordered after the write of a bulk load",
            kConsumersStarve};
  });
}

TEST(BrokenMbarrier, ExpectsTooManyBytes) {
  expect_caught(pipeline({.extra_bytes = 16}),
                "wait at mbarrier +0x200 for parity 0: phase 2 lacks 0 of 1 arrivals and 16 bytes, "
                "at broken_sm90_test.cpp:");
}

TEST(BrokenMbarrier, ExpectsTooFewBytes) {
  expect_caught(pipeline({.extra_bytes = -16}),
                "wait at mbarrier +0x200 for parity 0: phase 2 lacks 0 of 1 arrivals and -16 "
                "bytes, at broken_sm90_test.cpp:");
}

TEST(BrokenMbarrier, ThreadArrivesTwice) {
  expect_caught({64, 64,
                 [](bool broken, Words&) {
                   make_barriers(shared_base(), {64});
                   if (broken && thread() == 5) mbarrier_arrive(shared_base());
                   mbarrier_arrive(shared_base());
                   mbarrier_wait(shared_base(), 0);
                 }},
                "mbarrier +0x0: thread 5 arrives twice in phase 0, at broken_sm90_test.cpp:");
}

TEST(BrokenMbarrier, MoreArrivalsThanItsCount) {
  // With a transaction pending the phase stays open, and one arrival is too many.
  expect_caught({64, 256,
                 [](bool broken, Words&) {
                   make_barriers(shared_base(), {32});
                   if (thread() == 0) mbarrier_expect(shared_base(), 16);
                   sync_threads();
                   if (thread() < (broken ? 33 : 32)) mbarrier_arrive(shared_base());
                   sync_threads();
                   if (thread() == 0) bulk_load(word_of(16), source.words, 16, shared_base());
                   mbarrier_wait(shared_base(), 0);
                 }},
                "mbarrier +0x0: more arrivals than its 32 in phase 0, at broken_sm90_test.cpp:");
}

TEST(BrokenMbarrier, UsedBeforeInitialisation) {
  expect_caught({64, 64,
                 [](bool broken, Words&) {
                   if (thread() == 0) mbarrier_init(shared_base(), 64);
                   if (!broken) sync_threads();
                   mbarrier_arrive(shared_base());
                   mbarrier_wait(shared_base(), 0);
                 }},
                [](const Options& o) -> std::vector<std::string> {
                  if (o.order == LaneOrder::forward) {
                    return {"race: thread 1 reads shared memory +0x0 at broken_sm90_test.cpp"};
                  }
                  return {"mbarrier_arrive: no mbarrier was initialised at shared memory +0x0",
                          "race: thread"};
                });
}

TEST(BrokenMbarrier, InitialisedWithoutFence) {
  expect_caught({32, 256,
                 [](bool broken, Words&) {
                   make_barriers(shared_base(), {1}, !broken);
                   if (lane() == 0) {
                     mbarrier_arrive_expect(shared_base(), 16);
                     bulk_load(word_of(16), source.words, 16, shared_base());
                   }
                   mbarrier_wait(shared_base(), 0);
                 }},
                "bulk_load: mbarrier +0x0 was initialised without fence_mbarrier_init");
}

TEST(BrokenMbarrier, ArrivalsOfTheNextPhaseOrderNothing) {
  // Threads 0 and 40 share the barrier. Thread 0 writes between phases 0 and 1; thread 40 may read
  // only after phase 1.
  expect_caught({64, 256,
                 [](bool broken, Words& out) {
                   const SharedAddress barrier = shared_base(), data = word_of(16);
                   if (thread() == 0) store_shared(data, 1u);
                   make_barriers(barrier, {2});
                   if (thread() != 0 && thread() != 40) return;
                   mbarrier_arrive(barrier);
                   mbarrier_wait(barrier, 0);
                   if (thread() == 0) store_shared(data, 2u);
                   if (thread() == 40 && broken) out[0] = load_shared<std::uint32_t>(data);
                   mbarrier_arrive(barrier);
                   if (thread() != 40 || broken) return;
                   mbarrier_wait(barrier, 1);
                   out[0] = load_shared<std::uint32_t>(data);
                 }},
                "race: thread");
}

TEST(BrokenMbarrier, EndsInTheMiddleOfAPhase) {
  for (const Options& options : all_schedules()) {
    const std::string error = error_of(64, 64, options, [] {
      make_barriers(shared_base(), {64});
      if (thread() < 63) mbarrier_arrive(shared_base());
    });
    EXPECT_NE(error.find("the kernel ended in the middle of a phase: mbarrier +0x0 phase 0 lacks 1 "
                         "of 64 arrivals and 0 bytes"),
              std::string::npos)
        << error;
  }
}

TEST(BrokenMbarrier, IsOverwritten) {
  expect_caught({32, 64,
                 [](bool broken, Words&) {
                   make_barriers(shared_base(), {1});
                   if (lane() == 0) store_shared(word_of(broken ? 1 : 2), 1u);
                 }},
                "store_shared: write over an mbarrier, shared memory +0x4");
}

// ---- Bulk copies, TMA
// ------------------------------------------------------------------------------

TEST(BrokenBulk, MissingFenceBeforeAStore) {
  alignas(128) static std::uint32_t target[32];
  expect_caught({32, 128,
                 [](bool broken, Words& out) {
                   store_shared(word_of(lane()), number(lane()));
                   if (!broken) fence_async_proxy();
                   sync_warp();
                   if (lane() == 0) {
                     bulk_store(target, shared_base(), 128);
                     bulk_commit();
                     bulk_wait<0>();
                   }
                   sync_warp();
                   out[number(lane())] = target[lane()];
                 }},
                "a bulk store of warp 0 reads shared memory +0x0 at broken_sm90_test.cpp");
}

TEST(BrokenBulk, FenceBeforeTheWriteDoesNotCount) {
  alignas(128) static std::uint32_t target[32];
  expect_caught({32, 128,
                 [](bool broken, Words&) {
                   if (broken) fence_async_proxy();
                   store_shared(word_of(lane()), number(lane()));
                   if (!broken) fence_async_proxy();
                   sync_warp();
                   if (lane() == 0) {
                     bulk_store(target, shared_base(), 128);
                     bulk_commit();
                     bulk_wait_read<0>();
                   }
                 }},
                "without fence_async_proxy between");
}

TEST(BrokenBulk, FenceOfTheIssuerAfterTheBarrierCounts) {
  alignas(128) static std::uint32_t target[32];
  expect_twin_passes({64, 128, [](bool, Words&) {
                        if (warp() == 0) store_shared(word_of(lane()), 1u);
                        sync_threads();
                        if (thread() == 32) {
                          fence_async_proxy();
                          bulk_store(target, shared_base(), 128);
                          bulk_commit();
                          bulk_wait<0>();
                        }
                      }});
}

TEST(BrokenBulk, SourceIsOverwrittenBeforeItWasRead) {
  alignas(128) static std::uint32_t target[32];
  expect_caught({32, 128,
                 [](bool broken, Words& out) {
                   store_shared(word_of(lane()), number(lane()));
                   fence_async_proxy();
                   sync_warp();
                   if (lane() == 0) {
                     bulk_store(target, shared_base(), 128);
                     bulk_commit();
                     if (!broken) bulk_wait_read<0>();
                   }
                   sync_warp();
                   store_shared(word_of(lane()), 77u);
                   if (lane() == 0) bulk_wait<0>();
                   sync_warp();
                   out[number(lane())] = target[lane()];
                 }},
                "not ordered after the read of a bulk store of warp 0");
}

TEST(BrokenBulk, EndsBeforeTheStoreHasRead) {
  alignas(128) static std::uint32_t target[32];
  expect_caught({32, 128,
                 [](bool broken, Words&) {
                   store_shared(word_of(lane()), 1u);
                   fence_async_proxy();
                   sync_warp();
                   if (lane() != 0) return;
                   bulk_store(target, shared_base(), 128);
                   bulk_commit();
                   if (!broken) bulk_wait_read<0>();
                 }},
                "the kernel ended while a bulk store may still read shared memory");
}

TEST(BrokenBulk, LoadThatNobodyWaitsFor) {
  expect_caught({32, 256,
                 [](bool broken, Words& out) {
                   make_barriers(shared_base() + 128, {1});
                   if (lane() == 0) {
                     mbarrier_arrive_expect(shared_base() + 128, 128);
                     bulk_load(shared_base(), source.words, 128, shared_base() + 128);
                   }
                   if (!broken) mbarrier_wait(shared_base() + 128, 0);
                   out[number(lane())] = load_shared<std::uint32_t>(word_of(lane()));
                 }},
                [](const Options&) -> std::vector<std::string> {
                  return {"load_shared: read of bytes with a copy in flight",
                          "not ordered after the write of a bulk load",
                          "load_shared: read of uninitialised bytes"};
                });
}

TEST(BrokenBulk, WrongSwizzleOfTheReader) {
  TensorMap map;
  ASSERT_EQ(make_tensor_map({.address = source.words,
                             .rank = 2,
                             .sizes = {128, 8},
                             .stride_bytes = {0, 128},
                             .box = {128, 8},
                             .swizzle = Swizzle::bytes128},
                            map),
            "");
  const Kernel kernel = [&](bool broken, Words& out) {
    const SharedAddress barrier = shared_base() + 1024;
    make_barriers(barrier, {1});
    if (lane() == 0) {
      mbarrier_arrive_expect(barrier, 1024);
      tma_load<2>(shared_base(), map, {0, 0}, barrier);
    }
    mbarrier_wait(barrier, 0);
    const int row = lane() % 8, chunk = lane() / 8;
    std::uint32_t r[1][4];
    load_matrix<1>(r, {word_of(32 * row + 4 * (broken ? chunk : chunk ^ row))});
    for (int m = 0; m < 4; ++m) out[number(4 * lane() + m)] = r[0][m];
  };
  expect_twin_passes({32, 2048, kernel});
  for (const Options& options : all_schedules()) {
    Words right(1024), wrong(1024);
    EXPECT_EQ(error_of(32, 2048, options, [&] { kernel(false, right); }), "");
    EXPECT_EQ(error_of(32, 2048, options, [&] { kernel(true, wrong); }), "");
    EXPECT_NE(right, wrong);
    EXPECT_EQ(right[4 * 5 + 2], 1u + 32 * 1 + 4 * 2 + 1);  // lane 5, matrix 2: row 1, chunk 2
  }
}

}  // namespace
}  // namespace qattn::isa_test
