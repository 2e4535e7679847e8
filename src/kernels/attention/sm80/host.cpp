#include "kernels/attention/sm80/host.hpp"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>

#include "kernels/attention/common/call_params.hpp"
#include "kernels/attention/common/spoil.hpp"
#include "kernels/attention/portable.hpp"

namespace qattn::kernels {
inline namespace QATTN_TARGET {
namespace {

using detail::PlanData;
using isa::Element;

using Instance = Sm80Instance;

template <Sm80Config C>
constexpr Instance instance() {
  return {C, &launch_sm80<C>};
}

constexpr Instance instances[] = {
#define QATTN_INSTANCE(D, QK, PV, GENERAL) \
  instance<Sm80Config{D, Element::QK, Element::PV, GENERAL}>(),
#include "kernels/attention/sm80/instances.inc"
#undef QATTN_INSTANCE
};
static_assert(sizeof instances / sizeof *instances <= 40);

const Instance* find(const Sm80Config& config) {
  for (const Instance& i : instances) {
    if (i.config == config) return &i;
  }
  return nullptr;
}

/// Does a kernel note bad keys, for SpoilRows?
bool notes_bad_keys(const Sm80Config& c) { return isa::is_16bit(c.qk) && !c.general; }

constexpr int tile_keys = 64;
constexpr int tile_rows(const Sm80Config& c) { return c.d > 128 ? 64 : 128; }

// ---- What the problem asks for ------------------------------------------------------------------

Recipe resolve(const Problem& problem) {
  // One scale for a tile of K costs nothing in the kernel, one per token a multiplication a score.
  return detail::resolve_recipe(problem, "int8_full", {Granularity::per_block, tile_keys, 0});
}

Element element_of(Format format) {
  return format == Format::f16    ? Element::f16
         : format == Format::bf16 ? Element::bf16
         : format == Format::e4m3 ? Element::e4m3
                                  : Element::s8;
}

/// Is K's scale the same for all keys of a tile?
bool tile_scaled(const Problem& p, const Recipe& r) {
  using enum Granularity;
  const Scaling& s = r.k_scale;
  if (p.paged && p.tensors.k_scale.present()) return false;  // given with the pages
  return s.granularity == per_tensor || s.granularity == per_head ||
         (s.granularity == per_block && s.block % tile_keys == 0);
}

Sm80Config config_of(const Problem& p, const Recipe& r, bool general) {
  Sm80Config c;
  c.d = prepared_channels(std::max(p.d, p.dv));
  c.qk = element_of(r.qk);
  c.pv = r.v == Format::s8 ? Element::u8 : element_of(r.v);
  if (c.pv == Element::e4m3 && c.d == 96) c.d = 128;  // no instances of 96: zeros fill the rest
  c.general = general;
  return c;
}

/// Are V's scales nothing that the loop over the tiles must see? s8: of tokens, which P carries;
/// e4m3: one a channel in a sequence, at the end. And does its tile fill the plain variant's?
bool plain_values(const Problem& p, const Recipe& r) {
  const Granularity g = r.v_scale.granularity;
  const bool scales =
      r.v == Format::s8 ? g == Granularity::per_token : g != Granularity::per_block_channel;
  return scales && prepared_channels(p.dv) == config_of(p, r, false).d;
}

}  // namespace

bool is_unmasked(const Problem& p, const Recipe& r) {
  const bool codes = coded(r.qk), v_codes = coded(r.v);
  const bool q_in_place = !codes || p.q_codes, k_in_place = !codes || p.k_codes;
  const bool v_in_place = !v_codes;
  return p.window_left < 0 && p.softcap <= 0 && p.mask == MaskKind::none && p.block_mask_q == 0 &&
         !p.tensors.alibi_slopes.present() && p.softmax_scale > 0 && r.smooth_q != Toggle::on &&
         !(p.paged && (k_in_place || v_in_place)) && (!q_in_place || aligned(p.q)) &&
         (!k_in_place || aligned(p.k)) && (!v_in_place || aligned(p.v)) &&
         (!codes || tile_scaled(p, r)) && (!v_codes || plain_values(p, r));
}

namespace {

/// What will run, as far as a plan can tell.
const Instance& instance_of(const Problem& p, const Sm80Plan& plan) {
  return plan.plain != nullptr && is_unmasked(p, plan.recipe) ? *plan.plain : *plan.general;
}

PrepareNeeds needs_of(const Problem& p, const Recipe& r) {
  PrepareNeeds n;
  n.q_rows = n.k_rows = coded(r.qk);
  n.v_tiles = coded(r.v);
  n.dot_mean = n.q_rows && needs_dot_mean(p, r);
  return n;
}

Status refuse(const std::string& why) { return Status(Code::unsupported, why); }

std::string text(Format f) { return std::string(info(f).name); }

/// The formats that have kernels, and how inputs must come for them.
Status check_formats(const Problem& p, const Recipe& r) {
  const bool wide = r.qk == Format::f16 || r.qk == Format::bf16;
  if (!wide && !coded(r.qk)) return refuse("no GPU path for Q and K in " + text(r.qk));
  if (wide && (p.q.format != r.qk || p.k.format != r.qk)) {
    return refuse("the recipe multiplies Q and K in " + text(r.qk) + ", but q is " +
                  text(p.q.format) + " and k " + text(p.k.format));
  }
  for (const auto& [name, t, quantised] :
       {std::tuple{"q", &p.q, coded(r.qk)}, std::tuple{"k", &p.k, coded(r.qk)},
        std::tuple{"v", &p.v, coded(r.v)}}) {
    if (!quantised && t->format == Format::f32) {
      return refuse(std::string(name) + ": is f32; GPU kernels multiply f16, bf16 and codes");
    }
  }
  if (r.v == Format::s8) {
    return r.p == Format::u8 ? Status() : refuse("s8 V goes with u8 P");
  }
  if (r.v == Format::e4m3) {
    if (r.p != Format::e4m3) return refuse("e4m3 V goes with e4m3 P");
    return r.v_scale.granularity != Granularity::per_token
               ? Status()
               : refuse("v: scales per token do not fit e4m3 P, which is rounded without them");
  }
  if (r.v != Format::f16 && r.v != Format::bf16) return refuse("no GPU path for V in " + text(r.v));
  if (p.v.format != r.v || r.p != r.v) {
    return refuse("the recipe multiplies P and V in " + text(r.p) + " and " + text(r.v) +
                  ", but v is " + text(p.v.format));
  }
  return {};
}

/// The products that this GPU has, and that this library has code of for it.
Status check_products(const Problem& p, const Sm80Config& c) {
  const int gpu = isa::architecture(p.device().index);
  const std::string sm = "sm_" + std::to_string(gpu);
  if (gpu < 80) return refuse("needs sm_80 or newer");
  const auto missing = [&](int architecture) {
    return !isa::has_mma(c.qk, architecture) || !isa::has_mma(c.pv, architecture);
  };
  if (missing(gpu)) {
    return refuse(gpu < 89 ? sm + " has no FP8 products, which begin with sm_89"
                           : sm + " emulates mma.sync of FP8 with 16-bit products; this kernel's "
                                  "FP8 is for sm_89 and sm_120");
  }
  const int code = isa::code_architecture();
  if (code == 0) return refuse("the library has no code that runs on " + sm);
  if (missing(code)) {
    return refuse("the library has no machine code for " + sm + ", and its code for sm_" +
                  std::to_string(code) + " has no FP8 products");
  }
  return {};
}

Status supports(const Problem& p) {
  const Recipe r = resolve(p);
  if (Status s = check_formats(p, r); !s.ok()) return s;
  const Sm80Config c = config_of(p, r, true);
  if (Status s = check_products(p, c); !s.ok()) return s;
  if (r.smooth_q == Toggle::on && !coded(r.qk)) {
    return refuse("smooth_q has no effect on 16-bit products");
  }
  if (r.smooth_k == Toggle::on && !coded(r.qk)) {
    return refuse("smooth_k has no effect on 16-bit products");
  }
  if (r.smooth_v == Toggle::on && !coded(r.v)) return refuse("smooth_v is for quantised V");
  if (r.rotate == Toggle::on && !coded(r.qk)) return refuse("rotate is for quantised Q and K");
  if (too_long(p)) return refuse("sequences longer than 2^30 tokens");
  if (find(c) == nullptr) {
    return refuse("no instance for Q and K in " + text(r.qk) + ", P in " + text(r.p) +
                  " and head dimension " + std::to_string(c.d));
  }
  // A tile of V has one scale a channel.
  const std::int64_t v_block = channel_block(p, r, needs_of(p, r));
  if (v_block % tile_keys != 0 && v_block < p.max_k) {
    return refuse("v: scales per channel change every " + std::to_string(v_block) +
                  " keys; GPU kernels have one for " + std::to_string(tile_keys));
  }
  if (p.block_mask_q % tile_rows(c) != 0) {  // blocks of keys are multiples of 64 anyway
    return refuse("block_mask_q: " + std::to_string(p.block_mask_q) + " is not a multiple of " +
                  std::to_string(tile_rows(c)) + ", the rows of a tile");
  }
  if (row_blocks(p, tile_rows(c)) > 0x7fffffff / std::max<std::int64_t>(p.heads_q, 1)) {
    return refuse("more than 2^31 blocks of rows");
  }
  if (const std::string why = prepare_refusal(p, r, needs_of(p, r)); !why.empty()) {
    return refuse(why);
  }
  return {};
}

Status attend_sm80(const GpuPlan& data, const Problem& p, void* workspace, Stream stream, Handover);

std::shared_ptr<PlanData> tune(const Problem& p) {
  auto plan = std::make_shared<Sm80Plan>();
  plan->attend = attend_sm80;
  plan->recipe = resolve(p);
  plan->plain = find(config_of(p, plan->recipe, false));  // d96 and d256 have none
  plan->general = find(config_of(p, plan->recipe, true));
  plan->prepared = plan_prepare(p, plan->recipe, needs_of(p, plan->recipe));
  plan->workspace = plan->prepared.bytes;
  if (plan->plain != nullptr && notes_bad_keys(plan->plain->config)) {
    plan->bad_keys = plan->workspace;
    plan->workspace += bad_keys_bytes(p, plan->prepared);
  }
  const Sm80Config& c = instance_of(p, *plan).config;
  SplitKvLimits limits;
  limits.rows = tile_rows(c), limits.channels = c.d;
  limits.blocks = isa::multiprocessors() * (c.d == 64 ? 3 : 2);
  plan->split_kv = plan_split_kv(p, plan->recipe, limits, plan->workspace);
  if (plan->split_kv.rows == 0) {
    plan->order = plan_order(p, {limits.rows, limits.blocks, read_bytes(plan->recipe), false});
  }
  plan->packed = plan_varlen(p, tile_rows(c), plan->workspace);
  plan->error = isa::error_word();
  plan->text = "variant: " + std::string(c.general ? "general" : "plain") + " d" +
               std::to_string(c.d) + "\ntile: " + std::to_string(tile_rows(c)) + " rows x " +
               std::to_string(tile_keys) + " keys\ntile_keys: " + std::to_string(tile_keys) +
               "\nlost_mass: " + (c.pv == isa::Element::u8 ? "a second byte" : "none") + "\n" +
               text_of(plan->split_kv) + text_of(plan->order) + hidden_keys_text(plan->prepared);
  return plan;
}

/// Its kernels are not `dependent`: they start after all.
Status attend_sm80(const GpuPlan& data, const Problem& p, void* workspace, Stream stream,
                   Handover) {
  const auto& plan = static_cast<const Sm80Plan&>(data);
  const Instance& instance = instance_of(p, plan);
  AttentionParams params = params_of(p, prepared_in(p, plan.recipe, plan.prepared, workspace),
                                     tile_rows(instance.config), plan.error);
  if (params.work_tiles == 0) return {};
  set_split_kv(plan.split_kv, tile_rows(instance.config), workspace, params);
  set_order(plan.order, params);
  const bool notes = notes_bad_keys(instance.config);
  if (notes) {
    params.bad_keys =
        reinterpret_cast<std::int32_t*>(static_cast<std::byte*>(workspace) + plan.bad_keys);
  }
  isa::Start start = isa::Start::after_all;
  isa::LaunchError e = locate_varlen(plan.packed, p, workspace, params, stream, start);
  if (e.empty()) e = instance.launch(params, {params.work_tiles, 1, 1}, stream);
  if (e.empty()) e = combine_parts(params, stream);
  if (e.empty() && notes) e = spoil_rows(p, params, stream);
  return e.empty() ? Status() : Status(Code::internal, "attention kernel: " + e);
}

}  // namespace

detail::Kernel sm80_prefill() { return {"sm80_prefill", supports, tune, run_steps}; }

GpuKernels sm80_kernels() {
  static const detail::Kernel kernels[] = {sm80_prefill()};
  static constexpr Architecture architectures[] = {{isa::sm_80, "portable kernels"},
                                                   {isa::sm_89, "portable kernels, with FP8"}};
  return {kernels, architectures};
}

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
