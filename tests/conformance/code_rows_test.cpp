// Codes and sums of rows, on every instruction set, against the steps one by one.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "conformance/float_rows.hpp"
#include "formats/scale.hpp"
#include "qattn/qattn.hpp"

namespace qattn::test {
namespace {

constexpr float inf = std::numeric_limits<float>::infinity();
constexpr int counts[] = {1, 3, 16, 33, 64, 80, 100, 128, 130, 256, 576};
constexpr int rows_of_each = 9;

int filled(int n) { return (n + cpu::lanes - 1) / cpu::lanes * cpu::lanes; }

/// Rows of normal numbers, and among them those that others are not.
Rows some_rows(cpu::Element element, int channels, std::mt19937& random) {
  Rows x(element, rows_of_each, channels, random);
  const auto set = [&](int row, int channel, float value) {
    x.set(row, channel % channels, value);
  };
  for (int c = 0; c < channels; ++c) set(1, c, 0.0f), set(2, c, 0.0f), set(3, c, -0.0f);
  set(2, 5, 1e-40f);
  set(4, 7, std::nanf(""));
  set(5, 2, inf), set(6, channels - 1, -inf);
  set(7, 0, element == cpu::Element::f16 ? 65504.0f : 3e38f);
  return x;
}

struct Coded {
  std::vector<std::int8_t> codes;
  std::vector<float> scale;
  std::vector<std::int32_t> sum;
};

Coded one_by_one(const cpu::KernelTable& words, const Rows& x, int channels, const float* mean,
                 const float* factors) {
  const int n = filled(channels);
  Coded made{std::vector<std::int8_t>(static_cast<std::size_t>(rows_of_each * n)), {}, {}};
  std::vector<float> row(static_cast<std::size_t>(n));
  for (int r = 0; r < rows_of_each; ++r) {
    words.load_row(x.view.row[r], x.view.element, channels, mean, row.data());
    for (int i = 0; factors != nullptr && i < channels; ++i) row[i] *= factors[i];
    const float scale = formats::amax_scale(words.amax(row.data(), channels), 127.0f);
    std::int8_t* codes = made.codes.data() + r * n;
    const int clipped = words.encode_s8(row.data(), channels, formats::reciprocal(scale), codes);
    EXPECT_TRUE(clipped == 0 || std::isnan(scale));
    made.scale.push_back(scale);
    made.sum.push_back(0);
    for (int i = 0; i < n; ++i) made.sum.back() += codes[i];
  }
  return made;
}

void expect_same_floats(const std::vector<float>& a, const std::vector<float>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (std::isnan(a[i]) && std::isnan(b[i])) continue;
    EXPECT_EQ(a[i], b[i]) << i;
  }
}

TEST(CodeRows, AreThoseOfTheStepsOneByOne) {
  on_each([](const cpu::KernelTable& words, cpu::Element element) {
    std::mt19937 random(5);
    for (const int channels : counts) {
      const Rows x = some_rows(element, channels, random);
      const int n = filled(channels);
      std::vector<float> mean(static_cast<std::size_t>(n)), factors(mean);
      std::normal_distribution<float> normal;
      for (int i = 0; i < channels; ++i) mean[i] = normal(random), factors[i] = i % 3 ? 1.0f : 4.0f;
      for (const bool with_mean : {false, true}) {
        for (const bool balanced : {false, true}) {
          const float* m = with_mean ? mean.data() : nullptr;
          const float* f = balanced ? factors.data() : nullptr;
          const Coded asked = one_by_one(words, x, channels, m, f);
          Coded made{std::vector<std::int8_t>(asked.codes.size(), 99),
                     std::vector<float>(rows_of_each), std::vector<std::int32_t>(rows_of_each)};
          words.rows_to_codes({x.view, rows_of_each, channels, m, f, made.codes.data(), n,
                               made.scale.data(), made.sum.data()});
          EXPECT_EQ(made.codes, asked.codes) << channels;
          EXPECT_EQ(made.sum, asked.sum) << channels;
          expect_same_floats(made.scale, asked.scale);
        }
      }
    }
  });
}

TEST(CodeRows, SumsAreThoseOfRowsInTheirOrder) {
  on_each([](const cpu::KernelTable& words, cpu::Element element) {
    std::mt19937 random(6);
    for (const int channels : counts) {
      const Rows x = some_rows(element, channels, random);
      std::vector<float> sum(static_cast<std::size_t>(filled(channels)), -1.0f), asked(sum);
      for (const int rows : {0, 1, rows_of_each}) {
        words.sum_rows(x.view, rows, channels, sum.data());
        std::fill(asked.begin(), asked.end(), 0.0f);
        for (int r = 0; r < rows; ++r) {
          for (int c = 0; c < channels; ++c) {
            const auto value = static_cast<float>(x.value(r, c));
            asked[c] += value + (value - value);
          }
        }
        expect_same_floats(sum, asked);
      }
    }
  });
}

TEST(CodeRows, DotsAreExactSumsOfProducts) {
  on_each([](const cpu::KernelTable& words, cpu::Element element) {
    std::mt19937 random(7);
    for (const int channels : counts) {
      const Rows x = some_rows(element, channels, random);
      const std::vector<float> other = [&] {
        std::vector<float> made(static_cast<std::size_t>(filled(channels)));
        for (int i = 0; i < channels; ++i) made[i] = static_cast<float>(i % 7) - 3.0f;
        return made;
      }();
      for (int r = 0; r < rows_of_each; ++r) {
        double parts[cpu::lanes] = {}, asked = 0.0;
        bool finite = true;
        for (int c = 0; c < channels; ++c) {
          parts[c % cpu::lanes] += x.value(r, c) * double{other[c]};
          finite &= std::isfinite(x.value(r, c));
        }
        for (const double part : parts) asked += part;
        const double dot = words.dot(x.view.row[r], element, channels, other.data());
        if (finite) {
          EXPECT_EQ(dot, asked) << channels << ' ' << r;
        } else {
          EXPECT_TRUE(std::isnan(dot)) << channels << ' ' << r;
        }
      }
    }
  });
}

/// Less their mean, values of V may leave the floats.
TEST(CodeRows, ARowOfVThatOverflowsIsNanWhetherClippedCodesAreCountedOrNot) {
  on_each_isa([] {
    constexpr int keys = 3, d = 16;
    std::vector<float> zeros(keys * d), v(keys * d), out(d);
    v[0] = 3.3e38f, v[d] = v[2 * d] = -3.3e38f;
    std::vector<std::int64_t> clipped(3);
    for (const bool counted : {false, true}) {
      AttentionTensors t;
      t.q = TensorView::dense(zeros.data(), Format::f32, {1, 1, 1, d});
      t.k = TensorView::dense(zeros.data(), Format::f32, {1, keys, 1, d});
      t.v = TensorView::dense(v.data(), Format::f32, {1, keys, 1, d});
      t.out = TensorView::dense(out.data(), Format::f32, {1, 1, 1, d});
      if (counted) t.saturated = TensorView::dense(clipped.data(), Format::s64, {3});
      AttentionOptions o;
      o.recipe = *recipe_named("int8_full");
      o.recipe.smooth_v = Toggle::on;
      const Status made = attention(t, o);
      ASSERT_TRUE(made.ok()) << made.message();
      EXPECT_TRUE(std::isnan(out[0])) << counted << ' ' << out[0];
    }
  });
}

}  // namespace
}  // namespace qattn::test
