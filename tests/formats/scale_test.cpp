// The scale rules: float32 scales, UE8M0 and NVFP4's two levels.
#include "formats/scale.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "formats/e5m2.hpp"
#include "formats/int8.hpp"
#include "oracle.hpp"

namespace qattn::formats {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
const float kNan = std::numeric_limits<float>::quiet_NaN();

TEST(FoldAmax, IsTheLargestMagnitude) {
  float amax = 0.0f;
  for (const float x : {-0.0f, 1e-45f, -3.0f, 2.0f, -1e-30f}) amax = fold_amax(amax, x);
  EXPECT_EQ(amax, 3.0f);
  EXPECT_FALSE(std::signbit(fold_amax(0.0f, -0.0f)));
}

TEST(FoldAmax, NanAndInfinitiesBecomeNanAndStay) {
  for (const float bad : {kNan, -kNan, kInf, -kInf, oracle::from_bits(0x7f800001u)}) {
    for (const float before : {0.0f, 1.0f, 3e38f}) {
      const float amax = fold_amax(before, bad);
      EXPECT_TRUE(std::isnan(amax));
      EXPECT_TRUE(std::isnan(fold_amax(amax, 3e38f)));
      EXPECT_TRUE(std::isnan(fold_amax(before, amax))) << "partial maxima merge the same way";
    }
  }
}

TEST(AmaxScale, IsOneMultiplicationWithTheRoundedReciprocal) {
  // A double holds the exact product of two floats, so one conversion rounds it once.
  for (const float qmax : {S8::max, U8::max, E4m3::max, 240.0f, E5m2::max, 6.0f * 448.0f}) {
    const auto inverse = static_cast<float>(1.0 / static_cast<double>(qmax));
    for (const float x : oracle::random_bits(10000, 6)) {
      const double product = std::fabs(static_cast<double>(x)) * static_cast<double>(inverse);
      const float expected = std::fmax(static_cast<float>(product), 0x1p-126f);
      ASSERT_EQ(amax_scale(std::fabs(x), qmax), expected) << std::hexfloat << x;
    }
  }
}

TEST(AmaxScale, ZeroAndSubnormalsGiveTheSmallestNormal) {
  for (const float amax : {0.0f, 1e-45f, 0x1p-126f, 127 * 0x1p-127f}) {
    EXPECT_EQ(amax_scale(amax, 127.0f), 0x1p-126f) << amax;
    EXPECT_EQ(reciprocal(amax_scale(amax, 127.0f)), 0x1p126f);
  }
  EXPECT_GT(amax_scale(std::numeric_limits<float>::max(), 127.0f), 0x1p120f);
}

TEST(AmaxScale, NanAndInfinitiesGiveNan) {
  for (const float amax : {kNan, -kNan, kInf}) {
    const float scale = amax_scale(amax, 127.0f);
    EXPECT_TRUE(std::isnan(scale));
    EXPECT_TRUE(std::isnan(reciprocal(scale)));
    EXPECT_EQ(S8::encode(1.0f * reciprocal(scale)), 0);
  }
}

TEST(AmaxScale, TheLargestElementGetsTheLargestCode) {
  for (const float x : oracle::random_bits(100000, 7)) {
    const float amax = std::fabs(x);
    const float scale = amax_scale(amax, S8::max);
    if (scale == 0x1p-126f) continue;
    ASSERT_EQ(S8::encode(x * reciprocal(scale)), x < 0 ? -127 : 127) << std::hexfloat << x;
  }
}

TEST(Reciprocal, IsCorrectlyRounded) {
  for (const float x : oracle::random_bits(100000, 8)) {
    // A double has more than 2 * 24 + 1 bits, so rounding a quotient twice is harmless.
    if (std::fabs(x) < 0x1p-126f || std::fabs(x) > 0x1p126f) continue;
    ASSERT_EQ(reciprocal(x), static_cast<float>(1.0 / static_cast<double>(x)));
  }
}

TEST(Ue8m0, EveryCodeIsAnExactPowerOfTwo) {
  for (int code = 0; code < 255; ++code) {
    const float value = Ue8m0::decode(static_cast<std::uint8_t>(code));
    ASSERT_EQ(static_cast<double>(value), std::ldexp(1.0, code - 127)) << code;
    ASSERT_EQ(Ue8m0::floor_encode(value, 0), code);
    ASSERT_TRUE(std::isfinite(reciprocal(value)));
    ASSERT_EQ(static_cast<double>(reciprocal(value)), std::ldexp(1.0, 127 - code)) << code;
  }
  EXPECT_TRUE(std::isnan(Ue8m0::decode(255)));
}

TEST(Ue8m0, TakesTheFloorOfTheLogarithm) {
  for (const int emax : {0, 2, 8, 15}) {
    const auto expected = [&](float x) {
      int exponent = 0;
      std::frexp(static_cast<double>(x), &exponent);
      return std::clamp(exponent - 1 - emax + 127, 0, 254);
    };
    for (int power = -149; power <= 127; ++power) {
      const float x = std::ldexp(1.0f, power);
      for (const float y : {std::nextafter(x, 0.0f), x, std::nextafter(x, 3e38f)}) {
        if (y == 0.0f) continue;
        ASSERT_EQ(Ue8m0::floor_encode(y, emax), expected(y)) << std::hexfloat << y;
      }
    }
    for (const float x : oracle::random_bits(100000, 9)) {
      if (x != 0.0f) {
        ASSERT_EQ(Ue8m0::floor_encode(std::fabs(x), emax), expected(x));
      }
    }
    EXPECT_EQ(Ue8m0::floor_encode(0.0f, emax), 0);
    for (const float bad : {kNan, -kNan, kInf, -kInf}) {
      EXPECT_EQ(Ue8m0::floor_encode(bad, emax), 255);
    }
  }
}

TEST(MxScale, BringsTheMaximumBelowTwicePowerOfTheElement) {
  EXPECT_EQ(mx_scale_code(448.0f, E4m3::emax), 127);
  EXPECT_EQ(mx_scale_code(256.0f, E4m3::emax), 127);
  EXPECT_EQ(mx_scale_code(255.9f, E4m3::emax), 126);
  EXPECT_EQ(mx_scale_code(512.0f, E4m3::emax), 128);
  EXPECT_EQ(mx_scale_code(6.0f, E2m1::emax), 127);
  EXPECT_EQ(mx_scale_code(7.9f, E2m1::emax), 127) << "the element saturates at 6";
  EXPECT_EQ(mx_scale_code(8.0f, E2m1::emax), 128);
}

TEST(Nvfp4Scale, TheLargestGroupGetsTheLargestCode) {
  for (const float x : oracle::random_bits(10000, 10)) {
    const float amax = std::fabs(x);
    const float global = nvfp4_global(amax);
    ASSERT_GE(global, 0x1p-126f);
    if (global > 0x1p-126f) {
      ASSERT_EQ(nvfp4_scale_code(amax, global), 0x7e) << amax;
    }
  }
}

TEST(Nvfp4Scale, EdgeCases) {
  EXPECT_EQ(nvfp4_global(0.0f), 0x1p-126f);
  EXPECT_TRUE(std::isnan(nvfp4_global(kNan)));
  EXPECT_TRUE(std::isnan(nvfp4_global(kInf)));
  EXPECT_EQ(nvfp4_scale_code(0.0f, 1.0f), 0);
  EXPECT_EQ(nvfp4_scale_code(6.0f, 1.0f), E4m3::encode(1.0f));
  EXPECT_EQ(nvfp4_scale_code(6e6f, 1.0f), 0x7e) << "a given global scale saturates";
  EXPECT_EQ(nvfp4_scale_code(6.0f * 0x1p-11f, 1.0f), 0) << "below half of the smallest scale";
  EXPECT_EQ(nvfp4_scale_code(6.0f * 0x1p-9f, 1.0f), 1);
  for (const float bad : {kNan, -kNan, kInf}) {
    EXPECT_EQ(nvfp4_scale_code(bad, 1.0f), 0x7f);
    EXPECT_EQ(nvfp4_scale_code(1.0f, bad), 0x7f);
  }
  EXPECT_EQ(nvfp4_scale_code(0.0f, 0.0f), 0x7f) << "0 / 0 is no plausible scale";
}

}  // namespace
}  // namespace qattn::formats
