// Groups with a built-in scale: MXFP8, MXFP4 and NVFP4.
#include "formats/micro.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "oracle.hpp"

namespace qattn::formats {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
const float kNan = std::numeric_limits<float>::quiet_NaN();

using Bytes = std::vector<std::uint8_t>;

struct Group {
  std::uint8_t scale;
  Bytes codes;
};

// One description a format, so that every case runs on all three. Codes start as rubbish and one
// byte past the group must stay.
struct Mxfp8 {
  static constexpr int group = 32;
  static constexpr std::uint8_t nan = 0xff;
  static Group encode(const std::vector<float>& x, float = 1.0f) {
    Group out{0, Bytes(33, 0xa5)};
    out.scale = encode_group_mxfp8(x.data(), static_cast<int>(x.size()), out.codes.data());
    return out;
  }
  static float decode(std::uint8_t code, std::uint8_t scale, float = 1.0f) {
    return decode_mxfp8(code, scale);
  }
};

struct Mxfp4 {
  static constexpr int group = 32;
  static constexpr std::uint8_t nan = 0xff;
  static Group encode(const std::vector<float>& x, float = 1.0f) {
    Group out{0, Bytes(33, 0xa5)};
    out.scale = encode_group_mxfp4(x.data(), static_cast<int>(x.size()), out.codes.data());
    return out;
  }
  static float decode(std::uint8_t code, std::uint8_t scale, float = 1.0f) {
    return decode_mxfp4(code, scale);
  }
};

struct Nvfp4 {
  static constexpr int group = 16;
  static constexpr std::uint8_t nan = 0x7f;
  static Group encode(const std::vector<float>& x, float global = 1.0f) {
    Group out{0, Bytes(17, 0xa5)};
    out.scale = encode_group_nvfp4(x.data(), static_cast<int>(x.size()), global, out.codes.data());
    return out;
  }
  static float decode(std::uint8_t code, std::uint8_t scale, float global = 1.0f) {
    return decode_nvfp4(code, scale, global);
  }
};

template <class T>
class Micro : public testing::Test {};

using Formats = testing::Types<Mxfp8, Mxfp4, Nvfp4>;

class FormatNames {
 public:
  template <class T>
  static std::string GetName(int i) {
    static const char* const names[] = {"mxfp8", "mxfp4", "nvfp4"};
    return names[i];
  }
};

TYPED_TEST_SUITE(Micro, Formats, FormatNames);

TYPED_TEST(Micro, ZerosGiveZeroCodesAndZeroValues) {
  const auto out = TypeParam::encode(std::vector<float>(TypeParam::group, 0.0f));
  EXPECT_EQ(out.scale, 0);
  for (int i = 0; i < TypeParam::group; ++i) {
    EXPECT_EQ(out.codes[i], 0);
    EXPECT_EQ(TypeParam::decode(out.codes[i], out.scale), 0.0f);
  }
}

TYPED_TEST(Micro, ANanOrInfinityMakesTheWholeGroupNan) {
  for (const float bad : {kNan, -kNan, kInf, -kInf}) {
    for (const int at : {0, 7, TypeParam::group - 1}) {
      std::vector<float> x(TypeParam::group, 1.0f);
      x[at] = bad;
      const auto out = TypeParam::encode(x);
      EXPECT_EQ(out.scale, TypeParam::nan);
      for (int i = 0; i < TypeParam::group; ++i) {
        EXPECT_EQ(out.codes[i], 0);
        EXPECT_TRUE(std::isnan(TypeParam::decode(out.codes[i], out.scale)));
      }
    }
  }
}

TYPED_TEST(Micro, AShortGroupIsPaddedWithZeros) {
  std::mt19937 engine(11);
  std::normal_distribution<float> normal;
  for (int count = 0; count <= TypeParam::group; ++count) {
    std::vector<float> x(count);
    for (float& value : x) value = normal(engine);
    std::vector<float> padded = x;
    padded.resize(TypeParam::group, 0.0f);
    const auto out = TypeParam::encode(x);
    const auto expected = TypeParam::encode(padded);
    EXPECT_EQ(out.scale, expected.scale);
    EXPECT_EQ(out.codes, expected.codes);
    EXPECT_EQ(out.codes[TypeParam::group], 0xa5) << "wrote past the group";
  }
}

TYPED_TEST(Micro, PowersOfTwoScaleTheValuesExactly) {
  std::mt19937 engine(12);
  std::normal_distribution<float> normal;
  std::vector<float> x(TypeParam::group);
  for (float& value : x) value = normal(engine);
  const auto base = TypeParam::encode(x);
  for (const float factor : {0x1p-100f, 0x1p-10f, 2.0f, 0x1p100f}) {
    std::vector<float> scaled = x;
    for (float& value : scaled) value *= factor;
    // NVFP4 scales through its tensor factor, the others through the group's own.
    const auto out = TypeParam::encode(scaled, factor);
    EXPECT_EQ(out.codes, base.codes);
    for (int i = 0; i < TypeParam::group; ++i) {
      EXPECT_EQ(TypeParam::decode(out.codes[i], out.scale, factor),
                factor * TypeParam::decode(base.codes[i], base.scale));
    }
  }
}

// The codes from the definition: nearest value of the element format to x times the inverse scale,
// saturating, ties to even.
std::uint8_t element(const oracle::Levels& levels, std::uint32_t sign, float scaled) {
  const std::uint32_t code = oracle::nearest(levels, std::fabs(static_cast<double>(scaled)));
  return static_cast<std::uint8_t>(std::signbit(scaled) ? code | sign : code);
}

std::vector<float> random_group(std::mt19937& engine, int size) {
  std::normal_distribution<float> normal;
  std::uniform_int_distribution<int> exponent(-140, 120);
  std::vector<float> x(size);
  const int shift = exponent(engine);
  for (float& value : x) value = std::ldexp(normal(engine), shift);
  return x;
}

TEST(MicroMx, RandomGroupsMatchTheDefinition) {
  std::mt19937 engine(13);
  const oracle::Levels e4m3 = oracle::levels(3, 7, 0x7f);
  const oracle::Levels e2m1 = oracle::levels(1, 1, 8);
  for (int round = 0; round < 5000; ++round) {
    const std::vector<float> x = random_group(engine, kMxGroup);
    double amax = 0;
    for (const float value : x) amax = std::max(amax, std::fabs(static_cast<double>(value)));
    const int power = static_cast<int>(std::floor(std::log2(amax)));
    const int scale8 = std::clamp(power - 8 + 127, 0, 254);
    const int scale4 = std::clamp(power - 2 + 127, 0, 254);
    const Group fp8 = Mxfp8::encode(x);
    const Group fp4 = Mxfp4::encode(x);
    ASSERT_EQ(fp8.scale, scale8);
    ASSERT_EQ(fp4.scale, scale4);
    for (int i = 0; i < kMxGroup; ++i) {
      ASSERT_EQ(fp8.codes[i], element(e4m3, 0x80, std::ldexp(x[i], 127 - scale8)));
      ASSERT_EQ(fp4.codes[i], element(e2m1, 0x8, std::ldexp(x[i], 127 - scale4)));
    }
  }
}

TEST(MicroNvfp4, RandomGroupsMatchTheDefinition) {
  std::mt19937 engine(14);
  const oracle::Levels e4m3 = oracle::levels(3, 7, 0x7f);
  const oracle::Levels e2m1 = oracle::levels(1, 1, 8);
  const float sixth = 1.0f / 6.0f;
  for (int round = 0; round < 5000; ++round) {
    const std::vector<float> x = random_group(engine, kNvfp4Group);
    float amax = 0;
    for (const float value : x) amax = std::max(amax, std::fabs(value));
    const float global = nvfp4_global(amax * std::ldexp(1.0f, static_cast<int>(engine() % 8)));
    const float wanted = amax * sixth * (1.0f / global);
    const std::uint8_t scale = element(e4m3, 0x80, wanted);
    const Group out = Nvfp4::encode(x, global);
    ASSERT_EQ(out.scale, scale);
    const auto combined = static_cast<float>(e4m3[scale] * static_cast<double>(global));
    for (int i = 0; i < kNvfp4Group; ++i) {
      const bool zero = combined < 0x1p-126f;
      ASSERT_EQ(out.codes[i], zero ? 0 : element(e2m1, 0x8, x[i] * (1.0f / combined)));
    }
  }
}

TEST(MicroNvfp4, AGroupTooSmallForTheTensorIsZero) {
  std::vector<float> x(kNvfp4Group, 1e-6f);
  const Group out = Nvfp4::encode(x, nvfp4_global(1e6f));
  EXPECT_EQ(out.scale, 0);
  EXPECT_EQ(out.codes[0], 0);
}

TEST(MicroNvfp4, TheSmallestTensorScaleStaysFinite) {
  // Group scale times 2^-126 is subnormal for the smaller of these; its reciprocal would overflow.
  for (const float amax : {6 * 0x1p-126f, 0x1p-128f, 0x1p-133f, 1e-45f}) {
    std::vector<float> x(kNvfp4Group, amax);
    const Group out = Nvfp4::encode(x, nvfp4_global(amax));
    for (int i = 0; i < kNvfp4Group; ++i) {
      const float value = Nvfp4::decode(out.codes[i], out.scale, 0x1p-126f);
      EXPECT_LE(value, 2 * amax) << std::hexfloat << amax;
      EXPECT_GE(value, 0.0f);
    }
  }
  EXPECT_EQ(Nvfp4::encode(std::vector<float>(kNvfp4Group, 6 * 0x1p-126f), 0x1p-126f).codes[0], 7);
}

TEST(MicroNvfp4, ABrokenTensorScaleBreaksTheGroup) {
  for (const float bad : {kNan, kInf}) {
    const Group out = Nvfp4::encode(std::vector<float>(kNvfp4Group, 1.0f), bad);
    EXPECT_EQ(out.scale, 0x7f);
    EXPECT_EQ(out.codes[0], 0);
    EXPECT_TRUE(std::isnan(Nvfp4::decode(out.codes[0], out.scale, bad)));
  }
}

TEST(MicroMxfp4, AGroupByHand) {
  // amax 5 gives 2^(2 - 2) = 1; 5 is a tie between 4 and 6 and takes the even code.
  const Group out = Mxfp4::encode({5.0f, -2.5f, 0.25f, -0.0f, 0.75f, 3.0f});
  EXPECT_EQ(out.scale, 127);
  EXPECT_EQ(Bytes(out.codes.begin(), out.codes.begin() + 7), Bytes({6, 12, 0, 8, 2, 5, 0}));
}

}  // namespace
}  // namespace qattn::formats
