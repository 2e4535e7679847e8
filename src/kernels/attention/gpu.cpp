#include "kernels/attention/gpu.hpp"

#include <algorithm>
#include <array>

#include "isa/launch.hpp"
#include "kernels/attention/automatic.hpp"
#include "kernels/attention/schedule/split_kv.hpp"

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

bool ends_at_diagonal(const Problem& p) {
  return p.window_right >= 0 && p.window_right < p.max_k / 2;
}

std::int64_t average_keys(const Problem& p) {
  const std::int64_t average = p.max_k - (ends_at_diagonal(p) ? std::min(p.max_q, p.max_k) / 2 : 0);
  return std::min(average, visible_keys(p, 1));
}

namespace {

/// From how many keys a row on codes gain what making them costs, where each KV head has as many
/// rows of Q as keys; by head dimension, between those of records in proportion.
struct BreakEven {
  int channels;
  double keys;
};

/// What codes a GPU's kernels gain most from: of Q and K alone, or of V, too.
struct Codes {
  const char* recipe;
  bool of_v;
  std::array<BreakEven, 3> break_even;
};

/// Fitted to end-to-end times of 8-bit recipes and of 16 bits: bench/results/gpu-h200-prefill.json
/// and choices-h200.json, gpu-portable-h100.json (the portable kernel on an H100, in place of GPUs
/// without a record). tests/cli/test_automatic.py holds the choices to those records.
constexpr Codes hopper{"int8_full", true, {{{64, 1200.0}, {128, 650.0}, {256, 900.0}}}};
constexpr Codes portable{"int8", false, {{{64, 4000.0}, {128, 1400.0}, {256, 1400.0}}}};

double break_even(const Codes& codes, int channels) {
  const auto& all = codes.break_even;
  if (channels <= all.front().channels) return all.front().keys;
  for (std::size_t i = 1; i < all.size(); ++i) {
    const BreakEven &low = all[i - 1], &high = all[i];
    if (channels > high.channels) continue;
    const double part =
        static_cast<double>(channels - low.channels) / (high.channels - low.channels);
    return low.keys + part * (high.keys - low.keys);
  }
  return all.back().keys;
}

/// A row's products gain in proportion to its keys, codes cost in proportion to what is coded: with
/// few rows a row of K or V costs twice what one of Q does.
bool codes_gain(const Codes& codes, const Problem& p) {
  const auto rows = static_cast<double>(p.group() * p.max_q), keys = static_cast<double>(p.max_k);
  const double of_keys = codes.of_v ? 4.0 : 2.0, coded = of_keys * keys + rows;
  const double gains = rows * static_cast<double>(average_keys(p));
  return gains * (of_keys + 1.0) >= break_even(codes, std::max(p.d, p.dv)) * coded;
}

detail::Automatic automatic(const Problem& p) {
  const Format format = p.q.format;
  const bool halves = format == Format::f16 || format == Format::bf16;
  if (!detail::may_choose(p) || !halves || p.k.format != format || p.v.format != format) {
    return {"int8_full", "operands are codes, or become them"};
  }
  const Codes& codes = isa::architecture(p.device().index) == 90 ? hopper : portable;
  // How long packed sequences are the host does not know, and neighbours have no influence.
  if (p.varlen_q || p.varlen_k || codes_gain(codes, p)) {
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
