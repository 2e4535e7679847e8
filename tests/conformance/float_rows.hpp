// Rows of floats in memory, for the words that read them as they lie.
#pragma once

#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "formats/bf16.hpp"
#include "formats/f16.hpp"
#include "kernels/cpu/words.hpp"
#include "support/isas.hpp"

namespace qattn::test {

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
    if (element != cpu::Element::f32) halves.resize(f32.size());
    for (int j = 0; j < rows; ++j) {
      for (int c = 0; c < stride; ++c) set(j, c, f32[at(j, c)], element);
    }
    for (int j = 0; j < rows; ++j) {
      row.push_back(halves.empty() ? static_cast<const void*>(&f32[at(j, 0)]) : &halves[at(j, 0)]);
    }
    view = {row.data(), element};
  }
  /// What the format makes of a value.
  void set(int j, int channel, float x, cpu::Element element) {
    float& value = f32[at(j, channel)];
    value = x;
    if (halves.empty()) return;
    const bool f16 = element == cpu::Element::f16;
    std::uint16_t& code = halves[at(j, channel)];
    code = f16 ? formats::F16::encode(x) : formats::Bf16::encode(x);
    value = f16 ? formats::F16::decode(code) : formats::Bf16::decode(code);
  }
  void set(int j, int channel, float x) { set(j, channel, x, view.element); }
  std::size_t at(int j, int channel) const {
    return static_cast<std::size_t>(j * stride + channel);
  }
  double value(int j, int channel) const { return double{f32[at(j, channel)]}; }

  cpu::FloatRows view;
};

/// Calls f(words, element) for each instruction set of this CPU and each format.
template <class Function>
void on_each(Function f) {
  on_each_isa([&] {
    for (const auto element : {cpu::Element::f32, cpu::Element::f16, cpu::Element::bf16}) {
      f(*cpu::select_words().words, element);
    }
  });
}

}  // namespace qattn::test
