// Matrices of codes with scales of blocks, and their product as the definition has it.
#pragma once

#include <cstdint>
#include <random>

#include "formats/e2m1.hpp"
#include "formats/e4m3.hpp"
#include "formats/ue8m0.hpp"
#include "isa/isa.hpp"

namespace qattn::isa_test {

using isa::Scaled;

/// Products of 16 M x 8 N x depth(S). Sums are exact in float32: codes and scales are small.
template <Scaled S, int M, int N>
struct ScaledOperands {
  static constexpr int bits = S == Scaled::mxfp8 ? 8 : 4, depth = S == Scaled::mxfp8 ? 32 : 64;
  static constexpr int block = S == Scaled::nvfp4 ? 16 : 32, blocks = depth / block;
  static constexpr int each = 32 / bits;  ///< elements of a register

  std::uint32_t a[16 * M][depth], b[depth][8 * N];
  std::uint32_t sa[16 * M][blocks], sb[8 * N][blocks];

  explicit ScaledOperands(unsigned seed) {
    std::mt19937 random(seed);
    const auto code = [&] {
      if constexpr (bits == 4) return static_cast<std::uint32_t>(random() % 16);
      return std::uint32_t{formats::E4m3::encode(static_cast<float>(random() % 7) - 3.0f)};
    };
    const auto scale = [&] {
      if constexpr (S != Scaled::nvfp4) return static_cast<std::uint32_t>(125 + random() % 5);
      return std::uint32_t{formats::E4m3::encode(static_cast<float>(1 + random() % 6) * 0.5f)};
    };
    for (auto& row : a) {
      for (auto& x : row) x = code();
    }
    for (auto& row : b) {
      for (auto& x : row) x = code();
    }
    for (auto& row : sa) {
      for (auto& x : row) x = scale();
    }
    for (auto& row : sb) {
      for (auto& x : row) x = scale();
    }
  }

  static double value(std::uint32_t code) {
    const auto byte = static_cast<std::uint8_t>(code);
    return bits == 4 ? formats::E2m1::decode(byte) : formats::E4m3::decode(byte);
  }
  static double scale(std::uint32_t code) {
    const auto byte = static_cast<std::uint8_t>(code);
    return S == Scaled::nvfp4 ? formats::E4m3::decode(byte) : formats::Ue8m0::decode(byte);
  }
  double product(int row, int column) const {
    double sum = 0;
    for (int k = 0; k < depth; ++k) {
      sum += value(a[row][k]) * scale(sa[row][k / block]) * value(b[k][column]) *
             scale(sb[column][k / block]);
    }
    return sum;
  }

  /// The registers of lane `l` as isa.hpp has them. What counts not is `junk`.
  void fragments(int l, int byte, std::uint32_t junk, std::uint32_t (&fa)[M][4],
                 std::uint32_t (&fb)[N][2], std::uint32_t (&fsa)[M],
                 std::uint32_t (&fsb)[N]) const {
    const int g = l / 4, t = l % 4;
    const auto scales = [&](const std::uint32_t (&of)[blocks]) {
      std::uint32_t word = junk;
      for (int i = 0; i < blocks; ++i) {
        const int shift = 8 * (byte + i);
        word = (word & ~(0xffu << shift)) | of[i] << shift;
      }
      return word;
    };
    for (int m = 0; m < M; ++m) {
      for (int r = 0; r < 4; ++r) {
        fa[m][r] = 0;
        for (int i = 0; i < each; ++i) {
          fa[m][r] |= a[16 * m + g + 8 * (r % 2)][each * t + i + 4 * each * (r / 2)] << bits * i;
        }
      }
      fsa[m] = t < 2 ? scales(sa[16 * m + g + 8 * t]) : junk;
    }
    for (int n = 0; n < N; ++n) {
      for (int r = 0; r < 2; ++r) {
        fb[n][r] = 0;
        for (int i = 0; i < each; ++i) {
          fb[n][r] |= b[each * t + i + 4 * each * r][8 * n + g] << bits * i;
        }
      }
      fsb[n] = t == 0 ? scales(sb[8 * n + g]) : junk;
    }
  }
};

}  // namespace qattn::isa_test
