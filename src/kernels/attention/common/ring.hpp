// Rings of buffers between a producer and its consumers.
#pragma once

#include <cstdint>

#include "isa/isa.hpp"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

/// A place in a ring of N buffers, and the parity of its current round.
template <int N>
struct RingPlace {
  int stage = 0;
  std::uint32_t parity = 0;

  QATTN_DEVICE void advance() {
    if (++stage == N) stage = 0, parity ^= 1;
  }
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
