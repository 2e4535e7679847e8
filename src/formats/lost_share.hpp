// Constants alone: code for one instruction set must bring no inline functions along.
#pragma once

namespace qattn::formats {

// docs/NUMERICS.md, "Lost mass".

/// A row whose codes of P in one tile miss more than this share of its codes so far gets a second
/// byte of P there.
inline constexpr float kMostLost = 1.0f / 256;
/// Where there is no room for that, beyond this share of all the row's codes the mean of V's codes
/// stands for what is lost.
inline constexpr float kMostReplaced = 1.0f / 1024;

/// V's least scale per token. Sums of inverse scales could overflow below it; such values of V are
/// zeros for all purposes.
inline constexpr float kLeastTokenScale = 0x1p-90f;

}  // namespace qattn::formats
