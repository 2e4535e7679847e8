#include "kernels/attention/gpu.hpp"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

namespace {

Status quantize(const GpuPlan& plan, const Problem& p, void* workspace, Stream stream,
                Handover& next) {
  PrepareLayout layout = plan.prepared;
  if (next.left == CodesLeft::all) return {};
  if (next.left == CodesLeft::queries) layout.needs.q_rows = false;
  const isa::LaunchError e = prepare(p, plan.recipe, layout, workspace, stream, next.start);
  return e.empty() ? Status() : Status(Code::internal, "quantisation: " + e);
}

const GpuPlan& of_gpu(const detail::PlanData& plan) { return static_cast<const GpuPlan&>(plan); }

}  // namespace

std::optional<CodesLeft>& codes_left_override() {
  static std::optional<CodesLeft> value;
  return value;
}

CodesLeft codes_left(const GpuPlan& plan, const Problem& p) {
  using enum CodesLeft;
  if (plan.can_make == nullptr) return none;
  const std::optional<CodesLeft> asked = codes_left_override();
  const bool all_wanted = asked ? asked == all : plan.gains_all;
  const bool queries_wanted = asked ? asked == queries : plan.gains_queries;
  if (all_wanted && plan.can_make(plan, p, all)) return all;
  return queries_wanted && plan.can_make(plan, p, queries) ? queries : none;
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
  next.left = codes_left(plan, p);
  if (Status s = quantize(plan, p, workspace, stream, next); !s.ok()) return s;
  return plan.attend(plan, p, workspace, stream, next);
}

std::vector<GpuKernels> gpu_architectures() {
  return {
#define QATTN_ARCHITECTURE(NAME) NAME##_kernels(),
#include "kernels/attention/architectures.inc"
#undef QATTN_ARCHITECTURE
  };
}

std::span<const detail::Kernel> gpu_attention_kernels() {
  static const std::vector<detail::Kernel> kernels = [] {
    std::vector<detail::Kernel> all = {sm80_coded_decode()};
    for (const GpuKernels& own : gpu_architectures()) {
      all.insert(all.end(), own.kernels.begin(), own.kernels.end());
    }
    return all;
  }();
  return kernels;
}

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
