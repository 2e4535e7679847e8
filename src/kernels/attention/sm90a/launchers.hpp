// Launchers of the Hopper prefill kernel's instances.
#pragma once

#include "isa/launch.hpp"
#include "kernels/attention/sm90a/params.hpp"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

/// Launches one instance; defined in the units that instantiate kernels (launch.cuh).
template <Sm90Config C>
isa::LaunchError launch_sm90a(const Sm90Params& params, isa::Index3 grid, void* stream,
                              isa::Start start);

/// Is the code that would run on the current device that of sm_90a? Others have an empty kernel.
template <Sm90Config C>
bool compiled_sm90a();

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
