// Matrices of codes for products, and the fragments that isa.hpp's definition makes of them.
#pragma once

#include <bit>
#include <cstdint>
#include <random>

#include "isa/isa.hpp"

namespace qattn::isa_test {

using namespace isa;

inline double value_of(Element element, std::uint32_t bits) {
  switch (element) {
    case Element::s8:
      return static_cast<std::int8_t>(bits);
    case Element::u8:
      return static_cast<std::uint8_t>(bits);
    case Element::e4m3:
      return formats::E4m3::decode(static_cast<std::uint8_t>(bits));
    case Element::e5m2:
      return formats::E5m2::decode(static_cast<std::uint8_t>(bits));
    case Element::e2m1:
      return formats::E2m1::decode(static_cast<std::uint8_t>(bits >> 2));
    case Element::f16:
      return formats::F16::decode(static_cast<std::uint16_t>(bits));
    default:
      return std::bit_cast<float>(bits << 16);
  }
}

/// A random code of small magnitude: sums are exact in float32 and in f16.
inline std::uint32_t small_code(Element element, std::mt19937& random) {
  const int v = static_cast<int>(random() % 7) - 3;
  switch (element) {
    case Element::s8:
      return static_cast<std::uint8_t>(random());
    case Element::u8:
      return static_cast<std::uint8_t>(random());
    case Element::e4m3:
      return formats::E4m3::encode(static_cast<float>(v));
    case Element::e5m2:
      return formats::E5m2::encode(static_cast<float>(v));
    case Element::e2m1:  // padding that counts not
      return static_cast<std::uint8_t>(random());
    case Element::f16:
      return formats::F16::encode(static_cast<float>(v));
    default:
      return std::bit_cast<std::uint32_t>(static_cast<float>(v)) >> 16;
  }
}

/// Matrices of codes, and the fragments that the definition makes of them.
template <int M, int N>
struct Operands {
  Element a_format, b_format;
  int k;
  std::uint32_t a[16 * M][32], b[32][8 * N];

  Operands(Element ea, Element eb, unsigned seed)
      : a_format(ea), b_format(eb), k(is_16bit(ea) ? 16 : 32) {
    std::mt19937 random(seed);
    for (auto& row : a) {
      for (auto& x : row) x = small_code(ea, random);
    }
    for (auto& row : b) {
      for (auto& x : row) x = small_code(eb, random);
    }
  }
  void fragments(int l, std::uint32_t (&fa)[M][4], std::uint32_t (&fb)[N][2]) const {
    const int g = l / 4, t = l % 4, per = k / 8, bits = 32 / per;
    for (int m = 0; m < M; ++m) {
      for (int r = 0; r < 4; ++r) {
        fa[m][r] = 0;
        for (int e = 0; e < per; ++e) {
          fa[m][r] |= a[16 * m + g + 8 * (r % 2)][per * t + e + k / 2 * (r / 2)] << (bits * e);
        }
      }
    }
    for (int n = 0; n < N; ++n) {
      for (int r = 0; r < 2; ++r) {
        fb[n][r] = 0;
        for (int e = 0; e < per; ++e) {
          fb[n][r] |= b[per * t + e + k / 2 * r][8 * n + g] << (bits * e);
        }
      }
    }
  }
  double product(int row, int column) const {
    double sum = 0;
    for (int i = 0; i < k; ++i) {
      sum += value_of(a_format, a[row][i]) * value_of(b_format, b[i][column]);
    }
    return sum;
  }
};

}  // namespace qattn::isa_test
