#include "kernels/operand/prepare.hpp"

#include <algorithm>
#include <array>
#include <numeric>
#include <string>

#include "core/plan.hpp"
#include "kernels/operand/call_masks.hpp"
#include "kernels/quantize/gpu/prepare_gather.hpp"
#include "kernels/quantize/gpu/prepare_means.hpp"
#include "kernels/quantize/gpu/prepare_plain.hpp"

namespace qattn::kernels {
inline namespace QATTN_TARGET {
namespace {

class Allocator {
 public:
  std::size_t take(std::int64_t bytes) {
    const std::size_t at = total_;
    total_ += (static_cast<std::size_t>(bytes) + 255) / 256 * 256;
    return at;
  }
  std::size_t total() const { return total_; }

 private:
  std::size_t total_ = 0;
};

LaunchError clear(const Call& call, Launches& launches) {
  ClearParams c;
  std::int64_t words = 0;
  for (int i = 0; i < 3; ++i) {
    const PrepareLayout::Part& p = call.layout.part[i];
    if (p.maxima == PrepareLayout::none || call.plain(static_cast<Role>(i))) continue;
    c.words[i] = at<std::uint32_t>(call.workspace, p.maxima);
    std::int64_t groups = 0;
    c.counts[i] = maxima_words(call.facts[static_cast<std::size_t>(i)], call.rows[i], groups);
    words += c.counts[i];
  }
  if (const SeenKeys seen = call.seen(); seen.counts != nullptr) {
    c.words[3] = seen.counts;
    c.counts[3] = std::int64_t{2} * seen.heads * seen.batches;
    words += c.counts[3];
    c.words[4] = call.slight().counts;
    if (c.words[4] != nullptr) c.counts[4] = std::int64_t{seen.heads} * seen.batches;
  }
  const TensorView& s = call.problem.tensors.saturated;
  if (s.present()) {
    c.saturated = static_cast<std::uint64_t*>(s.data);
    c.saturated_stride = s.stride[0];
  }
  if (words == 0 && !s.present()) return {};
  const std::int64_t blocks = std::clamp<std::int64_t>(words / 1024, 1, 1024);
  return launches.launch<ClearWords>(c, blocks);
}

LaunchError find_seen(const Call& call, Launches& launches) {
  SeenParams params;
  params.out = call.seen();
  if (params.out.bits == nullptr) return {};
  params.slight = call.slight();
  params.q = call.rows[0];
  params.k = call.rows[1];
  if (call.problem.masks_vary_by_head()) {
    params.heads = params.out.heads;
    params.group = static_cast<std::int32_t>(call.problem.group());
  }
  tell_masks(call.problem, params);
  return launches.launch<FindSeen>(params, params.out.tiles * params.heads);
}

LaunchError settle_seen(const Call& call, Launches& launches) {
  SettleParams params;
  params.slight = call.slight();
  if (params.slight.bits == nullptr) return {};
  params.seen = call.seen();
  const Problem& p = call.problem;
  const auto rows = [&](Role role) {
    const OperandSpec& f = call.facts[static_cast<std::size_t>(role)];
    const tile::Rows& r = call.rows[static_cast<int>(role)];
    return NormRows{r, input_kind(f.tensor.format), aligned_rows(f, r)};
  };
  params.q = rows(Role::q);
  params.k = rows(Role::k);
  params.padded = prepared_channels(call.facts[1].channels);
  params.scale = p.softmax_scale;
  params.softcap = p.softcap;
  params.group = static_cast<std::int32_t>(p.group());
  params.mask_heads = p.masks_vary_by_head() ? params.group : 1;
  tell_masks(p, params);
  return launches.launch<SettleSeen>(params, p.batch * p.heads_kv);
}

LaunchError balance(const Call& call, Launches& launches) {
  if (call.layout.factors == PrepareLayout::none || call.balances_late()) return {};
  return find_factors(call, BalanceParams{}, launches);
}

GeneralRole general_role(const Call& call, const OperandSpec& f, bool maxima_pass) {
  const int i = static_cast<int>(f.role);
  GeneralRole r;
  r.rows = call.rows[i];
  r.grouping = grouping_of(call, f);
  r.source = source_of(f);
  r.kind = code_kind(f.format);
  r.micro = micro_of(f.format);
  if (f.role != Role::q) r.order = call.layout.needs.key_order;
  r.input = input_kind(f.tensor.format);
  r.codes = f.codes;
  r.aligned = aligned_rows(f, call.rows[i]);
  r.seen = call.seen(f.role);
  r.rotate = call.recipe.rotate == Toggle::on && f.role != Role::v && !f.codes;
  if (f.role == Role::q) {
    r.block_mean = call.query_means();
  } else if (subtracts_mean(call.recipe, f)) {
    r.mean = call.mean(f.role);
  }
  if (f.role != Role::v) {
    r.out = call.prepared_rows(f.role);
    r.factors = at<float>(call.workspace, call.layout.factors);
  }
  if (f.role == Role::q) r.heads_per_mean = static_cast<std::int32_t>(call.problem.group());
  // K's mean may come after the pass for maxima, which does not need it.
  if (f.role == Role::q && r.out.dot_mean != nullptr && !maxima_pass) {
    r.dot = call.mean(Role::k);
  }
  r.saturated = call.saturated(f);
  return r;
}

enum class Pass { maxima, codes };

/// The operands among `mask` (bits by Role), which share a padded size, and in the pass for codes
/// whether their formats have built-in scales.
LaunchError general(const Call& call, unsigned mask, Pass pass, Launches& launches) {
  const bool maxima_pass = pass == Pass::maxima;
  bool micro = false;
  GeneralParams params;
  params.maxima_pass = maxima_pass;
  params.v_out = call.prepared_tiles();
  std::int64_t blocks = 0;
  int padded = 0;
  for (const OperandSpec& f : call.facts) {
    const int i = static_cast<int>(f.role);
    if ((mask >> i & 1) == 0 || (maxima_pass && !needs_maxima(f))) continue;
    params.role[i] = general_role(call, f, maxima_pass);
    params.blocks[i] = call.blocks(f.role);
    blocks += params.blocks[i];
    padded = f.padded;
    micro = is_micro(f.format);
  }
  // Formats with built-in scales have kernels of their own for codes.
  return micro && !maxima_pass ? launches.launch_encoder<Encoder::micro>(params, padded, blocks)
                               : launches.launch_encoder<Encoder::general>(params, padded, blocks);
}

LaunchError channel_scales(const Call& call, Launches& launches) {
  const OperandSpec& f = call.facts[2];
  if (!f.wanted || source_of(f) != ScaleSource::channel) return {};
  if (call.plain(f.role) && !f.scale.present()) return {};  // FinishMeans makes them
  ChannelScaleParams params;
  params.rows = call.rows[2];
  params.grouping = grouping_of(call, f);
  params.limit = f.format == Format::nvfp4 ? formats::E2m1::max * formats::E4m3::max
                                           : code_limit(code_kind(f.format));
  params.out = call.prepared_tiles();
  return launches.launch<FinishChannelScales>(
      params, (params.out.packed_groups ? 1 : call.problem.batch) * f.heads * params.out.groups);
}

LaunchError encode(const Call& call, Launches& launches) {
  unsigned general_mask = 0, micro_mask = 0, gather_mask = 0;
  for (const OperandSpec& f : call.facts) {
    if (!f.wanted || call.plain(f.role)) continue;
    unsigned& mask = gathered(f) ? gather_mask : is_micro(f.format) ? micro_mask : general_mask;
    mask |= 1u << static_cast<int>(f.role);
  }
  // Launches are of one padded size, and the plain one of one format; V's may differ from those of
  // Q and K, where these are codes.
  const auto fits = [&](const OperandSpec& f) {
    return !call.plain(f.role) || !call.plain(Role::v) ||
           f.tensor.format == call.facts[2].tensor.format;
  };
  const bool together =
      call.facts[0].padded == call.facts[2].padded && fits(call.facts[0]) && fits(call.facts[1]);
  const unsigned runs[2] = {together ? 7u : 3u, together ? 0u : 4u};
  for (const unsigned run : runs) {
    const unsigned mask = (general_mask | micro_mask) & run;
    if (LaunchError e = general(call, mask, Pass::maxima, launches); !e.empty()) return e;
  }
  if (LaunchError e = channel_scales(call, launches); !e.empty()) return e;
  for (const unsigned run : runs) {
    if (LaunchError e = PlainRun(call, run, launches).run(); !e.empty()) return e;
    for (const unsigned mask : {general_mask & run, micro_mask & run}) {
      if (LaunchError e = general(call, mask, Pass::codes, launches); !e.empty()) return e;
    }
    if (LaunchError e = gather(call, gather_mask & run, launches); !e.empty()) return e;
  }
  return {};
}

}  // namespace

tile::Rows rows_of(const Problem& p, Role role) {
  const Operand x = operand_of(p, role);
  tile::Rows r;
  r.data = x.tokens.data;
  r.batch = x.tokens.batch;
  r.token = x.tokens.token;
  r.head = x.tokens.head;
  r.max_length = x.longest;
  r.batches = static_cast<std::int32_t>(p.batch);
  r.heads = static_cast<std::int32_t>(x.heads);
  r.channels = x.channels;
  const auto index = [](const TensorView& v) { return static_cast<const std::int32_t*>(v.data); };
  r.used = index(x.seqused);
  if (x.varlen) {
    r.cu_seqlens = index(x.cu_seqlens);
    r.total = x.in_memory;
  }
  if (x.paged) {
    r.page_table = index(p.tensors.page_table);
    r.page_table_stride = p.tensors.page_table.stride[0];
    r.page_size = static_cast<std::int32_t>(p.page_size);
    r.total = p.pages;
  }
  return r;
}

std::string prepare_refusal(const Problem& p, const Recipe& recipe, const PrepareNeeds& needs) {
  if (recipe.balance_k == Toggle::on && !(needs.q_rows && needs.k_rows)) {
    return "balance_k is for quantised Q and K";
  }
  for (const OperandSpec& f : all_facts(p, recipe, needs)) {
    if (!f.wanted) continue;
    const std::string who(name(f.role));
    const std::string format(info(f.format).name);
    if (!free_scale(f.format) && !is_micro(f.format)) {
      return who + ": format " + format + " has no codes";
    }
    if (std::string why = gather_refusal(p, f); !why.empty()) return why;
  }
  const AttentionTensors& t = p.tensors;
  for (const TensorView* v : {&t.cu_seqlens_q, &t.cu_seqlens_k, &t.seqused_q, &t.seqused_k}) {
    if (v->present() && v->format != Format::s32) return "an index tensor is not s32";
    if (v->present() && v->shape[0] > 1 && v->stride[0] != 1) {
      return "an index tensor's stride is not 1";
    }
  }
  if (t.page_table.present() && t.page_table.format != Format::s32) return "page_table is not s32";
  if (t.page_table.present() && t.page_table.shape[1] > 1 && t.page_table.stride[1] != 1) {
    return "page_table's last stride is not 1";
  }
  return {};
}

std::int64_t channel_block(const Problem& p, const Recipe& recipe, const PrepareNeeds& needs) {
  const OperandSpec f = facts_of(p, recipe, needs, Role::v);
  const std::int64_t all = std::max<std::int64_t>(p.max_k, 1);
  if (f.wanted && f.scaling.granularity == Granularity::per_block) return f.scaling.block;  // pages
  if (!f.wanted || f.scaling.granularity != Granularity::per_block_channel) return all;
  // Given scales of paged V belong to pages, so that a group must end where its page ends.
  const bool pages = p.paged && f.scale.present();
  return pages ? std::gcd<std::int64_t>(f.scaling.block, p.page_size) : f.scaling.block;
}

PrepareLayout plan_prepare(const Problem& p, const Recipe& recipe, const PrepareNeeds& needs) {
  PrepareLayout layout;
  layout.needs = needs;
  layout.error = isa::error_word();
  Allocator memory;
  for (const OperandSpec& f : all_facts(p, recipe, needs)) {
    PrepareLayout::Part& part = layout.part[static_cast<int>(f.role)];
    tile::Rows r = rows_of(p, f.role);
    // slot_count() and others look whether the sequence is packed; at planning there may be no
    // address yet.
    static constexpr std::int32_t somewhere = 0;
    if (f.role == Role::q ? p.varlen_q : p.varlen_k) r.cu_seqlens = &somewhere;
    part.slots = tile::slot_count(r);
    const std::int64_t rows = f.heads * part.slots, tiles = rows / slot_tile;
    if (f.wanted && f.role == Role::v) {
      // Kernels with tiles of 128 keys read a tile behind the last, and ignore it.
      part.codes = memory.take((tiles + 1) * tile_offsets(f).bytes);
    } else if (f.wanted) {
      part.codes = memory.take(rows * row_bytes(f));
      if (is_micro(f.format)) part.group_scale = memory.take(rows * group_bytes(f));
      part.scale = memory.take((rows + slot_tile) * 4);
      part.flags = memory.take(tiles * 4);
      if (f.role == Role::q && needs.dot_mean) part.dot_mean = memory.take(rows * 4);
    }
    const bool mean = has_mean(p, recipe, f) && (f.wanted || (f.role == Role::k && needs.dot_mean));
    if (f.wanted && needs_maxima(f)) {
      part.maxima = memory.take(maxima_words(f, r, part.groups) * 4);
    }
    if (f.wanted && f.role == Role::v && source_of(f) == ScaleSource::channel) {
      layout.channel_block = channel_block(p, recipe, needs);
      layout.channel_groups =
          std::max<std::int64_t>((p.max_k + layout.channel_block - 1) / layout.channel_block, 1);
      // A sequence may have them all, but all sequences have few more.
      layout.packed_groups = p.varlen_k && layout.channel_groups > 1;
      if (layout.packed_groups) layout.channel_groups = tile::block_count(r, layout.channel_block);
      const std::int64_t sequences = layout.packed_groups ? 1 : p.batch;
      layout.channel_scale =
          memory.take(sequences * f.heads * layout.channel_groups * f.padded * 4);
    }
    if (f.wanted && f.role == Role::q && subtracts_mean(recipe, f)) {
      part.mean_blocks = tile::block_count(r, recipe.q_scale.block);
      part.mean = memory.take(f.heads * part.mean_blocks * f.padded * 4);
    }
    if (f.wanted && f.role == Role::v && scales_channels(recipe, f)) {
      part.sums = memory.take(tiles * f.padded * 4);
    }
    if (mean) {
      part.mean = memory.take(p.batch * f.heads * f.padded * 4);
      if (!given_mean(p, f.role).present()) part.sums = memory.take(tiles * f.padded * 4);
    }
  }
  if (PrepareLayout::Part& q = layout.part[0]; q.mean_blocks > 0) {
    layout.most_means = (p.max_q + recipe.q_scale.block - 1) / recipe.q_scale.block;
    q.mean_scores = memory.take(p.heads_q * layout.most_means * layout.part[1].slots * 4);
  }
  if (recipe.balance_k == Toggle::on && needs.k_rows) {
    const int padded = facts_of(p, recipe, needs, Role::k).padded;
    layout.factors = memory.take(p.batch * p.heads_kv * 2 * padded * 4);
    layout.loud = memory.take(p.batch * p.heads_kv * 4);
  }
  if (detail::must_find_hidden_keys(p, recipe) && (needs.k_rows || needs.v_tiles)) {
    const bool slight = detail::bounds_slight_keys(p);  // by norms of each head
    const std::int64_t heads = slight || p.masks_vary_by_head() ? p.heads_kv : 1;
    const std::int64_t tiles = layout.part[static_cast<int>(Role::k)].slots / slot_tile;
    layout.seen_heads = static_cast<std::int32_t>(heads);
    layout.seen = memory.take(heads * tiles * 16);
    layout.seen_counts = memory.take(heads * p.batch * 2 * 4);
    if (slight) layout.slight = memory.take(heads * tiles * 8);
    if (slight) layout.slight_counts = memory.take(heads * p.batch * 4);
  }
  layout.bytes = memory.total();
  return layout;
}

std::string hidden_keys_text(const PrepareLayout& layout) {
  const bool looks = layout.seen != PrepareLayout::none;
  return std::string("hidden_keys: ") + (looks ? "are looked for\n" : "none\n");
}

namespace {

Call make_call(const Problem& problem, const Recipe& recipe, const PrepareLayout& layout,
               void* workspace) {
  Call call{problem, recipe, layout, workspace, all_facts(problem, recipe, layout.needs), {}};
  for (int i = 0; i < 3; ++i) {
    call.rows[i] = rows_of(problem, static_cast<Role>(i));
    call.rows[i].error = layout.error;
  }
  return call;
}

}  // namespace

LaunchError prepare(const Problem& problem, const Recipe& recipe, const PrepareLayout& layout,
                    void* workspace, void* stream, isa::Start& next) {
  const Call call = make_call(problem, recipe, layout, workspace);
  Launches launches(stream);
  if (problem.batch == 0) return {};  // packed: there is no sequence that kernels could look up
  for (auto step :
       {&clear, &find_seen, &settle_seen, &balance, &means, &block_means, &encode, &mean_scores}) {
    if (LaunchError e = step(call, launches); !e.empty()) return e;
  }
  next = launches.next();
  return {};
}

bool plan_plain(const Problem& p, const Recipe& recipe, const PrepareLayout& layout,
                void* workspace, PlainParams& params) {
  const Call call = make_call(p, recipe, layout, workspace);
  const AttentionTensors& t = p.tensors;
  if (p.varlen_q || p.varlen_k || p.paged || t.seqused_q.present() || t.seqused_k.present() ||
      t.saturated.present()) {
    return false;
  }
  for (const OperandSpec& f : call.facts) {
    if (!call.plain(f.role) || f.tensor.format != call.facts[0].tensor.format) return false;
    if (f.scale.present()) return false;
    if (f.role != Role::q && given_mean(p, f.role).present()) return false;
  }
  Launches none(nullptr);
  params = PlainRun(call, 7u, none).params();
  params.input =
      call.facts[0].tensor.format == Format::bf16 ? isa::Element::bf16 : isa::Element::f16;
  for (const Role role : {Role::k, Role::v}) {
    params.sums[static_cast<int>(role)] = at<float>(workspace, call.part(role).sums);
  }
  return true;
}

void query_factors(const PrepareLayout& layout, const Problem& problem, void* workspace,
                   const float*& factors, const std::uint32_t*& loud) {
  factors = at<float>(workspace, layout.factors);
  if (factors != nullptr) factors += prepared_channels(problem.d);
  loud = at<std::uint32_t>(workspace, layout.loud);
}

LaunchError begin(const Problem& problem, const Recipe& recipe, const PrepareLayout& layout,
                  void* workspace, std::uint32_t* zeros, std::int64_t count, void* stream) {
  Launches first(stream);
  if (layout.factors != PrepareLayout::none) {
    BalanceParams params;
    params.zeros = zeros;
    params.zero_count = count;
    return find_factors(make_call(problem, recipe, layout, workspace), params, first);
  }
  ClearParams c;
  c.words[0] = zeros;
  c.counts[0] = count;
  return first.launch<ClearWords>(c, std::clamp<std::int64_t>(count / 1024, 1, 64));
}

Prepared prepared_in(const Problem& problem, const Recipe& recipe, const PrepareLayout& layout,
                     void* workspace) {
  const Call call = make_call(problem, recipe, layout, workspace);
  Prepared out;
  out.q = call.prepared_rows(Role::q);
  out.k = call.prepared_rows(Role::k);
  out.v = call.prepared_tiles();
  out.q_mean = call.query_means();
  out.k_mean = call.mean(Role::k);
  out.v_mean = call.mean(Role::v);
  out.v_channels = call.facts[2].padded;
  return out;
}

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
