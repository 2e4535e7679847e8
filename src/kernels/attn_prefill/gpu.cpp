#include "kernels/attn_prefill/gpu.hpp"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

namespace {

Status quantize(const GpuPlan& plan, const Problem& p, void* workspace, Stream stream,
                Handover& next) {
  PrepareLayout layout = plan.prepared;
  if (next.raw_queries) layout.needs.q_rows = false;
  const isa::LaunchError e = prepare(p, plan.recipe, layout, workspace, stream, next.start);
  return e.empty() ? Status() : Status(Code::internal, "quantisation: " + e);
}

const GpuPlan& of_gpu(const detail::PlanData& plan) { return static_cast<const GpuPlan&>(plan); }

}  // namespace

QueryCodes& query_codes_override() {
  static QueryCodes value = QueryCodes::by_plan;
  return value;
}

bool leaves_queries(const GpuPlan& plan, const Problem& p) {
  const QueryCodes asked = query_codes_override();
  const bool wanted =
      asked == QueryCodes::by_plan ? plan.gains_by_encoding : asked == QueryCodes::attention;
  return wanted && plan.encodes_queries != nullptr && plan.encodes_queries(plan, p);
}

Status quantize_operands(const detail::PlanData& plan, const Problem& p, void* workspace,
                         Stream stream) {
  Handover next;
  return quantize(of_gpu(plan), p, workspace, stream, next);
}

Status attend(const detail::PlanData& plan, const Problem& p, void* workspace, Stream stream) {
  return of_gpu(plan).attend(of_gpu(plan), p, workspace, stream, {});
}

Status run_steps(const detail::PlanData& data, const Problem& p, void* workspace, Stream stream) {
  const GpuPlan& plan = of_gpu(data);
  Handover next;
  next.raw_queries = leaves_queries(plan, p);
  if (Status s = quantize(plan, p, workspace, stream, next); !s.ok()) return s;
  return plan.attend(plan, p, workspace, stream, next);
}

std::span<const detail::Kernel> gpu_attention_kernels() {
  static const detail::Kernel kernels[] = {sm80_coded_decode(), sm90a_prefill(),
                                           sm90a_wide_prefill(), sm80_prefill()};
  return kernels;
}

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
