// Faults that tests plant in the emulated words, to show that kernels' tests would notice.
#pragma once

#include <cstdint>

namespace qattn::emu {

/// What products with scales of blocks (mma_scaled) do wrong.
enum class Fault : std::uint8_t {
  none,
  scale_lane,   ///< rows g and g + 8 of A take each other's scales
  scale_byte,   ///< neighbouring scales of a register change places
  neighbours,   ///< neighbouring elements of A do; those of 4 bits are a byte's nibbles
  stale_scales  ///< B's scales are those of the warp's product before, of the same kind and size
};

struct PlantedFault {
  Fault fault = Fault::none;
  int column_tiles = 0;  ///< of the words that are broken; 0: all
};

/// Of all launches.
PlantedFault& planted_fault();

}  // namespace qattn::emu
