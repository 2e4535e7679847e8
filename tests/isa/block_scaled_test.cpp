// Words of sm_120a, against their definitions: products with scales of blocks and of narrow floats,
// the transposing load of bytes, conversions to e2m1 and ue8m0.
#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>

#include "broken.hpp"
#include "operands.hpp"
#include "scaled_operands.hpp"

namespace qattn::isa_test {
namespace {

constexpr int sm_120 = 120;

template <Scaled S, int Byte = 0>
void expect_products() {
  constexpr int M = 2, N = 3;
  const ScaledOperands<S, M, N> operands(7);
  // NaN as ue8m0, and as e4m3: what counts may not be there.
  for (const std::uint32_t junk : {0u, ~0u}) {
    run_block(
        32, 0,
        [&] {
          std::uint32_t a[M][4], b[N][2], sa[M], sb[N];
          operands.fragments(lane(), Byte, junk, a, b, sa, sb);
          float d[M][N][4];
          for (int i = 0; i < 4 * M * N; ++i) (&d[0][0][0])[i] = static_cast<float>(i);
          mma_scaled<S, M, N, Byte>(d, a, b, sa, sb);
          for (int m = 0; m < M; ++m) {
            for (int n = 0; n < N; ++n) {
              for (int i = 0; i < 4; ++i) {
                const int row = 16 * m + lane() / 4 + 8 * (i / 2);
                const int column = 8 * n + lane() % 4 * 2 + i % 2;
                const double before = 4 * (m * N + n) + i;
                ASSERT_EQ(d[m][n][i], before + operands.product(row, column));
              }
            }
          }
        },
        sm_120);
  }
}

TEST(ScaledProduct, IsItsDefinition) {
  expect_products<Scaled::mxfp8, 0>();
  expect_products<Scaled::mxfp8, 1>();
  expect_products<Scaled::mxfp8, 2>();
  expect_products<Scaled::mxfp8, 3>();
  expect_products<Scaled::mxfp4, 0>();
  expect_products<Scaled::mxfp4, 2>();
  expect_products<Scaled::nvfp4, 0>();
}

/// A row and a column whose scale is NaN are NaN, and no others.
TEST(ScaledProduct, SpreadsNanAlongItsRowAndColumn) {
  ScaledOperands<Scaled::mxfp4, 1, 1> operands(3);
  operands.sa[5][1] = operands.sb[2][0] = formats::Ue8m0::nan;
  run_block(
      32, 0,
      [&] {
        std::uint32_t a[1][4], b[1][2], sa[1], sb[1];
        operands.fragments(lane(), 0, 0, a, b, sa, sb);
        float d[1][1][4] = {};
        mma_scaled<Scaled::mxfp4, 1, 1>(d, a, b, sa, sb);
        for (int i = 0; i < 4; ++i) {
          const int row = lane() / 4 + 8 * (i / 2), column = lane() % 4 * 2 + i % 2;
          ASSERT_EQ(d[0][0][i] != d[0][0][i], row == 5 || column == 2);
        }
      },
      sm_120);
}

/// With scales of 1 mxfp8 is the product of FP8.
TEST(ScaledProduct, OfUnitScalesIsThePlainOne) {
  const Operands<1, 2> operands(Element::e4m3, Element::e4m3, 11);
  run_block(
      32, 0,
      [&] {
        std::uint32_t a[1][4], b[2][2];
        operands.fragments(lane(), a, b);
        float plain[1][2][4] = {}, scaled[1][2][4] = {};
        mma<Element::e4m3, Element::e4m3, 1, 2>(plain, a, b);
        constexpr std::uint32_t one = 0x7f7f7f7fu;
        mma_scaled<Scaled::mxfp8, 1, 2, 3>(scaled, a, b, {one}, {one, one});
        for (int n = 0; n < 2; ++n) {
          for (int i = 0; i < 4; ++i) ASSERT_EQ(plain[0][n][i], scaled[0][n][i]);
        }
      },
      sm_120);
}

template <Element A, Element B>
void expect_narrow_products() {
  constexpr int M = 2, N = 3;
  const Operands<M, N> operands(A, B, 13);
  run_block(
      32, 0,
      [&] {
        std::uint32_t a[M][4], b[N][2];
        operands.fragments(lane(), a, b);
        float d[M][N][4];
        for (int i = 0; i < 4 * M * N; ++i) (&d[0][0][0])[i] = static_cast<float>(i);
        mma_f8f6f4<A, B, M, N>(d, a, b);
        for (int m = 0; m < M; ++m) {
          for (int n = 0; n < N; ++n) {
            for (int i = 0; i < 4; ++i) {
              const int row = 16 * m + lane() / 4 + 8 * (i / 2);
              const int column = 8 * n + lane() % 4 * 2 + i % 2;
              const double before = 4 * (m * N + n) + i;
              ASSERT_EQ(d[m][n][i], before + operands.product(row, column));
            }
          }
        }
      },
      sm_120);
}

TEST(NarrowProduct, IsItsDefinition) {
  using enum Element;
  expect_narrow_products<e4m3, e4m3>();
  expect_narrow_products<e4m3, e5m2>();
  expect_narrow_products<e5m2, e4m3>();
  expect_narrow_products<e5m2, e5m2>();
  expect_narrow_products<e4m3, e2m1>();
  expect_narrow_products<e5m2, e2m1>();
  expect_narrow_products<e2m1, e4m3>();
  expect_narrow_products<e2m1, e5m2>();
  expect_narrow_products<e2m1, e2m1>();
}

/// Bits 0, 1, 6 and 7 of a byte with e2m1 count not.
TEST(NarrowProduct, LooksAtFourBitsOfAByte) {
  const auto product = [](std::uint32_t padding) {
    float sum = 0;
    run_block(
        32, 0,
        [&] {
          std::uint32_t a[1][4], b[1][2];
          for (auto& r : a[0]) r = 0x10203c04u | padding;  // 2, -0, -6, 0.5
          for (auto& r : b[0]) r = 0x38383838u;            // e4m3: 1
          float d[1][1][4] = {};
          mma_f8f6f4<Element::e2m1, Element::e4m3, 1, 1>(d, a, b);
          sum = d[0][0][0];
        },
        sm_120);
    return sum;
  };
  EXPECT_EQ(product(0), 8 * (2 - 6 + 0.5f));
  EXPECT_EQ(product(0xc3c3c3c3u), product(0));
}

/// NaN along its row; an infinity of e5m2 is one, and NaN beside its opposite.
TEST(NarrowProduct, KeepsNanAndInfinity) {
  run_block(
      32, 0,
      [] {
        const int g = lane() / 4, t = lane() % 4;
        // k = 0 and 1 of rows 0 to 3, of e5m2: NaN, infinity, both infinities, 57344 twice.
        const std::uint32_t rows[4] = {0x7f, 0x7c, 0xfc7c, 0x7b7b};
        const std::uint32_t a[1][4] = {{t == 0 && g < 4 ? rows[g] : 0}};
        const std::uint32_t b[1][2] = {{0x7e7e7e7eu, 0x7e7e7e7eu}};  // e4m3: 448
        float d[1][1][4] = {};
        mma_f8f6f4<Element::e5m2, Element::e4m3, 1, 1>(d, a, b);
        if (g == 0 || g == 2) {
          ASSERT_NE(d[0][0][0], d[0][0][0]);
        } else {
          ASSERT_EQ(d[0][0][0], g == 1   ? std::numeric_limits<float>::infinity()
                                : g == 3 ? 2 * 57344.0f * 448
                                         : 0.0f);
        }
        ASSERT_EQ(d[0][0][2], 0.0f);
      },
      sm_120);
}

TEST(NarrowProduct, OfFp8IsThePlainOne) {
  const Operands<1, 2> operands(Element::e4m3, Element::e5m2, 17);
  run_block(
      32, 0,
      [&] {
        std::uint32_t a[1][4], b[2][2];
        operands.fragments(lane(), a, b);
        float plain[1][2][4] = {}, narrow[1][2][4] = {};
        mma<Element::e4m3, Element::e5m2, 1, 2>(plain, a, b);
        mma_f8f6f4<Element::e4m3, Element::e5m2, 1, 2>(narrow, a, b);
        for (int n = 0; n < 2; ++n) {
          for (int i = 0; i < 4; ++i) ASSERT_EQ(plain[0][n][i], narrow[0][n][i]);
        }
      },
      sm_120);
}

TEST(LoadBytesTransposed, GivesColumns) {
  const auto byte = [](int matrix, int row, int column) {
    return static_cast<std::uint8_t>(101 * matrix + 16 * row + column);
  };
  run_block(
      32, 1024,
      [&] {
        const int l = lane(), g = l / 4, t = l % 4;
        // Rows lie in reverse order, so that the addresses matter.
        const auto row = shared_base() + static_cast<SharedAddress>((31 - l) * 16);
        for (int c = 0; c < 16; ++c) {
          store_shared(row + static_cast<SharedAddress>(c), byte(l / 16, l % 16, c));
        }
        sync_warp();
        std::uint32_t r[1][4];
        load_bytes_transposed<1>(r, {row});
        for (int i = 0; i < 4; ++i) {
          std::uint32_t want = 0;
          for (int b = 0; b < 4; ++b) {
            want |= std::uint32_t{byte(i / 2, 4 * t + b, g + 8 * (i % 2))} << 8 * b;
          }
          ASSERT_EQ(r[0][i], want);
        }
      },
      sm_120);
}

TEST(PackE2m1, RoundsToEvenAndSaturates) {
  constexpr float inf = std::numeric_limits<float>::infinity();
  const std::array<std::array<float, 8>, 2> rows = {{
      {0.0f, 0.25f, 0.2500001f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f},
      {5.0f, 5.0001f, 6.0f, 1e30f, -0.25f, -0.75f, -inf, -6.0f},
  }};
  const std::uint32_t codes[2] = {0x64422100u, 0xffa87776u};  // of 5.0: 4, the even one
  run_block(
      32, 0,
      [&] {
        for (int n = 0; n < 2; ++n) {
          float x[8];
          std::copy(rows[static_cast<std::size_t>(n)].begin(),
                    rows[static_cast<std::size_t>(n)].end(), x);
          ASSERT_EQ(pack_e2m1(x), codes[n]) << n;
        }
      },
      sm_120);
}

/// Both roundings of `x`, in either place.
void expect_scales(float x, std::uint32_t down, std::uint32_t up) {
  run_block(
      32, 0,
      [=] {
        ASSERT_EQ(pack_ue8m0(x, 1.0f), down | 127u << 8) << x;
        ASSERT_EQ(pack_ue8m0(1.0f, x), down << 8 | 127u) << x;
        ASSERT_EQ(pack_ue8m0_up(x, 1.0f), up | 127u << 8) << x;
        ASSERT_EQ(pack_ue8m0_up(1.0f, x), up << 8 | 127u) << x;
      },
      sm_120);
}

TEST(PackUe8m0, RoundsBothWaysAndSaturates) {
  using Float = std::numeric_limits<float>;
  expect_scales(1.0f, 127, 127);
  expect_scales(1.0000001f, 127, 128);
  expect_scales(1.9999999f, 127, 128);
  expect_scales(-6.0f, 129, 130);
  expect_scales(0.0f, 0, 0);
  expect_scales(-0.0f, 0, 0);
  expect_scales(Float::denorm_min(), 0, 0);
  expect_scales(0x1p-127f, 0, 0);
  expect_scales(0x1.0004p-127f, 0, 1);
  expect_scales(0x1p-126f, 1, 1);
  expect_scales(0x1p127f, 254, 254);
  expect_scales(Float::max(), 254, 254);
  expect_scales(Float::infinity(), 254, 254);
  expect_scales(-Float::infinity(), 254, 254);
  expect_scales(Float::quiet_NaN(), 255, 255);
  expect_scales(-Float::signaling_NaN(), 255, 255);
}

/// Toward zero it is the rule of the formats, for every exponent and some fractions; of largest
/// values that are divided by a power of two too. Infinities are NaN there.
TEST(PackUe8m0, IsTheFormatsRule) {
  run_block(
      32, 0,
      [] {
        if (lane() != 0) return;
        for (std::uint32_t high = 0; high < 0x7f80; ++high) {
          const float x = std::bit_cast<float>(high << 16 | high);
          const std::uint32_t code = formats::Ue8m0::floor_encode(x, 0);
          ASSERT_EQ(pack_ue8m0(x, x), code | code << 8) << x;
          for (const int emax : {2, 8, 15}) {
            const std::uint32_t scale = formats::Ue8m0::floor_encode(x, emax);
            ASSERT_EQ(pack_ue8m0(std::ldexp(x, -emax), 1.0f), scale | 127u << 8) << x;
          }
        }
        const float infinity = std::numeric_limits<float>::infinity();
        ASSERT_EQ(formats::Ue8m0::floor_encode(infinity, 0), formats::Ue8m0::nan);
      },
      sm_120);
}

TEST(BlockScaled, ExistsInCodeForOneGpuAlone) {
  for (const Word word : {Word::mma_mxfp8, Word::mma_fp4, Word::mma_f8f6f4,
                          Word::load_bytes_transposed, Word::convert_e2m1, Word::convert_ue8m0}) {
    for (const int gpu : {80, 89, 90, 100, 120, 121}) {
      EXPECT_FALSE(emu::exists(word, {gpu})) << emu::name(word);
      EXPECT_EQ(emu::exists(word, {gpu, true}), gpu >= sm_120) << emu::name(word);
    }
    EXPECT_FALSE(emu::exists(word, gfx942));
  }
  const std::string error = error_of(32, 0, {.architecture = 100}, [] {
    float d[1][1][4] = {};
    const std::uint32_t a[1][4] = {}, b[1][2] = {}, s[1] = {};
    mma_scaled<Scaled::nvfp4, 1, 1>(d, a, b, s, s);
  });
  EXPECT_NE(error.find("mma_scaled fp4: sm_100a"), std::string::npos) << error;
  const auto lacks = [](const std::function<void()>& kernel) {
    return error_of(32, 0, {.architecture = 90}, kernel);
  };
  EXPECT_NE(lacks([] { pack_ue8m0(1, 1); }).find("convert to ue8m0: sm_90a"), std::string::npos);
  EXPECT_NE(lacks([] { pack_ue8m0_up(1, 1); }).find("convert to ue8m0: sm_90a"), std::string::npos);
  EXPECT_NE(lacks([] {
              float d[1][1][4] = {};
              mma_f8f6f4<Element::e4m3, Element::e4m3, 1, 1>(d, {}, {});
            }).find("mma f8f6f4: sm_90a"),
            std::string::npos);
}

}  // namespace
}  // namespace qattn::isa_test
