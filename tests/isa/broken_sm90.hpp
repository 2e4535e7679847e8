// What broken kernels of sm_90 have in common.
#pragma once

#include <initializer_list>
#include <iterator>
#include <numeric>

#include "broken.hpp"
#include "isa/tensor_map.hpp"

namespace qattn::isa_test {

/// What copies of sm_90 read.
struct alignas(128) Source {
  std::uint32_t words[4096];
  Source() { std::iota(std::begin(words), std::end(words), 1u); }
};
inline const Source source;

/// Thread 0 makes the barriers at `at`, 8 bytes apart, and the block meets.
inline void make_barriers(SharedAddress at, std::initializer_list<int> arrivals,
                          bool fence = true) {
  if (thread() == 0) {
    for (const int n : arrivals) {
      mbarrier_init(at, n);
      at += 8;
    }
    if (fence) fence_mbarrier_init();
  }
  sync_threads();
}

}  // namespace qattn::isa_test
