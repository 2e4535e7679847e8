// Launchers of the instances for GeForce Blackwell.
#pragma once

#include "isa/launch.hpp"
#include "kernels/attention/sm120a/config.hpp"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

/// Launches one instance; defined in the units that instantiate kernels (launch.cuh).
template <Sm120Config C>
isa::LaunchError launch_sm120a(const Sm120Params<C>& params, isa::Index3 grid, void* stream);

template <Sm120Config C>
bool compiled_sm120a();

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
