// Every word of sm_80 against its definition in isa.hpp, written here a second time.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <tuple>

#include "emulate.hpp"
#include "operands.hpp"

namespace qattn::isa_test {
namespace {

using namespace isa;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// ---- Places, memory
// ------------------------------------------------------------------------------

TEST(Places, TellThreadAndBlock) {
  std::vector<int> seen(2 * 3 * 64);
  emu::run({3, 2, 1}, 64, 0, Options{}, [&] {
    const Index3 b = block(), g = grid();
    ASSERT_EQ(g.x, 3);
    ASSERT_EQ(g.y, 2);
    ASSERT_EQ(thread(), 32 * warp() + lane());
    seen[static_cast<std::size_t>((b.y * 3 + b.x) * 64 + thread())] += 1;
  });
  for (int n : seen) EXPECT_EQ(n, 1);
}

TEST(Memory, EverySizeGoesThroughSharedMemory) {
  run_block(32, 4096, [] {
    const SharedAddress s = shared_base() + static_cast<SharedAddress>(lane()) * 64;
    store_shared(s, std::uint8_t{0x12});
    store_shared(s + 2, std::uint16_t{0x3456});
    store_shared(s + 4, 0x789abcdeu);
    store_shared(s + 8, Words2{{1, 2}});
    store_shared(s + 16, Words4{{3, 4, 5, 6}});
    ASSERT_EQ(load_shared<std::uint8_t>(s), 0x12);
    ASSERT_EQ(load_shared<std::uint16_t>(s + 2), 0x3456);
    ASSERT_EQ(load_shared<std::uint32_t>(s + 4), 0x789abcdeu);
    ASSERT_EQ(load_shared<Words2>(s + 8).w[1], 2u);
    ASSERT_EQ(load_shared<Words4>(s + 16).w[2], 5u);
    ASSERT_EQ(load_shared<std::uint32_t>(s + 20), 4u);
  });
}

TEST(Memory, WhatIsUsedOnceIsCopiedWhole) {
  const Words4 from{{1, 2, 3, 4}};
  Words4 to{};
  run_block(32, 0, [&] {
    if (lane() == 3) store_once(&to, load_once(&from));
  });
  for (int i = 0; i < 4; ++i) EXPECT_EQ(to.w[i], from.w[i]);
}

TEST(Memory, AtomicsGiveTheOldValue) {
  run_block(64, 64, [] {
    const SharedAddress sum = shared_base(), top = sum + 4;
    if (thread() == 0) {
      store_shared(sum, 0u);
      store_shared(top, 7u);
    }
    sync_threads();
    ASSERT_LT(atomic_add_shared(sum, 2), 128u);
    ASSERT_GE(atomic_max_shared(top, static_cast<std::uint32_t>(thread())), 7u);
    sync_threads();
    ASSERT_EQ(load_shared<std::uint32_t>(sum), 128u);
    ASSERT_EQ(load_shared<std::uint32_t>(top), 63u);
  });
}

TEST(Memory, GlobalAtomicsOfBlocksOnSeveralThreads) {
  std::uint32_t sum = 0, bits = 0, top = 0;
  std::uint64_t wide = 0;
  emu::run({200, 1, 1}, 32, 0, Options{.workers = 4}, [&] {
    atomic_add_global(&sum, 1);
    atomic_add_global(&wide, std::uint64_t{1} << 32);
    atomic_or_global(&bits, 1u << lane());
    atomic_max_global(&top, static_cast<std::uint32_t>(block().x));
  });
  EXPECT_EQ(sum, 6400u);
  EXPECT_EQ(wide, std::uint64_t{6400} << 32);
  EXPECT_EQ(bits, ~0u);
  EXPECT_EQ(top, 199u);
}

// ---- Shuffles, votes
// -------------------------------------------------------------------------------

TEST(Shuffles, TakeTheNamedLanesValue) {
  run_block(64, 0, [] {
    const int l = lane(), v = 100 * warp() + l;
    ASSERT_EQ(shuffle_xor(v, 5), 100 * warp() + (l ^ 5));
    ASSERT_EQ(shuffle(v, 9), 100 * warp() + 9);
    ASSERT_EQ(shuffle(v, l + 1), 100 * warp() + (l + 1) % 32);
    ASSERT_EQ(shuffle_up(v, 3), l < 3 ? v : v - 3);
    ASSERT_EQ(shuffle_down(v, 3), l > 28 ? v : v + 3);
    ASSERT_EQ(shuffle_xor(0.5f * static_cast<float>(l), 1), 0.5f * static_cast<float>(l ^ 1));
    ASSERT_EQ(shuffle_xor(std::uint64_t{1} << l, 1), std::uint64_t{1} << (l ^ 1));
    ASSERT_EQ(ballot(l % 3 == 0), 0x49249249u);
    ASSERT_TRUE(any(l == 31));
    ASSERT_FALSE(any(l == 32));
    ASSERT_TRUE(all(l < 32));
    ASSERT_FALSE(all(l != 7));
  });
}

// ---- Asynchronous copies
// ---------------------------------------------------------------------------

TEST(CopyAsync, FillsThePastWithZeros) {
  alignas(16) const std::uint32_t source[4] = {0x04030201, 0x08070605, 0x0c0b0a09, 0x100f0e0d};
  for (const Options& options : all_schedules()) {
    for (int bytes = 0; bytes <= 16; ++bytes) {
      EXPECT_EQ(error_of(32, 512, options,
                         [&] {
                           const SharedAddress to =
                               shared_base() + static_cast<SharedAddress>(16 * lane());
                           copy_async16(to, bytes ? source : nullptr, bytes);
                           copy_async_commit();
                           copy_async_wait<0>();
                           for (int i = 0; i < 16; ++i) {
                             const int got =
                                 load_shared<std::uint8_t>(to + static_cast<SharedAddress>(i));
                             ASSERT_EQ(got, i < bytes ? i + 1 : 0);
                           }
                         }),
                "");
    }
  }
}

/// Copies of 4 and 8 bytes lie as close as they may.
TEST(CopyAsync, OfFourAndEightBytesFillThePastWithZeros) {
  alignas(8) const std::uint32_t source[2] = {0x04030201, 0x08070605};
  for (const Options& options : all_schedules()) {
    for (const int size : {4, 8}) {
      for (int bytes = 0; bytes <= size; ++bytes) {
        const auto kernel = [&] {
          const SharedAddress to = shared_base() + static_cast<SharedAddress>(size * lane());
          if (size == 4) copy_async4(to, bytes ? source : nullptr, bytes);
          if (size == 8) copy_async8(to, bytes ? source : nullptr, bytes);
          copy_async_commit();
          copy_async_wait<0>();
          for (int i = 0; i < size; ++i) {
            const int got = load_shared<std::uint8_t>(to + static_cast<SharedAddress>(i));
            ASSERT_EQ(got, i < bytes ? i + 1 : 0);
          }
        };
        EXPECT_EQ(error_of(32, 256, options, kernel), "");
      }
    }
  }
}

TEST(CopyAsync, WantsItsOwnAlignmentAndNoMoreThanItsBytes) {
  alignas(16) static const std::uint32_t source[8] = {};
  const auto error = [](auto copy) { return error_of(32, 512, Options{}, copy); };
  const auto expect = [](const std::string& got, const char* text) {
    EXPECT_NE(got.find(text), std::string::npos) << got;
  };
  expect(error([] { copy_async8(shared_base(), source + 1, 8); }),
         "copy_async8: misaligned source");
  expect(error([] { copy_async8(shared_base() + 4, source, 8); }),
         "copy_async8: misaligned shared address");
  expect(error([] { copy_async4(shared_base() + 2, source, 4); }),
         "copy_async4: misaligned shared address");
  expect(error([] { copy_async4(shared_base(), source, 5); }), "copy_async4: 5 bytes");
  expect(error([] { copy_async8(shared_base(), source, 9); }), "copy_async8: 9 bytes");
}

TEST(CopyAsync, WaitLeavesTheYoungestGroupsInFlight) {
  alignas(16) const std::uint32_t source[12] = {1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3};
  for (const int read : {0, 1, 2}) {
    for (const Options& options : all_schedules()) {
      const std::string error = error_of(32, 2048, options, [&] {
        const SharedAddress to = shared_base() + static_cast<SharedAddress>(64 * lane());
        for (int group = 0; group < 3; ++group) {
          copy_async16(to + static_cast<SharedAddress>(16 * group), source + 4 * group, 16);
          copy_async_commit();
        }
        copy_async_wait<1>();
        const auto at = to + static_cast<SharedAddress>(16 * read);
        ASSERT_EQ(load_shared<std::uint32_t>(at), static_cast<std::uint32_t>(read + 1));
      });
      if (read < 2) {
        EXPECT_EQ(error, "");
      } else {
        EXPECT_NE(error.find("read of bytes with a copy in flight"), std::string::npos) << error;
      }
    }
  }
}

// ---- Matrices
// ----------------------------------------------------------------------------------------

template <Element A, Element B>
void expect_mma() {
  constexpr int M = 2, N = 3;
  static const Operands<M, N> operands(A, B, 7);
  const Options options{.architecture = has_mma(A, 90) ? 90 : 89};
  const std::string error = error_of(32, 0, options, [] {
    const int l = lane(), g = l / 4, t = l % 4;
    std::uint32_t a[M][4], b[N][2];
    operands.fragments(l, a, b);
    Accumulator<A> d[M][N][4];
    for (auto& tile : d) {
      for (auto& x : tile) {
        for (int i = 0; i < 4; ++i) x[i] = static_cast<Accumulator<A>>(10 * l + i);
      }
    }
    mma<A, B>(d, a, b);
    for (int m = 0; m < M; ++m) {
      for (int n = 0; n < N; ++n) {
        for (int i = 0; i < 4; ++i) {
          const double sum = operands.product(16 * m + g + 8 * (i / 2), 8 * n + 2 * t + i % 2);
          ASSERT_EQ(static_cast<double>(d[m][n][i]), 10 * l + i + sum) << m << n << i;
        }
      }
    }
  });
  EXPECT_EQ(error, "");
}

TEST(Mma, MultipliesEveryPairOfFormats) {
  using enum Element;
  expect_mma<f16, f16>();
  expect_mma<bf16, bf16>();
  expect_mma<s8, s8>();
  expect_mma<s8, u8>();
  expect_mma<u8, s8>();
  expect_mma<u8, u8>();
  expect_mma<e4m3, e4m3>();
  expect_mma<e4m3, e5m2>();
  expect_mma<e5m2, e4m3>();
  expect_mma<e5m2, e5m2>();
}

TEST(Mma, HalfAccumulators) {
  static const Operands<1, 2> operands(Element::f16, Element::f16, 9);
  run_block(32, 0, [] {
    const int l = lane(), g = l / 4, t = l % 4;
    std::uint32_t a[1][4], b[2][2], d[1][2][2] = {};
    operands.fragments(l, a, b);
    for (auto& n : d[0]) n[0] = n[1] = pack_f16(1, 2);
    mma_f16(d, a, b);
    for (int n = 0; n < 2; ++n) {
      for (int r = 0; r < 2; ++r) {
        const Pair got = unpack_f16(d[0][n][r]);
        ASSERT_EQ(got.lo, 1 + operands.product(g + 8 * r, 8 * n + 2 * t));
        ASSERT_EQ(got.hi, 2 + operands.product(g + 8 * r, 8 * n + 2 * t + 1));
      }
    }
  });
}

TEST(Mma, ExtremesOfIntegersAreExact) {
  run_block(32, 0, [] {
    const std::uint32_t a[1][4] = {{~0u, ~0u, ~0u, ~0u}}, b[1][2] = {{~0u, ~0u}};
    std::int32_t d[1][1][4] = {};
    mma<Element::u8, Element::u8>(d, a, b);
    ASSERT_EQ(d[0][0][0], 32 * 255 * 255);
    d[0][0][0] = std::numeric_limits<std::int32_t>::max();
    mma<Element::s8, Element::s8>(d, a, b);
    ASSERT_EQ(d[0][0][0], std::numeric_limits<std::int32_t>::min() + 31);  // wraps
  });
}

// ---- Arithmetic
// ----------------------------------------------------------------------------------------

TEST(Arithmetic, ApproximationsFlushSubnormals) {
  EXPECT_EQ(isa::exp2(3.0f), 8.0f);
  EXPECT_EQ(isa::exp2(-kInf), 0.0f);
  EXPECT_EQ(isa::exp2(-127.0f), 0.0f);  // the result is subnormal
  EXPECT_EQ(isa::exp2(1e-40f), 1.0f);
  EXPECT_EQ(isa::log2(8.0f), 3.0f);
  EXPECT_EQ(isa::log2(1e-40f), -kInf);
  EXPECT_TRUE(std::isnan(isa::log2(-1.0f)));
  EXPECT_EQ(reciprocal(4.0f), 0.25f);
  EXPECT_EQ(reciprocal(0.0f), kInf);
  EXPECT_EQ(reciprocal(-1e-40f), -kInf);
  EXPECT_EQ(reciprocal(0x1p127f), 0.0f);
  EXPECT_EQ(max3(1.0f, kNan, 3.0f), 3.0f);
  EXPECT_TRUE(std::isnan(max3(kNan, kNan, kNan)));
}

/// Every order of three numbers, and NaN in every place. +0 is the larger zero.
TEST(Arithmetic, MaximumOfThreeFloats) {
  const float numbers[] = {-kInf, -2.0f, -0x1p-140f, -0.0f, 0.0f, 0x1p-149f, 1.0f, kInf};
  const float nan = std::numeric_limits<float>::signaling_NaN();
  const auto bits = [](float x) { return std::bit_cast<std::uint32_t>(x); };
  for (std::size_t i = 0; i < std::size(numbers); ++i) {
    const float most = numbers[i];
    for (std::size_t j = 0; j <= i; ++j) {
      const float x = numbers[j];
      for (const float y : {x, most, nan, -kNan}) {
        EXPECT_EQ(bits(max3(most, x, y)), bits(most)) << most << ' ' << x << ' ' << y;
        EXPECT_EQ(bits(max3(x, most, y)), bits(most)) << most << ' ' << x << ' ' << y;
        EXPECT_EQ(bits(max3(y, x, most)), bits(most)) << most << ' ' << x << ' ' << y;
      }
      EXPECT_EQ(bits(max3(kNan, most, nan)), bits(most)) << most;
    }
  }
}

/// Each half is the plain operation, rounded once, whatever lies beside it.
TEST(Arithmetic, PairsAreTwoOfThePlainOperations) {
  const float numbers[] = {0.0f,      -0.0f,      1.0f,        -3.0f, 1.0f + 0x1p-23f,
                           0x1p-149f, -0x1p-130f, 0x1.8p-126f, 1e38f, -0x1p127f,
                           kInf,      kNan};
  const auto same = [](Pair p, float lo, float hi) {
    const auto equal = [](float x, float y) {
      if (std::isnan(x) || std::isnan(y)) return std::isnan(x) && std::isnan(y);
      return std::bit_cast<std::uint32_t>(x) == std::bit_cast<std::uint32_t>(y);
    };
    return equal(p.lo, lo) && equal(p.hi, hi);
  };
  for (const float x : numbers) {
    for (const float y : numbers) {
      EXPECT_TRUE(same(multiply_pair({x, 2.0f}, {y, -0.5f}), x * y, -1.0f)) << x << ' ' << y;
      EXPECT_TRUE(same(multiply_pair({kNan, x}, {1.0f, y}), kNan, x * y)) << x << ' ' << y;
      EXPECT_TRUE(same(add_pair({x, 1.0f}, {y, 0x1p-25f}), x + y, 1.0f)) << x << ' ' << y;
      EXPECT_TRUE(same(add_pair({kInf, x}, {-kInf, y}), kNan, x + y)) << x << ' ' << y;
      for (const float z : numbers) {
        EXPECT_TRUE(same(fma_pair({x, y}, {y, z}, {z, x}), std::fmaf(x, y, z), std::fmaf(y, z, x)))
            << x << ' ' << y << ' ' << z;
      }
    }
  }
  const float e = 1.0f + 0x1p-12f;  // e * e = 1 + 2^-11 + 2^-24, rounded once or twice
  EXPECT_TRUE(same(fma_pair({e, e}, {e, e}, {-1, 0}), 0x1p-11f + 0x1p-24f, 1.0f + 0x1p-11f));
}

TEST(Arithmetic, ExtremesOfThreeIntegers) {
  const std::uint32_t large = ~0u;  // -1 where signs count
  for (const auto& [a, b, c] : {std::tuple{1u, 5u, large}, {5u, large, 1u}, {large, 1u, 5u}}) {
    const auto s = [](std::uint32_t w) { return static_cast<std::int32_t>(w); };
    EXPECT_EQ(max3(s(a), s(b), s(c)), 5);
    EXPECT_EQ(max3(a, b, c), large);
    EXPECT_EQ(min3(a, b, c), 1u);
  }
}

TEST(Arithmetic, ConversionsRoundAndSaturate) {
  EXPECT_EQ(pack_u8(0.5f, 1.5f, 2.5f, -3.0f), 0x00020200u);
  EXPECT_EQ(pack_u8(kNan, 254.5f, 255.5f, kInf), 0xfffffe00u);
  EXPECT_EQ(pack_u8(-kInf, -0.4f, 0.50001f, 127.4f), 0x7f010000u);
  EXPECT_EQ(pack_f16(1.0f, -2.0f), 0xc0003c00u);
  EXPECT_EQ(pack_f16(65519.0f, 65520.0f), 0x7c007bffu);
  EXPECT_EQ(pack_f16(kNan, 1.0f + 0x1p-11f), 0x3c007fffu);
  EXPECT_EQ(pack_bf16(1.0f + 0x1p-8f, -kNan), 0x7fff3f80u);
  EXPECT_EQ(pack_e4m3(448.0f, 1e9f), 0x7e7e);
  EXPECT_EQ(pack_e4m3(kNan, -kInf), 0xfe7f);
  EXPECT_EQ(pack_e5m2(57344.0f, kInf), 0x7b7b);
  EXPECT_EQ(pack_e5m2(-1.0f, kNan), 0x7fbc);
  EXPECT_EQ(unpack_f16(0xc0003c00u).lo, 1.0f);
  EXPECT_EQ(unpack_f16(0xc0003c00u).hi, -2.0f);
  EXPECT_EQ(unpack_e4m3(0x7efe), 0x5f00df00u);  // -448, 448
  EXPECT_EQ(unpack_e4m3(0x01ff), 0x18007fffu);  // NaN, 2^-9
  EXPECT_EQ(unpack_bf16(0xc0003f80u).lo, 1.0f);
  EXPECT_EQ(unpack_bf16(0xc0003f80u).hi, -2.0f);
}

TEST(Arithmetic, ExtremesOfHalves) {
  EXPECT_EQ(max_f16(0x3c00bc00u, 0x4000c000u), 0x4000bc00u);  // 1 and 2, -1 and -2
  EXPECT_EQ(min_f16(0x3c00bc00u, 0x4000c000u), 0x3c00c000u);
  EXPECT_EQ(max_bf16(0x80003f80u, 0x0000ff80u), 0x00003f80u);  // -0 and 0, 1 and -Inf
  EXPECT_EQ(min_bf16(0x80003f80u, 0x0000ff80u), 0x8000ff80u);
  EXPECT_EQ(max_bf16(0x7f80ffc1u, 0x3f803f80u), 0x7f807fffu);  // Inf and 1, NaN and 1
  EXPECT_EQ(min_f16(0x3c000001u, 0xfe008001u), 0x7fff8001u);   // 1 and NaN, subnormals
}

TEST(Arithmetic, BitsAndDots) {
  EXPECT_EQ(multiply_f16(0x3c004000u, 0xc0003555u), 0xc0003955u);  // 1 * -2, 2 * 0.333
  EXPECT_EQ(multiply_f16(0x00033c01u, 0x38003c01u), 0x00023c02u);  // a subnormal's tie, (1 + u)^2
  EXPECT_EQ(fma_f16(0x3c004000u, 0xc0003555u, 0x3c003800u), 0xbc003caau);  // 1 - 2, 1 / 2 + 0.667
  // 1 + 2^-11, a tie, and 1 + 2^-11 (1 + 2^-10).
  EXPECT_EQ(fma_f16(0x10001000u, 0x3c013c00u, 0x3c003c00u), 0x3c013c00u);
  // A tie to even and 2^-24 more or less, which float32 does not hold: without it 3e02 and 3c84.
  EXPECT_EQ(fma_f16(0x3c043c01u, 0x3c803e00u, 0x00018001u), 0x3c853e01u);
  EXPECT_EQ(fma_f16(0x80018001u, 0x00010001u, 0x7bff0001u), 0x7bff0001u);  // less 2^-48
  EXPECT_EQ(fma_f16(0x7bff7c00u, 0x7bff0000u, 0xfc000000u), 0xfc007fffu);  // -Inf; Inf 0
  EXPECT_EQ(byte_permute(0x33221100u, 0x77665544u, 0x7520u), 0x77552200u);
  EXPECT_THROW(byte_permute(0, 0, 0x8000u), emu::Error);
  EXPECT_EQ(lop3<(0xf0 & 0xcc) | 0xaa>(0xff00ff00u, 0xf0f0f0f0u, 0x0000000fu),
            (0xff00ff00u & 0xf0f0f0f0u) | 0xfu);
  EXPECT_EQ(lop3<0xf0 ^ 0xcc ^ 0xaa>(1u, 3u, 7u), 1u ^ 3u ^ 7u);
  EXPECT_EQ(dot4_s8(0x80ff0102u, 0x80020304u, 5), 5 + 2 * 4 + 1 * 3 + -1 * 2 + 128 * 128);
  EXPECT_EQ(dot4_u8(0x80ff0102u, 0x80020304u, 5u), 5u + 2 * 4 + 1 * 3 + 255 * 2 + 128 * 128);
}

// ---- Counters
// ------------------------------------------------------------------------------------------

TEST(Counters, CountWarpInstructionsAndBytes) {
  std::vector<std::uint32_t> data(64);
  const emu::Stats stats = emu::run({2, 1, 1}, 64, 256, Options{}, [&] {
    store_shared(shared_base() + static_cast<SharedAddress>(4 * thread()),
                 load_global(&data[static_cast<std::size_t>(thread())]));
    const std::uint32_t a[2][4] = {}, b[3][2] = {};
    std::int32_t d[2][3][4] = {};
    mma<Element::s8, Element::s8>(d, a, b);
    sync_threads();
  });
  EXPECT_EQ(stats.blocks, 2u);
  EXPECT_EQ(stats.warp_instructions(emu::Word::mma_int8), 4 * 6);
  EXPECT_EQ(stats.warp_instructions(emu::Word::sync_threads), 4);
  EXPECT_EQ(stats.warp_instructions(emu::Pipe::tensor), 24);
  EXPECT_EQ(stats.tensor_macs, 24u * 16 * 8 * 32);
  EXPECT_EQ(stats.tensor_macs_16bit, 0u);
  EXPECT_EQ(stats.bulk_bytes, 0u);
  EXPECT_EQ(stats.shared_written, 512u);
  EXPECT_EQ(stats.global_read, 512u);
  EXPECT_NE(stats.report().find("mma int8"), std::string::npos);
}

TEST(Counters, CountWhatAWordIsOnTheMachine) {
  float sink = 0;
  const emu::Stats stats = emu::run({1, 1, 1}, 32, 0, Options{}, [&] {
    const std::uint32_t a[1][4] = {}, b[1][2] = {};
    float d[1][1][4] = {};
    mma<Element::bf16, Element::bf16>(d, a, b);
    float x = fmaf(exp2(1.0f), 2.0f, 3.0f);
    x = fmaxf(max3(x, 1.0f, 2.0f), fminf(x, 5.0f));                                 // 2 + 1 + 1
    x += static_cast<float>(max3(1, 2, 3) + pack_u8(x, x, x, x) + pack_f16(x, x));  // 1; 2 + 1
    const Pair pair = add_pair(multiply_pair({x, x}, {x, x}), fma_pair({x, x}, {x, x}, {x, x}));
    if (thread() == 0) sink = x + pair.lo;
  });
  EXPECT_GT(sink, 0);
  EXPECT_EQ(stats.warp_instructions(emu::Pipe::fma), 1 + 6);
  EXPECT_EQ(stats.warp_instructions(emu::Pipe::special), 1);
  EXPECT_EQ(stats.warp_instructions(emu::Pipe::integer), 5);
  EXPECT_EQ(stats.warp_instructions(emu::Pipe::convert), 3);
  EXPECT_EQ(stats.tensor_macs, 16u * 8 * 16);
  EXPECT_EQ(stats.tensor_macs_16bit, stats.tensor_macs);
}

TEST(Counters, AddUpUntilTaken) {
  const auto once = [] { emu::run({3, 1, 1}, 32, 0, Options{}, [] {}); };
  emu::take_stats();
  once();
  once();
  EXPECT_EQ(emu::last_stats().blocks, 3u);
  EXPECT_EQ(emu::take_stats().blocks, 6u);
  EXPECT_EQ(emu::take_stats().blocks, 0u);
}

}  // namespace
}  // namespace qattn::isa_test
