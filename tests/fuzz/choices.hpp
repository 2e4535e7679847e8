// Bytes as a row of decisions: what a fuzzer mutates and what a random test draws. Zeros, and the
// end of the bytes, always choose the plain answer, so that short inputs are valid calls.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

namespace qattn::fuzz {

class Choices {
 public:
  explicit Choices(std::span<const std::uint8_t> bytes) : bytes_(bytes) {}

  std::uint8_t byte() { return at_ < bytes_.size() ? bytes_[at_++] : std::uint8_t{0}; }

  std::uint64_t word() {
    std::uint64_t value = 0;
    for (int i = 0; i < 8; ++i) value = value << 8 | byte();
    return value;
  }

  /// In [0, n), 0 < n <= 256.
  int below(int n) { return byte() % n; }

  /// True for the upper 256 / one_in byte values.
  bool chance(int one_in) { return byte() >= 256 - 256 / one_in; }

  /// A number that some limit may have been forgotten for.
  std::int64_t wild() {
    constexpr std::int64_t most = std::numeric_limits<std::int64_t>::max();
    constexpr std::int64_t corners[] = {-1,
                                        0,
                                        1,
                                        2,
                                        3,
                                        7,
                                        8,
                                        16,
                                        127,
                                        128,
                                        129,
                                        256,
                                        1024,
                                        4096,
                                        65536,
                                        1LL << 31,
                                        1LL << 32,
                                        (1LL << 31) - 1,
                                        -8,
                                        -16,
                                        -4096,
                                        -1LL << 31,
                                        1LL << 40,
                                        1LL << 50,
                                        most,
                                        -most,
                                        most / 2,
                                        most / 64,
                                        most / 64 + 1,
                                        -most - 1};
    constexpr int count = sizeof corners / sizeof *corners;
    const int which = below(count + 2);
    if (which < count) return corners[which];
    return which == count ? static_cast<std::int64_t>(word()) : below(256);
  }

 private:
  std::span<const std::uint8_t> bytes_;
  std::size_t at_ = 0;
};

}  // namespace qattn::fuzz
