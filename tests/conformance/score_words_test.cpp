// What changes scores between the product and the softmax, on every instruction set: softcap(),
// hide() and add_bias() against their definitions.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "formats/bf16.hpp"
#include "formats/f16.hpp"
#include "kernels/cpu/words.hpp"
#include "support/isas.hpp"

namespace qattn::test {
namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr float largest = std::numeric_limits<float>::max();
constexpr float nan = std::numeric_limits<float>::quiet_NaN();

/// Calls f(words) for each instruction set of this CPU.
template <class Function>
void on_each(Function f) {
  on_each_isa([&] { f(*cpu::select_words().words); });
}

bool same(float x, float y) { return x == y || (std::isnan(x) && std::isnan(y)); }

TEST(ScoreWords, SoftcapIsTanh) {
  std::vector<float> scores;
  for (float x = 1e-30f; x < 1e30f; x *= 1.7f) scores.insert(scores.end(), {x, -x});
  scores.insert(scores.end(), {0.0f, infinity, -infinity, largest, -largest});
  while (scores.size() % 16 != 0) scores.push_back(1.0f);
  on_each([&](const cpu::KernelTable& words) {
    for (const float cap : {30.0f, 1.0f, 0.01f, 1e30f, 1e-40f}) {
      for (const float offset : {0.0f, 0.75f, -20.0f}) {
        std::vector<float> out = scores;
        words.softcap(out.data(), static_cast<int>(out.size()), offset, cap);
        for (std::size_t i = 0; i < out.size(); ++i) {
          const double x = double{scores[i] + offset}, want = cap * std::tanh(x / cap);
          EXPECT_NEAR(out[i], want, 1.5e-6 * std::fabs(want) + 1e-37 + 3e-45 * cap)
              << scores[i] << " " << cap;
        }
      }
    }
    float bad[16] = {nan, 1.0f, -nan};
    words.softcap(bad, 16, 0.0f, 30.0f);
    EXPECT_TRUE(std::isnan(bad[0]) && std::isnan(bad[2]));
    EXPECT_FALSE(std::isnan(bad[1]) || std::isnan(bad[3]));
  });
}

TEST(ScoreWords, HideTakesAnyByte) {
  on_each([](const cpu::KernelTable& words) {
    std::vector<float> scores(32, 2.0f);
    scores[5] = nan;
    std::vector<std::uint8_t> visible(32, 0);
    visible[3] = 1;
    visible[17] = 128;
    visible[31] = 255;
    words.hide(scores.data(), 32, visible.data());
    for (std::size_t i = 0; i < 32; ++i) {
      EXPECT_EQ(scores[i], visible[i] != 0 ? 2.0f : -infinity) << i;
    }
  });
}

/// The rule, one number at a time.
float biased(float score, float bias) {
  if (bias == -infinity) return -infinity;
  const float sum = score + bias;
  if (!std::isfinite(score) || !std::isfinite(bias)) return sum;
  return sum > largest ? largest : sum < -largest ? -largest : sum;
}

TEST(ScoreWords, BiasesOfEveryFormatAndCount) {
  const float numbers[] = {0.0f,     1.5f,     -3.0f,     1e30f, largest,
                           -largest, infinity, -infinity, nan,   -65504.0f};
  on_each([&](const cpu::KernelTable& words) {
    for (int n = 1; n <= 40; ++n) {
      const auto count = static_cast<std::size_t>(n);
      std::vector<float> scores(count + 1), f32(count);
      std::vector<std::uint16_t> f16(count), bf16(count);
      for (std::size_t i = 0; i < count; ++i) {
        scores[i] = numbers[(i + count) % 10];
        f32[i] = numbers[(i / 3 + 7 * count) % 10];
        f16[i] = formats::F16::encode(f32[i]);
        bf16[i] = formats::Bf16::encode(f32[i]);
      }
      scores[count] = 42.0f;  // nobody's
      const auto check = [&](const void* bias, cpu::Element element, auto decoded) {
        std::vector<float> out = scores;
        words.add_bias(out.data(), n, bias, element);
        for (std::size_t i = 0; i < count; ++i) {
          EXPECT_TRUE(same(out[i], biased(scores[i], decoded(i))))
              << out[i] << " of " << scores[i] << " and " << decoded(i);
        }
        EXPECT_EQ(out[count], 42.0f);
      };
      check(f32.data(), cpu::Element::f32, [&](std::size_t i) { return f32[i]; });
      check(f16.data(), cpu::Element::f16,
            [&](std::size_t i) { return formats::F16::decode(f16[i]); });
      check(bf16.data(), cpu::Element::bf16,
            [&](std::size_t i) { return formats::Bf16::decode(bf16[i]); });
    }
  });
}

}  // namespace
}  // namespace qattn::test
