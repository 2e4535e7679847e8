// The GPU attention kernels of this target, and what their plans share. Compiled by nvcc for GPUs
// and by the host compiler for the emulator.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/plan.hpp"
#include "isa/target.hpp"
#include "kernels/attention/automatic.hpp"
#include "kernels/attention/schedule/varlen.hpp"
#include "kernels/operand/prepare.hpp"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

/// Which codes the first step leaves to the attention kernel.
enum class CodesLeft { none, queries, all };

/// What the second step of a plan finds.
struct Handover {
  /// Early only behind the first step, whose kernels are a chain (isa/launch.hpp).
  isa::Start start = isa::Start::after_all;
  CodesLeft left = CodesLeft::none;
};

/// A plan in two steps, which benchmarks time apart: codes into the workspace, and attention on
/// what the first left there.
struct GpuPlan : detail::PlanData {
  PrepareLayout prepared;
  VarlenPlan packed;
  std::uint32_t* error = nullptr;  ///< the device's error word
  Status (*attend)(const GpuPlan& plan, const Problem& problem, void* workspace, Stream stream,
                   Handover handover) = nullptr;
  /// Can the second step make these codes, with these addresses and strides? Null: none ever.
  bool (*can_make)(const GpuPlan& plan, const Problem& problem, CodesLeft left) = nullptr;
  bool gains_queries = false, gains_all = false;  ///< and is a call faster so?
};

/// All codes, and attention on them.
Status quantize_operands(const detail::PlanData& plan, const Problem& problem, void* workspace,
                         Stream stream);
Status attend(const detail::PlanData& plan, const Problem& problem, void* workspace, Stream stream);

/// Both steps: Kernel::run of every GPU kernel.
Status run_steps(const detail::PlanData& plan, const Problem& problem, void* workspace,
                 Stream stream);

/// Instead of what plans choose, where that is possible. Set by tests and benchmarks alone, while
/// no call runs.
std::optional<CodesLeft>& codes_left_override();

/// What run_steps() leaves to the attention kernel.
CodesLeft codes_left(const GpuPlan& plan, const Problem& problem);

/// Code that kernels were written for, and so what the emulator shows and tests them on: the GPU of
/// that number, where code of that target runs.
struct Architecture {
  isa::Target target;
  const char* what;  ///< "Hopper's kernels"
};

/// What a directory of kernels brings.
struct GpuKernels {
  std::span<const detail::Kernel> kernels;      ///< best first
  std::span<const Architecture> architectures;  ///< the last has all of the kernels
};

#define QATTN_ARCHITECTURE(VENDOR, NAME) GpuKernels NAME##_kernels();
#include "kernels/attention/architectures.inc"
#undef QATTN_ARCHITECTURE

/// Those of architectures.inc that this target has code for, in its order.
std::vector<GpuKernels> gpu_architectures();

/// Few queries over 8-bit codes, on every GPU (decode/uniform8).
detail::Kernel uniform8_decode();

using detail::average_keys;
using detail::ends_at_diagonal;

/// The problem's recipe on the current device. All kernels of a device make the same choice of
/// "auto", since some leave blocks to others.
Recipe resolve_on_gpu(const Problem& problem, const Scaling& k_default, const Scaling& v_default);
/// The plan's line on that choice, if there was one.
std::string automatic_text(const Problem& problem);

/// All kernels of attention on GPUs, best first.
std::span<const detail::Kernel> gpu_attention_kernels();

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
