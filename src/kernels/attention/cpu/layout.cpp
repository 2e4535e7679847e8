// Where everything of a call lies in its workspace.
#include <algorithm>

#include "kernels/attention/cpu/kernel.hpp"
#include "kernels/attention/cpu/operand.hpp"
#include "qattn/quantize.hpp"

namespace qattn::cpu {
namespace {

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

/// Hands out 64-byte-aligned arrays one behind the other; with base null it only counts.
class Arena {
 public:
  explicit Arena(void* base) : base_(static_cast<char*>(base)) {}
  template <class T>
  T* take(std::int64_t count) {
    if (count <= 0) return nullptr;
    const std::size_t at = used_;
    used_ += (static_cast<std::size_t>(count) * sizeof(T) + 63) / 64 * 64;
    return base_ ? reinterpret_cast<T*>(base_ + at) : nullptr;
  }
  std::size_t used() const { return used_; }

 private:
  char* base_;
  std::size_t used_ = 0;
};

/// Entries that the coarse granularities of one thread's sequence need.
std::int64_t most_groups(const Problem& p, const Config& c) {
  std::int64_t groups = 0;
  for (const Role role : {Role::q, Role::k}) {
    if (!needs_scale_pass(p, c, role)) continue;
    groups = std::max(groups,
                      scale_count(scaling_of(c, role), role, role == Role::q ? p.max_q : p.max_k));
  }
  return groups;
}

void layout_thread(Arena& arena, const Problem& p, const Config& c, std::size_t tile_bytes,
                   Scratch& s) {
  const int rows = tile_rows, own = tile_rows * c.heads_in_turn;
  const int d = filled(p.d), width = row_width(p);
  const bool in_place = c.float_rows_in_place > 0;
  const bool float_p = c.pv == Engine::f32 || is_split(c.pv) || in_place;
  s.q = arena.take<float>(c.qk == Engine::f32 || in_place ? own * d : 0);
  s.q_bf16 = arena.take<std::uint16_t>(parts_of(c.qk) * own * d);
  s.q_codes = arena.take<std::int8_t>(c.qk == Engine::integer ? own * d : 0);
  s.scores = arena.take<float>(rows * tile_keys);
  s.p = arena.take<float>(float_p ? rows * tile_keys : 0);
  s.p_bf16 = arena.take<std::uint16_t>(parts_of(c.pv) * rows * tile_keys);
  s.codes = arena.take<std::uint8_t>(c.pv == Engine::integer ? rows * tile_keys : 0);
  s.rest = arena.take<std::uint8_t>(c.pv == Engine::integer ? rows * tile_keys : 0);
  s.out = arena.take<float>(own * padded(p.dv));
  for (float** f : {&s.max, &s.sum, &s.mass, &s.q_scale, &s.offset}) *f = arena.take<float>(own);
  s.alpha = arena.take<float>(rows);
  s.beta = arena.take<float>(rows);
  s.correction = arena.take<std::int32_t>(own);
  s.rows = arena.take<float>(tile_keys * padded(p.dv));
  s.k_rows = arena.take<float>(in_place ? tile_keys * padded(p.d) : 0);
  s.row = arena.take<float>(width);
  s.bytes = arena.take<std::uint8_t>(tile_keys * width);
  s.codes_row = arena.take<std::uint8_t>(width);
  const std::int64_t groups = most_groups(p, c);
  s.token_amax = arena.take<float>(groups > 0 ? std::max(p.max_q, p.max_k) : 0);
  s.group_amax = arena.take<float>(groups);
  s.tile = arena.take<std::byte>(static_cast<std::int64_t>(tile_bytes));
  s.q_panels = arena.take<std::uint8_t>(c.rows_in_place > 0 ? own * d : 0);
  if (!p.projects()) return;
  const std::int64_t joined = joined_width(p), bytes = bytes_of(c.projection);
  s.projected = arena.take<float>(project_rows * project_columns);
  const int row = padded(static_cast<int>(joined));
  s.weight_rows = arena.take<float>(copies_weight(p, c) ? lanes * row : 0);
  s.weight = arena.take<std::byte>(shares_panels(p) ? 0 : project_columns * joined * bytes);
}

}  // namespace

TileLayout tile_layout(const Problem& p, const Config& c) {
  const int dv = padded(p.dv);
  Arena arena(nullptr);
  TileLayout t{};
  const auto part = [&arena](std::size_t& offset, std::int64_t bytes) {
    offset = arena.used();
    arena.take<std::byte>(bytes);
  };
  part(t.k, std::int64_t{tile_keys} * filled(p.d) * bytes_of(c.qk));
  part(t.k_scale, tile_keys * 4);
  part(t.v, std::int64_t{tile_keys} * dv * bytes_of(c.pv));
  part(t.v_scale, c.v_channel_scale ? std::int64_t{tile_keys} / c.v_block * dv * 4 : 0);
  part(t.v_log, c.v_token_scale ? tile_keys * 4 : 0);
  part(t.v_inverse, c.v_token_scale ? tile_keys * 4 : 0);
  part(t.v_bad, tile_keys);
  part(t.any_bad, 1);
  t.bytes = arena.used();
  return t;
}

std::size_t layout(const Problem& p, const Config& c, void* base, Arrays& a) {
  Arena arena(base);
  const int d16 = padded(p.d), dv = padded(p.dv);
  const std::int64_t heads = p.heads_kv, units = p.batch * heads;
  a.tile = tile_layout(p, c);
  a.sequences = arena.take<SequenceInfo>(p.batch);
  a.slots = p.varlen_k ? p.tokens_k + tile_keys * p.batch
                       : p.batch * ceil_div(p.max_k, tile_keys) * tile_keys;
  a.slots = ceil_div(a.slots, tile_keys) * tile_keys;
  a.seen = arena.take<Seen>(c.finds_seen ? heads * a.slots : 0);
  a.k_mean = arena.take<float>(units * d16);
  a.v_mean = arena.take<float>(units * dv);
  a.balance = arena.take<float>(c.balances() ? 2 * units * d16 : 0);
  a.loud = arena.take<bool>(c.balances() ? units : 0);
  a.q_scale = arena.take<float>(needs_scale_pass(p, c, Role::q) ? p.heads_q * p.tokens_q : 0);
  a.k_scale = arena.take<float>(needs_scale_pass(p, c, Role::k) ? heads * a.slots : 0);
  a.v_groups = 0;
  if (needs_scale_pass(p, c, Role::v)) {
    const Scaling& s = c.recipe.v_scale;
    a.v_groups = p.batch + (s.granularity == Granularity::per_channel ? 0 : a.slots / s.block);
  }
  a.v_channel = arena.take<float>(heads * a.v_groups * dv);
  a.q_blocks = c.smooth_q ? ceil_div(p.max_q, c.recipe.q_scale.block) : 0;
  a.q_mean = arena.take<float>(p.batch * p.heads_q * a.q_blocks * d16);
  a.head_amax[0] = arena.take<float>(p.batch * p.heads_q);
  a.head_amax[1] = arena.take<float>(units);
  a.head_amax[2] = arena.take<float>(units);
  // Decode calls need no prepared tiles at all; packed queries may mix long and short sequences.
  const bool prepared = p.varlen_q || !may_be_short(p);
  const std::int64_t stores = prepared ? heads * (a.slots / tile_keys) : 0;
  a.tiles = arena.take<std::byte>(stores * static_cast<std::int64_t>(a.tile.bytes));
  const std::int64_t split_rows = std::min(p.batch * tile_rows, p.group() * p.tokens_q);
  const std::int64_t splits = p.max_k > c.split_keys ? ceil_div(p.max_k, c.split_keys) : 0;
  a.partials = arena.take<float>(split_rows * heads * splits * (dv + 2));
  if (p.projects()) {
    const std::int64_t bytes = bytes_of(c.projection), width = joined_width(p);
    const std::int64_t columns = ceil_div(p.tensors.projection.shape[0], lanes) * lanes;
    a.joined = arena.take<std::byte>(p.tokens_q * width * bytes);
    a.weight = arena.take<std::byte>(shares_panels(p) ? columns * width * bytes : 0);
    a.bias = arena.take<float>(columns);
  }
  a.scratch = arena.take<Scratch>(c.threads);
  for (int t = 0; t < c.threads; ++t) {
    Scratch unused;
    layout_thread(arena, p, c, a.tile.bytes, base ? a.scratch[t] : unused);
  }
  return arena.used();
}

}  // namespace qattn::cpu
