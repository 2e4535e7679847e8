#include "kernels/attn_prefill/sm80.hpp"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>

#include "kernels/attn_prefill/sm80_spoil.cuh"
#include "kernels/quantize/prepare.hpp"

namespace qattn::kernels {
inline namespace QATTN_TARGET {
namespace {

using detail::Kernel;
using detail::PlanData;
using isa::Element;

using Launcher = isa::LaunchError (*)(const PrefillParams&, isa::Index3, void*);

struct Instance {
  PrefillConfig config;
  Launcher launch;
};

template <PrefillConfig C>
constexpr Instance instance() {
  return {C, &launch_prefill<C>};
}

constexpr Instance instances[] = {
#define QATTN_INSTANCE(D, QK, PV, GENERAL) \
  instance<PrefillConfig{D, Element::QK, Element::PV, GENERAL}>(),
#include "kernels/attn_prefill/sm80_instances.inc"
#undef QATTN_INSTANCE
};
static_assert(sizeof instances / sizeof *instances <= 40);

const Instance* find(const PrefillConfig& config) {
  for (const Instance& i : instances) {
    if (i.config == config) return &i;
  }
  return nullptr;
}

/// Does a kernel note bad keys, for SpoilRows?
bool notes_bad_keys(const PrefillConfig& c) { return isa::is_16bit(c.qk) && !c.general; }

struct PrefillPlan : PlanData {
  /// Both have the same tiles. run() takes the plain one, if there is one, where is_plain() says so
  /// of the call at hand: a plan knows neither its addresses nor its strides.
  const Instance *plain = nullptr, *general = nullptr;
  PrepareLayout prepared;
  std::size_t bad_keys = 0;  ///< offset in the workspace
  std::uint32_t* error = nullptr;
};

constexpr int tile_keys = 64;
constexpr int tile_rows(const PrefillConfig& c) { return c.d > 128 ? 64 : 128; }

// ---- What the problem asks for ------------------------------------------------------------------

Recipe resolve(const Problem& problem) {
  // One scale for a tile of K costs nothing in the kernel, one per token a multiplication a score.
  return detail::resolve_recipe(problem, "int8_full", {Granularity::per_block, tile_keys, 0});
}

Element element_of(Format format) {
  return format == Format::f16    ? Element::f16
         : format == Format::bf16 ? Element::bf16
                                  : Element::s8;
}

bool aligned(const TokenTensor& t) {
  const std::int64_t bytes = info(t.format).bits / 8;
  const auto fits = [&](std::int64_t n) { return n * bytes % 16 == 0; };
  return reinterpret_cast<std::uintptr_t>(t.data) % 16 == 0 && fits(t.batch) && fits(t.token) &&
         fits(t.head);
}

/// Is K's scale the same for all keys of a tile?
bool tile_scaled(const Problem& p, const Recipe& r) {
  using enum Granularity;
  const Scaling& s = r.k_scale;
  if (p.paged && p.tensors.k_scale.present()) return false;  // given with the pages
  return s.granularity == per_tensor || s.granularity == per_head ||
         (s.granularity == per_block && s.block % tile_keys == 0);
}

PrefillConfig config_of(const Problem& p, const Recipe& r, bool general) {
  PrefillConfig c;
  c.d = prepared_channels(std::max(p.d, p.dv));
  c.qk = element_of(r.qk);
  c.pv = r.v == Format::s8 ? Element::u8 : element_of(r.v);
  c.general = general;
  return c;
}

/// Does the plain variant serve the call with these addresses, strides and values?
bool is_plain(const Problem& p, const Recipe& r) {
  const bool codes = r.qk == Format::s8, v_codes = r.v == Format::s8;
  const bool q_in_place = !codes || p.q_codes, k_in_place = !codes || p.k_codes;
  const bool v_in_place = !v_codes;
  return p.window_left < 0 && p.softcap <= 0 && p.mask == MaskKind::none && p.block_mask_q == 0 &&
         !p.tensors.alibi_slopes.present() && p.softmax_scale > 0 && r.smooth_q != Toggle::on &&
         !(p.paged && (k_in_place || v_in_place)) && (!q_in_place || aligned(p.q)) &&
         (!k_in_place || aligned(p.k)) && (!v_in_place || aligned(p.v)) &&
         (!codes || tile_scaled(p, r)) &&
         (!v_codes || (r.v_scale.granularity == Granularity::per_token &&
                       prepared_channels(p.dv) == prepared_channels(std::max(p.d, p.dv))));
}

/// What will run, as far as a plan can tell.
const Instance& instance_of(const Problem& p, const PrefillPlan& plan) {
  return plan.plain != nullptr && is_plain(p, plan.recipe) ? *plan.plain : *plan.general;
}

PrepareNeeds needs_of(const Problem& p, const Recipe& r) {
  PrepareNeeds n;
  n.q_rows = n.k_rows = r.qk == Format::s8;
  n.v_tiles = r.v == Format::s8;
  const bool mean = r.smooth_k == Toggle::on || p.tensors.k_mean.present();
  n.dot_mean =
      n.q_rows && mean && (p.tensors.lse.present() || p.softcap > 0 || p.tensors.sinks.present());
  return n;
}

Status refuse(const std::string& why) { return Status(Code::unsupported, why); }

std::string text(Format f) { return std::string(info(f).name); }

/// The formats that have kernels, and how inputs must come for them.
Status check_formats(const Problem& p, const Recipe& r) {
  const bool wide = r.qk == Format::f16 || r.qk == Format::bf16;
  if (!wide && r.qk != Format::s8) return refuse("no GPU path for Q and K in " + text(r.qk));
  if (wide && (p.q.format != r.qk || p.k.format != r.qk)) {
    return refuse("the recipe multiplies Q and K in " + text(r.qk) + ", but q is " +
                  text(p.q.format) + " and k " + text(p.k.format));
  }
  for (const auto& [name, t, codes] :
       {std::tuple{"q", &p.q, p.q_codes}, std::tuple{"k", &p.k, p.k_codes},
        std::tuple{"v", &p.v, p.v_codes}}) {
    if (!codes && t->format == Format::f32) {
      return refuse(std::string(name) + ": is f32; GPU kernels take f16 and bf16");
    }
  }
  if (r.v == Format::s8) {
    return r.p == Format::u8 ? Status() : refuse("s8 V goes with u8 P");
  }
  if (r.v != Format::f16 && r.v != Format::bf16) return refuse("no GPU path for V in " + text(r.v));
  if (p.v.format != r.v || r.p != r.v) {
    return refuse("the recipe multiplies P and V in " + text(r.p) + " and " + text(r.v) +
                  ", but v is " + text(p.v.format));
  }
  return {};
}

Status supports(const Problem& p) {
  if (isa::architecture(p.device().index) < 80) return refuse("needs sm_80 or newer");
  const Recipe r = resolve(p);
  if (Status s = check_formats(p, r); !s.ok()) return s;
  if (r.smooth_q == Toggle::on && r.qk != Format::s8) {
    return refuse("smooth_q has no effect on 16-bit products");
  }
  if (r.smooth_k == Toggle::on && r.qk != Format::s8) {
    return refuse("smooth_k has no effect on 16-bit products");
  }
  if (r.smooth_v == Toggle::on && r.v != Format::s8) {
    return refuse("smooth_v is for quantised V");
  }
  if (r.rotate == Toggle::on && r.qk != Format::s8)
    return refuse("rotate is for quantised Q and K");
  constexpr std::int64_t longest = std::int64_t{1} << 30;
  if (p.max_q > longest || p.max_k > longest) return refuse("sequences longer than 2^30 tokens");
  const PrefillConfig c = config_of(p, r, true);
  if (find(c) == nullptr) return refuse("no instance for head dimension " + std::to_string(c.d));
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
  const std::int64_t blocks = (p.max_q + tile_rows(c) - 1) / tile_rows(c);
  if (p.batch * p.heads_q > 0x7fffffff / std::max<std::int64_t>(blocks, 1)) {
    return refuse("more than 2^31 blocks of rows");
  }
  if (const std::string why = prepare_refusal(p, r, needs_of(p, r)); !why.empty()) {
    return refuse(why);
  }
  return {};
}

std::shared_ptr<PlanData> tune(const Problem& p) {
  auto plan = std::make_shared<PrefillPlan>();
  plan->recipe = resolve(p);
  plan->plain = find(config_of(p, plan->recipe, false));  // 96 and 256 have none
  plan->general = find(config_of(p, plan->recipe, true));
  plan->prepared = plan_prepare(p, plan->recipe, needs_of(p, plan->recipe));
  plan->workspace = plan->prepared.bytes;
  if (plan->plain != nullptr && notes_bad_keys(plan->plain->config)) {
    plan->bad_keys = plan->workspace;
    const std::int64_t slots = plan->prepared.part[static_cast<int>(Role::k)].slots;
    plan->workspace +=
        static_cast<std::size_t>(p.heads_kv * slots / tile_keys * 4) * sizeof(std::int32_t);
  }
  const PrefillConfig& c = instance_of(p, *plan).config;
  plan->error = isa::error_word();
  plan->text = "variant: " + std::string(c.general ? "general" : "plain") + " d" +
               std::to_string(c.d) + "\ntile: " + std::to_string(tile_rows(c)) + " rows x " +
               std::to_string(tile_keys) + " keys\ntile_keys: " + std::to_string(tile_keys) + "\n";
  return plan;
}

// ---- Parameters of a launch ---------------------------------------------------------------------

/// Strides of a tensor that broadcasts over leading dimensions it lacks.
BroadcastView per_head(const TensorView& t) {
  BroadcastView v;
  if (!t.present()) return v;
  v.data = t.data;
  v.format = t.format;
  v.stride[0] = t.rank == 2 ? t.stride[0] : 0;
  v.stride[1] = t.stride[t.rank - 1];
  return v;
}

OutputView output_of(const Problem& p) {
  OutputView o;
  o.data = p.out.data;
  o.format = p.out.format;
  o.batch = p.out.batch;
  o.token = p.out.token;
  o.head = p.out.head;
  o.channels = p.dv;
  o.vectors = p.out.format != Format::f32 && aligned(p.out) && p.dv % 8 == 0;
  if (const TensorView& lse = p.tensors.lse; lse.present()) {
    o.lse = static_cast<float*>(lse.data);
    o.lse_batch = p.varlen_q ? 0 : lse.stride[0];
    o.lse_head = lse.stride[p.varlen_q ? 0 : 1];
    o.lse_token = lse.stride[p.varlen_q ? 1 : 2];
  }
  return o;
}

PrefillParams params_of(const Problem& p, const PrefillPlan& plan, const PrefillConfig& config,
                        const Prepared& prepared) {
  PrefillParams a;
  a.q = rows_of(p, Role::q);
  a.k = rows_of(p, Role::k);
  a.v = rows_of(p, Role::v);
  a.q_vectors = aligned(p.q);
  a.k_vectors = aligned(p.k);
  a.v_vectors = aligned(p.v);
  a.q8 = prepared.q;
  a.k8 = prepared.k;
  a.v8 = prepared.v;
  if (prepared.q.codes != nullptr) a.q.data = nullptr;
  if (prepared.k.codes != nullptr) a.k.data = nullptr;
  a.q_mean = prepared.q_mean;
  if (a.q_mean.data != nullptr) {
    a.k_input = rows_of(p, Role::k);
    a.k_format = p.k.format;
    a.k_mean = prepared.k_mean;
  }
  a.v_mean = prepared.v_mean;
  a.v_mean_channels = prepared_channels(p.dv);
  a.out = output_of(p);
  a.scale = p.softmax_scale;
  a.softcap = p.softcap;
  const auto window = [](std::int64_t w) {
    return static_cast<std::int32_t>(std::min<std::int64_t>(w, 0x3fffffff));
  };
  a.window_left = window(p.window_left);
  a.window_right = window(p.window_right);
  if (p.mask != MaskKind::none) {
    a.mask.data = p.tensors.mask.data;
    a.mask.format = p.tensors.mask.format;
    std::copy(p.mask_stride.begin(), p.mask_stride.end(), a.mask.stride);
    if (p.mask_stride[2] != 0) a.mask_queries = p.mask_shape[2];
    if (p.mask_stride[3] != 0) a.mask_keys = p.mask_shape[3];
  }
  if (p.block_mask_q > 0) {
    a.block_mask.data = p.tensors.block_mask.data;
    a.block_mask.format = Format::b8;
    std::copy(p.block_mask_stride.begin(), p.block_mask_stride.end(), a.block_mask.stride);
    a.block_mask_q = static_cast<std::int32_t>(p.block_mask_q);
    a.block_mask_k = static_cast<std::int32_t>(p.block_mask_k);
  }
  a.alibi = per_head(p.tensors.alibi_slopes);
  a.sinks = per_head(p.tensors.sinks);
  a.group = static_cast<std::int32_t>(p.group());
  const int rows = tile_rows(config);
  a.q_blocks = static_cast<std::int32_t>((p.max_q + rows - 1) / rows);
  a.heads_first = p.window_right >= 0;
  a.error = plan.error;
  return a;
}

Status run(const PlanData& data, const Problem& p, void* workspace, Stream stream) {
  if (Status s = quantize_operands(data, p, workspace, stream); !s.ok()) return s;
  return attend(data, p, workspace, stream);
}

constexpr Kernel kernels[] = {{"sm80_prefill", supports, tune, run}};

}  // namespace

Status quantize_operands(const PlanData& data, const Problem& p, void* workspace, Stream stream) {
  const auto& plan = static_cast<const PrefillPlan&>(data);
  const isa::LaunchError e = prepare(p, plan.recipe, plan.prepared, workspace, stream);
  return e.empty() ? Status() : Status(Code::internal, "quantisation: " + e);
}

Status attend(const PlanData& data, const Problem& p, void* workspace, Stream stream) {
  const auto& plan = static_cast<const PrefillPlan&>(data);
  const Instance& instance = instance_of(p, plan);
  PrefillParams params = params_of(p, plan, instance.config,
                                   prepared_in(p, plan.recipe, plan.prepared, workspace));
  const std::int64_t units = p.batch * p.heads_q, blocks = params.q_blocks * units;
  if (blocks == 0) return {};
  const bool notes = notes_bad_keys(instance.config);
  if (notes) {
    params.bad_keys =
        reinterpret_cast<std::int32_t*>(static_cast<std::byte*>(workspace) + plan.bad_keys);
  }
  isa::LaunchError e = instance.launch(params, {static_cast<int>(blocks), 1, 1}, stream);
  if (e.empty() && notes) {
    e = isa::launch<SpoilRows>(params, {static_cast<int>(units), 1, 1}, stream);
  }
  return e.empty() ? Status() : Status(Code::internal, "attention kernel: " + e);
}

std::span<const detail::Kernel> gpu_attention_kernels() { return kernels; }

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
