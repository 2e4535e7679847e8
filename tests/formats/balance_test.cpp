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
  EXPECT_EQ(balance_tokens(0), 0);
  EXPECT_EQ(balance_tokens(7), 7);
  EXPECT_EQ(balance_tokens(100), 8);
  EXPECT_EQ(balance_tokens(400), 25);
  for (const std::int64_t count : {1LL, 5LL, 16LL, 17LL, 65LL, 511LL, 1000LL, 1LL << 40}) {
    const int tokens = balance_tokens(count);
    EXPECT_LE(tokens, std::min<std::int64_t>(count, 32));
    for (int i = 0; i < tokens; ++i) {
      const std::int64_t token = balance_token(i, count);
      EXPECT_GE(token, count * i / tokens);
      EXPECT_LE(token, count * (i + 1) / tokens);
      EXPECT_LT(token, count);
      EXPECT_GE(token, balance_token(i > 0 ? i - 1 : 0, count));
    }
  }
}

TEST(Balance, CentralSquaresLeaveTheMeanOut) {
  EXPECT_EQ(central_squares(6.0, 17.0, 0.25), 8.0);
  EXPECT_EQ(central_squares(4e6, 4e12, 0.25), 0.0);
}

}  // namespace
}  // namespace qattn::formats
