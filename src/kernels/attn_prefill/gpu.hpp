// The GPU attention kernels of this target, and what their plans share. Compiled by nvcc for GPUs
// and by the host compiler for the emulator.
#pragma once

#include <span>

#include "core/plan.hpp"
#include "kernels/quantize/prepare.hpp"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

/// A plan in two steps, which benchmarks time apart: codes into the workspace, and attention on
/// what the first left there.
struct GpuPlan : detail::PlanData {
  PrepareLayout prepared;
  std::uint32_t* error = nullptr;  ///< the device's error word
  Status (*attend)(const GpuPlan& plan, const Problem& problem, void* workspace, Stream stream,
                   isa::Start start) = nullptr;
};

Status quantize_operands(const detail::PlanData& plan, const Problem& problem, void* workspace,
                         Stream stream);
/// `start`: early only behind the first step, whose kernels are a chain (isa/launch.hpp).
Status attend(const detail::PlanData& plan, const Problem& problem, void* workspace, Stream stream,
              isa::Start start = isa::Start::after_all);

/// Both steps: Kernel::run of every GPU kernel.
Status run_steps(const detail::PlanData& plan, const Problem& problem, void* workspace,
                 Stream stream);

detail::Kernel sm80_prefill();
detail::Kernel sm90a_prefill();
detail::Kernel sm90a_wide_prefill();

/// All of them, best first.
std::span<const detail::Kernel> gpu_attention_kernels();

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
