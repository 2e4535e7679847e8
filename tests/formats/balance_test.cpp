// The arithmetic of K's loud channels.
#include "formats/balance.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

namespace qattn::formats {
namespace {

TEST(Balance, ExponentIsThreeQuartersOfTheLogarithm) {
  for (double ratio = 1e-3; ratio < 1e12; ratio *= 1.0137) {
    const double exact = 0.75 * std::log2(std::sqrt(ratio));
    const int want = static_cast<int>(std::clamp(std::floor(exact + 0.5), 0.0, 12.0));
    EXPECT_EQ(balance_exponent(ratio), want) << ratio;
  }
  EXPECT_EQ(balance_exponent(0.0), 0);
  EXPECT_EQ(balance_exponent(1e300), kMostBalance);
  EXPECT_EQ(power_of_two(-12), 0x1p-12f);
  EXPECT_EQ(power_of_two(3), 8.0f);
}

TEST(Balance, TokensAreSpreadInOrder) {
  for (const std::int64_t count : {65LL, 127LL, 128LL, 1000LL, 1LL << 40}) {
    for (int i = 0; i < kBalanceTokens; ++i) {
      const std::int64_t token = balance_token(i, count);
      EXPECT_GE(token, count * i / kBalanceTokens);
      EXPECT_LT(token, count * (i + 1) / kBalanceTokens + 1);
      EXPECT_LT(token, count);
      EXPECT_GE(token, balance_token(i > 0 ? i - 1 : 0, count));
    }
  }
}

TEST(Balance, CentralSquaresLeaveTheMeanOut) {
  EXPECT_EQ(central_squares(6.0, 14.0, 3), 2.0);
  EXPECT_EQ(central_squares(3e6, 3e12, 3), 0.0);
}

}  // namespace
}  // namespace qattn::formats
