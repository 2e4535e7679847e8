#include "kernels/attn_prefill/gpu.hpp"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

namespace {

Status quantize(const detail::PlanData& data, const Problem& p, void* workspace, Stream stream,
                isa::Start& next) {
  const auto& plan = static_cast<const GpuPlan&>(data);
  const isa::LaunchError e = prepare(p, plan.recipe, plan.prepared, workspace, stream, next);
  return e.empty() ? Status() : Status(Code::internal, "quantisation: " + e);
}

}  // namespace

Status quantize_operands(const detail::PlanData& plan, const Problem& p, void* workspace,
                         Stream stream) {
  isa::Start next;
  return quantize(plan, p, workspace, stream, next);
}

Status attend(const detail::PlanData& data, const Problem& p, void* workspace, Stream stream,
              isa::Start start) {
  const auto& plan = static_cast<const GpuPlan&>(data);
  return plan.attend(plan, p, workspace, stream, start);
}

Status run_steps(const detail::PlanData& plan, const Problem& p, void* workspace, Stream stream) {
  isa::Start next = isa::Start::after_all;
  if (Status s = quantize(plan, p, workspace, stream, next); !s.ok()) return s;
  return attend(plan, p, workspace, stream, next);
}

std::span<const detail::Kernel> gpu_attention_kernels() {
  static const detail::Kernel kernels[] = {sm90a_prefill(), sm90a_wide_prefill(), sm80_prefill()};
  return kernels;
}

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
