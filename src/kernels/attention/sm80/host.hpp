// Launchers of the portable prefill kernel's instances.
#pragma once

#include "isa/launch.hpp"
#include "kernels/attention/common/params.hpp"
#include "kernels/attention/sm80/config.hpp"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

/// Launches one instance; defined in the units that instantiate kernels (launch.cuh).
template <Sm80Config C>
isa::LaunchError launch_sm80(const AttentionParams& params, isa::Index3 grid, void* stream);

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
