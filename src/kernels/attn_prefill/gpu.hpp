// The GPU attention kernels of this target, and what their plans share. Compiled by nvcc for GPUs
// and by the host compiler for the emulator.
#pragma once

#include <span>

#include "core/plan.hpp"
#include "kernels/attn_prefill/packed.hpp"
#include "kernels/quantize/prepare.hpp"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

/// What the second step of a plan finds.
struct Handover {
  /// Early only behind the first step, whose kernels are a chain (isa/launch.hpp).
  isa::Start start = isa::Start::after_all;
  bool raw_queries = false;  ///< Q has no codes yet: the attention kernel makes them
};

/// A plan in two steps, which benchmarks time apart: codes into the workspace, and attention on
/// what the first left there.
struct GpuPlan : detail::PlanData {
  PrepareLayout prepared;
  PackedPlan packed;
  std::uint32_t* error = nullptr;  ///< the device's error word
  Status (*attend)(const GpuPlan& plan, const Problem& problem, void* workspace, Stream stream,
                   Handover handover) = nullptr;
  /// Can the second step make Q's codes, with these addresses and strides? Null: never.
  bool (*encodes_queries)(const GpuPlan& plan, const Problem& problem) = nullptr;
  bool gains_by_encoding = false;  ///< and is a call faster so?
};

/// All codes, and attention on them.
Status quantize_operands(const detail::PlanData& plan, const Problem& problem, void* workspace,
                         Stream stream);
Status attend(const detail::PlanData& plan, const Problem& problem, void* workspace, Stream stream);

/// Both steps: Kernel::run of every GPU kernel.
Status run_steps(const detail::PlanData& plan, const Problem& problem, void* workspace,
                 Stream stream);

/// Who makes Q's codes where both can.
enum class QueryCodes { by_plan, quantisation, attention };

/// Instead of what plans choose. Set by tests and benchmarks alone, while no call runs.
QueryCodes& query_codes_override();

/// Does run_steps() leave Q's codes to the attention kernel?
bool leaves_queries(const GpuPlan& plan, const Problem& problem);

detail::Kernel sm80_coded_decode();
detail::Kernel sm80_prefill();
detail::Kernel sm90a_prefill();
detail::Kernel sm90a_wide_prefill();

/// All of them, best first.
std::span<const detail::Kernel> gpu_attention_kernels();

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
