// Bytes of packed codes.
#include "formats/pack.hpp"

#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <vector>

namespace qattn::formats {
namespace {

using Bytes = std::vector<std::uint8_t>;

template <int Bits>
Bytes packed(const Bytes& codes) {
  Bytes bytes(codes.size() * Bits / 8 + 1, 0xa5);
  pack<Bits>(codes.data(), static_cast<std::int64_t>(codes.size()), bytes.data());
  EXPECT_EQ(bytes.back(), 0xa5) << "wrote past the end";
  bytes.pop_back();
  return bytes;
}

template <int Bits>
void expect_round_trips() {
  std::mt19937 engine(5);
  for (const int units : {0, 1, 2, 3, 7, 100}) {
    Bytes codes(static_cast<std::size_t>(units * PackUnit<Bits>::codes));
    for (auto& code : codes) code = static_cast<std::uint8_t>(engine() & ((1u << Bits) - 1));
    const Bytes bytes = packed<Bits>(codes);
    // The statement in bits: bit b of code i is bit i * Bits + b of the stream.
    for (std::size_t bit = 0; bit < codes.size() * Bits; ++bit) {
      ASSERT_EQ((bytes[bit / 8] >> (bit % 8)) & 1, (codes[bit / Bits] >> (bit % Bits)) & 1);
    }
    Bytes back(codes.size() + 1, 0xa5);
    unpack<Bits>(bytes.data(), static_cast<std::int64_t>(codes.size()), back.data());
    EXPECT_EQ(back.back(), 0xa5) << "wrote past the end";
    back.pop_back();
    EXPECT_EQ(back, codes);
  }
}

TEST(Pack, RoundTripsAtEveryWidth) {
  expect_round_trips<2>();
  expect_round_trips<3>();
  expect_round_trips<4>();
  expect_round_trips<8>();
}

TEST(Pack, ExactBytes) {
  EXPECT_EQ(packed<2>({0, 1, 2, 3}), Bytes({0xe4}));
  EXPECT_EQ(packed<3>({1, 2, 3, 4, 5, 6, 7, 0}), Bytes({0xd1, 0x58, 0x1f}));
  EXPECT_EQ(packed<4>({0x1, 0x2, 0xf, 0x0}), Bytes({0x21, 0x0f}));
  EXPECT_EQ(packed<8>({0, 0x7f, 0xff}), Bytes({0, 0x7f, 0xff}));
}

TEST(Pack, BitsAboveTheWidthAreDropped) {
  EXPECT_EQ(packed<4>({0xf1, 0x32}), Bytes({0x21}));
  EXPECT_EQ(packed<2>({0xfc, 0xfd, 0xfe, 0xff}), Bytes({0xe4}));
}

}  // namespace
}  // namespace qattn::formats
