// Faults that tests plant in the emulated words, to show that kernels' tests would notice.
#pragma once

#include <cstdint>

namespace qattn::emu {

/// What products with scales of blocks (mma_scaled) do wrong; what goes wrong around mbarriers, as
/// if a kernel had it wrong.
enum class Fault : std::uint8_t {
  none,
  scale_lane,    ///< rows g and g + 8 of A take each other's scales
  scale_byte,    ///< neighbouring scales of a register change places
  neighbours,    ///< neighbouring elements of A do; those of 4 bits are a byte's nibbles
  stale_scales,  ///< B's scales are those of the warp's product before, of the same kind and size
  lost_wait,     ///< nobody waits
  lost_arrival,  ///< who arrives does not count
  few_bytes,     ///< a piece of 16 bytes fewer is expected than comes
  many_bytes,    ///< one more
  no_swizzle     ///< TMA's loads do not swizzle
};

struct PlantedFault {
  Fault fault = Fault::none;
  int column_tiles = 0;  ///< of the products that are broken; 0: all
  int mbarrier = 0;      ///< which is broken, in the order in which the block initialised them

  /// Is it planted there?
  bool at(Fault wanted, int barrier) const { return fault == wanted && mbarrier == barrier; }
};

/// Of all launches.
PlantedFault& planted_fault();

}  // namespace qattn::emu
