// Notes of bad keys (AttentionParams::bad_keys), which kernels of 16-bit K and V leave in passing,
// and what turns the rows that see such a key into NaN.
#pragma once

#include <cstddef>

#include "core/problem.hpp"
#include "isa/launch.hpp"
#include "kernels/attention/common/params.hpp"
#include "kernels/operand/prepare.hpp"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

/// Bytes of AttentionParams::bad_keys.
std::size_t bad_keys_bytes(const Problem& problem, const PrepareLayout& prepared);

/// Turns the rows that see what AttentionParams::bad_keys notes into NaN.
isa::LaunchError spoil_rows(const Problem& problem, const AttentionParams& params, Stream stream);

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
