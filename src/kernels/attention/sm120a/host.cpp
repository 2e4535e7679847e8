#include "kernels/attention/sm120a/host.hpp"

#include <algorithm>
#include <memory>
#include <string>

#include "kernels/attention/common/call_params.hpp"
#include "kernels/attention/portable.hpp"

namespace qattn::kernels {
inline namespace QATTN_TARGET {
namespace {

using isa::Element;

struct Instance : MmaInstance {
  bool (*has_code)();  ///< for the current device, and not an empty kernel
};

template <Sm120Config C>
constexpr Instance instance() {
  constexpr MmaConfig config = mma_config(C);
  if constexpr (config.ring) {
    return {{config, nullptr, &launch_sm120a<C>}, &compiled_sm120a<C>};
  } else {
    return {{config, &launch_sm120a<C>}, &compiled_sm120a<C>};
  }
}

constexpr Instance instances[] = {
#define QATTN_INSTANCE(D, QK, QK_GROUP, PV, PV_GROUP, GENERAL) \
  instance<Sm120Config{D, Element::QK, QK_GROUP, Element::PV, PV_GROUP, GENERAL}>(),
#include "kernels/attention/sm120a/instances.inc"
#undef QATTN_INSTANCE
};

Recipe resolve(const Problem& p) {
  return resolve_on_gpu(p, {Granularity::per_block, slot_tile, 0}, {});
}

Sm120Config config_of(const Problem& p, const Recipe& r, bool general) {
  Sm120Config c;
  c.d = micro_channels(std::max(p.d, p.dv));
  c.qk = element_of(r.qk), c.qk_group = info(r.qk).group;
  c.pv = probability_of(r.v), c.pv_group = info(r.v).group;
  c.general = general;
  return c;
}

const Instance* find(const Problem& p, const Recipe& r, bool general) {
  const MmaConfig wanted = mma_config(config_of(p, r, general));
  for (const Instance& i : instances) {
    if (i.config == wanted) return &i;
  }
  return nullptr;
}

/// The portable kernel's where there is a plain one alone: a plan knows no strides, and calls with
/// odd ones may come.
const MmaInstance* general_of(const Problem& p, const Recipe& r) {
  if (const Instance* own = find(p, r, true)) return own;
  const Instance* plain = find(p, r, false);
  if (plain == nullptr) return nullptr;
  const MmaConfig& c = plain->config;
  return portable_instance(c.d, c.qk, c.pv);
}

Status supports(const Problem& p) {
  const Recipe r = resolve(p);
  const isa::Gpu gpu = isa::gpu(p.device().index);
  if (!isa::runs_on(isa::sm_120f, gpu)) {
    return refuse("for sm_120 and sm_121, not for " + gpu.name());
  }
  if (Status s = check_formats(p, r, coded); !s.ok()) return s;
  if (Status s = check_options(p, r); !s.ok()) return s;
  const MmaInstance* general = general_of(p, r);
  const Instance* plain = find(p, r, false);
  if (general == nullptr) {
    return refuse("no instance for Q and K in " + text(r.qk) + ", V in " + text(r.v) +
                  " and head dimension " + std::to_string(std::max(p.d, p.dv)));
  }
  const Instance* own = find(p, r, true);
  if (own == nullptr && !is_unmasked(p, r, plain->config.d)) {
    return refuse("of " + r.name + " it serves the plain calls, and leaves this to another");
  }
  if (!(own != nullptr ? own : plain)->has_code()) {
    return refuse("the library has no code of sm_120f or sm_120a, which has these products");
  }
  return check_tiles(p, r, general->config);
}

std::shared_ptr<detail::PlanData> tune(const Problem& p) {
  auto plan = std::make_shared<MmaPlan>();
  plan->recipe = resolve(p);
  plan->plain = find(p, plan->recipe, false);
  plan->general = general_of(p, plan->recipe);
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
