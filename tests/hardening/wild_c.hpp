// What tests of random calls through the C interface share.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "fuzz/wild_call.hpp"
#include "qattn/qattn.h"

namespace qattn::test {

/// Bytes of one call; many zeros, so that most calls differ from a plain one in a few places.
inline std::vector<std::uint8_t> draw(std::mt19937_64& random, int n) {
  std::vector<std::uint8_t> bytes(160);
  const unsigned density = 1 + static_cast<unsigned>(n % 8);
  for (std::uint8_t& b : bytes) {
    const std::uint64_t x = random();
    b = x % 8 < density ? static_cast<std::uint8_t>(x >> 8) : std::uint8_t{0};
  }
  return bytes;
}

inline qattn_tensor c_tensor(const TensorView& v) {
  qattn_tensor t;
  t.data = v.data;
  t.format = static_cast<std::int32_t>(v.format);
  t.rank = v.rank;
  std::copy(v.shape.begin(), v.shape.end(), t.shape);
  std::copy(v.stride.begin(), v.stride.end(), t.stride);
  t.device_type = static_cast<std::int32_t>(v.device.type);
  t.device_index = v.device.index;
  return t;
}

inline testing::AssertionResult refused_well(qattn_status status) {
  const std::string message = qattn_last_error();
  if (status != QATTN_INVALID_ARGUMENT && status != QATTN_UNSUPPORTED &&
      status != QATTN_OUT_OF_MEMORY) {
    return testing::AssertionFailure() << "status " << status << ": " << message;
  }
  if (fuzz::names_something(message)) return testing::AssertionSuccess();
  return testing::AssertionFailure() << "names nothing: " << message;
}

}  // namespace qattn::test
