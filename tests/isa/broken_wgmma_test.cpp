// Kernels around wgmma that are broken in one place each (see broken.hpp).
#include <gtest/gtest.h>

#include "broken_sm90.hpp"

namespace qattn::isa_test {
namespace {

// ---- wgmma
// -----------------------------------------------------------------------------------------

/// One 64 x 8 x 32 product of s8 from shared memory that the lanes have written.
struct Product {
  bool proxy_fence = true, fence = true, wait = true;
  std::uint32_t stride = 256;
  bool write_before_wait = false, other_descriptors = false;

  void run(Words& out) const {
    for (int i = thread(); i < 512; i += 128) store_shared(word_of(i), 0x01010101u);
    if (proxy_fence) fence_async_proxy();
    sync_threads();
    const std::uint64_t m = matrix_descriptor(shared_base(), 16, stride, Swizzle::bytes32);
    std::int32_t d[4] = {};
    if (fence) wgmma_fence();
    wgmma<Element::s8, Element::s8, 8>(d, m + (other_descriptors && lane() == 9 ? 2 : 0), m, true);
    wgmma_commit();
    if (write_before_wait && thread() == 70) d[2] = 5;
    if (wait) wgmma_wait<0>();
    out[number(thread())] = static_cast<std::uint32_t>(d[0]);
  }
};

Case product(const Product& broken) {
  return {128, 2048,
          [=](bool is_broken, Words& out) { (is_broken ? broken : Product{}).run(out); }};
}

TEST(BrokenWgmma, MissingProxyFence) {
  expect_caught(product({.proxy_fence = false}),
                "wgmma of warpgroup 0 reads shared memory +0x0 at broken_wgmma_test.cpp");
}

TEST(BrokenWgmma, MissingFence) {
  expect_caught(product({.fence = false}),
                "wgmma without a wgmma_fence since the last wait, at broken_wgmma_test.cpp:");
}

TEST(BrokenWgmma, MissingFenceAfterAWait) {
  expect_caught({128, 2048,
                 [](bool broken, Words& out) {
                   Product{}.run(out);
                   const std::uint64_t m =
                       matrix_descriptor(shared_base(), 16, 256, Swizzle::bytes32);
                   std::int32_t d[4] = {};
                   if (!broken) wgmma_fence();
                   wgmma<Element::s8, Element::s8, 8>(d, m, m, true);
                   wgmma_commit();
                   wgmma_wait<0>();
                 }},
                "wgmma without a wgmma_fence since the last wait");
}

TEST(BrokenWgmma, MissingWait) {
  expect_caught(product({.wait = false}),
                "the kernel ended with a wgmma in flight, issued at broken_wgmma_test.cpp:");
  // And what the lanes read meanwhile is no product.
  Words out(1024);
  error_of(128, 2048, Options{.schedule = Schedule::early},
           [&] { Product{.wait = false}.run(out); });
  EXPECT_EQ(out[0], 0x7fc0deadu);
}

TEST(BrokenWgmma, DescriptorStrideTooSmall) {
  expect_caught(product({.stride = 128}),
                "matrix descriptor: a stride of 128 bytes, but 8 rows take 256, at "
                "broken_wgmma_test.cpp:");
}

TEST(BrokenWgmma, DescriptorStrideTooLarge) {
  expect_caught(product({.stride = 512}),
                "wgmma: 16 bytes at shared memory +2048 are out of bounds");
}

TEST(BrokenWgmma, AccumulatorWrittenInFlight) {
  expect_caught(product({.write_before_wait = true}),
                "accumulator 2 of thread 70 was written while a wgmma had it in flight");
}

TEST(BrokenWgmma, DescriptorsDifferBetweenLanes) {
  expect_caught(product({.other_descriptors = true}),
                "wgmma: descriptors or `add` differ between lanes");
}

/// A producer warp fills K stages by TMA, a warpgroup multiplies.
struct Consumer {
  bool all_wait = true, wait_before_arrive = true;

  void run(Words& out) const {
    const SharedAddress full = shared_base() + 4096, empty = full + 8;
    make_barriers(full, {1, 4});
    std::int32_t d[4] = {};
    for (std::uint32_t tile = 0; tile < 3; ++tile) {
      const std::uint32_t round = tile % 2;
      if (warp() == 4) {
        if (lane() != 0) continue;
        mbarrier_wait(empty, round ^ 1);
        mbarrier_arrive_expect(full, 2048);
        bulk_load(shared_base(), source.words + 512 * tile, 2048, full);
        continue;
      }
      if (all_wait || lane() == 0) mbarrier_wait(full, round);
      const std::uint64_t m = matrix_descriptor(shared_base(), 16, 256, Swizzle::bytes32);
      wgmma_fence();
      wgmma<Element::u8, Element::s8, 8>(d, m, m, tile != 0);
      wgmma_commit();
      if (wait_before_arrive) wgmma_wait<0>();
      if (elect()) mbarrier_arrive(empty);
      if (!wait_before_arrive) wgmma_wait<0>();
    }
    if (warp() < 4) {
      for (int i = 0; i < 4; ++i) out[number(4 * thread() + i)] = static_cast<std::uint32_t>(d[i]);
    }
  }
};

Case consumer(const Consumer& broken) {
  return {160, 8192,
          [=](bool is_broken, Words& out) { (is_broken ? broken : Consumer{}).run(out); }};
}

TEST(BrokenWgmma, OnlyOneLaneWaitedForTheLoad) {
  expect_caught(consumer({.all_wait = false}), [](const Options&) -> std::vector<std::string> {
    return {"race: wgmma of warpgroup 0 reads shared memory +0x0 at broken_wgmma_test.cpp"};
  });
}

TEST(BrokenWgmma, StageIsReleasedBeforeTheWait) {
  expect_caught(consumer({.wait_before_arrive = false}),
                "not ordered after the read of wgmma of warpgroup 0");
}

TEST(BrokenWgmma, MoreRegistersThanThereAre) {
  expect_caught({384, 0,
                 [](bool broken, Words&) {
                   if (warp() < 4) {
                     registers_decrease<40>();
                   } else if (broken) {
                     registers_increase<240>();
                   } else {
                     registers_increase<232>();
                   }
                 }},
                [](const Options&) -> std::vector<std::string> { return {"deadlock"}; });
}

TEST(BrokenWgmma, RegistersIncreasedDownwards) {
  expect_caught({128, 0,
                 [](bool broken, Words&) {
                   registers_decrease<160>();
                   if (broken) registers_increase<152>();
                 }},
                "registers_increase: to 152, but the warpgroup has 160 registers a thread");
}

// ---- The writer's swizzle against the descriptor's
// --------------------------------------------------------------

/// 64 rows of 128 bytes, written under a swizzle of 128 bytes and multiplied by the first eight of
/// them; only the first 32 bytes of each row belong to the product.
std::int8_t written_byte(int row, int k) { return static_cast<std::int8_t>(row + 3 * k % 11 - 5); }

/// The lanes write `chunks` of the 8 chunks of 16 bytes of each row.
void write_rows(int chunks) {
  for (int i = thread(); i < 64 * chunks; i += 128) {
    const int row = i / chunks, chunk = i % chunks;
    Words4 bytes{};
    for (int byte = 0; byte < 16; ++byte) {
      const auto code = static_cast<std::uint8_t>(written_byte(row, 16 * chunk + byte));
      bytes.w[byte / 4] |= number(code) << (8 * (byte % 4));
    }
    store_shared(word_of(32 * row + 4 * (chunk ^ row % 8)), bytes);
  }
  fence_async_proxy();
  sync_threads();
}
void multiply_rows(Swizzle swizzle, Words& out) {
  const std::uint64_t m = matrix_descriptor(shared_base(), 16, 1024, swizzle);
  std::int32_t d[4];
  wgmma_fence();
  wgmma<Element::s8, Element::s8, 8>(d, m, m, false);
  wgmma_commit();
  wgmma_wait<0>();
  for (int i = 0; i < 4; ++i) out[number(4 * thread() + i)] = static_cast<std::uint32_t>(d[i]);
}

TEST(BrokenSwizzle, OfADescriptorOnATileOfTma) {
  for (const Swizzle wrong : {Swizzle::none, Swizzle::bytes32, Swizzle::bytes64}) {
    const char* texts[] = {"no swizzle", "32 bytes", "64 bytes"};
    TensorMap map;
    ASSERT_EQ(make_tensor_map({.address = source.words,
                               .rank = 2,
                               .sizes = {128, 64},
                               .stride_bytes = {0, 128},
                               .box = {128, 64},
                               .swizzle = Swizzle::bytes128},
                              map),
              "");
    expect_caught({128, 8192 + 64,
                   [&](bool broken, Words& out) {
                     const SharedAddress barrier = shared_base() + 8192;
                     make_barriers(barrier, {1});
                     if (thread() == 0) {
                       mbarrier_arrive_expect(barrier, 8192);
                       tma_load<2>(shared_base(), map, {0, 0}, barrier);
                     }
                     mbarrier_wait(barrier, 0);
                     multiply_rows(broken ? wrong : Swizzle::bytes128, out);
                   }},
                  "wgmma: the descriptor's swizzle is " +
                      std::string(texts[static_cast<int>(wrong)]) +
                      ", but TMA wrote shared memory +0x0 under one of 128 bytes, at "
                      "broken_wgmma_test.cpp:");
  }
}

// Lanes may keep any layout: what they wrote belongs to no swizzle. A wrong one is caught where it
// leads to bytes that nobody wrote ...
TEST(BrokenSwizzle, OfADescriptorOnATileThatLanesFilledInPart) {
  expect_caught({128, 8192,
                 [](bool broken, Words& out) {
                   write_rows(2);
                   multiply_rows(broken ? Swizzle::bytes64 : Swizzle::bytes128, out);
                 }},
                "wgmma: read of uninitialised bytes");
}

// ... but not in a tile that they filled: every byte there is data, and nothing tells these from
// those that were meant. Only the product is another, which a test must compare
// (docs/ISA_CONFORMANCE.md).
TEST(BrokenSwizzle, OfADescriptorOnATileThatLanesFilledGivesOtherValuesOnly) {
  const Kernel kernel = [](bool broken, Words& out) {
    write_rows(8);
    multiply_rows(broken ? Swizzle::bytes64 : Swizzle::bytes128, out);
  };
  expect_twin_passes({128, 8192, kernel});
  for (const Options& options : all_schedules()) {
    Words right(1024), wrong(1024);
    EXPECT_EQ(error_of(128, 8192, options, [&] { kernel(false, right); }), "");
    EXPECT_EQ(error_of(128, 8192, options, [&] { kernel(true, wrong); }), "");
    EXPECT_NE(right, wrong);
    int sum = 0;  // thread 37: row 17, columns 2 and 3
    for (int k = 0; k < 32; ++k) sum += written_byte(17, k) * written_byte(3, k);
    EXPECT_EQ(static_cast<int>(right[4 * 37 + 1]), sum);
  }
}

}  // namespace
}  // namespace qattn::isa_test
