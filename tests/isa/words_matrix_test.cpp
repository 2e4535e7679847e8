// Words that move matrices between a warp's registers and shared memory, against their definitions.
#include <gtest/gtest.h>

#include <cstring>

#include "broken.hpp"

namespace qattn::isa_test {
namespace {

TEST(Matrices, TransposesEightByEight) {
  run_block(32, 0, [] {
    const auto element = [](int row, int column) -> std::uint32_t {
      return static_cast<std::uint32_t>(100 * row + column);
    };
    const int g = lane() / 4, c = lane() % 4 * 2;
    const std::uint32_t before = element(g, c) | element(g, c + 1) << 16;
    ASSERT_EQ(transpose_matrix(before), element(c, g) | element(c + 1, g) << 16);
  });
}

TEST(LoadMatrix, GivesRowsOrColumns) {
  // Byte b of row r of matrix m is 64 m + 8 r + b, except that b counts pairs twice.
  const auto halves = [](int m, int r, int c) { return 256 * m + 16 * r + c; };
  run_block(32, 1024, [&] {
    const int l = lane(), g = l / 4, t = l % 4;
    // Matrices lie in reverse order, so that the addresses matter.
    for (int c = 0; c < 8; ++c) {
      store_shared(shared_base() + static_cast<SharedAddress>((31 - l) * 16 + 2 * c),
                   static_cast<std::uint16_t>(halves(l / 8, l % 8, c)));
    }
    sync_warp();
    const auto pair = [](int low, int high) {
      return static_cast<std::uint32_t>(low) | static_cast<std::uint32_t>(high) << 16;
    };
    const auto row = shared_base() + static_cast<SharedAddress>((31 - l) * 16);
    std::uint32_t r4[1][4], t4[1][4], r2[1][2], t2[1][2], r1[1][1], t1[1][1];
    load_matrix<1>(r4, {row});
    load_matrix_transposed<1>(t4, {row});
    load_matrix2<1>(r2, {row});
    load_matrix2_transposed<1>(t2, {row});
    load_matrix1<1>(r1, {row});
    load_matrix1_transposed<1>(t1, {row});
    for (int m = 0; m < 4; ++m) {
      const std::uint32_t rows = pair(halves(m, g, 2 * t), halves(m, g, 2 * t + 1));
      const std::uint32_t columns = pair(halves(m, 2 * t, g), halves(m, 2 * t + 1, g));
      ASSERT_EQ(r4[0][m], rows);
      ASSERT_EQ(t4[0][m], columns);
      if (m < 2) {
        ASSERT_EQ(r2[0][m], rows);
        ASSERT_EQ(t2[0][m], columns);
      }
      if (m < 1) {
        ASSERT_EQ(r1[0][m], rows);
        ASSERT_EQ(t1[0][m], columns);
      }
    }
  });
}

TEST(LoadMatrix, CountsBankConflicts) {
  const auto waves = [](SharedAddress stride) {
    return emu::run({1, 1, 1}, 32, 8192, Options{},
                    [=] {
                      const auto row = shared_base() + static_cast<SharedAddress>(lane()) * stride;
                      store_shared(row, Words4{});
                      std::uint32_t r[2][4];
                      load_matrix<2>(r, {row, row});
                    })
        .matrix_waves;
  };
  EXPECT_EQ(waves(16), 8u);    // 2 instructions of 4 matrices, without conflicts
  EXPECT_EQ(waves(128), 64u);  // all rows in the same banks
  EXPECT_EQ(waves(144), 8u);   // padded
}

TEST(StoreMatrix, IsTheInverseOfLoadMatrix) {
  run_block(32, 2048, [] {
    std::uint32_t r[2][4], back[2][4];
    const SharedAddress row[2] = {word_of(4 * (31 - lane())), word_of(128 + 4 * lane())};
    for (int i = 0; i < 8; ++i) r[i / 4][i % 4] = number(1000 * i + lane());
    store_matrix(row, r);
    sync_warp();
    load_matrix(back, row);
    ASSERT_EQ(std::memcmp(r, back, sizeof r), 0);
    // Lane 31 gave the address of row 7 of matrix 3, whose words lanes 28 to 31 held.
    ASSERT_EQ(load_shared<std::uint32_t>(word_of(0)), 3028u);
  });
}

/// Elements as the definition has them: `m`, row, column.
constexpr std::uint32_t element(int m, int row, int column) {
  return static_cast<std::uint32_t>(256 * m + 16 * row + column + 1);
}
/// What a lane holds of matrix `m`: two of a row, or of a column.
std::uint32_t held(int m, bool transposed) {
  const int g = lane() / 4, t = lane() % 4;
  return transposed ? element(m, 2 * t, g) | element(m, 2 * t + 1, g) << 16
                    : element(m, g, 2 * t) | element(m, g, 2 * t + 1) << 16;
}

/// Rows of `matrices` matrices, last row first; a sentinel behind each, that must stay.
template <int Matrices, class Store>
void expect_stored(bool transposed, Store store) {
  constexpr int rows = 8 * Matrices, pitch = 8;  // words
  EXPECT_EQ(error_of(32, 4 * rows * pitch, Options{},
                     [&] {
                       for (int i = lane(); i < rows * pitch; i += 32) {
                         store_shared(word_of(i), 0xffffffffu);
                       }
                       sync_warp();
                       std::uint32_t r[1][Matrices];
                       for (int m = 0; m < Matrices; ++m) r[0][m] = held(m, transposed);
                       // Lanes beyond the rows give addresses that nobody uses.
                       const int mine = lane() < rows ? rows - 1 - lane() : 0;
                       const SharedAddress row[1] = {word_of(pitch * mine)};
                       store(row, r);
                       sync_warp();
                       for (int i = lane(); i < rows; i += 32) {
                         const SharedAddress at = word_of(pitch * (rows - 1 - i));
                         for (int column = 0; column < 16; ++column) {
                           const std::uint32_t got =
                               load_shared<std::uint16_t>(at + number(2 * column));
                           ASSERT_EQ(got, column < 8 ? element(i / 8, i % 8, column) : 0xffffu)
                               << i << " " << column;
                         }
                       }
                     }),
            "");
}

TEST(StoreMatrix, WritesRowsOrColumnsOfEveryCount) {
  expect_stored<4>(false, [](auto& row, auto& r) { store_matrix(row, r); });
  expect_stored<4>(true, [](auto& row, auto& r) { store_matrix_transposed(row, r); });
  expect_stored<2>(false, [](auto& row, auto& r) { store_matrix2(row, r); });
  expect_stored<2>(true, [](auto& row, auto& r) { store_matrix2_transposed(row, r); });
  expect_stored<1>(false, [](auto& row, auto& r) { store_matrix1(row, r); });
  expect_stored<1>(true, [](auto& row, auto& r) { store_matrix1_transposed(row, r); });
}

}  // namespace
}  // namespace qattn::isa_test
