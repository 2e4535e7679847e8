#include "kernels/attention/sm120a/host.hpp"

#include <algorithm>
#include <memory>
#include <string>

#include "kernels/attention/common/call_params.hpp"
#include "kernels/attention/mma/host.hpp"

namespace qattn::kernels {
inline namespace QATTN_TARGET {
namespace {

using isa::Element;

struct Instance : MmaInstance {
  bool (*has_code)();  ///< for the current device, and not an empty kernel
};

template <Sm120Config C>
constexpr Instance instance() {
  return {{mma_config(C), &launch_sm120a<C>}, &compiled_sm120a<C>};
}

constexpr Instance instances[] = {
#define QATTN_INSTANCE(D, QK, QK_GROUP, PV, PV_GROUP, GENERAL) \
  instance<Sm120Config{D, Element::QK, QK_GROUP, Element::PV, PV_GROUP, GENERAL}>(),
#include "kernels/attention/sm120a/instances.inc"
#undef QATTN_INSTANCE
};

Recipe resolve(const Problem& p) {
  return detail::resolve_recipe(p, "int8_full", {Granularity::per_block, slot_tile, 0});
}

const Instance* find(const Problem& p, const Recipe& r, bool general) {
  Sm120Config c;
  c.d = micro_channels(std::max(p.d, p.dv));
  c.qk = element_of(r.qk), c.qk_group = info(r.qk).group;
  c.pv = probability_of(r.v), c.pv_group = info(r.v).group;
  c.general = general;
  const MmaConfig wanted = mma_config(c);
  for (const Instance& i : instances) {
    if (i.config == wanted) return &i;
  }
  return nullptr;
}

Status supports(const Problem& p) {
  const Recipe r = resolve(p);
  const int gpu = isa::architecture(p.device().index);
  if (gpu / 10 != 12) {
    return refuse("for sm_120 and sm_121, not for sm_" + std::to_string(gpu));
  }
  if (Status s = check_formats(p, r, coded); !s.ok()) return s;
  if (Status s = check_options(p, r); !s.ok()) return s;
  const Instance* general = find(p, r, true);
  if (general == nullptr) {
    return refuse("no instance for Q and K in " + text(r.qk) + ", V in " + text(r.v) +
                  " and head dimension " + std::to_string(std::max(p.d, p.dv)));
  }
  if (!general->has_code()) {
    return refuse("the library has no code of sm_120f or sm_120a, which has these products");
  }
  return check_tiles(p, r, general->config);
}

std::shared_ptr<detail::PlanData> tune(const Problem& p) {
  auto plan = std::make_shared<MmaPlan>();
  plan->recipe = resolve(p);
  plan->plain = find(p, plan->recipe, false);
  plan->general = find(p, plan->recipe, true);
  plan_mma(*plan, p, 1);
  return plan;
}

}  // namespace

GpuKernels sm120a_kernels() {
  static const detail::Kernel kernels[] = {{"sm120a_prefill", supports, tune, run_steps}};
  static constexpr Architecture architectures[] = {{isa::sm_120a, "GeForce Blackwell's kernels"}};
  return {kernels, architectures};
}

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
