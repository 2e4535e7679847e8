// The quantiser of the KV cache: codes and scales bit for bit against a plain statement of them,
// on every instruction set of this machine; errors against docs/NUMERICS.md; the layout of codes.
#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <set>

#include "formats/hadamard.hpp"
#include "formats/kv/layout.hpp"
#include "formats/kv/quantize.hpp"
#include "kernels/operand/rows.hpp"
#include "kernels/quantize/host/kv_rows.hpp"
#include "kvcache/plain_quantizer.hpp"
#include "support/isas.hpp"

namespace qattn {
namespace {

using test::PlainRow;
using test::quantize_plainly;

std::vector<const cpu::KernelTable*> all_words() {
  std::vector<const cpu::KernelTable*> list;
  test::on_each_isa([&] { list.push_back(cpu::select_words().words); });
  return list;
}

std::vector<float> normal_row(int n, std::mt19937& random, float sigma = 1.0f) {
  std::normal_distribution<float> normal(0.0f, sigma);
  std::vector<float> x(static_cast<std::size_t>(n));
  for (float& v : x) v = normal(random);
  return x;
}

/// Rows of every kind that has its own branch.
std::vector<std::vector<float>> rows_of(int n) {
  std::mt19937 random(static_cast<unsigned>(n));
  std::vector<std::vector<float>> rows;
  for (const float sigma : {1.0f, 1e-3f, 300.0f, 1e-6f, 3e-8f, 1e-20f, 3e4f, 1e6f, 1e30f}) {
    for (int i = 0; i < 12; ++i) rows.push_back(normal_row(n, random, sigma));
  }
  rows.emplace_back(n, 0.0f);
  rows.emplace_back(n, 1.0f);
  rows.emplace_back(n, -0.25f);
  for (const float outlier : {1e2f, 1e5f}) {
    rows.push_back(normal_row(n, random));
    rows.back()[3] = outlier;
  }
  for (const float bad : {INFINITY, -INFINITY, NAN}) {
    rows.push_back(normal_row(n, random));
    rows.back()[static_cast<std::size_t>(n) - 1] = bad;
  }
  std::vector<float> steps;  // every boundary of the grid
  for (int i = 0; i < n; ++i) steps.push_back(static_cast<float>(i % 17 - 8) * 0.125f);
  rows.push_back(steps);
  return rows;
}

void expect_row(const PlainRow& want, const std::vector<std::uint8_t>& codes, std::uint16_t scale,
                const char* who) {
  const float got = formats::F16::decode(scale);
  if (std::isnan(want.scale)) {
    EXPECT_TRUE(std::isnan(got)) << who;
    return;
  }
  ASSERT_EQ(got, want.scale) << who;
  for (std::size_t i = 0; i < codes.size(); ++i) ASSERT_EQ(codes[i], want.codes[i]) << who << i;
}

TEST(KvQuantizer, IsItsDefinitionBitForBit) {
  const auto words = all_words();
  ASSERT_FALSE(words.empty());
  for (const int n : {32, 64, 96, 128, 256, 288, 576}) {
    for (const auto& x : rows_of(n)) {
      for (const int bits : {2, 3, 4, 8}) {
        const PlainRow want = quantize_plainly(x, bits);
        std::vector<std::uint8_t> codes(x.size());
        const std::uint16_t scale = formats::kv_row_scale(x.data(), n, bits);
        for (std::size_t i = 0; i < x.size(); ++i) {
          codes[i] = formats::kv_encode(x[i], formats::kv_inverse(scale), bits);
        }
        expect_row(want, codes, scale, "header ");
        for (const cpu::KernelTable* w : words) {
          const std::uint16_t own = cpu::encode_kv_row(*w, x.data(), n, bits, codes.data());
          EXPECT_EQ(own, scale) << w->isa;
          expect_row(want, codes, own, w->isa);
        }
      }
    }
  }
}

TEST(KvQuantizer, ErrorOnNormalRowsIsWithinTheTable) {
  const struct {
    int d;
    double bound[4];  // 2, 3, 4, 8 bits
  } table[] = {{64, {0.35, 0.19, 0.101, 0.0075}},
               {128, {0.35, 0.19, 0.101, 0.0075}},
               {256, {0.36, 0.195, 0.105, 0.0075}}};
  for (const auto& row : table) {
    for (int b = 0; b < 4; ++b) {
      const int bits = b == 3 ? 8 : b + 2;
      std::mt19937 random(5);
      double error = 0, norm = 0, squares = 0;
      for (int i = 0; i < 4000; ++i) {
        std::vector<float> x = normal_row(row.d, random);
        formats::rotate(x.data(), row.d);
        const std::uint16_t scale = formats::kv_row_scale(x.data(), row.d, bits);
        squares += std::pow(static_cast<double>(formats::F16::decode(scale)), 2) * row.d;
        for (const float v : x) {
          const std::uint8_t code = formats::kv_encode(v, formats::kv_inverse(scale), bits);
          const double e = formats::kv_decode(code, scale, bits) - v;
          error += e * e;
          norm += static_cast<double>(v) * v;
        }
      }
      const double relative = std::sqrt(error / norm);
      std::printf("d %3d  %d bits  relative RMS error %.4f\n", row.d, bits, relative);
      EXPECT_LE(relative, row.bound[b]) << row.d << " " << bits;
      EXPECT_GE(relative, std::ldexp(0.95, -bits)) << "below the bound of rate-distortion theory";
      if (bits == 8) continue;
      const double noise = static_cast<double>(formats::kv_noise(bits));
      EXPECT_NEAR(error / squares / noise, 1, row.d == 128 ? 0.01 : 0.06) << row.d << " " << bits;
    }
  }
}

/// Scales of all sizes that f16 has, subnormal ones too, beside the definition.
TEST(KvRows, ScalesOfEverySizeAreAsDefined) {
  std::mt19937 random(17);
  const auto words = all_words();
  for (float size = 1e-10f; size < 1e6f; size *= 1.013f) {
    std::vector<float> row = normal_row(16, random, size);
    for (const int bits : {2, 3, 4, 8}) {
      const std::uint16_t want = formats::kv_row_scale(row.data(), 16, bits);
      std::uint8_t codes[16];
      for (const cpu::KernelTable* w : words) {
        ASSERT_EQ(cpu::encode_kv_row(*w, row.data(), 16, bits, codes), want)
            << w->isa << " " << bits << " bits, size " << size;
      }
    }
  }
}

/// In vectors or, where their blocks are too small, one by one.
TEST(KvRows, RotateBitByBitAsDefined) {
  std::mt19937 random(13);
  std::normal_distribution<float> normal(0.0f, 3.0f);
  for (const cpu::KernelTable* w : all_words()) {
    for (const int n : {8, 16, 24, 32, 64, 72, 80, 96, 128, 192, 224, 256, 272, 288, 512, 576}) {
      std::vector<float> row(static_cast<std::size_t>(n));
      for (float& x : row) x = normal(random);
      row[3] = -0.0f, row[5] = 1e-41f, row[7] = 1e30f;
      std::vector<float> want = row, got = row;
      formats::rotate(want.data(), n);
      cpu::rotate(*w, got.data(), n);
      EXPECT_TRUE(std::memcmp(got.data(), want.data(), got.size() * sizeof(float)) == 0)
          << w->isa << " " << n;
      formats::unrotate(want.data(), n);
      cpu::unrotate(*w, got.data(), n);
      EXPECT_TRUE(std::memcmp(got.data(), want.data(), got.size() * sizeof(float)) == 0)
          << w->isa << " " << n;
    }
  }
}

TEST(KvLayout, EveryElementHasItsOwnBits) {
  for (const int d : {32, 64, 96, 128, 256}) {
    std::set<int> k, v;
    for (int token = 0; token < 16; ++token) {
      for (int c = 0; c < d; ++c) {
        k.insert(formats::kv_place_k(token, c));
        v.insert(formats::kv_place_v(d, token, c));
      }
    }
    EXPECT_EQ(k.size(), static_cast<std::size_t>(16 * d));
    EXPECT_EQ(v.size(), static_cast<std::size_t>(16 * d));
    EXPECT_EQ(*k.begin(), 0);
    EXPECT_EQ(*v.begin(), 0);
    EXPECT_EQ(*k.rbegin(), 16 * d - 1);
    EXPECT_EQ(*v.rbegin(), 16 * d - 1);
  }
}

TEST(KvLayout, PackingIsItsDefinitionAndUnpackingItsInverse) {
  std::mt19937 random(9);
  const auto words = all_words();
  for (const int n : {512, 1024, 1536, 2048, 4096, 4608, 9216}) {
    for (const int bits : {2, 3, 4, 8}) {
      std::vector<int> panel(static_cast<std::size_t>(n));
      for (int& code : panel) code = static_cast<int>(random() % (1u << bits));
      const std::vector<std::uint8_t> bytes(panel.begin(), panel.end());
      std::vector<std::uint8_t> packed(static_cast<std::size_t>(n * bits / 8), 0xee);
      formats::kv_pack(bytes.data(), n, bits, packed.data());
      EXPECT_EQ(packed, test::pack_plainly(panel, bits)) << n << " " << bits;
      EXPECT_EQ(formats::kv_code_bytes(n, bits), n * bits / 8);
      for (int x = 0; x < n; ++x) {
        ASSERT_EQ(formats::kv_code_at(packed.data(), n, bits, x),
                  panel[static_cast<std::size_t>(x)]);
      }
      for (const cpu::KernelTable* w : words) {
        std::vector<std::uint8_t> unpacked(static_cast<std::size_t>(n), 0xee);
        w->kv_unpack(packed.data(), n, bits, unpacked.data());
        EXPECT_EQ(unpacked, bytes) << w->isa << " " << n << " " << bits;
        std::vector<std::uint8_t> again(packed.size(), 0xee);
        w->kv_pack(bytes.data(), n, bits, again.data());
        EXPECT_EQ(again, packed) << w->isa << " " << n << " " << bits;
      }
    }
  }
}

TEST(KvLayout, PartsOfABlockAreAlignedAndAddUp) {
  for (const int d : {32, 128, 256}) {
    for (const int k_bits : {2, 3, 4, 8}) {
      for (const int v_bits : {2, 3, 4, 8}) {
        const formats::KvBlock block{d, 64, k_bits, v_bits};
        EXPECT_EQ(block.v_codes(), 16 * d * k_bits / 8);
        EXPECT_EQ(block.k_scales(), 16 * d * k_bits / 8 + 16 * 64 * v_bits / 8);
        EXPECT_EQ(block.bytes(), block.k_scales() + 64);
        EXPECT_EQ(block.v_codes() % 64, 0);
        EXPECT_EQ(block.k_scales() % 64, 0);
        EXPECT_EQ(block.bytes() % 64, 0);
        const formats::KvPage by_token{block, 4, false}, by_channel{block, 4, true};
        EXPECT_EQ(by_token.bytes(), 4 * block.bytes());
        EXPECT_EQ(by_token.v_scales(), block.v_scales());
        EXPECT_EQ(by_channel.v_scales(), block.k_scales());
        EXPECT_EQ(by_channel.channel_scales(), 4 * (block.k_scales() + 32));
        EXPECT_EQ(by_channel.bad_tokens(), by_channel.channel_scales() + 2 * d);
        EXPECT_EQ(by_channel.bytes(), by_channel.bad_tokens() + 16);
        EXPECT_EQ(by_channel.bytes() % 16, 0);
      }
    }
    const formats::KvBlock window{d, 64, 16, 16};
    EXPECT_EQ(window.bytes(), 16 * (d + 64) * 2);
    EXPECT_EQ(window.scale_bytes(), 0);
  }
}

}  // namespace
}  // namespace qattn
