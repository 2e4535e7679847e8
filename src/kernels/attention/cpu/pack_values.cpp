// V's tiles: values or codes, their scales, and the panels that products read (pack.cpp).
#include <algorithm>
#include <cmath>
#include <cstring>

#include "formats/scale.hpp"
#include "kernels/attention/cpu/pack.hpp"
#include "qattn/quantize.hpp"

namespace qattn::cpu {

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
      if (!free_scale(format) && !grouped(format)) round_row(job.words(), format, row, x.channels);
    } else {
      for (int i = x.channels; i < dv; ++i) row[i] = 0.0f;
      if (grouped(format)) {
        decode_grouped_row(job, Role::v, x, b, head, first + j, row);
      } else {
        decode_given_row(x, first + j, row);
      }
    }
    bad[j] = !std::isfinite(job.words().amax(row, x.channels));
    any |= bad[j];
    if (bad[j]) std::memset(row, 0, sizeof(float) * static_cast<std::size_t>(dv));
  }
  *tile.at<std::uint8_t>(&TileLayout::any_bad) = any;
}

namespace {

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
      const float* from = job.arrays.v_channel + row * dv;
      std::copy(from, from + dv, scale);
    } else if (g == Granularity::per_head || g == Granularity::per_tensor) {
      std::fill(scale, scale + dv, head_scale(job, Role::v, b, head));
    } else {
      std::fill(scale, scale + dv, 0.0f);
      const int end = std::min(count, j0 + c.v_block);
      const bool shared = some_share(x, first + j0, first + end);
      for (int j = j0; j < end; ++j) {
        if (shared && !x.shares(first + j)) continue;
        job.words().accumulate_amax(scratch.rows + j * dv, dv, scale);
      }
      for (int i = 0; i < dv; ++i) scale[i] = formats::amax_scale(scale[i], qmax);
    }
  }
  // Products come in steps of 16 keys: blocks behind the last key are multiplied by codes of 0.
  float* scales = tile.at<float>(&TileLayout::v_scale);
  const auto blocks = [&c](int keys) { return (keys + c.v_block - 1) / c.v_block; };
  std::fill(scales + blocks(count) * dv, scales + blocks(padded(count)) * dv, 0.0f);
}

/// One scale per token, given or from its row (flagged rows are zeros by now).
void token_scales(const Job& job, const Sequence& x, std::int64_t b, std::int64_t head,
                  std::int64_t first, int count, const Scratch& scratch, float* scale) {
  if (scale_view(job.problem, Role::v).present()) {
    given_token_scales(job, Role::v, x, b, head, first, count, scale);
    return;
  }
  const float qmax = code_max(job.config.recipe.v);
  for (int j = 0; j < count; ++j) {
    scale[j] = job.words().amax(scratch.rows + j * job.dv(), x.channels);
  }
  if (joins_groups(job.config.recipe.v_scale, Role::v)) {
    float own[tile_keys];
    for (int j = 0; j < count; ++j) {
      own[j] = scale[j];
      if (!x.shares(first + j)) scale[j] = 0.0f;
    }
    join_amax(scale, count);
    for (int j = 0; j < count; ++j) {
      if (!x.shares(first + j)) scale[j] = own[j];
    }
  }
  for (int j = 0; j < count; ++j) scale[j] = formats::amax_scale(scale[j], qmax);
}

void put_token_scales(const Job& job, const float* scale, int count, const Tile& tile) {
  job.words().token_scale_tables(scale, count, tile.at<float>(&TileLayout::v_log),
                                 tile.at<float>(&TileLayout::v_inverse));
}

/// Codes of one float row of V under 1 / scale per channel.
void encode_values(const Job& job, float* row, int channels, const float* inverse, Scratch& scratch,
                   std::uint8_t* codes) {
  if (job.config.recipe.v == Format::s8) {
    scratch.saturated[2] += job.words().encode_s8_channels(row, channels, inverse,
                                                           reinterpret_cast<std::int8_t*>(codes));
    return;
  }
  for (int i = 0; i < channels; ++i) row[i] *= inverse[i];
  scratch.saturated[2] += encode_row(job.words(), job.config.recipe.v, row, channels, 1.0f, codes);
  decode_row(job.config.recipe.v, codes, channels, row);
}

/// Free scales: finds them and leaves codes in scratch.bytes (integer engine, [tile_keys][dv]) or
/// what the codes stand for in scratch.rows.
void scale_values(const Job& job, const Sequence& x, std::int64_t b, std::int64_t head,
                  std::int64_t first, int count, const Tile& tile, Scratch& scratch) {
  const Config& c = job.config;
  const int dv = job.dv();
  const bool by_token = !c.v_channel_scale;
  float inverse[most_value_channels], scale[tile_keys];
  std::fill(inverse, inverse + dv, 0.0f);
  if (by_token) token_scales(job, x, b, head, first, count, scratch, scale);
  for (int j = 0; j < count; ++j) {
    float* row = scratch.rows + j * dv;
    const float* by_channel = tile.at<float>(&TileLayout::v_scale) + j / c.v_block * dv;
    if (!job.problem.v_codes) {
      if (by_token) {
        std::fill(inverse, inverse + x.channels, formats::reciprocal(scale[j]));
      } else if (j % c.v_block == 0) {
        for (int i = 0; i < x.channels; ++i) inverse[i] = formats::reciprocal(by_channel[i]);
      }
      const bool integer = c.pv == Engine::integer;
      encode_values(job, row, x.channels, inverse, scratch,
                    integer ? scratch.bytes + j * dv : scratch.codes_row);
    }
    // Scales per token join P in the integer engine, and the values in the float engines.
    for (int i = 0; by_token && !c.v_token_scale && i < x.channels; ++i) row[i] *= scale[j];
  }
  if (!c.v_token_scale) return;
  // A bad or hidden token's zeros must not make the tile a special one: nobody finite sees it.
  const auto* bad = tile.at<std::uint8_t>(&TileLayout::v_bad);
  const float top = *std::max_element(scale, scale + count);
  for (int j = 0; j < count; ++j) {
    if (bad[j] != 0 || x.hidden(first + j)) scale[j] = top;
  }
  put_token_scales(job, scale, count, tile);
}

/// Tokens in floats as codes in scratch.bytes, each under a scale of its own (load_values(),
/// scale_values()).
void code_values(const Job& job, const Sequence& x, std::int64_t b, std::int64_t head,
                 std::int64_t first, int count, const Tile& tile, Scratch& scratch) {
  float scale[tile_keys];
  auto* bad = tile.at<std::uint8_t>(&TileLayout::v_bad);
  std::uint8_t any = 0;
  code_rows(job, Role::v, x, b, head, first, count, {scratch.bytes, job.dv(), scale});
  float top = formats::kMinNormal;
  for (int j = 0; j < count; ++j) {
    bad[j] = std::isnan(scale[j]) ? 1 : 0;
    any |= bad[j];
    if (bad[j] == 0) top = std::max(top, scale[j]);
  }
  for (int j = 0; any != 0 && j < count; ++j) {
    if (bad[j] != 0) scale[j] = top;
  }
  *tile.at<std::uint8_t>(&TileLayout::any_bad) = any;
  put_token_scales(job, scale, count, tile);
}

/// Values of tokens [first, first + n) of one channel that have no part in their scale go no
/// further than those that have one.
void limit_to_shared(const Sequence& x, std::int64_t first, int n, float* column) {
  if (x.seen == nullptr || !some_share(x, first, first + n)) return;
  float most = 0.0f;
  for (int j = 0; j < n; ++j) {
    if (x.shares(first + j)) most = std::max(most, std::abs(column[j]));
  }
  for (int j = 0; j < n; ++j) column[j] = std::clamp(column[j], -most, most);
}

/// Groups along the keys (mxfp8, mxfp4, nvfp4), in place.
void encode_groups_of_tile(const Job& job, const Sequence& x, std::int64_t b, std::int64_t head,
                           std::int64_t first, int count, Scratch& scratch) {
  const Format format = job.config.recipe.v;
  const int dv = job.dv(), group = info(format).group;
  const float global = format == Format::nvfp4 ? head_scale(job, Role::v, b, head) : 1.0f;
  for (int i = 0; i < job.problem.dv; ++i) {
    float column[tile_keys];
    std::uint8_t codes[tile_keys], scales[tile_keys / 16];
    for (int j = 0; j < count; ++j) column[j] = scratch.rows[j * dv + i];
    for (int j = 0; j < count; j += group) {
      limit_to_shared(x, first + j, std::min(group, count - j), column + j);
    }
    encode_groups(format, column, count, global, codes, scales);
    for (int j = 0; j < count; ++j) {
      scratch.rows[j * dv + i] = decode_group_code(format, codes[j], scales[j / group], 1.0f);
    }
  }
}

/// Integer panels [keys / 4][dv][4] of `count` rows of codes. Rows are padded to dv channels.
template <class RowOf>
void put_integer_values(const Job& job, int count, const Tile& tile, RowOf row_of) {
  static constexpr std::uint8_t zeros[most_value_channels] = {};
  const int dv = job.dv();
  for (int j = 0; j < padded(count); j += 4) {
    const std::uint8_t* rows[4];
    for (int n = 0; n < 4; ++n) rows[n] = j + n < count ? row_of(j + n) : zeros;
    job.words().interleave_bytes(rows, dv, tile.at<std::uint8_t>(&TileLayout::v) + j * dv);
  }
}

/// Fused tiles take P in steps of 32 keys: behind the last one there must be no NaN.
int filled_keys(int count) { return (count + 31) / 32 * 32; }

/// Rows low and high of n bf16 side by side: [n][2].
void interleave_halves(const std::uint16_t* low, const std::uint16_t* high, int n,
                       std::uint16_t* panel) {
  for (int i = 0; i < n; ++i) {
    panel[2 * i] = low[i];
    panel[2 * i + 1] = high[i];
  }
}

/// Tokens as they lie into panels of their format; bad ones become zeros and are flagged
/// (load_values()).
void put_values_as_they_lie(const Job& job, const Sequence& x, std::int64_t first, int count,
                            int dv, const Tile& tile) {
  alignas(64) static constexpr std::byte zeros[most_value_channels * 4] = {};
  auto* bad = tile.at<std::uint8_t>(&TileLayout::v_bad);
  *tile.at<std::uint8_t>(&TileLayout::any_bad) = find_bad_rows(job, x, first, count, bad);
  const auto row_of = [&](int j) { return j >= count || bad[j] != 0 ? zeros : x.row(first + j); };
  if (x.format == Format::f32) {
    const auto bytes = sizeof(float) * static_cast<std::size_t>(dv);
    for (int j = 0; j < padded(count); ++j) {
      std::memcpy(tile.at<float>(&TileLayout::v) + j * dv, row_of(j), bytes);
    }
    return;
  }
  const auto half_row = [&](int j) { return reinterpret_cast<const std::uint16_t*>(row_of(j)); };
  auto* panel = tile.at<std::uint16_t>(&TileLayout::v);
  for (int j = 0; j < filled_keys(count); j += 2) {
    interleave_halves(half_row(j), half_row(j + 1), dv, panel + j * dv);
  }
}

/// scratch.rows of `filled` keys into panels of sums of bf16 values.
void put_split_values(const Job& job, int filled, const Tile& tile, const Scratch& scratch) {
  const int dv = job.dv();
  std::uint16_t low[2 * most_value_channels], high[2 * most_value_channels];
  for (int j = 0; j < filled; j += 2) {
    job.words().split_bf16(scratch.rows + j * dv, dv, dv, low);
    job.words().split_bf16(scratch.rows + (j + 1) * dv, dv, dv, high);
    for (int part = 0; part < 2; ++part) {
      interleave_halves(low + part * dv, high + part * dv, dv,
                        tile.at<std::uint16_t>(&TileLayout::v) + (part * tile_keys + j) * dv);
    }
  }
}

/// scratch.rows into the panels of a float engine: [keys / 2][dv][2] bf16, or [keys][dv] f32.
void put_float_values(const Job& job, int count, const Tile& tile, Scratch& scratch) {
  const int dv = job.dv();
  const int filled = filled_keys(count);
  std::fill(scratch.rows + count * dv, scratch.rows + filled * dv, 0.0f);
  if (job.config.pv == Engine::f32) {
    std::copy(scratch.rows, scratch.rows + padded(count) * dv, tile.at<float>(&TileLayout::v));
    return;
  }
  if (is_split(job.config.pv)) return put_split_values(job, filled, tile, scratch);
  auto* panel = tile.at<std::uint16_t>(&TileLayout::v);
  std::uint16_t low[most_value_channels], high[most_value_channels];
  for (int j = 0; j < filled; j += 2) {
    job.words().narrow_bf16(scratch.rows + j * dv, dv, low);
    job.words().narrow_bf16(scratch.rows + (j + 1) * dv, dv, high);
    interleave_halves(low, high, dv, panel + j * dv);
  }
}

/// The codes as a cache holds them: straight from memory to the panels.
void pack_given_codes(const Job& job, const Sequence& x, std::int64_t first, int count,
                      const Tile& tile, Scratch& scratch) {
  const int dv = job.dv();
  put_integer_values(job, count, tile,
                     [&](int j) { return filled_codes(x, first + j, dv, scratch.bytes + j * dv); });
}

}  // namespace

void given_value_scales(const Job& job, const Sequence& x, std::int64_t b, std::int64_t head,
                        std::int64_t first, int count, const Tile& tile, Scratch& scratch) {
  if (job.config.v_token_scale) {
    float scale[tile_keys];
    given_token_scales(job, Role::v, x, b, head, first, count, scale);
    put_token_scales(job, scale, count, tile);
  } else {
    channel_scales(job, x, b, head, first, count, tile, scratch);
  }
  *tile.at<std::uint8_t>(&TileLayout::any_bad) = 0;
  std::memset(tile.at<std::uint8_t>(&TileLayout::v_bad), 0, tile_keys);
}

void pack_values(const Job& job, std::int64_t b, std::int64_t head, std::int64_t first,
                 const Tile& tile, Scratch& scratch) {
  const Config& c = job.config;
  const Sequence x = job.v_sequence(b, head);
  const int dv = job.dv(), count = tile_count(x, first);
  if (job.problem.v_codes && c.pv == Engine::integer) {
    given_value_scales(job, x, b, head, first, count, tile, scratch);
    pack_given_codes(job, x, first, count, tile, scratch);
    return;
  }
  if (count > 0 && as_it_lies(job, Role::v, x, b, head, dv)) {
    put_values_as_they_lie(job, x, first, count, dv, tile);
    return;
  }
  if (count > 0 && coded_at_once(job, Role::v, x)) {
    code_values(job, x, b, head, first, count, tile, scratch);
    put_integer_values(job, count, tile, [&](int j) { return scratch.bytes + j * dv; });
    return;
  }
  load_values(job, x, b, head, first, count, tile, scratch);
  if (c.v_channel_scale) channel_scales(job, x, b, head, first, count, tile, scratch);
  if (grouped(c.recipe.v)) {
    if (!job.problem.v_codes) encode_groups_of_tile(job, x, b, head, first, count, scratch);
  } else if (free_scale(c.recipe.v)) {
    scale_values(job, x, b, head, first, count, tile, scratch);
  }
  if (c.pv == Engine::integer) {
    put_integer_values(job, count, tile, [&](int j) { return scratch.bytes + j * dv; });
  } else {
    put_float_values(job, count, tile, scratch);
  }
}

}  // namespace qattn::cpu
