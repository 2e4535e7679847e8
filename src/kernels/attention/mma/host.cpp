#include "kernels/attention/mma/host.hpp"

#include <algorithm>
#include <string>
#include <tuple>

#include "core/operand.hpp"
#include "kernels/attention/common/call_params.hpp"
#include "kernels/attention/common/check.cuh"
#include "kernels/attention/common/spoil.hpp"
#include "kernels/attention/common/supports.hpp"
#include "kernels/operand/map_rows.hpp"

namespace qattn::kernels {
inline namespace QATTN_TARGET {
namespace {

using isa::Element;

/// Does a kernel note bad keys, for SpoilRows?
bool notes_bad_keys(const MmaConfig& c) { return isa::is_16bit(c.qk) && !c.general; }

constexpr int tile_keys = slot_tile;

/// What prepared rows or tiles of the format are padded to.
int padded(Format format, int channels) {
  return info(format).group > 0 ? micro_channels(channels) : prepared_channels(channels);
}

/// Has every page of such codes a second level of its own?
bool scaled_by_page(const Problem& p, Format format, bool codes) {
  return p.paged && codes && format == Format::nvfp4;
}

/// Is K's scale the same for all keys of a tile, or do groups fill the kernel's rows?
bool tile_scaled(const Problem& p, const Recipe& r, int channels) {
  if (info(r.qk).group > 0) {
    const bool by_page = scaled_by_page(p, r.qk, p.k_codes) && p.page_size % tile_keys != 0;
    return padded(r.qk, p.d) == channels && !by_page;
  }
  return shares_k_scale(p, r, tile_keys, false);
}

/// Are V's scales nothing that the loop over the tiles must see? s8: of tokens, which P carries;
/// e4m3 and nvfp4: one a channel in a sequence, at the end. And does its tile fill the plain
/// variant's?
bool plain_values(const Problem& p, const Recipe& r, int channels) {
  const Granularity g = r.v_scale.granularity;
  const bool scales =
      r.v == Format::s8 ? g == Granularity::per_token
                        : g != Granularity::per_block_channel && !scaled_by_page(p, r.v, p.v_codes);
  return scales && padded(r.v, p.dv) == channels;
}

/// Are Q's means nothing that scores must see? Products of groups begin with what they give, for
/// blocks of 64 queries and multiples.
bool plain_means(const Recipe& r) {
  return r.smooth_q != Toggle::on || (info(r.qk).group > 0 && r.q_scale.block % slot_tile == 0);
}

/// What will run, as far as a plan can tell.
const MmaInstance& instance_of(const Problem& p, const MmaPlan& plan) {
  const bool plain = plan.plain != nullptr && is_unmasked(p, plan.recipe, plan.plain->config.d);
  return plain ? *plan.plain : *plan.general;
}

/// Tensor maps for a kernel with a ring. Empty, or why TMA cannot read the operands.
std::string map_tiles(const MmaConfig& c, RingParams& a) {
  const int width = isa::is_16bit(c.qk) ? 2 : 1;
  tile::Rows k = a.k;
  if (k.data == nullptr) {  // prepared
    k = {};
    k.data = a.k8.codes, k.channels = a.k8.row_bytes, k.heads = a.k.heads, k.batches = 1;
    k.token = a.k8.row_bytes, k.head = a.k8.slots * a.k8.row_bytes, k.max_length = a.k8.slots;
  }
  constexpr std::int64_t limit = 0x7fffffff - 4096;  // of coordinates
  if (std::max({k.total, k.max_length, a.v.total, a.v.max_length}) > limit) return "2^31 tokens";
  const int row = c.d * isa::element_bits(c.qk) / 8;
  std::string e = map_rows(k, row / width, tile_keys, a.k_map, 1, width);
  if (!e.empty()) return e;
  if (isa::is_16bit(c.pv)) return map_rows(a.v, c.d, tile_keys, a.v_map);
  const int bits = isa::element_bits(c.pv), bytes = tile_keys * bits / 8;
  const int rows = c.d + (c.pv == Element::u8 ? 0 : 8);
  isa::TensorShape t;
  t.address = a.v8.tiles;
  t.rank = 3;
  t.sizes[0] = static_cast<std::uint64_t>(bytes);
  t.sizes[1] = static_cast<std::uint64_t>(rows);
  t.sizes[2] = static_cast<std::uint64_t>(a.k.heads * a.v8.slots / tile_keys);
  t.stride_bytes[1] = static_cast<std::uint64_t>(bytes);
  t.stride_bytes[2] = static_cast<std::uint64_t>(tile_offsets(c.d, bits, c.pv_group).bytes);
  t.box[0] = static_cast<std::uint32_t>(bytes);
  t.box[1] = static_cast<std::uint32_t>(rows);
  t.box[2] = 1;
  t.swizzle = isa::swizzle_of(bytes);
  return isa::make_tensor_map(t, a.v_map);
}

/// Which operands come quantised with scales of groups.
std::string text_of_gathered(const Problem& p, const Recipe& r) {
  std::string names;
  for (const Role role : all_roles) {
    const Operand x = operand_of(p, role);
    if (x.codes && info(operand_recipe(r, role).format).group > 0)
      names += std::string(" ") + x.name;
  }
  return names.empty() ? names : "gathered:" + names + "\n";
}

/// Its kernels are not `dependent`: they start after all.
Status attend_mma(const GpuPlan& data, const Problem& p, void* workspace, Stream stream, Handover) {
  const auto& plan = static_cast<const MmaPlan&>(data);
  const MmaInstance* instance = &instance_of(p, plan);
  const int rows = instance->config.rows;
  RingParams params;
  static_cast<AttentionParams&>(params) =
      params_of(p, prepared_in(p, plan.recipe, plan.prepared, workspace), rows, plan.error);
  if (params.work_tiles == 0) return {};
  set_split_kv(plan.split_kv, rows, workspace, params);
  set_order(plan.order, params);
  if (instance->config.ring && !map_tiles(instance->config, params).empty()) {
    instance = plan.general;
  }
  const bool notes = notes_bad_keys(instance->config);
  if (notes) {
    params.bad_keys =
        reinterpret_cast<std::int32_t*>(static_cast<std::byte*>(workspace) + plan.bad_keys);
  }
  isa::Start start = isa::Start::after_all;
  isa::LaunchError e = locate_varlen(plan.packed, p, workspace, params, stream, start);
  if (e.empty()) {
    const isa::Index3 grid{params.work_tiles, 1, 1};
    e = instance->config.ring ? instance->launch_ring(params, grid, stream)
                              : instance->launch(params, grid, stream);
  }
  if (e.empty()) e = combine_parts(params, stream);
  if (e.empty() && notes) e = spoil_rows(p, params, stream);
  return e.empty() ? Status() : Status(Code::internal, "attention kernel: " + e);
}

}  // namespace

bool is_unmasked(const Problem& p, const Recipe& r, int channels) {
  const bool codes = coded(r.qk), v_codes = coded(r.v);
  // Codes with scales of groups are gathered, wherever they lie.
  const bool free = info(r.qk).group == 0;
  const bool q_in_place = !codes || (free && p.q_codes), k_in_place = !codes || (free && p.k_codes);
  const bool v_in_place = !v_codes;
  return p.window_left < 0 && p.softcap <= 0 && p.mask == MaskKind::none && p.block_mask_q == 0 &&
         !p.tensors.alibi_slopes.present() && p.softmax_scale > 0 && plain_means(r) &&
         !(p.paged && (k_in_place || v_in_place)) && (!q_in_place || in_pieces(p.q, p.d)) &&
         (!k_in_place || in_pieces(p.k, p.d)) && (!v_in_place || in_pieces(p.v, p.dv)) &&
         (!codes || tile_scaled(p, r, channels)) && (!v_codes || plain_values(p, r, channels));
}

PrepareNeeds needs_of(const Problem& p, const Recipe& r) {
  PrepareNeeds n;
  n.q_rows = n.k_rows = coded(r.qk);
  n.v_tiles = coded(r.v);
  n.dot_mean = n.q_rows && needs_dot_mean(p, r);
  if (element_of(r.v) == Element::e2m1) n.key_order = KeyOrder::fp4;
  return n;
}

Status check_formats(const Problem& p, const Recipe& r, bool (*serves)(Format)) {
  const bool wide = is_16bit(r.qk);
  if (!wide && !serves(r.qk)) return refuse("no GPU path for Q and K in " + text(r.qk));
  if (wide && (p.q.format != r.qk || p.k.format != r.qk)) {
    return refuse("the recipe multiplies Q and K in " + text(r.qk) + ", but q is " +
                  text(p.q.format) + " and k " + text(p.k.format));
  }
  for (const auto& [name, t, codes] :
       {std::tuple{"q", &p.q, coded(r.qk)}, std::tuple{"k", &p.k, coded(r.qk)},
        std::tuple{"v", &p.v, coded(r.v)}}) {
    if (!codes && t->format == Format::f32) {
      return refuse(std::string(name) + ": is f32; GPU kernels multiply f16, bf16 and codes");
    }
  }
  if (!is_16bit(r.v) && !serves(r.v)) {
    return refuse("no GPU path for V in " + text(r.v));
  }
  if (info(r.v).group > 0) {
    return r.p == r.v ? Status() : refuse(text(r.v) + " V goes with " + text(r.v) + " P");
  }
  if (r.v == Format::s8) {
    return r.p == Format::u8 ? Status() : refuse("s8 V goes with u8 P");
  }
  if (r.v == Format::e4m3) {
    return r.p == Format::e4m3 ? check_value_scales(r) : refuse("e4m3 V goes with e4m3 P");
  }
  if (p.v.format != r.v || r.p != r.v) {
    return refuse("the recipe multiplies P and V in " + text(r.p) + " and " + text(r.v) +
                  ", but v is " + text(p.v.format));
  }
  return {};
}

Status check_options(const Problem& p, const Recipe& r) {
  Status s = check_preparation(r);
  return s.ok() ? check_lengths(p) : s;
}

Status check_tiles(const Problem& p, const Recipe& r, const MmaConfig& c) {
  if (Status s = check_prepared(p, r, needs_of(p, r)); !s.ok()) return s;
  // A tile of V has one scale a channel.
  const std::int64_t v_block = channel_block(p, r, needs_of(p, r));
  if (v_block % tile_keys != 0 && v_block < p.max_k) {
    return refuse("v: scales per channel change every " + std::to_string(v_block) +
                  " keys; GPU kernels have one for " + std::to_string(tile_keys));
  }
  if (Status s = check_block_mask(p, c.rows, "the rows of a tile"); !s.ok()) return s;
  return too_many_blocks(p, c.rows) ? refuse("more than 2^31 blocks of rows") : Status();
}

void plan_mma(MmaPlan& plan, const Problem& p, int resident) {
  plan.attend = attend_mma;
  plan.prepared = plan_prepare(p, plan.recipe, needs_of(p, plan.recipe));
  plan.workspace = plan.prepared.bytes;
  if (plan.plain != nullptr && notes_bad_keys(plan.plain->config)) {
    plan.bad_keys = plan.workspace;
    plan.workspace += bad_keys_bytes(p, plan.prepared);
  }
  const MmaConfig& c = instance_of(p, plan).config;
  SplitKvLimits limits;
  limits.rows = c.rows, limits.channels = c.d;
  limits.blocks = isa::multiprocessors() * resident;
  plan.split_kv = plan_split_kv(p, plan.recipe, limits, plan.workspace);
  if (plan.split_kv.rows == 0) {
    plan.order = plan_order(p, {limits.rows, limits.blocks, read_bytes(plan.recipe), false});
  }
  plan.packed = plan_varlen(p, c.rows, plan.workspace);
  plan.error = isa::error_word();
  plan.text = "variant: " + std::string(c.general ? "general" : "plain") + " d" +
              std::to_string(c.d) + "\ntile: " + std::to_string(c.rows) + " rows x " +
              std::to_string(tile_keys) + " keys\ntile_keys: " + std::to_string(tile_keys) +
              "\nlost_mass: " + (c.pv == Element::u8 ? "a second byte" : "none") + "\n" +
              (isa::is_16bit(c.pv) ? "references: powers of two\n" : "") + text_of(plan.split_kv) +
              text_of(plan.order) + hidden_keys_text(plan.prepared) +
              text_of_gathered(p, plan.recipe) + automatic_text(p);
}

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
