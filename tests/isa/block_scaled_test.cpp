// Words of sm_120a, against their definitions: products with scales of blocks, the transposing load
// of bytes, conversions to e2m1.
#include <gtest/gtest.h>

#include <array>
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

TEST(BlockScaled, ExistsInCodeForOneGpuAlone) {
  for (const Word word :
       {Word::mma_mxfp8, Word::mma_fp4, Word::load_bytes_transposed, Word::convert_e2m1}) {
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
}

}  // namespace
}  // namespace qattn::isa_test
