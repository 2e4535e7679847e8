// Where accumulators lie: each fragment against the words whose results it describes, and how lanes
// that share a row join what they have of it.
#include "isa/fragment.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <set>

#include "broken.hpp"
#include "operands.hpp"

namespace qattn::isa_test {
namespace {

template <class F>
struct Fragments : testing::Test {};
using All = testing::Types<MmaFragment, MmaTransposedFragment, TensorMemoryFragment,
                           Mfma32TransposedFragment, Mfma16TransposedFragment>;
TYPED_TEST_SUITE(Fragments, All);

template <class F>
int column_of(int lane, int e) {
  return F::lane_column(lane) + F::element_column(e);
}

TYPED_TEST(Fragments, CoverATileOnce) {
  using F = TypeParam;
  ASSERT_EQ(F::rows * F::row_elements, F::elements);
  ASSERT_EQ(F::warp_lanes * F::elements, F::tile_rows * F::tile_columns);
  std::set<std::pair<int, int>> places;
  for (int lane = 0; lane < F::warp_lanes; ++lane) {
    std::set<int> numbers;
    for (int r = 0; r < F::rows; ++r) {
      for (int e = 0; e < F::row_elements; ++e) {
        const int i = F::element(r, e);
        numbers.insert(i);
        ASSERT_EQ(row_of_element<F>(i), r);
        ASSERT_EQ(place_in_row<F>(i), e);
        ASSERT_LT(F::row(lane, r), F::tile_rows);
        ASSERT_LT(column_of<F>(lane, e), F::tile_columns);
        if (e % F::run != 0) {
          ASSERT_EQ(column_of<F>(lane, e), column_of<F>(lane, e - 1) + 1);
        }
        places.insert({F::row(lane, r), column_of<F>(lane, e)});
      }
    }
    ASSERT_EQ(static_cast<int>(numbers.size()), F::elements);
  }
  ASSERT_EQ(static_cast<int>(places.size()), F::tile_rows * F::tile_columns);
}

TYPED_TEST(Fragments, JoinTheLanesOfARow) {
  using F = TypeParam;
  const auto number = [](int row, int column) {
    return static_cast<float>((7 * row + 5 * column) % 31);
  };
  const int architecture = F::warp_lanes == 64 ? 942 : 120;
  run_block(
      F::warp_lanes, 0,
      [&] {
        float sum[F::rows] = {}, top[F::rows];
        int leaders = 0;
        for (int r = 0; r < F::rows; ++r) {
          top[r] = -1.0f;
          for (int e = 0; e < F::row_elements; ++e) {
            const float x = number(F::row(lane(), r), column_of<F>(lane(), e));
            sum[r] += x;
            top[r] = std::fmax(top[r], x);
          }
        }
        add_rows<F>(sum);
        isa::row_maxima<F>(top);
        for (int r = 0; r < F::rows; ++r) {
          const int row = F::row(lane(), r);
          float all = 0.0f, most = -1.0f;
          for (int c = 0; c < F::tile_columns; ++c) {
            all += number(row, c), most = std::fmax(most, number(row, c));
          }
          ASSERT_EQ(sum[r], all);
          ASSERT_EQ(top[r], most);
          for (int other = 0; other < F::warp_lanes; ++other) {
            const bool shares = F::row(other, r) == row;
            ASSERT_EQ(any_in_row<F>(lane(), lane() == other), shares);
            leaders += shares && leads_row<F>(other) ? 1 : 0;
          }
        }
        ASSERT_EQ(leaders, F::rows);
        if (leads_row<F>(lane())) {
          ASSERT_EQ(F::lane_column(lane()), 0);
        }
      },
      architecture);
}

/// What mma() leaves where the fragment says: of the transposed one, columns are queries.
template <class F, bool Transposed>
void expect_products() {
  const Operands<2, 3> operands(Element::s8, Element::s8, 5);
  run_block(32, 0, [&] {
    std::uint32_t a[2][4], b[3][2];
    operands.fragments(lane(), a, b);
    std::int32_t d[2][3][4] = {};
    mma<Element::s8, Element::s8, 2, 3>(d, a, b);
    for (int m = 0; m < 2; ++m) {
      for (int n = 0; n < 3; ++n) {
        for (int i = 0; i < F::elements; ++i) {
          const int across = F::row(lane(), row_of_element<F>(i));
          const int along = column_of<F>(lane(), place_in_row<F>(i));
          const int row = 16 * m + (Transposed ? along : across);
          const int column = 8 * n + (Transposed ? across : along);
          ASSERT_EQ(d[m][n][i], operands.product(row, column));
        }
      }
    }
  });
}
TEST(Fragment, IsWhatMmaLeaves) { expect_products<MmaFragment, false>(); }
TEST(Fragment, TransposedIsWhatMmaLeaves) { expect_products<MmaTransposedFragment, true>(); }

}  // namespace
}  // namespace qattn::isa_test
