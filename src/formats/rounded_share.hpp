// Constants alone: code for one instruction set must bring no inline functions along.
#pragma once

namespace qattn::formats {

/// Where V's scale per token joins P before that is rounded to u8, a token whose scale is below
/// this share of its tile's largest, or below the least, joins the sum of a row with its unrounded
/// P (docs/NUMERICS.md, the normaliser). Decode over codes has a least scale of its own.
inline constexpr float kRoundedShare = 1.0f / 8;
/// A row whose codes of P in one tile miss more than this share of its codes so far gets a second
/// byte of P there.
inline constexpr float kMostLost = 1.0f / 256;
/// Where there is no room for that, beyond this share of all the row's codes the mean of V's codes
/// stands for what is lost.
inline constexpr float kMostReplaced = 1.0f / 1024;
/// Sums of inverse scales could overflow below it; such values of V are zeros for all purposes.
inline constexpr float kLeastTokenScale = 0x1p-90f;

}  // namespace qattn::formats
