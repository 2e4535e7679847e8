#include <algorithm>
#include <bit>
#include <cstdint>
#include <memory>
#include <string>

#include "kernels/attention/common/supports.hpp"
#include "kernels/attention/gpu.hpp"
#include "kernels/attention/schedule/split_kv.hpp"
#include "kernels/decode/uniform8/params.hpp"
#include "kernels/operand/scale_groups.hpp"

namespace qattn::kernels {
inline namespace QATTN_TARGET {
namespace {

using isa::Element;

/// With more, keys are read for too many blocks of rows, and tiles of prefill kernels are full.
constexpr std::int64_t most_queries = 16;

struct Instance {
  Uniform8Config config;
  isa::LaunchError (*launch)(const Uniform8Params&, isa::Index3, void*, isa::Start);
};

template <Uniform8Config C>
constexpr Instance instance() {
  return {C, &launch_uniform8<C>};
}

constexpr Instance instances[] = {
#define QATTN_INSTANCE(D, QK, PV) instance<Uniform8Config{D, Element::QK, Element::PV}>(),
#include "kernels/decode/uniform8/instances.inc"
#undef QATTN_INSTANCE
};

struct Uniform8Plan : GpuPlan {
  const Instance* instance = nullptr;
  SplitKv split_kv;
};

Recipe resolve(const Problem& p) { return detail::resolve_recipe(p, "int8_full", {}); }

const Instance* find(const Problem& p, const Recipe& r) {
  const bool s8 = r.qk == Format::s8, u8 = r.v == Format::s8 && r.p == Format::u8;
  if (!s8 && r.qk != Format::e4m3) return nullptr;
  if (!u8 && (r.v != Format::e4m3 || r.p != Format::e4m3)) return nullptr;
  const int channels = std::max(p.d, p.dv);
  const Uniform8Config wanted{channels <= 64    ? 64
                              : channels <= 128 ? 128
                                                : 256,
                              s8 ? Element::s8 : Element::e4m3, u8 ? Element::u8 : Element::e4m3};
  for (const Instance& i : instances) {
    if (i.config == wanted) return &i;
  }
  return nullptr;
}

PrepareNeeds needs_of(const Problem& p, const Recipe& r) {
  PrepareNeeds n;
  n.q_rows = true;
  n.dot_mean = needs_dot_mean(p, r);
  return n;
}

Uniform8Scales scales_of(const Problem& p, const TensorView& given, Role role, const Scaling& s) {
  const ScaleGroups groups{role, s.granularity, s.block, s.warp, 0};
  const auto at = [&](int outer, int head, int token, int channel) {
    return groups.offset(given.stride.data(), p.paged, outer, head, token, channel);
  };
  Uniform8Scales x;
  x.data = static_cast<const float*>(given.data);
  x.outer = at(1, 0, 0, 0), x.head = at(0, 1, 0, 0);
  x.token = at(0, 0, 1, 0), x.channel = at(0, 0, 0, 1);
  x.tokens = groups.by_token() ? given.shape[2] : -1;
  return x;
}

/// One number a token, or all tokens: where it lies is a sum of products then.
Status check_scales(const Problem& p, const Recipe& r) {
  using enum Granularity;
  if (!p.tensors.k_scale.present() || !p.tensors.v_scale.present()) {
    return refuse("reads codes of K and V that have scales");
  }
  const auto uniform = [](Granularity g) { return g == per_tensor || g == per_head; };
  const Granularity k = r.k_scale.granularity, v = r.v_scale.granularity;
  if (k != per_token && !uniform(k)) return refuse("k: scales " + std::string(name(k)));
  const bool tokens = v == per_token && r.v == Format::s8;  // P in u8 has room for them
  if (!tokens && !uniform(v) && v != per_channel) {
    return refuse("v: scales " + std::string(name(v)) + " of " + text(r.v));
  }
  return {};
}

Status supports(const Problem& p) {
  const Recipe r = resolve(p);
  if (!p.k_codes || !p.v_codes) return refuse("reads K and V that both come as codes");
  if (p.max_q > most_queries) {
    return refuse(std::to_string(p.max_q) + " queries are more than " +
                  std::to_string(most_queries));
  }
  const isa::Gpu gpu = isa::gpu(p.device().index);
  const int code = isa::code_architecture();
  if (!gpu.runs_sm(80) || code == 0) return no_code(gpu);
  if (find(p, r) == nullptr) {
    return refuse("no instance for codes of K in " + text(r.qk) + ", V in " + text(r.v) +
                  " and P in " + text(r.p));
  }
  if (r.qk == Format::e4m3 && code < uniform8_fp8_architecture) {
    return refuse("the code for sm_" + std::to_string(code) + " has no conversions of FP8");
  }
  if (Status s = check_scales(p, r); !s.ok()) return s;
  if (p.tensors.k_mean.present() || p.tensors.v_mean.present()) {
    return refuse("knows no mean of K or V");
  }
  if (r.smooth_q == Toggle::on) return refuse("knows no mean of Q");
  if (p.block_mask_q > 0 || p.mask != MaskKind::none) return refuse("reads no masks");
  if (p.tensors.alibi_slopes.present()) return refuse("knows no ALiBi slopes");
  if (Status s = check_lengths(p); !s.ok()) return s;
  if (too_many_blocks(p, uniform8_rows, 0x7fffffff / most_splits)) {
    return refuse("more than 2^31 blocks");
  }
  return check_prepared(p, r, needs_of(p, r));
}

/// Can the kernel make Q's codes? It always gains by it: a launch, and a pass over a few rows.
bool can_make(const GpuPlan& plan, const Problem& p, CodesLeft left) {
  return left == CodesLeft::queries && has_plain_queries(p, plan.recipe);
}

Status attend_codes(const GpuPlan& data, const Problem& p, void* workspace, Stream stream,
                    Handover handover) {
  const auto& plan = static_cast<const Uniform8Plan&>(data);
  Uniform8Params params;
  params.call = params_of(p, prepared_in(p, plan.recipe, plan.prepared, workspace), uniform8_rows,
                          plan.error);
  if (params.call.work_tiles == 0) return {};
  if (handover.left == CodesLeft::queries) {
    params.call.q = rows_of(p, Role::q);
    params.fused_q_quant = p.q.format;
  }
  set_split_kv(plan.split_kv, uniform8_rows, workspace, params.call);
  if (p.paged && std::has_single_bit(static_cast<std::uint64_t>(p.page_size))) {
    params.page_shift = std::countr_zero(static_cast<std::uint64_t>(p.page_size));
  }
  params.k_scale = scales_of(p, p.tensors.k_scale, Role::k, plan.recipe.k_scale);
  params.v_scale = scales_of(p, p.tensors.v_scale, Role::v, plan.recipe.v_scale);
  isa::LaunchError e =
      locate_varlen(plan.packed, p, workspace, params.call, stream, handover.start);
  if (e.empty()) {
    e = plan.instance->launch(params, {params.call.work_tiles, 1, 1}, stream, handover.start);
  }
  if (e.empty()) e = combine_parts(params.call, stream, isa::Start::early);
  return e.empty() ? Status() : Status(Code::internal, "decode kernel: " + e);
}

std::shared_ptr<detail::PlanData> tune(const Problem& p) {
  auto plan = std::make_shared<Uniform8Plan>();
  plan->attend = attend_codes;
  plan->can_make = can_make;
  plan->gains_queries = true;
  plan->recipe = resolve(p);
  plan->instance = find(p, plan->recipe);
  plan->prepared = plan_prepare(p, plan->recipe, needs_of(p, plan->recipe));
  plan->workspace = plan->prepared.bytes;
  SplitKvLimits limits;
  limits.rows = uniform8_rows, limits.channels = plan->instance->config.d;
  limits.parts = true;
  limits.blocks = isa::multiprocessors() * uniform8_blocks(limits.channels);
  plan->split_kv = plan_split_kv(p, plan->recipe, limits, plan->workspace);
  plan->packed = plan_varlen(p, uniform8_rows, plan->workspace);
  plan->error = isa::error_word();
  plan->text = "variant: codes d" + std::to_string(limits.channels) +
               "\ntile: " + std::to_string(uniform8_rows) + " rows x " +
               std::to_string(coded_tile_keys) +
               " keys\ntile_keys: " + std::to_string(coded_tile_keys) +
               "\nlost_mass: " + (plan->recipe.p == Format::u8 ? "a second byte" : "none") + "\n" +
               text_of(plan->split_kv) + hidden_keys_text(plan->prepared);
  if (codes_left(*plan, p) == CodesLeft::queries) {
    plan->text += "q_codes: in the attention kernel\n";
  }
  return plan;
}

}  // namespace

detail::Kernel uniform8_decode() { return {"uniform8_decode", supports, tune, run_steps}; }

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
