// What sm_120a's products with scales of blocks do, and its transposing load of bytes, for one
// warp.
#pragma once

#include "isa/emu/units/matrix.hpp"

namespace qattn::isa {
enum class Scaled;
}

namespace qattn::emu {

/// One lane's part of mma_scaled over m x n tiles.
struct ScaledProduct {
  Product product;
  const std::uint32_t* sa;  ///< [m]
  const std::uint32_t* sb;  ///< [n]
};

/// Sums in float32 from zero over ascending k, products with both scales exact where float32 holds
/// them, then added to d. The hardware's sums hold 25 bits and are truncated.
void multiply_scaled(Block& block, Arguments<ScaledProduct> lanes, isa::Scaled kind, int byte);

void load_bytes_transposed(Block& block, Arguments<MatrixRows> lanes);

}  // namespace qattn::emu
