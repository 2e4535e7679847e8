// Host side of the portable prefill kernel: the registry's entry, the launchers of its instances.
// Compiled by nvcc for GPUs and by the host compiler for the emulator.
#pragma once

#include <span>

#include "core/plan.hpp"
#include "isa/launch.hpp"
#include "kernels/attn_prefill/params.hpp"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

/// Launches one instance; defined in the units that instantiate kernels (sm80_launch.cuh).
template <PrefillConfig C>
isa::LaunchError launch_prefill(const PrefillParams& params, isa::Index3 grid, void* stream);

/// The two steps of a run, which benchmarks time apart: codes into the workspace, and attention on
/// what the first left there.
Status quantize_operands(const detail::PlanData& plan, const Problem& problem, void* workspace,
                         Stream stream);
Status attend(const detail::PlanData& plan, const Problem& problem, void* workspace,
              Stream stream);

/// The attention kernels of this target, best first.
std::span<const detail::Kernel> gpu_attention_kernels();

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
