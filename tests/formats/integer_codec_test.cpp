// The integer codecs and the KV cache's grids.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "formats/int8.hpp"
#include "formats/kv/codes.hpp"
#include "oracle.hpp"

namespace qattn::formats {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
const float kNan = std::numeric_limits<float>::quiet_NaN();

// std::nearbyint is the independent statement: the tests run in the default rounding mode.
int expected(float x, int low, int high) {
  const double rounded = std::nearbyint(static_cast<double>(x));
  return static_cast<int>(std::clamp(rounded, double(low), double(high)));
}

template <class Codec>
void expect_integers(int low, int high) {
  for (int code = low; code <= high; ++code) {
    ASSERT_EQ(Codec::encode(Codec::decode(static_cast<typename Codec::Code>(code))), code);
  }
  for (int twice = -1200; twice <= 1200; ++twice) {
    const float x = 0.5f * static_cast<float>(twice);
    for (const float y : {std::nextafter(x, -kInf), x, std::nextafter(x, kInf)}) {
      ASSERT_EQ(Codec::encode(y), expected(y, low, high)) << std::hexfloat << y;
    }
  }
  for (const float x : oracle::random_bits(1000000, 3)) {
    ASSERT_EQ(Codec::encode(x), expected(x, low, high)) << std::hexfloat << x;
  }
  EXPECT_EQ(Codec::encode(kInf), high);
  EXPECT_EQ(Codec::encode(-kInf), low);
  for (const std::uint32_t nan : {0x7fc00000u, 0xffc00000u, 0x7f800001u, 0xffffffffu}) {
    EXPECT_EQ(Codec::encode(oracle::from_bits(nan)), 0);
  }
}

TEST(S8, RoundsHalfToEvenAndClampsSymmetrically) {
  expect_integers<S8>(-127, 127);
  EXPECT_EQ(S8::encode(-1000.0f), -127);
  EXPECT_EQ(S8::decode(-128), -128.0f) << "codes from elsewhere";
}

TEST(U8, RoundsHalfToEvenAndClampsAtZero) { expect_integers<U8>(0, 255); }

TEST(RoundHalfEven, IsNearbyintInItsRange) {
  for (int twice = -(1 << 22); twice <= (1 << 22); ++twice) {
    const float x = 0.5f * static_cast<float>(twice);
    ASSERT_EQ(round_half_even(x), static_cast<int>(std::nearbyint(x))) << x;
  }
  EXPECT_EQ(round_half_even(4194303.75f), 4194304);
  EXPECT_EQ(round_half_even(-4194303.75f), -4194304);
}

template <int Bits>
void expect_grid() {
  using Codec = Kv<Bits>;
  const int half = 1 << (Bits - 1);
  const int last = 2 * half - 1;
  for (int code = 0; code <= last; ++code) {
    const float value = Codec::decode(static_cast<std::uint8_t>(code));
    ASSERT_EQ(value, static_cast<float>(code - half) + 0.5f);
    ASSERT_EQ(Codec::encode(value), code);
    ASSERT_EQ(Codec::decode(static_cast<std::uint8_t>(last - code)), -value) << "symmetric";
  }
  const auto code_of = [&](float x) {
    return static_cast<int>(std::clamp(std::floor(double{x}) + half, 0.0, double(last)));
  };
  for (int edge = -2 * half; edge <= 2 * half; ++edge) {
    const auto x = static_cast<float>(edge);
    for (const float y : {std::nextafter(x, -kInf), x, std::nextafter(x, kInf)}) {
      ASSERT_EQ(Codec::encode(y), code_of(y)) << std::hexfloat << y;
    }
  }
  for (const float x : oracle::random_bits(1000000, 4)) {
    ASSERT_EQ(Codec::encode(x), code_of(x)) << std::hexfloat << x;
  }
  EXPECT_EQ(Codec::encode(0.0f), half);
  EXPECT_EQ(Codec::encode(-0.0f), half);
  EXPECT_EQ(Codec::encode(kInf), last);
  EXPECT_EQ(Codec::encode(-kInf), 0);
  EXPECT_EQ(Codec::encode(kNan), 0);
  EXPECT_EQ(Codec::encode(-kNan), 0);
}

TEST(Kv, TwoBits) { expect_grid<2>(); }
TEST(Kv, ThreeBits) { expect_grid<3>(); }
TEST(Kv, FourBits) { expect_grid<4>(); }
TEST(Kv, EightBits) { expect_grid<8>(); }

}  // namespace
}  // namespace qattn::formats
