// Quantisation and repacking of K and V into panels, scales of Q: everything before the tiles.
#include <cmath>
#include <cstring>
#include <limits>

#include "formats/scale.hpp"
#include "kernels/attn_prefill/cpu.hpp"
#include "qattn/quantize.hpp"

namespace qattn::cpu {
namespace {

constexpr float nan_value = std::numeric_limits<float>::quiet_NaN();

bool free_scale(Format format) {
  return info(format).scale != Format::none && info(format).group == 0;
}
bool grouped(Format format) { return info(format).group > 0; }

bool per_channel(const Scaling& s) {
  return s.granularity == Granularity::per_channel ||
         s.granularity == Granularity::per_block_channel;
}

const TensorView& scale_view(const Job& job, Role role) {
  const AttentionTensors& t = job.problem.tensors;
  return role == Role::q ? t.q_scale : role == Role::k ? t.k_scale : t.v_scale;
}

Format format_of(const Job& job, Role role) {
  return role == Role::v ? job.config.recipe.v : job.config.recipe.qk;
}

const Scaling& scaling_of(const Job& job, Role role) {
  const Recipe& r = job.config.recipe;
  return role == Role::q ? r.q_scale : role == Role::k ? r.k_scale : r.v_scale;
}

bool has_codes(const Job& job, Role role) {
  const Problem& p = job.problem;
  return role == Role::q ? p.q_codes : role == Role::k ? p.k_codes : p.v_codes;
}

/// Where a token's scale is found: batch entry and token, or page and place in the page.
struct Place {
  std::int64_t outer, token;
};
Place place(const Sequence& x, std::int64_t b, std::int64_t token) {
  if (x.pages == nullptr) return {b, token};
  return {x.page(token), token % x.page_size};
}

float given_global(const Job& job, Role role, const Place& at, std::int64_t head) {
  const AttentionTensors& t = job.problem.tensors;
  const TensorView& g = role == Role::q ? t.q_global : role == Role::k ? t.k_global : t.v_global;
  if (!g.present()) return 1.0f;
  return static_cast<const float*>(g.data)[at.outer * g.stride[0] + head * g.stride[1]];
}

/// Transformed row of a float operand.
Transform transform_of(const Job& job, Role role, std::int64_t b, std::int64_t head,
                       std::int64_t token) {
  Transform t;
  if (role == Role::q) {
    t.mean = job.config.smooth_q ? job.q_mean(b, head, token) : nullptr;
  } else {
    t.mean = role == Role::k ? job.k_mean(b, head) : job.v_mean(b, head);
  }
  t.rotate = role != Role::v && job.config.rotate;
  return t;
}

Sequence sequence_of(const Job& job, Role role, std::int64_t b, std::int64_t head) {
  return role == Role::q   ? job.q_sequence(b, head)
         : role == Role::k ? job.k_sequence(b, head)
                           : job.v_sequence(b, head);
}

/// Scale of every token of a float operand whose scale is one number a token (after expansion of
/// its granularity). A token that holds NaN gets a NaN scale even where the scale is static.
void token_scales(const Job& job, Role role, std::int64_t b, std::int64_t head, Scratch& scratch,
                  float* scale) {
  const Sequence x = sequence_of(job, role, b, head);
  const Scaling& scaling = scaling_of(job, role);
  const float qmax = code_max(format_of(job, role));
  for (std::int64_t s = 0; s < x.length; ++s) {
    load_row(job.words(), x, s, transform_of(job, role, b, head, s), scratch.row);
    scratch.token_amax[s] = job.words().amax(scratch.row, x.channels);
    // Bad tokens of V are flagged one by one (load_v_tile) and need not poison a shared scale.
    if (role == Role::v && std::isnan(scratch.token_amax[s])) scratch.token_amax[s] = 0.0f;
  }
  if (scale_view(job, role).present()) {
    const GivenScale given = given_scale(job, role);
    for (std::int64_t s = 0; s < x.length; ++s) {
      const Place at = place(x, b, s);
      const bool nan = std::isnan(scratch.token_amax[s]);
      scale[s] = nan ? nan_value : given.at(at.outer, head, at.token, 0);
    }
    return;
  }
  if (scaling.granularity == Granularity::per_tensor) {
    const std::int64_t heads = role == Role::q ? job.problem.heads_q : job.problem.heads_kv;
    float amax = 0.0f;
    for (std::int64_t i = 0; i < job.problem.batch * heads; ++i) {
      amax = formats::fold_amax(amax, job.arrays.head_amax[static_cast<int>(role)][i]);
    }
    const float common = formats::amax_scale(amax, qmax);
    for (std::int64_t s = 0; s < x.length; ++s) scale[s] = common;
    return;
  }
  const std::int64_t groups = scale_count(scaling, role, x.length);
  fold_groups(scaling, role, scratch.token_amax, x.length, scratch.group_amax, groups);
  for (std::int64_t s = 0; s < x.length; ++s) {
    scale[s] = formats::amax_scale(scratch.group_amax[scale_index(scaling, role, s)], qmax);
  }
}

/// One key into the integer panel: 4 codes at a time, 64 bytes apart, biased to unsigned.
void pack_k_codes(const std::uint8_t* codes, int d, std::uint8_t* panel, int lane) {
  for (int t = 0; t < d / 4; ++t) {
    for (int i = 0; i < 4; ++i) {
      panel[t * 64 + lane * 4 + i] = static_cast<std::uint8_t>(codes[4 * t + i] ^ 0x80);
    }
  }
}

void pack_k_floats(const float* row, int d, float* panel, int lane) {
  for (int t = 0; t < d; ++t) panel[t * lanes + lane] = row[t];
}

/// Float engine: a K row as the recipe's format holds it, its free scale left out.
void k_row(const Job& job, const Sequence& x, std::int64_t b, std::int64_t head, std::int64_t s,
           float scale, Scratch& scratch) {
  const Format format = job.config.recipe.qk;
  float* row = scratch.row;
  if (job.problem.k_codes) {
    decode_codes(job, Role::k, x, b, head, s, row);
    return;
  }
  load_row(job.words(), x, s, transform_of(job, Role::k, b, head, s), row);
  if (free_scale(format)) {
    scratch.saturated[1] +=
        encode_row(job.words(), format, row, x.channels, formats::reciprocal(scale), scratch.bytes);
    decode_row(format, scratch.bytes, x.channels, row);
  } else if (grouped(format)) {
    const float global =
        format == Format::nvfp4 ? global_scale(job.arrays.head_amax[1][job.unit(b, head)]) : 1.0f;
    std::uint8_t scales[32];
    encode_groups(format, row, x.channels, global, scratch.bytes, scales);
    for (int i = 0; i < x.channels; ++i) {
      row[i] = decode_group_code(format, scratch.bytes[i], scales[i / info(format).group], global);
    }
  } else {
    round_row(format, row, x.channels);
  }
}

// --- V -----------------------------------------------------------------------------------------

/// Loads tokens [first, first + count) of V into scratch.rows ([tile_keys][dv padded]), as floats.
/// Rows that hold NaN or Inf become zeros and are flagged: the tile loop turns every query that can
/// see such a token into NaN and nobody else.
void load_v_tile(const Job& job, const Sequence& x, std::int64_t b, std::int64_t head,
                 std::int64_t first, int count, Scratch& scratch, std::uint8_t* bad) {
  const int dv = job.dv();
  const Format format = job.config.recipe.v;
  for (int j = 0; j < count; ++j) {
    float* row = scratch.rows + j * dv;
    if (job.problem.v_codes) {
      decode_codes(job, Role::v, x, b, head, first + j, row);
    } else {
      load_row(job.words(), x, first + j, {job.v_mean(b, head), false}, row);
      if (!free_scale(format) && !grouped(format)) round_row(format, row, x.channels);
    }
    bad[j] = std::isnan(job.words().amax(row, x.channels));
    if (bad[j]) std::memset(row, 0, sizeof(float) * static_cast<std::size_t>(dv));
  }
}

/// Scales [groups][dv padded] of V's channels, into scratch.group_amax.
void channel_scales(const Job& job, const Sequence& x, std::int64_t b, std::int64_t head,
                    Scratch& scratch) {
  const Scaling& scaling = job.config.recipe.v_scale;
  const int dv = job.dv();
  const std::int64_t groups = std::max<std::int64_t>(scale_count(scaling, Role::v, x.length), 1);
  float* scale = scratch.group_amax;
  if (scale_view(job, Role::v).present()) return;  // read where it is used
  std::memset(scale, 0, sizeof(float) * static_cast<std::size_t>(groups * dv));
  for (std::int64_t s = 0; s < x.length; ++s) {
    load_row(job.words(), x, s, {job.v_mean(b, head), false}, scratch.row);
    if (std::isnan(job.words().amax(scratch.row, x.channels))) continue;  // flagged, see above
    job.words().accumulate_amax(scratch.row, dv, scale + scale_index(scaling, Role::v, s) * dv);
  }
  const float qmax = code_max(job.config.recipe.v);
  for (std::int64_t i = 0; i < groups * dv; ++i) scale[i] = formats::amax_scale(scale[i], qmax);
}

/// V's scale of one (token, channel): given, or from what the passes above left in scratch.
struct VScales {
  const Job& job;
  const Sequence& x;
  std::int64_t b, head;
  const Scratch& scratch;
  bool token_form;  ///< one scale a token, in scratch.rows' sibling array
  const float* token_scale;
  GivenScale given;
  bool is_given;

  float at(std::int64_t s, int c) const {
    if (is_given) {
      const Place p = place(x, b, s);
      return given.at(p.outer, head, p.token, c);
    }
    if (token_form) return token_scale[s];
    return scratch.group_amax[scale_index(job.config.recipe.v_scale, Role::v, s) * job.dv() + c];
  }
};

/// Integer V: codes into [key / 4][channel][4], scales per sub-block and channel, or per token.
void pack_v_integer(const Job& job, const VScales& scales, std::int64_t first, int count,
                    std::int64_t slot, const std::uint8_t* bad, Scratch& scratch) {
  const Config& c = job.config;
  const int dv = job.dv(), channels = job.problem.dv;
  std::int8_t* panel = job.arrays.v_codes + (scales.head * job.arrays.slots + slot) * dv;
  const bool by_token = c.v_token_scale || scales.token_form;
  float inverse[256];
  for (int j = 0; j < count; ++j) {
    const float* row = scratch.rows + j * dv;
    const std::int64_t s = first + j;
    auto* codes = reinterpret_cast<std::int8_t*>(scratch.bytes);
    if (job.problem.v_codes) {
      for (int i = 0; i < channels; ++i) codes[i] = static_cast<std::int8_t>(row[i]);
    } else if (by_token) {
      scratch.saturated[2] +=
          job.words().encode_s8(row, channels, formats::reciprocal(scales.at(s, 0)), codes);
    } else {
      for (int i = 0; i < dv && j % c.v_block == 0; ++i) {
        inverse[i] = i < channels ? formats::reciprocal(scales.at(s, i)) : 0.0f;
      }
      scratch.saturated[2] += job.words().encode_s8_channels(row, channels, inverse, codes);
    }
    for (int i = 0; i < channels; ++i) panel[(j / 4 * dv + i) * 4 + j % 4] = codes[i];
  }
  if (c.v_token_scale) {
    float* scale = job.arrays.v_scale + scales.head * job.arrays.slots + slot;
    float* unscale = job.arrays.v_inverse + scales.head * job.arrays.slots + slot;
    float* plain = job.arrays.v_plain + scales.head * job.arrays.slots + slot;
    float top = 0.0f;
    for (int j = 0; j < count; ++j) {
      scale[j] = bad[j] ? 0.0f : scales.at(first + j, 0);
      top = scale[j] > top ? scale[j] : top;
    }
    // A token whose V is far smaller than its neighbours' leaves no code; the normaliser then takes
    // its probability unrounded. 1/64 keeps at least two bits of code (docs/NUMERICS.md).
    const float least = std::fmax(top * (1.0f / 64.0f), 0x1p-90f);
    for (int j = 0; j < count; ++j) {
      plain[j] = scale[j] >= least ? 0.0f : 1.0f;
      unscale[j] = scale[j] >= least ? 1.0f / scale[j] : 0.0f;
    }
    return;
  }
  for (int j = 0; j < count; j += c.v_block) {
    float* scale =
        job.arrays.v_scale + (scales.head * job.arrays.slots + slot + j) / c.v_block * dv;
    for (int i = 0; i < dv; ++i) scale[i] = i < channels ? scales.at(first + j, i) : 0.0f;
  }
}

/// Float V: what the format holds, scale folded in, into [key][channel].
void pack_v_float(const Job& job, const VScales& scales, std::int64_t first, int count,
                  std::int64_t slot, Scratch& scratch) {
  const Format format = job.config.recipe.v;
  const int dv = job.dv(), channels = job.problem.dv;
  float* panel = job.arrays.v_panels + (scales.head * job.arrays.slots + slot) * dv;
  std::memcpy(panel, scratch.rows, sizeof(float) * static_cast<std::size_t>(count * dv));
  if (job.problem.v_codes && grouped(format)) return;  // decode_codes() applied everything
  if (free_scale(format)) {
    for (int j = 0; j < count; ++j) {
      for (int i = 0; i < channels; ++i) {
        float& x = panel[j * dv + i];
        const float scale = scales.at(first + j, i);
        if (!job.problem.v_codes) {
          std::uint8_t code;
          scratch.saturated[2] +=
              encode_row(job.words(), format, &x, 1, formats::reciprocal(scale), &code);
          decode_row(format, &code, 1, &x);
        }
        x *= scale;
      }
    }
  } else if (grouped(format)) {
    const float global =
        format == Format::nvfp4
            ? global_scale(job.arrays.head_amax[2][job.unit(scales.b, scales.head)])
            : 1.0f;
    const int group = info(format).group;
    for (int i = 0; i < channels; ++i) {
      float column[tile_keys];
      std::uint8_t codes[tile_keys], coded[tile_keys / 16];
      for (int j = 0; j < count; ++j) column[j] = panel[j * dv + i];
      encode_groups(format, column, count, global, codes, coded);
      for (int j = 0; j < count; ++j) {
        panel[j * dv + i] = decode_group_code(format, codes[j], coded[j / group], global);
      }
    }
  }
}

}  // namespace

GivenScale given_scale(const Job& job, Role role) {
  return {scale_view(job, role),
          {scaling_of(job, role), role, info(format_of(job, role)).group,
           job.problem.paged && role != Role::q}};
}

void decode_codes(const Job& job, Role role, const Sequence& x, std::int64_t b, std::int64_t head,
                  std::int64_t token, float* row) {
  const std::byte* codes = x.row(token);
  for (int i = x.channels; i < padded(x.channels); ++i) row[i] = 0.0f;
  if (!grouped(x.format)) {
    decode_row(x.format, reinterpret_cast<const std::uint8_t*>(codes), x.channels, row);
    return;
  }
  const GivenScale given = given_scale(job, role);
  const Place at = place(x, b, token);
  const float global = given_global(job, role, at, head);
  for (int i = 0; i < x.channels; ++i) {
    const std::uint8_t scale = given.code_at(at.outer, head, at.token, i);
    row[i] = decode_group_code(x.format, packed_code(codes, i, x.bits), scale, global);
  }
}

bool needs_head_amax(const Config& config, Role role) {
  const Format format = role == Role::v ? config.recipe.v : config.recipe.qk;
  const Scaling& s = role == Role::q   ? config.recipe.q_scale
                     : role == Role::k ? config.recipe.k_scale
                                       : config.recipe.v_scale;
  return format == Format::nvfp4 || s.granularity == Granularity::per_tensor;
}

void prepare_means(const Job& job, std::int64_t b, std::int64_t head, Scratch& scratch) {
  const AttentionTensors& t = job.problem.tensors;
  const auto one = [&](Role role, bool smooth, const TensorView& given, float* mean, int width) {
    const Sequence x = sequence_of(job, role, b, head);
    if (given.present()) {
      for (int i = 0; i < padded(width); ++i) {
        mean[i] = i < width ? static_cast<const float*>(
                                  given.data)[b * given.stride[0] + head * given.stride[1] +
                                              i * given.stride[2]]
                            : 0.0f;
      }
    } else if (smooth) {
      mean_of_rows(job.words(), x, 0, x.length, mean, scratch.row);
    }
  };
  one(Role::k, job.config.smooth_k, t.k_mean,
      job.arrays.k_mean + job.unit(b, head) * padded(job.d()), job.d());
  one(Role::v, job.config.smooth_v, t.v_mean, job.arrays.v_mean + job.unit(b, head) * job.dv(),
      job.problem.dv);
}

void prepare_head_amax(const Job& job, Role role, std::int64_t b, std::int64_t head,
                       Scratch& scratch) {
  const Sequence x = sequence_of(job, role, b, head);
  if (role == Role::q && job.config.smooth_q) {
    const std::int64_t block = job.config.recipe.q_scale.block;
    for (std::int64_t s = 0; s < x.length; s += block) {
      mean_of_rows(job.words(), x, s, std::min(s + block, x.length), job.q_mean(b, head, s),
                   scratch.row);
    }
  }
  if (!needs_head_amax(job.config, role) || has_codes(job, role)) return;
  float amax = 0.0f;
  for (std::int64_t s = 0; s < x.length; ++s) {
    load_row(job.words(), x, s, transform_of(job, role, b, head, s), scratch.row);
    const float row = job.words().amax(scratch.row, x.channels);
    if (role == Role::v && std::isnan(row)) continue;  // flagged per token instead
    amax = formats::fold_amax(amax, row);
  }
  const std::int64_t heads = role == Role::q ? job.problem.heads_q : job.problem.heads_kv;
  job.arrays.head_amax[static_cast<int>(role)][b * heads + head] = amax;
}

void prepare_q(const Job& job, std::int64_t b, std::int64_t head, Scratch& scratch) {
  const Format format = job.config.recipe.qk;
  const Problem& p = job.problem;
  const std::int64_t unit = b * p.heads_q + head;
  if (format == Format::nvfp4 && !p.q_codes) {
    job.arrays.q_global[unit] = global_scale(job.arrays.head_amax[0][unit]);
  }
  if (!free_scale(format)) return;
  float* scale = job.arrays.q_scale + job.q_place(b, head, 0);
  if (!p.q_codes) {
    token_scales(job, Role::q, b, head, scratch, scale);
    return;
  }
  const GivenScale given = given_scale(job, Role::q);
  const std::int64_t length = job.arrays.sequences[b].q_length;
  for (std::int64_t i = 0; i < length; ++i) scale[i] = given.at(b, head, i, 0);
}

void prepare_k(const Job& job, std::int64_t b, std::int64_t head, Scratch& scratch) {
  const Config& c = job.config;
  const Sequence x = job.k_sequence(b, head);
  const int d = job.d();
  const std::int64_t slot = head * job.arrays.slots + job.arrays.sequences[b].slot;
  const std::int64_t end = (x.length + tile_keys - 1) / tile_keys * tile_keys;
  float* scale = job.arrays.k_scale + slot;
  if (!free_scale(c.recipe.qk)) {
    for (std::int64_t s = 0; s < x.length; ++s) scale[s] = 1.0f;
  } else if (job.problem.k_codes) {
    const GivenScale given = given_scale(job, Role::k);
    for (std::int64_t s = 0; s < x.length; ++s) {
      const Place at = place(x, b, s);
      scale[s] = given.at(at.outer, head, at.token, 0);
    }
  } else {
    token_scales(job, Role::k, b, head, scratch, scale);
  }
  for (std::int64_t s = x.length; s < end; ++s) scale[s] = 0.0f;
  for (std::int64_t s = 0; s < end; ++s) {
    const int lane = static_cast<int>(s % lanes);
    const std::int64_t panel = (slot + s - lane) * d;
    if (!c.integer_qk) {
      if (s < x.length) {
        k_row(job, x, b, head, s, scale[s], scratch);
      } else {
        std::memset(scratch.row, 0, sizeof(float) * static_cast<std::size_t>(d));
      }
      pack_k_floats(scratch.row, d, job.arrays.k_panels + panel, lane);
      continue;
    }
    if (s >= x.length) {
      std::memset(scratch.bytes, 0, static_cast<std::size_t>(d));
    } else if (job.problem.k_codes) {
      std::memcpy(scratch.bytes, x.row(s), static_cast<std::size_t>(d));
    } else {
      load_row(job.words(), x, s, transform_of(job, Role::k, b, head, s), scratch.row);
      scratch.saturated[1] += encode_row(job.words(), Format::s8, scratch.row, d,
                                         formats::reciprocal(scale[s]), scratch.bytes);
    }
    pack_k_codes(scratch.bytes, d, job.arrays.k_codes + panel, lane);
  }
}

void prepare_v(const Job& job, std::int64_t b, std::int64_t head, Scratch& scratch) {
  const Config& c = job.config;
  const Sequence x = job.v_sequence(b, head);
  const int dv = job.dv();
  const std::int64_t begin = job.arrays.sequences[b].slot;
  const Scaling& scaling = c.recipe.v_scale;
  const bool scaled = free_scale(c.recipe.v);
  const bool given = scaled && scale_view(job, Role::v).present();
  const bool token_form = scaled && !given && !per_channel(scaling);
  // K's scales of this head are done with; V's per-token scales live in v_scale or, for the float
  // engine and for per_head and per_tensor, in the thread's own array.
  if (token_form) {
    token_scales(job, Role::v, b, head, scratch, scratch.token_amax);
  } else if (scaled) {
    channel_scales(job, x, b, head, scratch);
  }
  const VScales scales{
      job, x, b, head, scratch, token_form, scratch.token_amax, given_scale(job, Role::v), given};
  for (std::int64_t first = 0; first < x.length; first += tile_keys) {
    const int count = static_cast<int>(std::min<std::int64_t>(tile_keys, x.length - first));
    const std::int64_t slot = begin + first;
    const std::int64_t place = head * job.arrays.slots + slot;
    std::uint8_t* bad = job.arrays.v_bad + place;
    std::memset(bad, 0, tile_keys);
    if (c.integer_pv) {
      std::memset(job.arrays.v_codes + place * dv, 0, static_cast<std::size_t>(tile_keys * dv));
      float* v_scale = job.arrays.v_scale;
      if (c.v_token_scale) {
        for (float* f : {v_scale, job.arrays.v_inverse, job.arrays.v_plain}) {
          std::memset(f + place, 0, sizeof(float) * tile_keys);
        }
      } else {
        std::memset(v_scale + place / c.v_block * dv, 0,
                    sizeof(float) * static_cast<std::size_t>(tile_keys / c.v_block * dv));
      }
    } else {
      std::memset(job.arrays.v_panels + place * dv, 0,
                  sizeof(float) * static_cast<std::size_t>(tile_keys * dv));
    }
    load_v_tile(job, x, b, head, first, count, scratch, bad);
    if (c.integer_pv) {
      pack_v_integer(job, scales, first, count, slot, bad, scratch);
    } else {
      pack_v_float(job, scales, first, count, slot, scratch);
    }
    std::uint8_t any = 0;
    for (int j = 0; j < count; ++j) any |= bad[j];
    job.arrays.v_bad_tile[place / tile_keys] = any;
  }
}

}  // namespace qattn::cpu
