// Rows to codes, and codes to the panels of a tile.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "formats/scale.hpp"
#include "kernels/attn_prefill/cpu.hpp"
#include "kernels/attn_prefill/cpu_operand.hpp"
#include "qattn/quantize.hpp"

namespace qattn::cpu {
namespace {

constexpr float nan_value = std::numeric_limits<float>::quiet_NaN();

/// Scale of one row of a float operand in a format with a free scale.
float row_scale(const Job& job, Role role, const Sequence& x, std::int64_t b, std::int64_t head,
                std::int64_t token, const float* row) {
  const float qmax = code_max(job.config.recipe.qk);
  if (scale_view(job.problem, role).present()) {  // static; it must not hide a bad row
    if (std::isnan(job.words().amax(row, x.channels))) return nan_value;
    return given_scale(job, role, x, b, head, token, 0);
  }
  if (needs_scale_pass(job.problem, job.config, role)) {
    return role == Role::q ? job.arrays.q_scale[job.q_place(b, head, token)]
                           : job.arrays.k_scale[job.k_place(b, head, token)];
  }
  return formats::amax_scale(job.words().amax(row, x.channels), qmax);
}

std::uint16_t upper_half(float x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return static_cast<std::uint16_t>(bits >> 16);
}

// --- K -----------------------------------------------------------------------------------------

/// One key into its panel of 16: packs of four codes, two bf16 or one float, 16 keys apart.
void put_key(Engine engine, const float* row, const std::uint8_t* codes, int d, int key,
             std::byte* panels) {
  const int lane = key % lanes;
  if (engine == Engine::integer) {
    auto* panel = reinterpret_cast<std::uint8_t*>(panels) + (key - lane) * d + lane * 4;
    for (int t = 0; t < d; t += 4) {
      std::uint32_t pack;
      std::memcpy(&pack, codes + t, sizeof pack);
      pack ^= 0x80808080u;  // s8 to code + 128
      std::memcpy(panel + t * lanes, &pack, sizeof pack);
    }
  } else if (engine == Engine::bf16) {
    auto* panel = reinterpret_cast<std::uint16_t*>(panels) + (key - lane) * d + lane * 2;
    for (int t = 0; t < d; t += 2) {
      panel[t * lanes] = upper_half(row[t]);
      panel[t * lanes + 1] = upper_half(row[t + 1]);
    }
  } else {
    auto* panel = reinterpret_cast<float*>(panels) + (key - lane) * d + lane;
    for (int t = 0; t < d; ++t) panel[t * lanes] = row[t];
  }
}

void pack_keys(const Job& job, std::int64_t b, std::int64_t head, std::int64_t first,
               const Tile& tile, Scratch& scratch) {
  const Sequence x = job.k_sequence(b, head);
  const int d = job.d();
  const int count = static_cast<int>(std::min<std::int64_t>(tile_keys, x.length - first));
  auto* panels = tile.at<std::byte>(&TileLayout::k);
  auto* scale = tile.at<float>(&TileLayout::k_scale);
  for (int j = 0; j < padded(count); ++j) {
    if (j < count) {
      scale[j] =
          quantized_row(job, Role::k, x, b, head, first + j, scratch, scratch.row, scratch.bytes);
    } else {  // up to whole panels: codes 0, masked later
      scale[j] = 0.0f;
      std::memset(scratch.row, 0, sizeof(float) * static_cast<std::size_t>(padded(d)));
      std::memset(scratch.bytes, 0, static_cast<std::size_t>(d));
    }
    put_key(job.config.qk, scratch.row, scratch.bytes, d, j, panels);
  }
}

// --- V -----------------------------------------------------------------------------------------

/// Loads a tile of V into scratch.rows ([tile_keys][dv padded]): transformed floats, or the values
/// of given codes without their free scale. Rows that hold NaN or Inf become zeros and are flagged:
/// the tile loop turns every query that can see such a token into NaN and nobody else.
void load_values(const Job& job, const Sequence& x, std::int64_t b, std::int64_t head,
                 std::int64_t first, int count, const Tile& tile, Scratch& scratch) {
  const int dv = job.dv();
  const Format format = job.config.recipe.v;
  auto* bad = tile.at<std::uint8_t>(&TileLayout::v_bad);
  std::uint8_t any = 0;
  for (int j = 0; j < count; ++j) {
    float* row = scratch.rows + j * dv;
    if (!job.problem.v_codes) {
      load_row(job.words(), x, first + j, transform_of(job, Role::v, b, head, first + j), row);
      if (!free_scale(format) && !grouped(format)) round_row(format, row, x.channels);
    } else {
      for (int i = x.channels; i < dv; ++i) row[i] = 0.0f;
      if (grouped(format)) {
        decode_grouped_row(job, Role::v, x, b, head, first + j, row);
      } else {
        decode_row(format, reinterpret_cast<const std::uint8_t*>(x.row(first + j)), x.channels,
                   row);
      }
    }
    bad[j] = std::isnan(job.words().amax(row, x.channels));
    any |= bad[j];
    if (bad[j]) std::memset(row, 0, sizeof(float) * static_cast<std::size_t>(dv));
  }
  *tile.at<std::uint8_t>(&TileLayout::any_bad) = any;
}

/// Scales per channel of the sub-blocks of a tile: given, from the pass over the sequence, of the
/// head, or from the sub-block itself.
void channel_scales(const Job& job, const Sequence& x, std::int64_t b, std::int64_t head,
                    std::int64_t first, int count, const Tile& tile, const Scratch& scratch) {
  const Config& c = job.config;
  const int dv = job.dv();
  const float qmax = code_max(c.recipe.v);
  const Granularity g = c.recipe.v_scale.granularity;
  for (int j0 = 0; j0 < count; j0 += c.v_block) {
    float* scale = tile.at<float>(&TileLayout::v_scale) + j0 / c.v_block * dv;
    if (grouped(c.recipe.v)) {  // nvfp4: the second level, the same for every channel
      const float global = job.problem.v_codes ? given_global(job, Role::v, x, b, head, first + j0)
                                               : head_scale(job, Role::v, b, head);
      std::fill(scale, scale + dv, global);
    } else if (scale_view(job.problem, Role::v).present()) {
      for (int i = 0; i < dv; ++i) {
        scale[i] = i < x.channels ? given_scale(job, Role::v, x, b, head, first + j0, i) : 0.0f;
      }
    } else if (needs_scale_pass(job.problem, c, Role::v)) {
      const std::int64_t row = head * job.arrays.v_groups + v_group_base(job, b) +
                               scale_index(c.recipe.v_scale, Role::v, first + j0);
      std::memcpy(scale, job.arrays.v_channel + row * dv,
                  sizeof(float) * static_cast<std::size_t>(dv));
    } else if (g == Granularity::per_head || g == Granularity::per_tensor) {
      std::fill(scale, scale + dv, head_scale(job, Role::v, b, head));
    } else {
      std::fill(scale, scale + dv, 0.0f);
      for (int j = j0; j < std::min(count, j0 + c.v_block); ++j) {
        job.words().accumulate_amax(scratch.rows + j * dv, dv, scale);
      }
      for (int i = 0; i < dv; ++i) scale[i] = formats::amax_scale(scale[i], qmax);
    }
  }
}

/// One scale per token, given or from its row. A flagged row counts as zeros.
float token_scale(const Job& job, const Sequence& x, std::int64_t b, std::int64_t head,
                  std::int64_t token, const float* row) {
  if (scale_view(job.problem, Role::v).present()) {
    return given_scale(job, Role::v, x, b, head, token, 0);
  }
  return formats::amax_scale(job.words().amax(row, x.channels), code_max(job.config.recipe.v));
}

/// What P and its normaliser need of the scales per token (docs/NUMERICS.md, "The normaliser").
void put_token_scales(const float* scale, int count, const Tile& tile) {
  auto* log = tile.at<float>(&TileLayout::v_log);
  auto* inverse = tile.at<float>(&TileLayout::v_inverse);
  auto* plain = tile.at<float>(&TileLayout::v_plain);
  // Below 2^-90 a scale could overflow the sums; such values of V are zeros for all purposes.
  constexpr float smallest = 0x1p-90f;
  float top = 0.0f;
  for (int j = 0; j < count; ++j) top = std::max(top, scale[j]);
  const float least = std::max(top * (1.0f / 64.0f), smallest);
  std::uint8_t any = 0;
  for (int j = 0; j < tile_keys; ++j) {
    const bool small = j < count && scale[j] < least;
    log[j] = j < count ? std::log(std::max(scale[j], smallest)) : 0.0f;
    inverse[j] = j < count && !small ? 1.0f / scale[j] : 0.0f;
    plain[j] = small ? 1.0f : 0.0f;
    any |= small;
  }
  *tile.at<std::uint8_t>(&TileLayout::any_plain) = any;
}

/// Quantises one row of scratch.rows in place (free scales), leaving code values; `inverse` holds
/// 1 / scale of every channel.
void encode_values(const Job& job, float* row, int channels, const float* inverse,
                   Scratch& scratch) {
  std::uint8_t* codes = scratch.bytes;
  if (job.config.recipe.v == Format::s8) {
    scratch.saturated[2] += job.words().encode_s8_channels(row, channels, inverse,
                                                           reinterpret_cast<std::int8_t*>(codes));
  } else {
    for (int i = 0; i < channels; ++i) row[i] *= inverse[i];
    scratch.saturated[2] +=
        encode_row(job.words(), job.config.recipe.v, row, channels, 1.0f, codes);
  }
  decode_row(job.config.recipe.v, codes, channels, row);
}

/// Groups along the keys (mxfp8, mxfp4, nvfp4), in place.
void encode_groups_of_tile(const Job& job, std::int64_t b, std::int64_t head, int count,
                           Scratch& scratch) {
  const Format format = job.config.recipe.v;
  const int dv = job.dv(), group = info(format).group;
  const float global = format == Format::nvfp4 ? head_scale(job, Role::v, b, head) : 1.0f;
  for (int i = 0; i < job.problem.dv; ++i) {
    float column[tile_keys];
    std::uint8_t codes[tile_keys], scales[tile_keys / 16];
    for (int j = 0; j < count; ++j) column[j] = scratch.rows[j * dv + i];
    encode_groups(format, column, count, global, codes, scales);
    for (int j = 0; j < count; ++j) {
      scratch.rows[j * dv + i] = decode_group_code(format, codes[j], scales[j / group], 1.0f);
    }
  }
}

/// scratch.rows, which hold what the panels shall hold, into the panels of the P V engine.
void put_values(const Job& job, int count, const Tile& tile, const Scratch& scratch) {
  const int dv = job.dv();
  const int keys = padded(count);
  const auto value = [&](int j, int i) { return j < count ? scratch.rows[j * dv + i] : 0.0f; };
  if (job.config.pv == Engine::integer) {
    auto* panel = tile.at<std::int8_t>(&TileLayout::v);
    for (int j = 0; j < keys; j += 4) {
      for (int i = 0; i < dv; ++i) {
        for (int n = 0; n < 4; ++n) {
          panel[j * dv + i * 4 + n] = static_cast<std::int8_t>(value(j + n, i));
        }
      }
    }
  } else if (job.config.pv == Engine::bf16) {
    auto* panel = tile.at<std::uint16_t>(&TileLayout::v);
    for (int j = 0; j < keys; j += 2) {
      for (int i = 0; i < dv; ++i) {
        panel[j * dv + i * 2] = upper_half(value(j, i));
        panel[j * dv + i * 2 + 1] = upper_half(value(j + 1, i));
      }
    }
  } else {
    auto* panel = tile.at<float>(&TileLayout::v);
    const auto bytes = [&](int n) { return sizeof(float) * static_cast<std::size_t>(n * dv); };
    std::memcpy(panel, scratch.rows, bytes(count));
    std::memset(panel + count * dv, 0, bytes(keys - count));
  }
}

void pack_values(const Job& job, std::int64_t b, std::int64_t head, std::int64_t first,
                 const Tile& tile, Scratch& scratch) {
  const Config& c = job.config;
  const Sequence x = job.v_sequence(b, head);
  const int dv = job.dv(), channels = x.channels;
  const int count = static_cast<int>(std::min<std::int64_t>(tile_keys, x.length - first));
  load_values(job, x, b, head, first, count, tile, scratch);
  if (c.v_channel_scale) channel_scales(job, x, b, head, first, count, tile, scratch);
  if (grouped(c.recipe.v)) {
    if (!job.problem.v_codes) encode_groups_of_tile(job, b, head, count, scratch);
  } else if (free_scale(c.recipe.v)) {
    float inverse[256] = {}, scale[tile_keys];
    for (int j = 0; j < count; ++j) {
      float* row = scratch.rows + j * dv;
      const float* by_channel = tile.at<float>(&TileLayout::v_scale) + j / c.v_block * dv;
      if (!c.v_channel_scale) scale[j] = token_scale(job, x, b, head, first + j, row);
      if (!job.problem.v_codes) {
        if (!c.v_channel_scale) {
          std::fill(inverse, inverse + channels, formats::reciprocal(scale[j]));
        } else if (j % c.v_block == 0) {
          for (int i = 0; i < channels; ++i) inverse[i] = formats::reciprocal(by_channel[i]);
        }
        encode_values(job, row, channels, inverse, scratch);
      }
      // Scales per token join P in the integer engine, and the values in the float engines.
      for (int i = 0; !c.v_channel_scale && !c.v_token_scale && i < channels; ++i)
        row[i] *= scale[j];
    }
    if (c.v_token_scale) put_token_scales(scale, count, tile);
  }
  put_values(job, count, tile, scratch);
}

}  // namespace

float quantized_row(const Job& job, Role role, const Sequence& x, std::int64_t b, std::int64_t head,
                    std::int64_t token, Scratch& scratch, float* row, std::uint8_t* codes) {
  const Format format = job.config.recipe.qk;
  const int d = x.channels;
  const bool integer = job.config.qk == Engine::integer;
  if (has_codes(job.problem, role)) {
    for (int i = d; i < padded(d); ++i) row[i] = 0.0f;
    if (grouped(format)) {
      decode_grouped_row(job, role, x, b, head, token, row);
      return given_global(job, role, x, b, head, token);
    }
    std::memcpy(codes, x.row(token), static_cast<std::size_t>(d));
    decode_row(format, codes, d, row);
    return given_scale(job, role, x, b, head, token, 0);
  }
  load_row(job.words(), x, token, transform_of(job, role, b, head, token), row);
  if (free_scale(format)) {
    const float scale = row_scale(job, role, x, b, head, token, row);
    const int clipped = encode_row(job.words(), format, row, d, formats::reciprocal(scale), codes);
    scratch.saturated[static_cast<int>(role)] += clipped;
    if (!integer) decode_row(format, codes, d, row);
    return scale;
  }
  if (!grouped(format)) {
    round_row(format, row, d);
    return 1.0f;
  }
  const float global = format == Format::nvfp4 ? head_scale(job, role, b, head) : 1.0f;
  std::uint8_t scales[32];
  encode_groups(format, row, d, global, codes, scales);
  for (int i = 0; i < d; ++i) {
    row[i] = decode_group_code(format, codes[i], scales[i / info(format).group], 1.0f);
  }
  return global;
}

void pack_tile(const Job& job, std::int64_t b, std::int64_t head, std::int64_t first,
               const Tile& tile, Scratch& scratch) {
  pack_keys(job, b, head, first, tile, scratch);
  pack_values(job, b, head, first, tile, scratch);
}

}  // namespace qattn::cpu
