// The rotation is orthonormal, has its inverse, and is the one documented.
#include "formats/hadamard.hpp"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

namespace qattn::formats {
namespace {

constexpr int kDims[] = {1, 2, 3, 8, 16, 48, 64, 72, 80, 96, 128, 192, 256};

std::vector<float> random_row(std::mt19937& engine, int dim) {
  std::normal_distribution<float> normal;
  std::vector<float> x(dim);
  for (float& value : x) value = normal(engine);
  return x;
}

double dot(const std::vector<float>& a, const std::vector<float>& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += static_cast<double>(a[i]) * b[i];
  return sum;
}

TEST(Hadamard, BlockAndNorm) {
  EXPECT_EQ(rotation_block(128), 128);
  EXPECT_EQ(rotation_block(96), 32);
  EXPECT_EQ(rotation_block(80), 16);
  EXPECT_EQ(rotation_block(7), 1);
  for (int block = 1; block <= 1 << 20; block *= 2) {
    EXPECT_EQ(rotation_norm(block), static_cast<float>(1.0 / std::sqrt(double(block)))) << block;
  }
}

TEST(Hadamard, MatchesTheMatrixOfTheDefinition) {
  std::mt19937 engine(15);
  for (const int dim : kDims) {
    const std::vector<float> x = random_row(engine, dim);
    std::vector<float> y = x;
    rotate(y.data(), dim);
    const int block = dim & -dim;
    for (int i = 0; i < dim; ++i) {
      double sum = 0;
      for (int j = i / block * block; j < (i / block + 1) * block; ++j) {
        const auto common = static_cast<unsigned>((i % block) & (j % block));
        const double entry = std::popcount(common) % 2 == 0 ? 1.0 : -1.0;
        sum += entry * rotation_sign(j) * x[j];
      }
      ASSERT_NEAR(y[i], sum / std::sqrt(double(block)), 2e-6) << dim << " " << i;
    }
  }
}

TEST(Hadamard, KeepsInnerProducts) {
  std::mt19937 engine(16);
  for (const int dim : kDims) {
    std::vector<float> a = random_row(engine, dim);
    std::vector<float> b = random_row(engine, dim);
    const double before = dot(a, b);
    const double size = std::sqrt(dot(a, a) * dot(b, b));
    rotate(a.data(), dim);
    rotate(b.data(), dim);
    EXPECT_NEAR(dot(a, b), before, 1e-6 * size) << dim;
  }
}

TEST(Hadamard, UnrotateIsTheInverse) {
  std::mt19937 engine(17);
  for (const int dim : kDims) {
    const std::vector<float> x = random_row(engine, dim);
    std::vector<float> y = x;
    rotate(y.data(), dim);
    unrotate(y.data(), dim);
    for (int i = 0; i < dim; ++i) EXPECT_NEAR(y[i], x[i], 2e-6) << dim << " " << i;
    rotate(y.data(), dim);
    unrotate(y.data(), dim);
    for (int i = 0; i < dim; ++i) EXPECT_NEAR(y[i], x[i], 4e-6) << dim << " " << i;
  }
}

TEST(Hadamard, EvenPowersOfTwoInvertExactlyOnIntegers) {
  // At 4, 16, 64 and 256 the norm is a power of two, so small integers never round.
  for (const int dim : {4, 16, 64, 256}) {
    std::vector<float> x(dim);
    for (int i = 0; i < dim; ++i) x[i] = static_cast<float>(i % 19 - 9);
    std::vector<float> y = x;
    rotate(y.data(), dim);
    unrotate(y.data(), dim);
    EXPECT_EQ(y, x) << dim;
  }
}

TEST(Hadamard, SpreadsAnOutlierOverItsBlock) {
  std::vector<float> x(128, 0.0f);
  x[5] = 1.0f;
  rotate(x.data(), 128);
  for (const float value : x) EXPECT_EQ(std::fabs(value), rotation_norm(128));
}

TEST(Hadamard, ANanStaysInItsBlock) {
  std::vector<float> x(96, 1.0f);
  x[40] = std::nanf("");
  rotate(x.data(), 96);
  for (int i = 0; i < 96; ++i) EXPECT_EQ(std::isnan(x[i]), i / 32 == 1) << i;
}

TEST(RotationSign, IsPartOfTheFormat) {
  // Channels 0..31 as bits, lowest first, 1 for -1. Stored caches depend on these.
  std::uint32_t signs = 0;
  int negative = 0;
  for (int channel = 0; channel < 256; ++channel) {
    ASSERT_EQ(std::fabs(rotation_sign(channel)), 1.0f);
    if (rotation_sign(channel) > 0) continue;
    ++negative;
    if (channel < 32) signs |= 1u << channel;
  }
  EXPECT_EQ(signs, 0x6718e062u);
  EXPECT_NEAR(negative, 128, 32);
}

}  // namespace
}  // namespace qattn::formats
