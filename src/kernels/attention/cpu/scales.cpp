// What must be known before any tile is packed: means, and the scales of granularities coarser than
// a token (Q, K) or a tile (V).
#include <algorithm>
#include <cmath>
#include <cstring>

#include "formats/scale.hpp"
#include "kernels/attention/cpu/kernel.hpp"
#include "kernels/attention/cpu/operand.hpp"
#include "qattn/quantize.hpp"

namespace qattn::cpu {
namespace {

/// Scale of every token of a coarse granularity, expanded. NaN in a group makes its scale NaN.
void token_scales(const Job& job, Role role, std::int64_t b, std::int64_t head, Scratch& scratch,
                  float* scale) {
  const Sequence x = sequence_of(job, role, b, head);
  const Scaling& scaling = scaling_of(job.config, role);
  const float qmax = code_max(format_of(job.config, role));
  if (scaling.granularity == Granularity::per_tensor) {
    std::fill(scale, scale + x.length, head_scale(job, role, b, head));
    return;
  }
  const std::int64_t groups = scale_count(scaling, role, x.length);
  float* shared = scratch.group_amax;  // 1: some token of the group shares; else all that are seen
  std::fill(shared, shared + groups, 0.0f);
  for (std::int64_t s = 0; s < x.length; ++s) {
    if (x.shares(s)) shared[scale_index(scaling, role, s)] = 1.0f;
  }
  for (std::int64_t s = 0; s < x.length; ++s) {
    load_row(job.words(), x, s, transform_of(job, role, b, head, s), scratch.row);
    const bool joins = x.shares(s) || shared[scale_index(scaling, role, s)] == 0.0f;
    scratch.token_amax[s] = joins ? job.words().amax(scratch.row, x.channels) : 0.0f;
  }
  fold_groups(scaling, role, scratch.token_amax, x.length, scratch.group_amax, groups);
  for (std::int64_t s = 0; s < x.length; ++s) {
    scale[s] = formats::amax_scale(scratch.group_amax[scale_index(scaling, role, s)], qmax);
  }
}

/// V's scales per channel over more than a tile.
void channel_scales(const Job& job, std::int64_t b, std::int64_t head, Scratch& scratch) {
  const Sequence x = job.v_sequence(b, head);
  const Scaling& scaling = job.config.recipe.v_scale;
  const int dv = job.dv();
  const std::int64_t groups = scale_count(scaling, Role::v, x.length);
  float* scale = job.arrays.v_channel + (head * job.arrays.v_groups + v_group_base(job, b)) * dv;
  std::memset(scale, 0, sizeof(float) * static_cast<std::size_t>(groups * dv));
  const bool whole = scaling.granularity == Granularity::per_channel;
  const std::int64_t block = whole ? std::max<std::int64_t>(x.length, 1) : scaling.block;
  bool shared = true;
  for (std::int64_t s = 0; s < x.length; ++s) {
    if (s % block == 0) shared = some_share(x, s, std::min(s + block, x.length));
    if (shared && !x.shares(s)) continue;
    load_row(job.words(), x, s, transform_of(job, Role::v, b, head, s), scratch.row);
    // Bad tokens of V are flagged one by one (pack.cpp) and need not poison a shared scale.
    if (!std::isfinite(job.words().amax(scratch.row, x.channels))) continue;
    job.words().accumulate_amax(scratch.row, dv, scale + scale_index(scaling, Role::v, s) * dv);
  }
  const float qmax = code_max(job.config.recipe.v);
  for (std::int64_t i = 0; i < groups * dv; ++i) scale[i] = formats::amax_scale(scale[i], qmax);
}

void given_mean(const TensorView& given, std::int64_t b, std::int64_t head, int width,
                float* mean) {
  for (int i = 0; i < padded(width); ++i) {
    const std::int64_t at =
        b * given.stride[0] + head * given.stride[1] + std::int64_t{i} * given.stride[2];
    mean[i] = i < width ? static_cast<const float*>(given.data)[at] : 0.0f;
  }
}

}  // namespace

bool has_means(const Problem& problem, const Config& config) {
  const AttentionTensors& t = problem.tensors;
  return config.smooth_k || config.smooth_v || config.balances() || t.k_mean.present() ||
         t.v_mean.present();
}

void prepare_means(const Job& job, std::int64_t b, std::int64_t head, Scratch& scratch) {
  const AttentionTensors& t = job.problem.tensors;
  float* k_mean = job.arrays.k_mean + job.unit(b, head) * padded(job.d());
  float* v_mean = job.arrays.v_mean + job.unit(b, head) * job.dv();
  if (t.k_mean.present()) {
    given_mean(t.k_mean, b, head, job.problem.d, k_mean);
  } else if (job.config.smooth_k) {
    const Sequence x = job.k_sequence(b, head);
    mean_of_rows(job.words(), x, 0, x.length, k_mean, scratch.row);
  }
  if (job.config.balances()) {
    float* factors = job.arrays.balance + 2 * job.unit(b, head) * padded(job.d());
    job.arrays.loud[job.unit(b, head)] = balance_rows(job.words(), job.k_sequence(b, head),
                                                      job.config.smooth_k, factors, scratch.row);
  }
  if (t.v_mean.present()) {
    given_mean(t.v_mean, b, head, job.problem.dv, v_mean);
  } else if (job.config.smooth_v) {
    const Sequence x = job.v_sequence(b, head);
    mean_of_rows(job.words(), x, 0, x.length, v_mean, scratch.row);
  }
}

bool needs_head_amax(const Problem& problem, const Config& config, Role role) {
  if (has_codes(problem, role)) return false;
  const Granularity g = scaling_of(config, role).granularity;
  return format_of(config, role) == Format::nvfp4 ||
         ((g == Granularity::per_tensor || (role == Role::v && g == Granularity::per_head)) &&
          !scale_view(problem, role).present());
}

bool needs_scale_pass(const Problem& problem, const Config& config, Role role) {
  if (!free_scale(format_of(config, role)) || has_codes(problem, role) ||
      scale_view(problem, role).present()) {
    return false;
  }
  const Scaling& s = scaling_of(config, role);
  if (role == Role::v) {
    return s.granularity == Granularity::per_channel ||
           (s.granularity == Granularity::per_block_channel && s.block > tile_keys);
  }
  return s.granularity != Granularity::per_token;
}

std::int64_t v_group_base(const Job& job, std::int64_t b) {
  const Scaling& s = job.config.recipe.v_scale;
  if (s.granularity == Granularity::per_channel) return b;
  return job.arrays.sequences[b].slot / s.block + b;  // every sequence rounds up to whole blocks
}

float head_scale(const Job& job, Role role, std::int64_t b, std::int64_t head) {
  const std::int64_t heads = role == Role::q ? job.problem.heads_q : job.problem.heads_kv;
  const float* all = job.arrays.head_amax[static_cast<int>(role)];
  const Format format = format_of(job.config, role);
  if (format == Format::nvfp4) return global_scale(all[b * heads + head]);
  float amax = all[b * heads + head];
  if (scaling_of(job.config, role).granularity == Granularity::per_tensor) {
    for (std::int64_t i = 0; i < job.problem.batch * heads; ++i) {
      amax = formats::fold_amax(amax, all[i]);
    }
  }
  return formats::amax_scale(amax, code_max(format));
}

bool needs_head_pass(const Problem& problem, const Config& config, Role role) {
  return needs_head_amax(problem, config, role) || (role == Role::q && config.smooth_q);
}

void prepare_head(const Job& job, Role role, std::int64_t b, std::int64_t head, Scratch& scratch) {
  const Sequence x = sequence_of(job, role, b, head);
  if (role == Role::q && job.config.smooth_q) {
    const std::int64_t block = job.config.recipe.q_scale.block;
    for (std::int64_t s = 0; s < x.length; s += block) {
      mean_of_rows(job.words(), x, s, std::min(s + block, x.length), job.q_mean(b, head, s),
                   scratch.row);
    }
  }
  if (!needs_head_amax(job.problem, job.config, role)) return;
  float amax = 0.0f;
  for (std::int64_t s = 0; s < x.length; ++s) {
    if (!x.shares(s)) continue;
    load_row(job.words(), x, s, transform_of(job, role, b, head, s), scratch.row);
    const float row = job.words().amax(scratch.row, x.channels);
    if (role == Role::v && !std::isfinite(row)) continue;  // flagged per token instead
    amax = formats::fold_amax(amax, row);
  }
  const std::int64_t heads = role == Role::q ? job.problem.heads_q : job.problem.heads_kv;
  job.arrays.head_amax[static_cast<int>(role)][b * heads + head] = amax;
}

void prepare_scales(const Job& job, Role role, std::int64_t b, std::int64_t head,
                    Scratch& scratch) {
  if (!needs_scale_pass(job.problem, job.config, role)) return;
  if (role == Role::v) {
    channel_scales(job, b, head, scratch);
  } else if (role == Role::k) {
    token_scales(job, role, b, head, scratch, job.arrays.k_scale + job.k_place(b, head, 0));
  } else {
    token_scales(job, role, b, head, scratch, job.arrays.q_scale + job.q_place(b, head, 0));
  }
}

// --- small facts about operands ----------------------------------------------------------------

Sequence sequence_of(const Job& job, Role role, std::int64_t b, std::int64_t head) {
  if (role == Role::q) return job.q_sequence(b, head);
  return role == Role::k ? job.k_sequence(b, head) : job.v_sequence(b, head);
}

Transform transform_of(const Job& job, Role role, std::int64_t b, std::int64_t head,
                       std::int64_t token) {
  Transform t;
  if (role == Role::q) {
    t.mean = job.config.smooth_q ? job.q_mean(b, head, token) : nullptr;
  } else {
    t.mean = role == Role::k ? job.k_mean(b, head) : job.v_mean(b, head);
  }
  if (role != Role::v && job.config.balances()) {
    t.factors = job.balance(role, b, role == Role::q ? head / job.problem.group() : head);
  }
  t.rotate = role != Role::v && job.config.rotate;
  return t;
}

float given_scale(const Job& job, Role role, const Sequence& x, std::int64_t b, std::int64_t head,
                  std::int64_t token, int channel) {
  const TensorView& view = scale_view(job.problem, role);
  const Place at = place(x, b, token);
  const ScaleMap map = scale_map(job, role);
  return static_cast<const float*>(view.data)[map.offset(view, at.outer, head, at.token, channel)];
}

void decode_grouped_row(const Job& job, Role role, const Sequence& x, std::int64_t b,
                        std::int64_t head, std::int64_t token, float* row) {
  const TensorView& view = scale_view(job.problem, role);
  const Place at = place(x, b, token);
  const ScaleMap map = scale_map(job, role);
  const std::byte* codes = x.row(token);
  for (int i = 0; i < x.channels; ++i) {
    const std::uint8_t scale =
        static_cast<const std::uint8_t*>(view.data)[map.offset(view, at.outer, head, at.token, i)];
    const float value = decode_group_code(x.format, packed_code(codes, i, x.bits), scale, 1.0f);
    row[i] = value + (value - value);  // beyond float32: NaN
  }
}

float given_global(const Job& job, Role role, const Sequence& x, std::int64_t b, std::int64_t head,
                   std::int64_t token) {
  const TensorView& g = operand_of(job.problem, role).global;
  if (!g.present()) return 1.0f;
  const Place at = place(x, b, token);
  return static_cast<const float*>(g.data)[at.outer * g.stride[0] + head * g.stride[1]];
}

}  // namespace qattn::cpu
