// Floats as sums of bf16 values and their products, where an instruction set has such words.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "conformance/runner.hpp"
#include "formats/bf16.hpp"
#include "formats/f16.hpp"
#include "kernels/cpu/words.hpp"
#include "support/isas.hpp"

namespace qattn::test {
namespace {

using Halves = std::vector<std::uint16_t>;

/// Calls f(words) for each instruction set that has them. There is one on few machines.
template <class Function>
void on_each(Function f) {
  bool any = false;
  on_each_isa([&] {
    const cpu::KernelTable& words = *cpu::select_words().words;
    if (words.split_bf16 == nullptr) return;
    any = true;
    f(words);
  });
  if (!any) GTEST_SKIP() << "no instruction set here multiplies floats as sums";
}

double sum_of(const Halves& x, std::size_t at, int parts, std::size_t stride) {
  double sum = 0;
  for (int p = 0; p < parts; ++p) {
    sum += double{formats::Bf16::decode(x[at + static_cast<std::size_t>(p) * stride])};
  }
  return sum;
}

std::vector<float> normal(std::size_t count, bool f16, std::mt19937& random) {
  std::normal_distribution<float> draw;
  std::vector<float> x(count);
  for (float& v : x)
    v = f16 ? formats::F16::decode(formats::F16::encode(draw(random))) : draw(random);
  return x;
}

TEST(SplitRows, PartsAddUp) {
  on_each([](const cpu::KernelTable& words) {
    std::mt19937 random(3);
    std::vector<float> x = normal(64, false, random);
    for (std::size_t i = 0; i < 48; ++i) x[i] = std::ldexp(x[i], static_cast<int>(4 * i) - 96);
    const float largest = std::numeric_limits<float>::max();
    x[60] = largest, x[61] = -largest, x[62] = 0.0f, x[63] = std::nanf("");
    Halves parts(2 * 64);
    words.split_bf16(x.data(), 64, 64, parts.data());
    for (std::size_t i = 0; i < 63; ++i) {
      EXPECT_NEAR(sum_of(parts, i, 2, 64), double{x[i]}, std::fabs(double{x[i]}) * 0x1p-17) << i;
    }
    EXPECT_TRUE(std::isnan(sum_of(parts, 63, 2, 64)));
    x = normal(64, true, random);
    words.split_bf16(x.data(), 64, 64, parts.data());
    for (std::size_t i = 0; i < 64; ++i) {
      EXPECT_EQ(sum_of(parts, i, 2, 64), double{x[i]}) << i;
    }
  });
}

/// Panels [parts][d / 2][16][2] of 16 rows [parts][d].
void turn(const Halves& rows, int parts, int d, std::uint16_t* panel) {
  for (int p = 0; p < parts; ++p) {
    for (int c = 0; c < d; ++c) {
      for (int j = 0; j < 16; ++j) {
        panel[((p * d / 2 + c / 2) * 16 + j) * 2 + c % 2] =
            rows[static_cast<std::size_t>((j * parts + p) * d + c)];
      }
    }
  }
}

void expect_scores(const cpu::KernelTable& words, int rows, int keys, int d) {
  constexpr int parts = 2;
  std::mt19937 random(rows);
  const auto width = static_cast<std::size_t>(d), row = width * static_cast<std::size_t>(parts);
  const auto count = static_cast<std::size_t>(rows), many = static_cast<std::size_t>(keys);
  const std::vector<float> q = normal(count * width, true, random);
  const std::vector<float> k = normal(many * width, true, random);
  Halves qs(count * row), ks(many * row);
  for (std::size_t r = 0; r < count; ++r) {
    words.split_bf16(&q[r * width], d, d, &qs[r * row]);
  }
  for (std::size_t j = 0; j < many; j += 16) {
    Halves block(16 * row);
    for (std::size_t n = 0; n < 16; ++n) {
      words.split_bf16(&k[(j + n) * width], d, d, &block[n * row]);
    }
    turn(block, parts, d, &ks[j * row]);
  }
  const std::vector<float> q_scale(count, 0.5f), k_scale(cpu::tile_keys, 2.0f);
  std::vector<float> scores(count * cpu::tile_keys);
  words.qk_bf16x2(qs.data(), rows, ks.data(), keys, d, q_scale.data(), k_scale.data(),
                  scores.data());
  const double bound = 0x1p-22;
  for (std::size_t r = 0; r < count; ++r) {
    for (std::size_t j = 0; j < many; ++j) {
      double want = 0, size = 0;
      for (std::size_t c = 0; c < width; ++c) {
        const double x = double{q[r * width + c]} * double{k[j * width + c]};
        want += x, size += std::fabs(x);
      }
      EXPECT_NEAR(scores[r * cpu::tile_keys + j], want, bound * size) << r << " " << j;
    }
  }
}

TEST(SplitRows, Scores) {
  on_each([](const cpu::KernelTable& words) {
    for (const int d : {32, 64, 160}) expect_scores(words, 17, 48, d);
    for (const int rows : {1, 7, 16, 32}) expect_scores(words, rows, 128, 64);
  });
}

void expect_values(const cpu::KernelTable& words, int rows, int keys, int channels) {
  constexpr int parts = 2;
  std::mt19937 random(keys);
  const std::size_t width = cpu::tile_keys, row = width * static_cast<std::size_t>(parts);
  const auto count = static_cast<std::size_t>(rows), dv = static_cast<std::size_t>(channels);
  const auto used = static_cast<std::size_t>((keys + 31) / 32 * 32);
  std::vector<float> p = normal(count * width, true, random);
  std::vector<float> v = normal(width * dv, true, random);
  Halves ps(count * row), vs(row * dv);
  for (std::size_t r = 0; r < count; ++r) {
    for (auto j = static_cast<std::size_t>(keys); j < used; ++j) p[r * width + j] = 0.0f;
    words.split_bf16(&p[r * width], static_cast<int>(used), cpu::tile_keys, &ps[r * row]);
  }
  for (std::size_t j = 0; j < used; ++j) {
    Halves parts_of_row(static_cast<std::size_t>(parts) * dv);
    words.split_bf16(&v[j * dv], channels, channels, parts_of_row.data());
    for (std::size_t part = 0; part < static_cast<std::size_t>(parts); ++part) {
      for (std::size_t c = 0; c < dv; ++c) {
        vs[part * width * dv + (j / 2 * dv + c) * 2 + j % 2] = parts_of_row[part * dv + c];
      }
    }
  }
  std::vector<float> alpha(count, 0.5f), beta(count, 2.0f), out(count * dv, 1.0f);
  words.pv_bf16x2(ps.data(), rows, vs.data(), keys, channels, alpha.data(), beta.data(),
                  out.data());
  const double bound = 0x1p-21;
  for (std::size_t r = 0; r < count; ++r) {
    for (std::size_t c = 0; c < dv; ++c) {
      double want = 0.5, size = 0.5;
      for (std::size_t j = 0; j < static_cast<std::size_t>(keys); ++j) {
        const double x = 2.0 * double{p[r * width + j]} * double{v[j * dv + c]};
        want += x, size += std::fabs(x);
      }
      EXPECT_NEAR(out[r * dv + c], want, bound * size) << r << " " << c;
    }
  }
}

TEST(SplitRows, Values) {
  on_each([](const cpu::KernelTable& words) {
    for (const int keys : {16, 48, 128}) expect_values(words, 17, keys, 80);
    for (const int rows : {1, 7, 32}) expect_values(words, rows, 128, 64);
  });
}

TEST(SplitRows, AreWhatF16RunsOn) {
  on_each([](const cpu::KernelTable& /*words*/) {
    for (const char* name : {"f16", "f32"}) {
      const Recipe recipe = *recipe_named(name);
      const Feature& feature = feature_named("plain");
      Call call = make_call(feature, 3);
      Laid laid = lay_out(call, feature.how);
      const std::string plan = run_call(call, laid, recipe).plan;
      const std::string engine = recipe.qk == Format::f16 ? "bf16x2 bf16x2" : "f32 f32";
      EXPECT_NE(plan.find("engines: " + engine + "\n"), std::string::npos) << plan;
    }
  });
}

}  // namespace
}  // namespace qattn::test
