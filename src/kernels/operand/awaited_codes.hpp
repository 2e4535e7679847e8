// What attention is told of codes that are made beside it (overlap.hpp).
#pragma once

#include <cstdint>

namespace qattn::kernels {

/// A unit is a KV head of a sequence with its query heads.
struct AwaitedCodes {
  static constexpr int words_of_unit = 4;  ///< of counts
  std::uint32_t* works = nullptr;          ///< that were taken; null: all codes are there
  const std::uint32_t* there = nullptr;    ///< counts of units, words_of_unit apart
  std::uint32_t codes = 0;                 ///< what they are to reach
};

}  // namespace qattn::kernels
