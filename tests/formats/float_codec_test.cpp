// The float codecs against the definition of their formats (oracle.hpp): every code, every decision
// and random bit patterns.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "formats/bf16.hpp"
#include "formats/e2m1.hpp"
#include "formats/e4m3.hpp"
#include "formats/e4m3fnuz.hpp"
#include "formats/e5m2.hpp"
#include "formats/f16.hpp"
#include "oracle.hpp"

namespace qattn::formats {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
const float kNan = std::numeric_limits<float>::quiet_NaN();

// What a typed test knows of a codec: its format's shape, how many magnitudes encode may produce
// (for f16 and bf16 the last one is the infinity, where the next power of two would be), and
// whether zero has a sign.
template <class C, int Mantissa, int Bias, int Count, int SignBit, bool NegativeZero = true>
struct Case {
  using Codec = C;
  static constexpr int count = Count;
  static constexpr std::uint32_t sign = 1u << SignBit;
  static constexpr bool negative_zero = NegativeZero;
  static oracle::Levels levels() { return oracle::levels(Mantissa, Bias, Count); }
};

using F16Case = Case<F16, 10, 15, 0x7c01, 15>;
using Bf16Case = Case<Bf16, 7, 127, 0x7f81, 15>;
using E4m3Case = Case<E4m3, 3, 7, 0x7f, 7>;
using FnuzCase = Case<E4m3Fnuz, 3, 8, 0x80, 7, false>;
using E5m2Case = Case<E5m2, 2, 15, 0x7c, 7>;
using E2m1Case = Case<E2m1, 1, 1, 8, 3>;

template <class T>
std::uint32_t expected_code(const oracle::Levels& levels, float x) {
  const std::uint32_t code = oracle::nearest(levels, std::fabs(static_cast<double>(x)));
  const bool sign = std::signbit(x) && (code != 0 || T::negative_zero);
  return sign ? code | T::sign : code;
}

template <class T>
void expect_all_right(const std::vector<float>& inputs) {
  const oracle::Levels levels = T::levels();
  int wrong = 0;
  for (const float x : inputs) {
    const std::uint32_t code = T::Codec::encode(x);
    const std::uint32_t expected = expected_code<T>(levels, x);
    if (code == expected) continue;
    ADD_FAILURE() << std::hexfloat << x << ": code " << code << ", expected " << expected;
    if (++wrong == 10) return;
  }
}

template <class T>
class FloatCodec : public testing::Test {};

using Cases = testing::Types<F16Case, Bf16Case, E4m3Case, FnuzCase, E5m2Case, E2m1Case>;

class CaseNames {
 public:
  template <class T>
  static std::string GetName(int i) {
    static const char* const names[] = {"f16", "bf16", "e4m3", "e4m3fnuz", "e5m2", "e2m1"};
    return names[i];
  }
};

TYPED_TEST_SUITE(FloatCodec, Cases, CaseNames);

TYPED_TEST(FloatCodec, EveryFiniteCodeHasItsValueAndEncodesToItself) {
  using Code = typename TypeParam::Codec::Code;
  const oracle::Levels levels = TypeParam::levels();
  for (std::uint32_t magnitude = 0; magnitude < levels.size(); ++magnitude) {
    if (levels[magnitude] > std::numeric_limits<float>::max()) continue;
    const bool infinity = std::is_same_v<TypeParam, F16Case> && magnitude == 0x7c00;
    for (const std::uint32_t sign : {0u, TypeParam::sign}) {
      if (infinity || (sign != 0 && magnitude == 0 && !TypeParam::negative_zero)) continue;
      const auto code = static_cast<Code>(sign | magnitude);
      const float value = TypeParam::Codec::decode(code);
      ASSERT_EQ(value, sign != 0 ? -levels[magnitude] : levels[magnitude]) << +code;
      ASSERT_EQ(std::signbit(value), sign != 0) << +code;
      ASSERT_EQ(TypeParam::Codec::encode(value), code);
    }
  }
}

TYPED_TEST(FloatCodec, EveryHalfwayPointAndItsNeighboursRoundToNearestEven) {
  expect_all_right<TypeParam>(oracle::decisions(TypeParam::levels()));
}

TYPED_TEST(FloatCodec, RandomBitPatternsRoundToNearestEven) {
  expect_all_right<TypeParam>(oracle::random_bits(1000000, 1));
}

TYPED_TEST(FloatCodec, RandomValuesInRangeRoundToNearestEven) {
  std::mt19937 engine(2);
  std::normal_distribution<float> normal;
  std::vector<float> inputs(1000000);
  for (float& x : inputs) x = normal(engine);
  expect_all_right<TypeParam>(inputs);
}

TYPED_TEST(FloatCodec, ZerosSubnormalsAndTheLargestFloat) {
  const float smallest = std::numeric_limits<float>::denorm_min();
  const float normal = std::numeric_limits<float>::min();
  const float largest = std::numeric_limits<float>::max();
  std::vector<float> inputs;
  for (float x : {0.0f, smallest, 2 * smallest, normal - smallest, normal, largest}) {
    inputs.push_back(x);
    inputs.push_back(-x);
  }
  expect_all_right<TypeParam>(inputs);
}

TEST(F16, InfinitiesAndNan) {
  EXPECT_EQ(F16::encode(kInf), 0x7c00);
  EXPECT_EQ(F16::encode(-kInf), 0xfc00);
  EXPECT_EQ(F16::decode(0x7c00), kInf);
  EXPECT_EQ(F16::decode(0xfc00), -kInf);
  for (std::uint32_t payload = 1; payload < 0x400; ++payload) {
    for (const std::uint32_t sign : {0u, 0x8000u}) {
      const auto code = static_cast<F16::Code>(sign | 0x7c00 | payload);
      const float value = F16::decode(code);
      ASSERT_TRUE(std::isnan(value)) << code;
      ASSERT_EQ(F16::encode(value), code | 0x200) << "quiet, otherwise as it was";
    }
  }
  EXPECT_EQ(F16::encode(oracle::from_bits(0x7f800001)), 0x7e00) << "a payload below the fraction";
  EXPECT_EQ(F16::encode(65519.996f), 0x7bff);
  EXPECT_EQ(F16::encode(65520.0f), 0x7c00);
}

TEST(Bf16, InfinitiesAndNan) {
  EXPECT_EQ(Bf16::encode(kInf), 0x7f80);
  EXPECT_EQ(Bf16::encode(-kInf), 0xff80);
  EXPECT_EQ(Bf16::decode(0x7f80), kInf);
  EXPECT_EQ(Bf16::decode(0xff80), -kInf);
  for (std::uint32_t payload = 1; payload < 0x80; ++payload) {
    for (const std::uint32_t sign : {0u, 0x8000u}) {
      const auto code = static_cast<Bf16::Code>(sign | 0x7f80 | payload);
      const float value = Bf16::decode(code);
      ASSERT_TRUE(std::isnan(value)) << code;
      ASSERT_EQ(Bf16::encode(value), code | 0x40) << "quiet, otherwise as it was";
    }
  }
  EXPECT_EQ(Bf16::encode(oracle::from_bits(0x7fffffff)), 0x7fff) << "no carry into the sign";
  EXPECT_EQ(Bf16::encode(oracle::from_bits(0x7f800001)), 0x7fc0) << "a payload below the fraction";
}

TEST(E4m3, SaturatesAndKeepsNan) {
  EXPECT_EQ(E4m3::decode(0x7e), E4m3::max);
  for (const float x : {448.0f, 464.0f, 465.0f, 480.0f, 1e30f}) {
    EXPECT_EQ(E4m3::encode(x), 0x7e) << x;
    EXPECT_EQ(E4m3::encode(-x), 0xfe) << x;
  }
  for (const float x : {kNan, kInf}) {
    EXPECT_EQ(E4m3::encode(std::copysign(x, 1.0f)), 0x7f);
    EXPECT_EQ(E4m3::encode(std::copysign(x, -1.0f)), 0xff);
  }
  EXPECT_TRUE(std::isnan(E4m3::decode(0x7f)));
  EXPECT_TRUE(std::isnan(E4m3::decode(0xff)));
  EXPECT_EQ(std::ldexp(1.0f, E4m3::emax), 256.0f);
}

TEST(E4m3Fnuz, SaturatesHasOneNanAndNoNegativeZero) {
  EXPECT_EQ(E4m3Fnuz::decode(0x7f), E4m3Fnuz::max);
  for (const float x : {240.0f, 248.0f, 249.0f, 1e30f}) {
    EXPECT_EQ(E4m3Fnuz::encode(x), 0x7f) << x;
    EXPECT_EQ(E4m3Fnuz::encode(-x), 0xff) << x;
  }
  for (const float x : {kNan, -kNan, kInf, -kInf}) EXPECT_EQ(E4m3Fnuz::encode(x), 0x80);
  EXPECT_TRUE(std::isnan(E4m3Fnuz::decode(0x80)));
  for (const float x : {-0.0f, -0x1p-12f, -1e-30f}) EXPECT_EQ(E4m3Fnuz::encode(x), 0x00) << x;
  EXPECT_EQ(std::ldexp(1.0f, E4m3Fnuz::emax), 128.0f);
}

TEST(E5m2, SaturatesAndKeepsNan) {
  EXPECT_EQ(E5m2::decode(0x7b), E5m2::max);
  for (const float x : {57344.0f, 61440.0f, 65536.0f, 1e30f}) {
    EXPECT_EQ(E5m2::encode(x), 0x7b) << x;
    EXPECT_EQ(E5m2::encode(-x), 0xfb) << x;
  }
  for (const float x : {kNan, kInf}) {
    EXPECT_EQ(E5m2::encode(std::copysign(x, 1.0f)), 0x7f);
    EXPECT_EQ(E5m2::encode(std::copysign(x, -1.0f)), 0xff);
  }
  EXPECT_EQ(E5m2::decode(0x7c), kInf);
  EXPECT_EQ(E5m2::decode(0xfc), -kInf);
  for (const int code : {0x7d, 0x7e, 0x7f, 0xfd, 0xfe, 0xff}) {
    EXPECT_TRUE(std::isnan(E5m2::decode(static_cast<E5m2::Code>(code)))) << code;
  }
  EXPECT_EQ(std::ldexp(1.0f, E5m2::emax), 32768.0f);
}

TEST(E2m1, TableTiesSaturationAndNan) {
  const float values[] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
  for (int code = 0; code < 8; ++code) {
    EXPECT_EQ(E2m1::decode(static_cast<E2m1::Code>(code)), values[code]);
    EXPECT_EQ(E2m1::decode(static_cast<E2m1::Code>(code + 8)), -values[code]);
    EXPECT_EQ(E2m1::decode(static_cast<E2m1::Code>(code + 0x50)), values[code]) << "high nibble";
  }
  const float ties[] = {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f};
  const float even[] = {0.0f, 1.0f, 1.0f, 2.0f, 2.0f, 4.0f, 4.0f};
  for (int i = 0; i < 7; ++i) EXPECT_EQ(E2m1::decode(E2m1::encode(ties[i])), even[i]) << ties[i];
  for (const float x : {6.0f, 7.0f, 8.0f, 1e30f, kInf}) {
    EXPECT_EQ(E2m1::encode(x), 7) << x;
    EXPECT_EQ(E2m1::encode(-x), 15) << x;
  }
  EXPECT_EQ(E2m1::encode(kNan), 0);
  EXPECT_EQ(E2m1::encode(-kNan), 0);
  EXPECT_EQ(std::ldexp(1.0f, E2m1::emax), 4.0f);
}

}  // namespace
}  // namespace qattn::formats
