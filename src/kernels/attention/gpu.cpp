#include "kernels/attention/gpu.hpp"

#include "isa/launch.hpp"
#include "kernels/attention/automatic.hpp"

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
  std::vector<GpuKernels> all;
#define QATTN_ARCHITECTURE(VENDOR, NAME) \
  if constexpr (isa::builds_for(isa::Vendor::VENDOR)) all.push_back(NAME##_kernels());
#include "kernels/attention/architectures.inc"
#undef QATTN_ARCHITECTURE
  return all;
}

std::span<const detail::Kernel> gpu_attention_kernels() {
  static const std::vector<detail::Kernel> kernels = [] {
    std::vector<detail::Kernel> all = {uniform8_decode()};
    for (const GpuKernels& own : gpu_architectures()) {
      all.insert(all.end(), own.kernels.begin(), own.kernels.end());
    }
    return all;
  }();
  return kernels;
}

namespace {

using detail::Codes;

/// Fitted to end-to-end times of 8-bit recipes and of 16 bits: bench/results/gpu-h200-prefill.json
/// and choices-h200.json, gpu-portable-h100.json (the portable kernel on an H100, in place of GPUs
/// without a record). tests/cli/test_automatic.py holds the choices to those records.
constexpr Codes hopper{"int8_full", true, {{{64, 1700.0}, {128, 650.0}, {256, 900.0}}}, 1.4};
constexpr Codes portable{"int8", false, {{{64, 4000.0}, {128, 1400.0}, {256, 1400.0}}}};

detail::Automatic automatic(const Problem& p) {
  const Format format = p.q.format;
  const bool halves = format == Format::f16 || format == Format::bf16;
  if (!detail::may_choose(p) || !halves || p.k.format != format || p.v.format != format) {
    return {"int8_full", "operands are codes, or become them"};
  }
  const Codes& codes = isa::runs_on(isa::sm_90a, isa::gpu(p.device().index)) ? hopper : portable;
  // How long packed sequences are the host does not know, and neighbours have no influence.
  if (p.varlen_q || p.varlen_k || detail::codes_gain(codes, p)) {
    return {codes.recipe, "enough rows and keys for codes to be worth their making"};
  }
  return {std::string(info(format).name), "too few rows and keys for codes"};
}

}  // namespace

Recipe resolve_on_gpu(const Problem& p, const Scaling& k_default, const Scaling& v_default) {
  return detail::resolve_recipe(p, automatic(p).recipe, k_default, v_default);
}

std::string automatic_text(const Problem& p) { return detail::text_of(automatic(p), p); }

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
