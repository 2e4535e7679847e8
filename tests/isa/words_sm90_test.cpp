// Every word of sm_90 against its definition.
#include <gtest/gtest.h>

#include <numeric>

#include "broken.hpp"
#include "isa/tensor_map.hpp"
#include "operands.hpp"

namespace qattn::isa_test {
namespace {

int span_of(Swizzle s) { return 16 << static_cast<int>(s); }

/// Where 16-byte chunk `chunk` of row `row` lies in rows of one span, said with XOR of chunk
/// numbers.
int swizzled_chunk(Swizzle s, int row, int chunk) {
  switch (s) {
    case Swizzle::bytes128:
      return chunk ^ row % 8;
    case Swizzle::bytes64:
      return chunk ^ row / 2 % 4;
    case Swizzle::bytes32:
      return chunk ^ row / 4 % 2;
    default:
      return chunk;
  }
}

// ---- wgmma
// -----------------------------------------------------------------------------------------

/// Offset of byte `byte` (of M or N, or of K) in a tile of `rows` rows of 32 bytes of K.
int k_major_offset(Swizzle s, int rows, int row, int k_byte) {
  if (s == Swizzle::none) return k_byte / 16 * 16 * rows + 16 * row + k_byte % 16;
  const int span = span_of(s);
  return row * span + 16 * swizzled_chunk(s, row, k_byte / 16) + k_byte % 16;
}
/// Transposed: rows are K (16 of them), one span of M or N wide; 16 * span bytes to the next span.
int transposed_offset(Swizzle s, int row, int k) {
  const int span = span_of(s), byte = 2 * row;
  return byte / span * 16 * span + k * span + 16 * swizzled_chunk(s, k, byte % span / 16) +
         byte % 16;
}

std::uint64_t descriptor_of(Swizzle s, SharedAddress at, int rows, bool transposed) {
  const auto span = static_cast<std::uint32_t>(span_of(s));
  if (transposed) {  // without swizzle leading is the step in K, stride the one in M
    return s == Swizzle::none ? matrix_descriptor(at, 8 * 16, 16 * 16, s)
                              : matrix_descriptor(at, 16 * span, 8 * span, s);
  }
  return s == Swizzle::none ? matrix_descriptor(at, number(16 * rows), 128, s)
                            : matrix_descriptor(at, 16, 8 * span, s);
}

void store_code(SharedAddress at, int bytes, std::uint32_t code) {
  if (bytes == 1) store_shared(at, static_cast<std::uint8_t>(code));
  if (bytes == 2) store_shared(at, static_cast<std::uint16_t>(code));
}

template <Element A, Element B, int N, bool TransposeA, bool TransposeB>
void check_wgmma(Swizzle swizzle, bool registers, const Options& options) {
  static const Operands<4, N / 8> operands(A, B, 11);
  constexpr int bytes = is_16bit(A) ? 2 : 1, k = 32 / bytes;
  constexpr SharedAddress b_offset = 64 * 128;
  EXPECT_EQ(error_of(128, 65536, options,
                     [&] {
                       const SharedAddress sa = shared_base(), sb = sa + b_offset;
                       for (int i = thread(); i < 64 * k; i += 128) {
                         const int row = i / k, c = i % k;
                         const int at = TransposeA ? transposed_offset(swizzle, row, c)
                                                   : k_major_offset(swizzle, 64, row, bytes * c);
                         store_code(sa + number(at), bytes, operands.a[row][c]);
                       }
                       for (int i = thread(); i < N * k; i += 128) {
                         const int row = i / k, c = i % k;
                         const int at = TransposeB ? transposed_offset(swizzle, row, c)
                                                   : k_major_offset(swizzle, N, row, bytes * c);
                         store_code(sb + number(at), bytes, operands.b[c][row]);
                       }
                       fence_async_proxy();
                       sync_threads();
                       const int w = warp(), g = lane() / 4, t = lane() % 4;
                       std::uint32_t all_a[4][4], unused[N / 8][2];
                       operands.fragments(lane(), all_a, unused);
                       Accumulator<A> d[N / 2];
                       for (int i = 0; i < N / 2; ++i) d[i] = static_cast<Accumulator<A>>(i);
                       const std::uint64_t a = descriptor_of(swizzle, sa, 64, TransposeA);
                       const std::uint64_t b = descriptor_of(swizzle, sb, N, TransposeB);
                       wgmma_fence();
                       for (const bool add : {false, true}) {
                         if (registers) {
                           wgmma<A, B, N, TransposeB>(d, all_a[w], b, add);
                         } else {
                           wgmma<A, B, N, TransposeA, TransposeB>(d, a, b, add);
                         }
                       }
                       wgmma_commit();
                       wgmma_wait<0>();
                       for (int i = 0; i < N / 2; ++i) {
                         const double sum = operands.product(16 * w + g + 8 * (i / 2 % 2),
                                                             8 * (i / 4) + 2 * t + i % 2);
                         ASSERT_EQ(static_cast<double>(d[i]), 2 * sum) << i;
                       }
                     }),
            "")
      << describe(options);
}

template <Element A, Element B, int N, bool TransposeA = false, bool TransposeB = false>
void check_swizzles() {
  for (const Swizzle s : {Swizzle::none, Swizzle::bytes32, Swizzle::bytes64, Swizzle::bytes128}) {
    for (const Schedule schedule : {Schedule::early, Schedule::late, Schedule::random}) {
      check_wgmma<A, B, N, TransposeA, TransposeB>(s, false, {.schedule = schedule});
      if (!TransposeA) {
        check_wgmma<A, B, N, TransposeA, TransposeB>(s, true, {.schedule = schedule});
      }
    }
  }
}

TEST(Wgmma, MultipliesEveryPairOfFormats) {
  using enum Element;
  check_swizzles<f16, f16, 16>();
  check_swizzles<bf16, bf16, 64>();
  check_swizzles<s8, s8, 32>();
  check_swizzles<s8, u8, 8>();
  check_swizzles<u8, s8, 128>();
  check_swizzles<u8, u8, 16>();
  check_swizzles<e4m3, e4m3, 24>();
  check_swizzles<e4m3, e5m2, 8>();
  check_swizzles<e5m2, e4m3, 8>();
  check_swizzles<e5m2, e5m2, 8>();
}

TEST(Wgmma, SixteenBitOperandsMayBeTransposed) {
  using enum Element;
  check_swizzles<f16, f16, 64, false, true>();
  check_swizzles<bf16, bf16, 128, true, false>();
  check_swizzles<f16, f16, 256, true, true>();
}

TEST(Wgmma, GroupsCompleteInOrderAndHoldTheirRegisters) {
  for (const Options& options : all_schedules()) {
    EXPECT_EQ(error_of(128, 8192, options,
                       [] {
                         for (int i = thread(); i < 2048; i += 128)
                           store_shared(word_of(i), 0x01010101u);
                         fence_async_proxy();
                         sync_threads();
                         const std::uint64_t m =
                             matrix_descriptor(shared_base(), 16, 256, Swizzle::bytes32);
                         std::int32_t first[4] = {}, second[4] = {};
                         wgmma_fence();
                         wgmma<Element::s8, Element::s8, 8>(first, m, m, false);
                         wgmma_commit();
                         wgmma<Element::s8, Element::s8, 8>(second, m, m, true);
                         wgmma_commit();
                         ASSERT_EQ(first[0], 0x7fc0dead);  // the hardware's
                         wgmma_wait<1>();
                         ASSERT_EQ(first[0], 32);
                         ASSERT_EQ(second[0], 0x7fc0dead);
                         wgmma_wait<0>();
                         ASSERT_EQ(second[3], 32);
                       }),
              "")
        << describe(options);
  }
}

// ---- mbarriers
// -------------------------------------------------------------------------------------

TEST(Mbarrier, PipelineOfTwoStages) {
  alignas(16) std::uint32_t source[8 * 64];
  std::iota(std::begin(source), std::end(source), 0u);
  for (const Options& options : all_schedules()) {
    EXPECT_EQ(error_of(96, 2048, options,
                       [&] {
                         const SharedAddress full = shared_base() + 1024, empty = full + 16;
                         if (thread() == 0) {
                           for (SharedAddress stage = 0; stage < 2; ++stage) {
                             mbarrier_init(full + 8 * stage, 1);
                             mbarrier_init(empty + 8 * stage, 64);
                           }
                           fence_mbarrier_init();
                         }
                         sync_threads();
                         for (std::uint32_t tile = 0; tile < 8; ++tile) {
                           const std::uint32_t stage = tile % 2, round = tile / 2 % 2;
                           if (warp() == 2) {
                             if (lane() == 7) {
                               mbarrier_wait(empty + 8 * stage, round ^ 1);
                               mbarrier_arrive_expect(full + 8 * stage, 256);
                               bulk_load(shared_base() + 256 * stage, source + 64 * tile, 256,
                                         full + 8 * stage);
                             }
                           } else {
                             mbarrier_wait(full + 8 * stage, round);
                             ASSERT_EQ(load_shared<std::uint32_t>(
                                           word_of(64 * static_cast<int>(stage) + thread())),
                                       64 * tile + number(thread()));
                             mbarrier_arrive(empty + 8 * stage);
                           }
                         }
                       }),
              "")
        << describe(options);
  }
}

TEST(Mbarrier, ExpectAloneDoesNotArriveAndTestPolls) {
  alignas(16) static const std::uint32_t source[8] = {5};
  for (const Options& options : all_schedules()) {
    EXPECT_EQ(error_of(64, 128, options,
                       [] {
                         const SharedAddress barrier = shared_base() + 64;
                         if (thread() == 0) {
                           mbarrier_init(barrier, 2);
                           fence_mbarrier_init();
                         }
                         sync_threads();
                         if (thread() == 0) {
                           mbarrier_expect(barrier, 32);
                           bulk_load(shared_base(), source, 32, barrier);
                           mbarrier_arrive(barrier);
                         }
                         if (thread() == 40) mbarrier_arrive(barrier);
                         while (!mbarrier_test(barrier, 0)) {
                         }
                         ASSERT_EQ(load_shared<std::uint32_t>(shared_base()), 5u);
                       }),
              "")
        << describe(options);
  }
}

TEST(Counters, CountBulkBytesAndWarpgroupProducts) {
  alignas(16) static const std::uint32_t source[256] = {};
  const emu::Stats stats = emu::run({2, 1, 1}, 128, 2048, Options{}, [] {
    const SharedAddress barrier = shared_base() + 1024;
    if (thread() == 0) {
      mbarrier_init(barrier, 1);
      fence_mbarrier_init();
    }
    sync_threads();
    if (thread() == 0) {
      mbarrier_arrive_expect(barrier, 1024);
      bulk_load(shared_base(), source, 1024, barrier);
    }
    mbarrier_wait(barrier, 0);
    const std::uint64_t m = matrix_descriptor(shared_base(), 16, 256, Swizzle::bytes32);
    std::int32_t d[4] = {};
    const std::uint32_t a[4] = {};
    wgmma_fence();
    wgmma<Element::s8, Element::s8, 8>(d, a, m, false);
    wgmma_commit();
    wgmma_wait<0>();
  });
  EXPECT_EQ(stats.bulk_bytes, 2u * 1024);
  EXPECT_EQ(stats.global_read, 2u * 1024);
  EXPECT_EQ(stats.shared_written, 2u * (1024 + 8));  // the mbarrier is initialised
  EXPECT_EQ(stats.shared_read, 2u * 8 * 32);         // B once a warpgroup, A is in registers
  EXPECT_EQ(stats.tensor_macs, 2u * 64 * 8 * 32);
  EXPECT_EQ(stats.tensor_macs_16bit, 0u);
  EXPECT_EQ(stats.warp_instructions(emu::Word::wgmma), 2 * 4);
}

// ---- TMA
// -------------------------------------------------------------------------------------------

/// Loads a box and stores it elsewhere; compares shared memory and the copy with the definition.
template <int Rank>
void check_tma(Swizzle swizzle, int element_bytes, const int (&corner)[Rank]) {
  constexpr int kSizes[5] = {0, 5, 3, 2, 2};
  const int width = (swizzle == Swizzle::none ? 64 : span_of(swizzle)) / element_bytes;
  TensorShape shape;
  shape.element_bytes = element_bytes;
  shape.rank = Rank;
  shape.swizzle = swizzle;
  std::size_t pitch = static_cast<std::size_t>((width + 3) * element_bytes + 15) / 16 * 16;
  int box_rows = 1;
  for (int i = 0; i < Rank; ++i) {
    shape.sizes[i] = number(i == 0 ? width + 3 : kSizes[i]);
    shape.box[i] = number(i == 0 ? width : std::min(kSizes[i], 4));
    if (i > 0) {
      shape.stride_bytes[i] = pitch;
      pitch *= shape.sizes[i];
      box_rows *= static_cast<int>(shape.box[i]);
    }
  }
  struct alignas(16) Line {
    std::uint8_t bytes[16];
  };
  std::vector<Line> source(pitch / 16), target(pitch / 16);
  auto* from = source.data()->bytes;
  for (std::size_t i = 0; i < pitch; ++i) from[i] = static_cast<std::uint8_t>(i * 37 + i / 251 + 1);
  std::vector<std::uint8_t> seen;
  TensorMap load_map, store_map;
  shape.address = source.data();
  ASSERT_EQ(make_tensor_map(shape, load_map), "");
  shape.address = target.data();
  TensorShape store_shape = shape;  // its rows are multiples of 16 bytes
  store_shape.sizes[0] = number(width + 16 / element_bytes);
  ASSERT_EQ(make_tensor_map(store_shape, store_map), "");
  const int row_bytes = width * element_bytes;
  int store_corner[Rank];  // no coordinate of a store is negative
  for (int i = 0; i < Rank; ++i) store_corner[i] = std::max(corner[i], 0);
  for (const Options& options : all_schedules()) {
    seen.assign(static_cast<std::size_t>(row_bytes * box_rows), 0);
    std::fill(target.begin(), target.end(), Line{});
    ASSERT_EQ(error_of(32, 32768, options,
                       [&] {
                         const SharedAddress barrier = shared_base() + 32760;
                         if (!elect()) return;
                         mbarrier_init(barrier, 1);
                         fence_mbarrier_init();
                         mbarrier_arrive_expect(barrier, number(row_bytes * box_rows));
                         tma_load<Rank>(shared_base(), load_map, corner, barrier);
                         mbarrier_wait(barrier, 0);
                         for (int i = 0; i < row_bytes * box_rows; ++i) {
                           seen[static_cast<std::size_t>(i)] =
                               load_shared<std::uint8_t>(shared_base() + number(i));
                         }
                         tma_store<Rank>(store_map, store_corner, shared_base());
                         bulk_commit();
                         bulk_wait<0>();
                       }),
              "")
        << describe(options);
    for (int row = 0; row < box_rows; ++row) {
      for (int byte = 0; byte < row_bytes; ++byte) {
        const int place =
            row * row_bytes + 16 * swizzled_chunk(swizzle, row, byte / 16) + byte % 16;
        for (const bool store : {false, true}) {
          const int (&from_corner)[Rank] = store ? store_corner : corner;
          const TensorShape& of = store ? store_shape : shape;
          int rest = row, x[Rank] = {from_corner[0] + byte / element_bytes};
          bool inside = x[0] >= 0 && x[0] < static_cast<int>(of.sizes[0]);
          std::size_t at = static_cast<std::size_t>(x[0] * element_bytes + byte % element_bytes);
          for (int d = 1; d < Rank; ++d) {
            x[d] = from_corner[d] + rest % static_cast<int>(of.box[d]);
            rest /= static_cast<int>(of.box[d]);
            inside = inside && x[d] >= 0 && x[d] < static_cast<int>(of.sizes[d]);
            at += static_cast<std::size_t>(x[d]) * of.stride_bytes[d];
          }
          const std::uint8_t loaded = seen[static_cast<std::size_t>(place)];
          if (!store) {
            ASSERT_EQ(loaded, inside ? from[at] : 0) << row << byte;
          } else if (inside) {
            ASSERT_EQ(target.data()->bytes[at], loaded) << row << byte;
          }
        }
      }
    }
  }
}

TEST(Tma, CopiesBoxesOfEveryRankAndSwizzle) {
  check_tma<2>(Swizzle::none, 1, {0, 0});
  check_tma<2>(Swizzle::none, 4, {-4, 3});
  check_tma<2>(Swizzle::bytes32, 1, {16, -1});
  check_tma<2>(Swizzle::bytes64, 2, {8, 1});
  check_tma<3>(Swizzle::bytes128, 1, {16, 2, -1});
  check_tma<4>(Swizzle::bytes128, 2, {0, 0, 1, 1});
  check_tma<5>(Swizzle::bytes128, 1, {-16, 1, 0, 1, -1});
  check_tma<5>(Swizzle::none, 2, {200, 0, 0, 0, 0});  // wholly outside
}

TEST(Tma, CoordinatesThatTheHardwareRefusesAreErrors) {
  struct alignas(16) Rows {
    std::uint8_t bytes[8 * 64];
  } rows{};
  TensorMap map;
  ASSERT_EQ(make_tensor_map({.address = &rows,
                             .element_bytes = 2,
                             .sizes = {32, 8},
                             .stride_bytes = {0, 64},
                             .box = {16, 8}},
                            map),
            "");
  for (const bool load : {true, false}) {
    const std::string error = error_of(32, 1024, Options{}, [&] {
      if (!elect()) return;
      for (int i = 0; i < 64; ++i) {
        store_shared(shared_base() + number(4 * i), std::uint32_t{1});
      }
      fence_async_proxy();
      mbarrier_init(shared_base() + 512, 1);
      if (load) tma_load<2>(shared_base(), map, {4, 0}, shared_base() + 512);
      if (!load) tma_store<2>(map, {4, 0}, shared_base());
    });
    EXPECT_NE(error.find("coordinate 4 of 2-byte elements is no multiple of 16 bytes"),
              std::string::npos)
        << error;
  }
  const auto store_error = [](const TensorMap& to, const int (&corner)[2]) {
    return error_of(32, 1024, Options{}, [&] {
      if (elect()) tma_store<2>(to, corner, shared_base());
    });
  };
  EXPECT_NE(store_error(map, {-8, 0}).find("coordinate -8 is negative"), std::string::npos);
  EXPECT_NE(store_error(map, {0, -1}).find("coordinate -1 is negative"), std::string::npos);
  ASSERT_EQ(make_tensor_map({.address = &rows,
                             .element_bytes = 2,
                             .sizes = {31, 8},
                             .stride_bytes = {0, 64},
                             .box = {16, 8}},
                            map),
            "");
  EXPECT_NE(store_error(map, {0, 0}).find("rows of 62 bytes"), std::string::npos);
}

TEST(Tma, MapsOfImpossibleTensorsAreRefused) {
  alignas(16) static char data[64];
  const TensorShape good{.address = data,
                         .sizes = {128, 8},
                         .stride_bytes = {0, 128},
                         .box = {128, 8},
                         .swizzle = Swizzle::bytes128};
  TensorMap map;
  EXPECT_EQ(make_tensor_map(good, map), "");
  const auto error = [&](auto change) {
    TensorShape shape = good;
    change(shape);
    return make_tensor_map(shape, map);
  };
  EXPECT_NE(error([](TensorShape& s) { s.rank = 6; }), "");
  EXPECT_NE(error([](TensorShape& s) { s.element_bytes = 3; }), "");
  EXPECT_NE(error([](TensorShape& s) { s.address = data + 8; }), "");
  EXPECT_NE(error([](TensorShape& s) { s.box[1] = 257; }), "");
  EXPECT_NE(error([](TensorShape& s) { s.box[0] = 64; }), "");
  EXPECT_NE(error([](TensorShape& s) { s.stride_bytes[1] = 100; }), "");
  EXPECT_NE(error([](TensorShape& s) { s.sizes[0] = 0; }), "");
}

// ---- The rest
// --------------------------------------------------------------------------------------

TEST(Elect, ChoosesOneLaneAlways) {
  for (const Options& options : all_schedules()) {
    std::uint32_t votes = 0;
    EXPECT_EQ(error_of(32, 0, options,
                       [&] {
                         const bool chosen = elect();
                         const std::uint32_t mask = ballot(chosen);
                         ASSERT_EQ(chosen, elect());
                         votes = mask;
                       }),
              "");
    EXPECT_EQ(std::popcount(votes), 1);
  }
}

TEST(Registers, MoveFromProducersToConsumers) {
  for (const Options& options : all_schedules()) {
    EXPECT_EQ(error_of(384, 0, options,
                       [] {
                         if (warp() < 4) {
                           registers_decrease<40>();
                         } else {
                           registers_increase<232>();  // waits for the decrease
                         }
                         cluster_sync();
                       }),
              "")
        << describe(options);
  }
}

}  // namespace
}  // namespace qattn::isa_test
