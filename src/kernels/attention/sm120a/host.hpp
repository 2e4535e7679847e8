// Launchers of the instances for GeForce Blackwell.
#pragma once

#include "isa/launch.hpp"
#include "kernels/attention/common/params.hpp"
#include "kernels/attention/sm120a/config.hpp"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

/// Launches one instance; defined in the units that instantiate kernels (launch.cuh).
template <Sm120Config C>
isa::LaunchError launch_sm120a(const AttentionParams& params, isa::Index3 grid, void* stream);

/// Is there code of the instance for the current device, and not an empty kernel?
template <Sm120Config C>
bool compiled_sm120a();

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
