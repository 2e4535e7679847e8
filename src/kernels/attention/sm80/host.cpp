#include "kernels/attention/sm80/host.hpp"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>

#include "kernels/attention/portable.hpp"

namespace qattn::kernels {
inline namespace QATTN_TARGET {
namespace {

using isa::Element;

template <Sm80Config C>
constexpr MmaInstance instance() {
  return {mma_config(C), &launch_sm80<C>};
}

constexpr MmaInstance instances[] = {
#define QATTN_INSTANCE(D, QK, PV, GENERAL) \
  instance<Sm80Config{D, Element::QK, Element::PV, GENERAL}>(),
#include "kernels/attention/sm80/instances.inc"
#undef QATTN_INSTANCE
};
static_assert(sizeof instances / sizeof *instances <= 40);

// ---- What the problem asks for ------------------------------------------------------------------

Recipe resolve(const Problem& problem) {
  // One scale for a tile of K costs nothing in the kernel, one per token a multiplication a score.
  return resolve_on_gpu(problem, {Granularity::per_block, slot_tile, 0}, {});
}

Sm80Config config_of(const Problem& p, const Recipe& r, bool general) {
  Sm80Config c;
  c.d = prepared_channels(std::max(p.d, p.dv));
  c.qk = element_of(r.qk);
  c.pv = probability_of(r.v);
  if (c.pv == Element::e4m3 && c.d == 96) c.d = 128;  // no instances of 96: zeros fill the rest
  c.general = general;
  return c;
}

const MmaInstance* find(const Sm80Config& c) {
  const MmaConfig wanted = mma_config(c);
  for (const MmaInstance& i : instances) {
    if (i.config == wanted) return &i;
  }
  return nullptr;
}
const MmaInstance* find(const Problem& p, const Recipe& r, bool general) {
  return find(config_of(p, r, general));
}

/// Has the format products here?
bool serves(Format f) { return f == Format::s8 || f == Format::e4m3; }

/// The products that this GPU has, and that this library has code of for it.
Status check_products(const Problem& p, const Sm80Config& c) {
  const isa::Gpu gpu = isa::gpu(p.device().index);
  const std::string sm = gpu.name();
  if (!gpu.runs_sm(80)) return refuse("needs sm_80 or newer");
  const auto missing = [&](int architecture) {
    return !isa::has_mma(c.qk, architecture) || !isa::has_mma(c.pv, architecture);
  };
  if (missing(gpu.number)) {
    return refuse(!gpu.runs_sm(89)
                      ? sm + " has no FP8 products, which begin with sm_89"
                      : sm + " emulates mma.sync of FP8 with 16-bit products; this kernel's "
                             "FP8 is for sm_89 and sm_120");
  }
  const int code = isa::code_architecture();
  if (code == 0) return no_code(gpu);
  if (missing(code)) {
    return refuse("the library has no machine code for " + sm + ", and its code for sm_" +
                  std::to_string(code) + " has no FP8 products");
  }
  return {};
}

Status supports(const Problem& p) {
  const Recipe r = resolve(p);
  if (Status s = check_formats(p, r, serves); !s.ok()) return s;
  const Sm80Config c = config_of(p, r, true);
  if (Status s = check_products(p, c); !s.ok()) return s;
  if (Status s = check_options(p, r); !s.ok()) return s;
  const MmaInstance* general = find(p, r, true);
  if (general == nullptr) {
    return refuse("no instance for Q and K in " + text(r.qk) + ", P in " + text(r.p) +
                  " and head dimension " + std::to_string(c.d));
  }
  return check_tiles(p, r, general->config);
}

std::shared_ptr<detail::PlanData> tune(const Problem& p) {
  auto plan = std::make_shared<MmaPlan>();
  plan->recipe = resolve(p);
  plan->plain = find(p, plan->recipe, false);  // d96 and d256 have none
  plan->general = find(p, plan->recipe, true);
  plan_mma(*plan, p, plan->general->config.d == 64 ? 3 : 2);
  return plan;
}

}  // namespace

const MmaInstance* portable_instance(int channels, Element qk, Element pv) {
  return find({channels, qk, pv, true});
}

detail::Kernel sm80_prefill() { return {"sm80_prefill", supports, tune, run_steps}; }

GpuKernels sm80_kernels() {
  static const detail::Kernel kernels[] = {sm80_prefill()};
  static constexpr Architecture architectures[] = {{isa::sm_80, "portable kernels"},
                                                   {isa::sm_89, "portable kernels, with FP8"}};
  return {kernels, architectures};
}

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
