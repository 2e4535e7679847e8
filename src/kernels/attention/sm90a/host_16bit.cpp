// Host side of the Hopper prefill kernel for 16-bit V, whose 16-bit operands TMA reads in place.
// What it cannot do (odd pages, rows at odd addresses or not of whole 16 bytes, smooth_q, few
// queries of more than 128 channels) the portable kernel does, which also looks again at blocks
// that met numbers that are not finite or pages that do not exist.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>

#include "kernels/attention/common/call_params.hpp"
#include "kernels/attention/common/spoil.hpp"
#include "kernels/attention/portable.hpp"
#include "kernels/attention/sm90a/host.hpp"

namespace qattn::kernels {
inline namespace QATTN_TARGET {
namespace {

using isa::Element;

struct WidePlan : GpuPlan {
  std::shared_ptr<detail::PlanData> portable;
  const Sm90Instance* instance = nullptr;
  int multiprocessors = 1;
  std::size_t bad_keys = 0, fallback_flags = 0;  ///< offsets in the workspace
  SplitKv split_kv;  ///< of this kernel, as the order; the portable one has its own
  TileScheduler order;

  const MmaPlan& other() const { return static_cast<const MmaPlan&>(*portable); }
};

Recipe resolve(const Problem& p) {
  // As the portable kernel's, so that both take the same codes.
  return resolve_on_gpu(p, {Granularity::per_block, slot_tile, 0}, {});
}

/// Where P goes through shared memory, if there is such a kernel. H200, D 128, TFLOP/s beside P in
/// registers: bf16 full 1.6 % less at 1024 and 2048, causal 313 448 526 (305 436 496) at S 1024
/// 2048 4096, with heads 32/8 537 (494); int8 full 670 711 742 (681 692 723) at S 2048 4096 16384,
/// causal 1 % less at 4096.
bool wants_p_in_smem(const Problem& p, bool codes) {
  const bool causal = p.window_right >= 0;
  return codes ? !causal && average_keys(p) >= 4096 : causal || average_keys(p) >= 4096;
}

const Sm90Instance* find(const Problem& p, const Recipe& r) {
  const Sm90Dims dims = sm90a_dims(p);
  const int asked = split_kv_override().p_in_smem;
  const bool p_in_smem = asked >= 0 ? asked > 0 : wants_p_in_smem(p, r.qk == Format::s8);
  return find_sm90a({dims.d, element_of(r.qk), element_of(r.v), false, 2, p_in_smem, dims.dv});
}

Status supports(const Problem& p) {
  const Recipe r = resolve(p);
  if (!is_16bit(r.v) || (r.qk != Format::s8 && r.qk != r.v)) {
    return refuse("multiplies 16-bit P and V, with Q and K of the same format or s8");
  }
  if (Status s = sm80_prefill().supports(p); !s.ok()) return s;
  PrepareNeeds needs;
  needs.q_rows = needs.k_rows = coded(r.qk);
  return check_sm90a(p, find(p, r), plan_prepare(p, r, needs));
}

/// Pages that tiles of so many keys consist of, or that consist of tiles?
bool whole_pages(std::int64_t size, int keys) {
  return size % keys == 0 || (size >= sm90_least_page && keys % size == 0);
}

/// Does this kernel serve the call with these addresses, strides and values?
bool is_native(const Problem& p, const Recipe& r, const Sm90Config& c) {
  const bool in_place = !coded(r.qk);
  return p.max_k > 0 && r.smooth_q != Toggle::on && (!in_place || in_pieces(p.q, p.d)) &&
         (!in_place || in_pieces(p.k, p.d)) && in_pieces(p.v, p.dv) &&
         (!p.paged || whole_pages(p.page_size, c.keys()));
}

/// Do blocks leave notes of bad keys to SpoilRows? That knows no left window and no block mask; a
/// general call has tests of every score.
bool takes_notes(const Problem& p, const Recipe& r) {
  return !coded(r.qk) && p.window_left < 0 && p.block_mask_q == 0 && !is_general(p, r);
}

/// Parts of rows can be done again only where the portable kernel's tiles have as many rows, which
/// is not so above these.
constexpr int most_part_channels = 128;

/// The same of a plan.
bool serves(const WidePlan& plan, const Problem& p) {
  const Sm90Config& c = plan.instance->config;
  return (plan.split_kv.rows == 0 || c.d <= most_part_channels) && is_native(p, plan.recipe, c);
}

// ---- Launch -------------------------------------------------------------------------------------

/// Empty, or why TMA cannot read the operands as they lie.
std::string make_maps(const Sm90Config& c, const Problem& p, Sm90Params& a) {
  if (isa::is_16bit(c.qk)) {
    if (std::string e = map_rows(a.q, c.d, 64, a.q_map, a.pack_gqa); !e.empty()) return e;
    if (std::string e = map_rows(a.k, c.d, c.keys(), a.k_map); !e.empty()) return e;
  } else {
    if (a.q8.codes == nullptr || a.k8.codes == nullptr) return "codes in place";
    if (std::string e = map_codes(c, p, a); !e.empty()) return e;
  }
  return map_rows(a.v, c.dv(), c.keys(), a.v_map);
}

Status attend_16bit(const GpuPlan& data, const Problem& p, void* workspace, Stream stream,
                    Handover handover) {
  const auto& plan = static_cast<const WidePlan&>(data);
  const MmaPlan& other = plan.other();
  Sm90Params params;
  static_cast<AttentionParams&>(params) =
      params_of(p, prepared_in(p, plan.recipe, plan.prepared, workspace), sm90a_rows, plan.error);
  if (params.work_tiles == 0) return {};
  set_split_kv(plan.split_kv, sm90a_rows, workspace, params);
  set_order(plan.order, params);
  const Sm90Config& c = plan.instance->config;
  if (!serves(plan, p) || !make_maps(c, p, params).empty()) {
    return other.attend(other, p, workspace, stream, handover);
  }
  auto* bytes = static_cast<std::byte*>(workspace);
  params.fallback_flags = reinterpret_cast<std::uint32_t*>(bytes + plan.fallback_flags);
  params.general = is_general(p, plan.recipe);
  const bool notes = takes_notes(p, plan.recipe);
  if (notes) params.bad_keys = reinterpret_cast<std::int32_t*>(bytes + plan.bad_keys);
  const int blocks = std::min(params.work_tiles, plan.multiprocessors);
  isa::LaunchError e = locate_varlen(plan.packed, p, workspace, params, stream, handover.start);
  if (e.empty()) e = plan.instance->launch(params, {blocks, 1, 1}, stream, handover.start);
  const int again = std::min(params.work_tiles, 2 * plan.multiprocessors);
  if (e.empty()) e = other.general->launch(params, {again, 1, 1}, stream);
  if (e.empty()) e = combine_parts(params, stream);
  if (e.empty() && notes) e = spoil_rows(p, params, stream);
  return e.empty() ? Status() : Status(Code::internal, "attention kernel: " + e);
}

std::shared_ptr<detail::PlanData> tune(const Problem& p) {
  auto plan = std::make_shared<WidePlan>();
  plan->attend = attend_16bit;
  plan->recipe = resolve(p);
  plan->portable = sm80_prefill().tune(p);
  const MmaPlan& other = plan->other();
  plan->instance = find(p, plan->recipe);
  plan->prepared = other.prepared;
  plan->error = other.error;
  plan->multiprocessors = isa::multiprocessors();
  plan->bad_keys = plan->portable->workspace;
  plan->workspace = plan->bad_keys + bad_keys_bytes(p, plan->prepared);
  const SplitKvLimits limits = sm90a_limits(plan->instance->config, plan->multiprocessors);
  plan->split_kv = plan_split_kv(p, plan->recipe, limits, plan->workspace);
  if (plan->split_kv.rows == 0) {
    plan->order = plan_order(p, {sm90a_rows, plan->multiprocessors, read_bytes(plan->recipe)});
  }
  if (plan->instance->config.d <= most_part_channels) {
    split_last(p, plan->recipe, limits, plan->split_kv, plan->workspace);
  }
  plan->fallback_flags = plan->workspace;
  plan->workspace +=
      static_cast<std::size_t>(plan->split_kv.work_tiles) * fallback_stride * sizeof(std::uint32_t);
  plan->packed = plan_varlen(p, sm90a_rows, plan->workspace);
  // What will run, as far as a plan can tell.
  plan->text = serves(*plan, p)
                   ? sm90a_text(plan->instance->config) + text_of(plan->split_kv) +
                         text_of(plan->order) + hidden_keys_text(plan->prepared) + automatic_text(p)
                   : "by the portable kernel\n" + plan->portable->text;
  return plan;
}

}  // namespace

detail::Kernel sm90a_16bit_prefill() { return {"sm90a_16bit_prefill", supports, tune, run_steps}; }

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
