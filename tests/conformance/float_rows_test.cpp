// Products with K and V in floats as they lie, on every instruction set, against float64.
#include "conformance/float_rows.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

namespace qattn::test {
namespace {

std::vector<float> floats(std::size_t n, std::mt19937& random) {
  std::normal_distribution<float> normal;
  std::vector<float> x(n);
  for (float& v : x) v = normal(random);
  return x;
}

constexpr int most_rows = 8;

TEST(FloatRows, Scores) {
  on_each([](const cpu::KernelTable& words, cpu::Element element) {
    std::mt19937 random(1);
    for (const int d : {1, 3, 16, 20, 64, 130}) {
      for (const int keys : {1, 2, 5, 8, 127, 128}) {
        const Rows k(element, keys, d, random);
        const int stride = (d + 7) / 8 * 8, rows = 1 + (d + keys) % most_rows;
        std::vector<float> q = floats(static_cast<std::size_t>(rows * stride), random);
        std::vector<float> scores(most_rows * cpu::tile_keys, 42.0f), scale(most_rows, 0.5f);
        words.qk_float_rows(q.data(), stride, rows, k.view, keys, d, scale.data(), scores.data());
        for (int i = 0; i < most_rows * cpu::tile_keys; ++i) {
          const int r = i / cpu::tile_keys, j = i % cpu::tile_keys;
          double want = 0, size = 0;
          for (int c = 0; c < d && j < keys; ++c) {
            const double x =
                0.5 * double{q[static_cast<std::size_t>(r % rows * stride + c)]} * k.value(j, c);
            want += x, size += std::fabs(x);
          }
          const bool written = r < rows && j < keys;
          EXPECT_NEAR(scores[static_cast<std::size_t>(i)], written ? want : 42.0, 1e-6 * size)
              << "d " << d << " keys " << keys << " row " << r << " key " << j;
        }
      }
    }
  });
}

TEST(FloatRows, Values) {
  on_each([](const cpu::KernelTable& words, cpu::Element element) {
    std::mt19937 random(2);
    for (const int dv : {1, 3, 16, 20, 64, 130}) {
      for (const int keys : {1, 5, 128}) {
        const Rows value(element, keys, dv, random);
        const int width = (dv + 15) / 16 * 16, rows = 1 + (dv + keys) % most_rows;
        const std::vector<float> p = floats(most_rows * cpu::tile_keys, random),
                                 alpha = floats(most_rows, random),
                                 beta = floats(most_rows, random),
                                 before = floats(static_cast<std::size_t>(rows * width), random);
        std::vector<float> out = before;
        words.pv_float_rows(p.data(), rows, value.view, keys, dv, alpha.data(), beta.data(),
                            out.data());
        for (int r = 0; r < rows; ++r) {
          const auto row = static_cast<std::size_t>(r);
          for (int c = 0; c < dv; ++c) {
            const auto at = static_cast<std::size_t>(r * width + c);
            double sum = 0, size = 0;
            for (int j = 0; j < keys; ++j) {
              const double x =
                  double{p[static_cast<std::size_t>(r * cpu::tile_keys + j)]} * value.value(j, c);
              sum += x, size += std::fabs(x);
            }
            const double kept = double{before[at]} * double{alpha[row]};
            EXPECT_NEAR(out[at], kept + double{beta[row]} * sum,
                        3e-6 * (std::fabs(kept) + std::fabs(double{beta[row]}) * size))
                << "dv " << dv << " keys " << keys << " row " << r << " channel " << c;
          }
        }
      }
    }
  });
}

TEST(FloatRows, OneBadValueIsFound) {
  on_each([](const cpu::KernelTable& words, cpu::Element element) {
    std::mt19937 random(3);
    for (const int channels : {1, 20, 64, 70, 130}) {
      Rows x(element, 9, channels, random);  // NaN lies between rows
      EXPECT_TRUE(words.finite_rows(x.view, 9, channels));
      for (int i = 0; i < 9 * channels; ++i) {
        const std::size_t at = x.at(i / channels, i % channels);
        const float inf = std::numeric_limits<float>::infinity();
        const float number = i % 3 == 0 ? inf : i % 3 == 1 ? -inf : std::nanf("");
        const float f32 = x.f32[at];
        x.f32[at] = number;
        const std::uint16_t half = x.halves.empty() ? std::uint16_t{0} : x.halves[at];
        if (element == cpu::Element::f16) x.halves[at] = formats::F16::encode(number);
        if (element == cpu::Element::bf16) x.halves[at] = formats::Bf16::encode(number);
        EXPECT_FALSE(words.finite_rows(x.view, 9, channels)) << channels << " " << i;
        x.f32[at] = f32;
        if (!x.halves.empty()) x.halves[at] = half;
      }
    }
  });
}

}  // namespace
}  // namespace qattn::test
