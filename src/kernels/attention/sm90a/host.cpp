// Host side of the Hopper prefill kernel.
#include "kernels/attention/sm90a/host.hpp"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "kernels/attention/common/call_params.hpp"
#include "kernels/attention/portable.hpp"
#include "kernels/operand/overlap.hpp"

namespace qattn::kernels {
inline namespace QATTN_TARGET {
namespace {

using isa::Element;

constexpr Sm90Instance instances[] = {
#define QATTN_INSTANCE(D, QK, PV, ...)                                  \
  {Sm90Config{D, Element::QK, Element::PV, __VA_ARGS__},                \
   &launch_sm90a<Sm90Config{D, Element::QK, Element::PV, __VA_ARGS__}>, \
   &compiled_sm90a<Sm90Config{D, Element::QK, Element::PV, __VA_ARGS__}>},
#include "kernels/attention/sm90a/instances.inc"
#undef QATTN_INSTANCE
};

constexpr int q_box = 64;  ///< rows of Q that one copy moves

using Shape = Sm90Shape<Sm90Config{}>;
static_assert(Shape::rows == sm90a_rows && sm90a_rows == fallback_rows);

struct Sm90Plan : GpuPlan {
  const Sm90Instance* instance = nullptr;
  const Sm90Instance* raw = nullptr;  ///< the same for Q in 16 bits, if there is one
  int multiprocessors = 1;
  SplitKv split_kv;
  TileScheduler order, raw_order;  ///< the latter where Q's codes are made in the kernel
  std::size_t progress = 0;        ///< OverlapParams::progress in the workspace, if planned for
};

Recipe resolve(const Problem& problem) {
  // Scales that a thread's own keys share cost nothing in the kernel.
  constexpr Scaling thread{Granularity::per_thread, slot_tile, 0};
  return resolve_on_gpu(problem, thread, thread);
}

const Sm90Instance* find(const Problem& p, const Recipe& r, bool fused_q_quant = false,
                         int consumers = 2) {
  const Sm90Dims dims = sm90a_dims(p);
  return find_sm90a(
      {dims.d, element_of(r.qk), probability_of(r.v), fused_q_quant, consumers, true, dims.dv});
}

/// Rows of Q in 16 bits want more heads at a time (TileScheduler), which lie beside one another.
/// End to end on an H100 (int8_full, 16 times 32 heads of 1024 tokens, TFLOP/s, all heads in one
/// group first): D 128 231, groups of 6 239, of 32 246; heads 32/8 340 320 345; D 64 175 164 173.
constexpr int raw_turns = 2;

/// Warpgroups that share a tile of keys. Three are faster for long rows (Sm90Shape has numbers),
/// and where 192 rows a block do not leave more multiprocessors idle, at the end of a sequence or
/// of the call, than 128 do: a third of the waves more make 12 % at 1024 queries. How long packed
/// sequences are the device alone knows. All have the same bits.
int consumers_for(const Problem& p, const Recipe& r, const SplitKv& split_kv, int multiprocessors) {
  if (p.block_mask_q > 0 || split_kv.rows > 0) return 2;
  const int asked = split_kv_override().consumers;
  if (asked > 0 && find(p, r, false, asked) != nullptr) return asked;
  const Sm90Instance* three = find(p, r, false, 3);
  if (three == nullptr || p.varlen_q || p.varlen_k) return 2;
  const std::int64_t heads = p.heads_q * p.batch;
  // Rows that a multiprocessor is busy with.
  const auto rows = [&](std::int64_t block) {
    const std::int64_t blocks = (p.max_q + block - 1) / block * heads;
    return (blocks + multiprocessors - 1) / multiprocessors * block;
  };
  const std::int64_t least = three->config.d > 64 ? 8192 : r.v == Format::s8 ? 2048 : 1024;
  return average_keys(p) >= least && rows(192) * 100 <= rows(128) * 104 ? 3 : 2;
}

PrepareNeeds needs_of(const Problem& p, const Recipe& r) {
  PrepareNeeds n;
  n.q_rows = n.k_rows = n.v_tiles = true;
  n.dot_mean = needs_dot_mean(p, r);
  return n;
}

/// Products of this kernel: s8 or e4m3 Q and K with u8 P and s8 V, or e4m3 both.
Status check_formats(const Problem& p, const Recipe& r) {
  const bool s8 = r.qk == Format::s8 && r.p == Format::u8 && r.v == Format::s8;
  const bool e4m3 =
      (r.qk == Format::s8 || r.qk == Format::e4m3) && r.p == Format::e4m3 && r.v == Format::e4m3;
  if (!s8 && !e4m3) {
    return refuse("multiplies s8 Q and K, u8 P and s8 V, or e4m3 P and V with s8 or e4m3 Q and K");
  }
  if (s8 && !scaled_by_token(r.v_scale, Role::v)) {
    return refuse("v: its scales are not per token");
  }
  if (Status s = check_value_scales(r); !s.ok()) return s;
  if (e4m3 && channel_block(p, r, needs_of(p, r)) < p.max_k) {
    return refuse("v: scales per channel change along the keys, which no FP8 kernel has on sm_90");
  }
  return {};
}

Status supports(const Problem& p) {
  const Recipe r = resolve(p);
  if (Status s = check_formats(p, r); !s.ok()) return s;
  if (r.smooth_q == Toggle::on) {
    return refuse(r.v == Format::e4m3
                      ? "smooth_q: no FP8 kernel has it on sm_90; int8 and int8_full do"
                      : "smooth_q: the portable kernel has it");
  }
  const PrepareNeeds needs = needs_of(p, r);
  if (Status s = check_prepared(p, r, needs); !s.ok()) return s;
  if (Status s = check_lengths(p); !s.ok()) return s;
  return check_sm90a(p, find(p, r), plan_prepare(p, r, needs));
}

// ---- Launch -------------------------------------------------------------------------------------

/// Rows of Q in 16 bits that TMA can read, for scales per token?
bool makes_queries(const Sm90Plan& plan, const Problem& p) {
  if (plan.raw == nullptr || p.max_k == 0 || !has_plain_queries(p, plan.recipe)) return false;
  if (plan.recipe.balance_k == Toggle::on && plan.recipe.qk != Format::s8) return false;
  if (plan.prepared.needs.dot_mean || plan.split_kv.all_parts()) return false;
  isa::TensorMap map;
  return p.q.data == nullptr ||  // while planning
         map_rows(rows_of(p, Role::q), plan.raw->config.d, q_box, map).empty();
}

bool makes_all(const Sm90Plan& plan, const Problem& p) {
  return !plan.split_kv.all_parts() && overlaps_quantisation(p, plan.recipe, plan.prepared);
}

bool can_make(const GpuPlan& data, const Problem& p, CodesLeft left) {
  const auto& plan = static_cast<const Sm90Plan&>(data);
  return left == CodesLeft::all       ? plan.progress > 0 && makes_all(plan, p)
         : left == CodesLeft::queries ? makes_queries(plan, p)
                                      : true;
}

/// Is a call faster if the attention kernel makes Q's codes? On an H200 (86ea62c; 16K tokens, 32
/// heads, D 128 and 64, one run) u8 P won 2 to 7 % up to 4096 keys and 0 to 11 % beyond. Where P is
/// e4m3 that kernel's loop is the slower one: 0 to 5 % won up to 4096 keys that a row sees on
/// average (half of them where it is causal), at 16384 and 32768 up to 7 % lost. So it is with u8 P
/// at D 64 since its row sums are exact (16 heads): 8 and 1 % won at 1024 and 4096 keys, 4 and 6 %
/// lost at 8192 and 16384. With three consumers others lost 0 to 2 % and have no such kernel. Nor
/// has any with P in shared memory (`instance`), which gains 3 to 7 % from 4096 keys on.
bool gains_by_encoding(const Problem& p, const Recipe& r, const Sm90Config& instance) {
  if (instance.p_in_smem) return average_keys(p) <= 2048;
  return (r.v == Format::s8 && instance.d > 64) || average_keys(p) <= 4096;
}

/// Multiprocessors that make codes while the others attend, in pairs (operand/overlap.hpp): a share
/// that falls with the keys, since attention takes longer then, and with query heads that share K
/// and V. Too few cost more than too many. H200, 16K tokens, 32 heads, D 128, TFLOP/s with 22, 28,
/// 34, 40, 48 of 132: S 512 212 263 310 342 338, causal 108 135 158 178 179; S 1024 causal 269 315
/// 317 (28, 34, 40); S 2048 causal 489 488 484 (28, 34, 40); S 4096 causal 671 669 668 664 659; S
/// 16384 causal 877 878 872 873 868 (16, 22, 28, 34, 40).
int overlap_blocks(const Problem& p, int multiprocessors) {
  const auto queries = static_cast<double>(p.group() * std::max<std::int64_t>(p.max_q, 1));
  const double bytes = 1 + 3.0 * static_cast<double>(p.max_k) / queries;  // to code for one of Q
  const auto keys = static_cast<double>(average_keys(p));
  const double share = 0.12 + 56.0 * bytes / (keys + 800.0);
  const int pairs = multiprocessors / 2;
  return 2 * std::max(static_cast<int>(std::min(share, 0.5) * pairs), 1);
}

/// Is a call faster if its codes are made beside attention? H200, D 128, heads as many as S makes
/// 16K tokens of 32, times the better of the other choices: S 128 1.35, S 256 1.21, causal 1.35, S
/// 512 1.19, causal 1.20, S 1024 1.11, causal 1.14, S 2048 causal 1.10, S 4096 causal 1.08, S 8192
/// 1.02, causal 1.05; in turns of 0.3 s, where power binds, S 8192 1.00 and 16384, causal, 0.985
/// (two records, each beside its kernels alone), on an H100 0.98 to 1.10 and 1.00 to 1.08 (two runs
/// with both). The first unit's codes are waited for: 64 units of 2048 tokens 1.06, causal 1.08; 32
/// units of 2048 and 4096 0.99 1.00, causal 1.06 1.06; 24 of 17000 0.98; 16 of 8192, causal, heads
/// 32/8 1.03; 8 of 8192 or 16384 0.86 to 0.97. D 64, where Q's codes cost the attention kernel more
/// than they do here: 32 units of 8192 1.02 times the better of the other choices, 16 of 16384,
/// causal, 0.99 and full 0.97.
bool gains_by_overlap(const Problem& p, std::int64_t works, int multiprocessors) {
  const std::int64_t keys = average_keys(p), units = p.batch * p.heads_kv;
  const bool causal = ends_at_diagonal(p), narrow = prepared_channels(p.d) <= 64;
  if (keys < 128 || keys > (narrow ? 8192 : 4096) || works < 3 * multiprocessors) return false;
  return units >= (causal ? 16 : keys > 4096 ? 32 : 64);
}

std::string make_maps(const Sm90Config& c, const Problem& p, Sm90Params& a) {
  if (std::string e = map_codes(c, p, a); !e.empty()) return e;
  if (c.fused_q_quant) {
    if (std::string e = map_rows(a.q, c.d, q_box, a.q_map); !e.empty()) return e;
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
  t.box[1] = static_cast<std::uint32_t>(c.dv());
  t.box[2] = 1;
  t.swizzle = isa::Swizzle::bytes64;
  if (std::string e = isa::make_tensor_map(t, a.v_map); !e.empty()) return e;
  t.sizes[1] += 8;
  t.box[1] = 8;
  return isa::make_tensor_map(t, a.weight_map);
}

Status attend_sm90a(const GpuPlan& data, const Problem& p, void* workspace, Stream stream,
                    Handover handover) {
  const auto& plan = static_cast<const Sm90Plan&>(data);
  const int rows = plan.instance->config.rows();
  Sm90Params params;
  static_cast<AttentionParams&>(params) =
      params_of(p, prepared_in(p, plan.recipe, plan.prepared, workspace), rows, plan.error);
  params.general = is_general(p, plan.recipe);
  if (params.work_tiles == 0) return {};
  const bool queries = handover.left == CodesLeft::queries, all = handover.left == CodesLeft::all;
  // Of kernels that leave codes to others none has parts: up to 4096 keys little is to be gained.
  if (handover.left == CodesLeft::none) set_split_kv(plan.split_kv, rows, workspace, params);
  set_order(queries ? plan.raw_order : plan.order, params);
  const Sm90Instance& instance = queries ? *plan.raw : *plan.instance;
  if (all) {
    auto* progress =
        reinterpret_cast<std::uint32_t*>(static_cast<std::uint8_t*>(workspace) + plan.progress);
    std::string e =
        encode_overlapped(p, plan.recipe, plan.prepared, workspace, progress,
                          overlap_blocks(p, plan.multiprocessors), stream, params.awaited);
    if (!e.empty()) return Status(Code::internal, "quantisation: " + e);
    handover.start = isa::Start::beside;
  }
  if (queries) {
    params.q = rows_of(p, Role::q);
    params.q_input = element_of(p.q.format);
    query_factors(plan.prepared, p, workspace, params.q_factors, params.loud);
    params.factor_channels = prepared_channels(p.d);
  }
  std::string e = p.max_k > 0 ? make_maps(instance.config, p, params) : std::string();
  const int blocks = std::min(params.work_tiles, plan.multiprocessors);
  if (e.empty()) e = locate_varlen(plan.packed, p, workspace, params, stream, handover.start);
  if (e.empty()) e = instance.launch(params, {blocks, 1, 1}, stream, handover.start);
  if (e.empty()) e = combine_parts(params, stream, isa::Start::early);
  return e.empty() ? Status() : Status(Code::internal, "attention kernel: " + e);
}

std::shared_ptr<detail::PlanData> tune(const Problem& p) {
  auto plan = std::make_shared<Sm90Plan>();
  plan->attend = attend_sm90a;
  plan->can_make = can_make;
  plan->recipe = resolve(p);
  plan->prepared = plan_prepare(p, plan->recipe, needs_of(p, plan->recipe));
  plan->workspace = plan->prepared.bytes;
  plan->error = isa::error_word();
  plan->multiprocessors = isa::multiprocessors();
  plan->split_kv = plan_split_kv(p, plan->recipe,
                                 sm90a_limits(find(p, plan->recipe)->config, plan->multiprocessors),
                                 plan->workspace);
  const int consumers = consumers_for(p, plan->recipe, plan->split_kv, plan->multiprocessors);
  plan->instance = find(p, plan->recipe, false, consumers);
  plan->raw = find(p, plan->recipe, true, consumers);
  plan->gains_queries = gains_by_encoding(p, plan->recipe, plan->instance->config);
  if (makes_all(*plan, p)) {
    const std::int64_t works = row_blocks(p, plan->instance->config.rows()) * p.heads_q;
    plan->gains_all = gains_by_overlap(p, works, plan->multiprocessors);
    plan->progress = (plan->workspace + 255) / 256 * 256;
    plan->workspace = plan->progress + 4 * static_cast<std::size_t>(overlap_words(p));
  }
  if (plan->split_kv.rows == 0) {
    Dealing dealing{plan->instance->config.rows(), plan->multiprocessors, read_bytes(plan->recipe)};
    plan->order = plan_order(p, dealing);
    dealing.least_turns = raw_turns;
    plan->raw_order = plan_order(p, dealing);
  }
  split_last(p, plan->recipe, sm90a_limits(plan->instance->config, plan->multiprocessors),
             plan->split_kv, plan->workspace);
  plan->text = sm90a_text(plan->instance->config) + text_of(plan->split_kv) + text_of(plan->order);
  plan->packed = plan_varlen(p, plan->instance->config.rows(), plan->workspace);
  const CodesLeft left = codes_left(*plan, p);
  plan->text += hidden_keys_text(plan->prepared) + automatic_text(p);
  if (left == CodesLeft::all) plan->text += "codes: beside attention\n";
  if (left == CodesLeft::queries) {  // by the other kernel, whose P may be elsewhere
    plan->text += "q_codes: in the attention kernel\nq_codes_shared_p: " +
                  std::to_string(plan->raw->config.p_in_smem ? 1 : 0) + "\n";
    if (plan->raw_order.heads_per_group > 0) {
      plan->text += "q_codes_heads_per_group: " + std::to_string(plan->raw_order.heads_per_group) +
                    "\nq_codes_snake: " + (plan->raw_order.snake > 0 ? "1\n" : "0\n");
    }
  }
  return plan;
}

}  // namespace

bool is_general(const Problem& p, const Recipe& r) {
  return p.softcap > 0 || p.tensors.alibi_slopes.present() || p.mask != MaskKind::none ||
         !(p.softmax_scale > 0) || (coded(r.qk) && !shares_k_scale(p, r, slot_tile, true));
}

Sm90Dims sm90a_dims(const Problem& p) {
  constexpr Sm90Dims all[] = {{64, 64}, {96, 96}, {128, 128}, {192, 128}, {192, 192}};
  for (const Sm90Dims& dims : all) {
    if (p.d <= dims.d && p.dv <= dims.dv) return dims;
  }
  return {256, 256};
}

const Sm90Instance* find_sm90a(Sm90Config config) {
  config.v = config.dv() == config.d ? 0 : config.v;
  for (const bool p_in_smem : {config.p_in_smem, !config.p_in_smem}) {
    config.p_in_smem = p_in_smem;
    for (const Sm90Instance& i : instances) {
      if (i.config == config) return &i;
    }
  }
  return nullptr;
}

Status check_sm90a(const Problem& p, const Sm90Instance* instance, const PrepareLayout& layout) {
  if (!isa::runs_on(isa::sm_90a, isa::gpu(p.device().index))) return refuse("is for sm_90");
  if (instance == nullptr) return refuse("no instance for these formats");
  if (!instance->compiled()) {
    return refuse("the library has no machine code for sm_90a, or GPUs run another's");
  }
  if (Status s = check_block_mask(p, sm90a_rows, "the rows of a block of work"); !s.ok()) return s;
  // TMA's coordinates and the loop over works are 32-bit and run a little past the end.
  constexpr std::int64_t limit = 0x7fffffff - 4096;
  if (p.heads_q * layout.part[0].slots > limit || p.heads_kv * layout.part[1].slots > limit ||
      p.tokens_q > limit || p.tokens_k > limit || too_many_blocks(p, sm90a_rows, limit)) {
    return refuse("more than 2^31 rows");
  }
  return {};
}

SplitKvLimits sm90a_limits(const Sm90Config& c, int multiprocessors) {
  SplitKvLimits limits;
  limits.rows = c.rows(), limits.channels = c.dv();
  limits.blocks = multiprocessors;
  limits.pack_rows = q_box;  // TMA brings whole tokens
  return limits;
}

std::string map_codes(const Sm90Config& c, const Problem& p, Sm90Params& a) {
  const auto shape = [&](const PreparedRows& x, std::int64_t heads, std::uint32_t rows) {
    isa::TensorShape t;
    t.address = x.codes;
    t.sizes[0] = static_cast<std::uint64_t>(x.row_bytes);
    t.sizes[1] = static_cast<std::uint64_t>(heads * x.slots);
    t.stride_bytes[1] = static_cast<std::uint64_t>(x.row_bytes);
    t.box[0] = static_cast<std::uint32_t>(c.qk_panel());
    t.box[1] = rows;
    t.swizzle = c.qk_panel() == 64 ? isa::Swizzle::bytes64 : isa::Swizzle::bytes128;
    return t;
  };
  isa::TensorShape q = shape(a.q8, p.heads_q, q_box);
  if (a.pack_gqa > 1) {
    q.rank = 3;
    q.sizes[1] = static_cast<std::uint64_t>(p.heads_q);
    q.sizes[2] = static_cast<std::uint64_t>(a.q8.slots);
    q.stride_bytes[2] = q.stride_bytes[1];
    q.stride_bytes[1] *= q.sizes[2];
    q.box[1] = static_cast<std::uint32_t>(a.pack_gqa);
    q.box[2] = static_cast<std::uint32_t>(q_box / a.pack_gqa);
  }
  if (auto e = isa::make_tensor_map(q, a.q_map); !e.empty()) return e;
  return isa::make_tensor_map(shape(a.k8, p.heads_kv, static_cast<std::uint32_t>(c.keys())),
                              a.k_map);
}

std::string sm90a_text(const Sm90Config& config) {
  const std::string keys = std::to_string(config.keys());
  std::string text = "variant: d" + std::to_string(config.d);
  if (config.v > 0) text.append("/").append(std::to_string(config.v));
  text += "\ntile: " + std::to_string(config.rows()) + " rows x " + keys + " keys\ntile_keys: ";
  text += keys + "\nconsumers: " + std::to_string(config.consumers) + "\n";
  text.append("lost_mass: ").append(config.pv == isa::Element::u8 ? "the mean of V" : "none");
  return text + "\nshared_p: " + (config.p_in_smem ? "1" : "0") + "\n";
}

GpuKernels sm90a_kernels() {
  static const detail::Kernel kernels[] = {{"sm90a_prefill", supports, tune, run_steps},
                                           sm90a_16bit_prefill()};
  static constexpr Architecture architectures[] = {{isa::sm_90a, "Hopper's kernels"}};
  return {kernels, architectures};
}

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
