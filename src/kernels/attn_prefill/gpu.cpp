#include "kernels/attn_prefill/gpu.hpp"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

Status quantize_operands(const detail::PlanData& data, const Problem& p, void* workspace,
                         Stream stream) {
  const auto& plan = static_cast<const GpuPlan&>(data);
  const isa::LaunchError e = prepare(p, plan.recipe, plan.prepared, workspace, stream);
  return e.empty() ? Status() : Status(Code::internal, "quantisation: " + e);
}

Status attend(const detail::PlanData& data, const Problem& p, void* workspace, Stream stream) {
  const auto& plan = static_cast<const GpuPlan&>(data);
  return plan.attend(plan, p, workspace, stream);
}

Status run_steps(const detail::PlanData& plan, const Problem& p, void* workspace, Stream stream) {
  if (Status s = quantize_operands(plan, p, workspace, stream); !s.ok()) return s;
  return attend(plan, p, workspace, stream);
}

std::span<const detail::Kernel> gpu_attention_kernels() {
  static const detail::Kernel kernels[] = {sm90a_prefill(), sm90a_wide_prefill(), sm80_prefill()};
  return kernels;
}

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
