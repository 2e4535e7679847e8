// Host side of the Hopper prefill kernel.
#include "kernels/attn_prefill/sm90a.hpp"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>

#include "kernels/attn_prefill/call_params.hpp"
#include "kernels/attn_prefill/gpu.hpp"

namespace qattn::kernels {
inline namespace QATTN_TARGET {
namespace {

using isa::Element;

using Launcher = isa::LaunchError (*)(const Sm90Params&, isa::Index3, void*);

struct Instance {
  Sm90Config config;
  Launcher launch;
  bool (*compiled)();
};

constexpr Instance instances[] = {
#define QATTN_INSTANCE(D, QK, PV)                           \
  {Sm90Config{D, Element::QK, Element::PV},                 \
   &launch_sm90a<Sm90Config{D, Element::QK, Element::PV}>,  \
   &compiled_sm90a<Sm90Config{D, Element::QK, Element::PV}>},
#include "kernels/attn_prefill/sm90a_instances.inc"
#undef QATTN_INSTANCE
};

constexpr int tile_rows = Sm90Shape<Sm90Config{}>::rows, tile_keys = Sm90Shape<Sm90Config{}>::keys;

struct Sm90Plan : GpuPlan {
  const Instance* instance = nullptr;
  int multiprocessors = 1;
};

Recipe resolve(const Problem& problem) {
  // Scales that a thread's own keys share cost nothing in the kernel.
  constexpr Scaling thread{Granularity::per_thread, slot_tile, 0};
  return detail::resolve_recipe(problem, "int8_full", thread, thread);
}

const Instance* find(const Problem& p) {
  const int d = std::max<int>(p.d, p.dv) <= 64 ? 64 : 128;
  for (const Instance& i : instances) {
    if (i.config == Sm90Config{d, Element::s8, Element::u8}) return &i;
  }
  return nullptr;
}

/// Is K's scale the same for all keys of 64 with the same (key % 8) / 2?
bool thread_scaled(const Problem& p, const Recipe& r) {
  using enum Granularity;
  const Scaling& s = r.k_scale;
  if (p.paged && p.tensors.k_scale.present()) return false;  // given with the pages
  return s.granularity == per_tensor || s.granularity == per_head ||
         ((s.granularity == per_block || s.granularity == per_thread) && s.block % slot_tile == 0);
}

PrepareNeeds needs_of(const Problem& p, const Recipe& r) {
  PrepareNeeds n;
  n.q_rows = n.k_rows = n.v_tiles = true;
  n.dot_mean = needs_dot_mean(p, r);
  return n;
}

Status refuse(const std::string& why) { return Status(Code::unsupported, why); }

Status supports(const Problem& p) {
  if (isa::architecture(p.device().index) != 90) return refuse("is for sm_90");
  const Recipe r = resolve(p);
  if (r.qk != Format::s8 || r.v != Format::s8 || r.p != Format::u8) {
    return refuse("multiplies s8 Q and K, u8 P and s8 V only");
  }
  if (r.smooth_q == Toggle::on) return refuse("smooth_q: the portable kernel has it");
  if (std::max(p.d, p.dv) > 128) return refuse("head dimensions above 128");
  if (!scaled_by_token(r.v_scale, Role::v)) return refuse("v: its scales are not per token");
  if (p.block_mask_q % tile_rows != 0 || p.block_mask_k % tile_keys != 0) {
    return refuse("block_mask: blocks are not multiples of " + std::to_string(tile_rows) +
                  " rows and " + std::to_string(tile_keys) + " keys");
  }
  if (!find(p)->compiled()) {
    return refuse("the library has no machine code for sm_90a, or GPUs run another's");
  }
  const PrepareNeeds needs = needs_of(p, r);
  if (const std::string why = prepare_refusal(p, r, needs); !why.empty()) return refuse(why);
  if (too_long(p)) return refuse("sequences longer than 2^30 tokens");
  const PrepareLayout layout = plan_prepare(p, r, needs);
  // TMA's coordinates and the loop over works are 32-bit and run a little past the end.
  constexpr std::int64_t limit = 0x7fffffff - 4096;
  const std::int64_t blocks = (p.max_q + tile_rows - 1) / tile_rows;
  if (p.heads_q * layout.part[0].slots > limit || p.heads_kv * layout.part[1].slots > limit ||
      p.batch * p.heads_q > limit / std::max<std::int64_t>(blocks, 1)) {
    return refuse("more than 2^31 rows");
  }
  return {};
}

// ---- Launch -------------------------------------------------------------------------------------

std::string make_maps(const Sm90Config& c, const Problem& p, Sm90Params& a) {
  const auto rows_shape = [&](const PreparedRows& x, std::int64_t heads, std::uint32_t rows) {
    isa::TensorShape t;
    t.address = x.codes;
    t.sizes[0] = static_cast<std::uint64_t>(x.row_bytes);
    t.sizes[1] = static_cast<std::uint64_t>(heads * x.slots);
    t.stride_bytes[1] = static_cast<std::uint64_t>(x.row_bytes);
    t.box[0] = static_cast<std::uint32_t>(c.d);
    t.box[1] = rows;
    t.swizzle = c.d == 64 ? isa::Swizzle::bytes64 : isa::Swizzle::bytes128;
    return t;
  };
  if (auto e = isa::make_tensor_map(rows_shape(a.q8, p.heads_q, 64), a.q_map); !e.empty()) return e;
  if (auto e = isa::make_tensor_map(rows_shape(a.k8, p.heads_kv, tile_keys), a.k_map); !e.empty()) {
    return e;
  }
  isa::TensorShape t;
  t.address = a.v8.tiles;
  t.rank = 3;
  t.sizes[0] = slot_tile;
  t.sizes[1] = static_cast<std::uint64_t>(a.v8.channels);
  t.sizes[2] = static_cast<std::uint64_t>(p.heads_kv * a.v8.slots / slot_tile);
  t.stride_bytes[1] = slot_tile;
  t.stride_bytes[2] = static_cast<std::uint64_t>(tile_offsets(a.v8.channels).bytes);
  t.box[0] = slot_tile;
  t.box[1] = static_cast<std::uint32_t>(c.d);
  t.box[2] = 1;
  t.swizzle = isa::Swizzle::bytes64;
  return isa::make_tensor_map(t, a.v_map);
}

Status attend_sm90a(const GpuPlan& data, const Problem& p, void* workspace, Stream stream) {
  const auto& plan = static_cast<const Sm90Plan&>(data);
  Sm90Params params;
  static_cast<PrefillParams&>(params) =
      params_of(p, prepared_in(p, plan.recipe, plan.prepared, workspace), tile_rows, plan.error);
  params.works = static_cast<std::int32_t>(params.q_blocks * p.batch * p.heads_q);
  params.general = p.softcap > 0 || p.tensors.alibi_slopes.present() || p.mask != MaskKind::none ||
                   !(p.softmax_scale > 0) || !thread_scaled(p, plan.recipe);
  if (params.works == 0) return {};
  std::string e = p.max_k > 0 ? make_maps(plan.instance->config, p, params) : std::string();
  const int blocks = std::min(params.works, plan.multiprocessors);
  if (e.empty()) e = plan.instance->launch(params, {blocks, 1, 1}, stream);
  return e.empty() ? Status() : Status(Code::internal, "attention kernel: " + e);
}

std::shared_ptr<detail::PlanData> tune(const Problem& p) {
  auto plan = std::make_shared<Sm90Plan>();
  plan->attend = attend_sm90a;
  plan->recipe = resolve(p);
  plan->instance = find(p);
  plan->prepared = plan_prepare(p, plan->recipe, needs_of(p, plan->recipe));
  plan->workspace = plan->prepared.bytes;
  plan->error = isa::error_word();
  plan->multiprocessors = isa::multiprocessors();
  plan->text = "variant: d" + std::to_string(plan->instance->config.d) +
               "\ntile: " + std::to_string(tile_rows) + " rows x " + std::to_string(tile_keys) +
               " keys\ntile_keys: " + std::to_string(tile_keys) + "\n";
  return plan;
}

}  // namespace

detail::Kernel sm90a_prefill() { return {"sm90a_prefill", supports, tune, run_steps}; }

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
