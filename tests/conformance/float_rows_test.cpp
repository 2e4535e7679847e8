// Products with K and V in floats as they lie, on every instruction set, against float64.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "formats/bf16.hpp"
#include "formats/f16.hpp"
#include "kernels/cpu/words.hpp"
#include "support/isas.hpp"

namespace qattn::test {
namespace {

/// Rows of floats in one format; behind the last value of a row lies NaN.
struct Rows {
  std::vector<float> f32;
  std::vector<std::uint16_t> halves;
  std::vector<const void*> row;
  int stride;

  Rows(cpu::Element element, int rows, int channels, std::mt19937& random) : stride(channels + 3) {
    std::normal_distribution<float> normal;
    f32.assign(static_cast<std::size_t>(rows * stride), std::nanf(""));
    for (int j = 0; j < rows; ++j) {
      for (int c = 0; c < channels; ++c) f32[at(j, c)] = normal(random);
    }
    for (float& x : f32) {
      if (element == cpu::Element::f32) break;
      const bool f16 = element == cpu::Element::f16;
      halves.push_back(f16 ? formats::F16::encode(x) : formats::Bf16::encode(x));
      x = f16 ? formats::F16::decode(halves.back()) : formats::Bf16::decode(halves.back());
    }
    for (int j = 0; j < rows; ++j) {
      row.push_back(halves.empty() ? static_cast<const void*>(&f32[at(j, 0)]) : &halves[at(j, 0)]);
    }
    view = {row.data(), element};
  }
  std::size_t at(int j, int channel) const {
    return static_cast<std::size_t>(j * stride + channel);
  }
  double value(int j, int channel) const { return double{f32[at(j, channel)]}; }

  cpu::FloatRows view;
};

std::vector<float> floats(std::size_t n, std::mt19937& random) {
  std::normal_distribution<float> normal;
  std::vector<float> x(n);
  for (float& v : x) v = normal(random);
  return x;
}

/// Calls f(words, element) for each instruction set of this CPU and each format.
template <class Function>
void on_each(Function f) {
  on_each_isa([&] {
    for (const auto element : {cpu::Element::f32, cpu::Element::f16, cpu::Element::bf16}) {
      f(*cpu::select_words().words, element);
    }
  });
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
