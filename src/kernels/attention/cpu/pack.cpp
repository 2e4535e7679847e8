// Rows to codes, and codes to the panels of a tile.
//
// A panel puts four bytes of the contraction of sixteen columns side by side, whatever the engine:
// four codes, two bf16 values or one float. K's panels are rows of four-byte packs transposed; V's
// contraction runs over keys, so four (integer) or two (bf16) rows are interleaved.
#include "kernels/attention/cpu/pack.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "formats/scale.hpp"
#include "qattn/quantize.hpp"

namespace qattn::cpu {

int tile_count(const Sequence& x, std::int64_t first) {
  return static_cast<int>(std::min<std::int64_t>(tile_keys, x.length - first));
}

void decode_given_row(const Sequence& x, std::int64_t token, float* row) {
  decode_row(x.format, reinterpret_cast<const std::uint8_t*>(x.row(token)), x.channels, row);
  if (x.format != Format::e5m2) return;
  for (int i = 0; i < x.channels; ++i) row[i] += row[i] - row[i];
}

void given_token_scales(const Job& job, Role role, const Sequence& x, std::int64_t b,
                        std::int64_t head, std::int64_t first, int count, float* scale) {
  const Scaling& scaling = scaling_of(job.config, role);
  if (scaled_by_token(scaling, role) && x.pages == nullptr) {
    const TensorView& view = scale_view(job.problem, role);
    const std::int64_t at = scale_map(job, role).offset(view, b, head, first, 0);
    const float* from = static_cast<const float*>(view.data) + at;
    if (view.stride[2] == 1) {
      std::copy(from, from + count, scale);
      return;
    }
    for (int j = 0; j < count; ++j) scale[j] = from[j * view.stride[2]];
    return;
  }
  for (int j = 0; j < count; ++j) scale[j] = given_scale(job, role, x, b, head, first + j, 0);
}

const std::uint8_t* filled_codes(const Sequence& x, std::int64_t token, int width,
                                 std::uint8_t* memory) {
  const auto* row = reinterpret_cast<const std::uint8_t*>(x.row(token));
  if (x.channels == width) return row;
  std::memcpy(memory, row, static_cast<std::size_t>(x.channels));
  std::memset(memory + x.channels, 0, static_cast<std::size_t>(width - x.channels));
  return memory;
}

bool as_it_lies(const Job& job, Role role, const Sequence& x, std::int64_t b, std::int64_t head,
                int width) {
  const Engine engine = role == Role::v ? job.config.pv : job.config.qk;
  if (is_split(engine)) return false;
  const Format native = engine == Engine::bf16 ? Format::bf16 : Format::f32;
  const Transform t = transform_of(job, role, b, head, 0);
  return engine != Engine::integer && format_of(job.config, role) == native && x.format == native &&
         x.channels == width && x.seen == nullptr && t.mean == nullptr && t.factors == nullptr &&
         !t.rotate;
}

std::uint8_t find_bad_rows(const Job& job, const Sequence& x, std::int64_t first, int count,
                           std::uint8_t* bad) {
  const void* rows[tile_keys];
  for (int j = 0; j < count; ++j) rows[j] = x.row(first + j);
  const Element element = element_of(x.format);
  std::fill(bad, bad + count, std::uint8_t{0});
  if (job.words().finite_rows({rows, element}, count, x.channels)) return 0;
  std::uint8_t any = 0;
  for (int j = 0; j < count; ++j) {
    bad[j] = job.words().finite_rows({rows + j, element}, 1, x.channels) ? 0 : 1;
    any |= bad[j];
  }
  return any;
}

bool coded_at_once(const Job& job, Role role, const Sequence& x) {
  const Config& c = job.config;
  const Scaling scaling = scaling_of(c, role);
  const Engine engine = role == Role::v ? c.pv : c.qk;
  const bool plain = role == Role::v   ? c.v_token_scale
                     : role == Role::q ? !c.rotate && !c.smooth_q
                                       : !c.rotate;
  return plain && engine == Engine::integer && format_of(c, role) == Format::s8 &&
         scaling.granularity == Granularity::per_token && is_float(x.format) && x.seen == nullptr &&
         !scale_view(job.problem, role).present() && !job.problem.tensors.saturated.present();
}

void code_rows(const Job& job, Role role, const Sequence& x, std::int64_t b, std::int64_t head,
               std::int64_t first, int count, const CodedRows& to) {
  const void* rows[tile_keys];
  for (int j = 0; j < count; ++j) rows[j] = x.row(first + j);
  const Transform t = transform_of(job, role, b, head, first);
  job.words().rows_to_codes({{rows, element_of(x.format)},
                             count,
                             x.channels,
                             t.mean,
                             t.factors,
                             reinterpret_cast<std::int8_t*>(to.codes),
                             to.stride,
                             to.scale,
                             to.sum});
}

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
    // The shared scale knows of every bad row but of one that has no part in it.
    if (!x.shares(token) && std::isnan(job.words().amax(row, x.channels))) return nan_value;
    return role == Role::q ? job.arrays.q_scale[job.q_place(b, head, token)]
                           : job.arrays.k_scale[job.k_place(b, head, token)];
  }
  return formats::amax_scale(job.words().amax(row, x.channels), qmax);
}

// --- K -----------------------------------------------------------------------------------------

void pack_keys(const Job& job, std::int64_t b, std::int64_t head, std::int64_t first,
               const Tile& tile, Scratch& scratch) {
  static constexpr std::uint8_t zeros[most_key_channels * 4] = {};
  const Sequence x = job.k_sequence(b, head);
  const int d = job.d(), count = tile_count(x, first);
  const Engine engine = job.config.qk;
  const int lane_bytes = 4 * row_width(job.problem);
  const int width = d * bytes_of(engine);
  auto* scale = tile.at<float>(&TileLayout::k_scale);
  const bool as_given = job.problem.k_codes && engine == Engine::integer;
  const bool as_lies = count > 0 && as_it_lies(job, Role::k, x, b, head, d);
  const bool at_once = coded_at_once(job, Role::k, x);
  if (as_given) given_token_scales(job, Role::k, x, b, head, first, count, scale);
  std::uint8_t bad[tile_keys];
  if (as_lies) find_bad_rows(job, x, first, count, bad);
  std::fill(scale + count, scale + tile_keys, 0.0f);
  for (int j0 = 0; j0 < padded(count); j0 += lanes) {
    const std::uint8_t* rows[lanes];
    if (at_once) {
      code_rows(job, Role::k, x, b, head, first + j0, std::min(lanes, count - j0),
                {scratch.bytes, lane_bytes, scale + j0});
    }
    for (int lane = 0; lane < lanes; ++lane) {
      const int j = j0 + lane;
      rows[lane] = zeros;  // up to whole panels: codes 0, masked later
      if (j >= count) continue;
      if (as_given) {
        rows[lane] = filled_codes(x, first + j, d, scratch.bytes + lane * lane_bytes);
      } else if (at_once) {
        rows[lane] = scratch.bytes + lane * lane_bytes;
      } else if (as_lies) {
        rows[lane] = reinterpret_cast<const std::uint8_t*>(x.row(first + j));
        scale[j] = bad[j] != 0 ? nan_value : 1.0f;
      } else {
        std::uint8_t* bytes = scratch.bytes + lane * lane_bytes;
        float* values = engine == Engine::f32 ? reinterpret_cast<float*>(bytes) : scratch.row;
        std::uint8_t* codes = engine == Engine::integer ? bytes : scratch.codes_row;
        scale[j] = quantized_row(job, Role::k, x, b, head, first + j, scratch, values, codes);
        // A bad key of the float engines: its scale says so, as an integer key's does.
        if (engine != Engine::integer && std::isnan(job.words().amax(values, d))) {
          scale[j] = nan_value;
        }
        if (engine == Engine::bf16) {
          job.words().narrow_bf16(values, d, reinterpret_cast<std::uint16_t*>(bytes));
        } else if (is_split(engine)) {
          job.words().split_bf16(values, d, d, reinterpret_cast<std::uint16_t*>(bytes));
        }
        rows[lane] = bytes;
      }
    }
    // Integer panels hold code + 128: the sign bits flip.
    job.words().transpose_packs(rows, width, engine == Engine::integer ? 0x80808080u : 0u,
                                tile.at<std::uint8_t>(&TileLayout::k) + j0 * width);
  }
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
    std::memset(codes + d, 0, static_cast<std::size_t>(job.d() - d));
    decode_given_row(x, token, row);
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
    round_row(job.words(), format, row, d);
    return 1.0f;
  }
  const float global = format == Format::nvfp4 ? head_scale(job, role, b, head) : 1.0f;
  std::uint8_t scales[most_key_channels / 16];
  encode_groups(format, row, d, global, codes, scales);
  for (int i = 0; i < d; ++i) {
    row[i] = decode_group_code(format, codes[i], scales[i / info(format).group], 1.0f);
  }
  return global;
}

namespace {

/// Rows of a tile by groups of 16. Groups behind the last repeat it.
const std::uint8_t** find_rows(const Sequence& x, std::int64_t first, const std::uint8_t** groups) {
  const int last = (tile_count(x, first) - 1) / 16;
  const auto at = [&](int g) {
    return reinterpret_cast<const std::uint8_t*>(x.row(first + 16 * g));
  };
  groups[0] = at(0);
  for (int g = 1; g < tile_keys / 16; ++g) {
    groups[g] = g > last             ? groups[last]
                : x.pages == nullptr ? groups[g - 1] + 16 * x.token_stride
                                     : at(g);
  }
  return groups;
}

/// A bad key shows in its scale, and so does a key whose V is bad.
void flag_bad_keys(const Job& job, std::int64_t b, std::int64_t head, std::int64_t first,
                   const Tile& tile) {
  auto* scale = tile.at<float>(&TileLayout::k_scale);
  const auto* bad_value = tile.at<std::uint8_t>(&TileLayout::v_bad);
  auto* any_bad = tile.at<std::uint8_t>(&TileLayout::any_bad);  // of V so far
  const int count = *any_bad != 0 ? tile_count(job.k_sequence(b, head), first) : 0;
  for (int j = 0; j < count; ++j) {
    if (bad_value[j] != 0) scale[j] = nan_value;
  }
  if (std::isnan(job.words().amax(scale, tile_keys))) *any_bad = 1;
}

}  // namespace

void pack_tile(const Job& job, std::int64_t b, std::int64_t head, std::int64_t first,
               const Tile& tile, Scratch& scratch) {
  pack_keys(job, b, head, first, tile, scratch);
  pack_values(job, b, head, first, tile, scratch);
  flag_bad_keys(job, b, head, first, tile);
}

bool find_tile(const Job& job, std::int64_t b, const TilePlace& place, const TilePlace* next,
               const Tile& tile, FoundRows& found, Scratch& scratch) {
  const auto [head, first] = place;
  const Sequence k = job.k_sequence(b, head), v = job.v_sequence(b, head);
  const int count = tile_count(k, first);
  if (count % 16 != 0) return false;
  auto* groups = found.groups;
  found.k = {find_rows(k, first, groups[0]), nullptr, k.token_stride};
  found.v = {find_rows(v, first, groups[1]), nullptr, v.token_stride};
  if (next != nullptr) {
    found.k.next = find_rows(job.k_sequence(b, next->head), next->first, groups[2]);
    found.v.next = find_rows(job.v_sequence(b, next->head), next->first, groups[3]);
  }
  auto* k_scale = tile.at<float>(&TileLayout::k_scale);
  given_token_scales(job, Role::k, k, b, head, first, count, k_scale);
  std::fill(k_scale + count, k_scale + tile_keys, 0.0f);
  given_value_scales(job, v, b, head, first, count, tile, scratch);
  flag_bad_keys(job, b, head, first, tile);
  return true;
}

namespace {

/// Where `count` rows from token `first` on begin. A page is looked up once.
void point_at_rows(const Sequence& x, std::int64_t first, int count, const void** rows) {
  const std::int64_t step = x.token_stride * x.bits / 8;
  for (int j = 0; j < count;) {
    const std::int64_t left = x.pages == nullptr ? count : x.page_size - (first + j) % x.page_size;
    const int end = static_cast<int>(std::min<std::int64_t>(count, j + left));
    const std::byte* row = x.row(first + j);
    for (; j < end; ++j, row += step) rows[j] = row;
  }
}

/// Those of a whole tile; behind the last token it stands again.
void point_at_next_rows(const Sequence& x, std::int64_t first, const void** rows) {
  const int count = tile_count(x, first);
  point_at_rows(x, first, count, rows);
  std::fill(rows + count, rows + tile_keys, rows[count - 1]);
}

/// K's rows of a tile into the scratch, NaN for Inf.
void bring_keys(const Job& job, std::int64_t b, const TilePlace& place, FoundFloats& found,
                Scratch& scratch) {
  const Sequence k = job.k_sequence(b, place.head);
  const int count = tile_count(k, place.first), width = padded(k.channels);
  for (int j = 0; j < count; ++j) {
    float* row = scratch.k_rows + j * width;
    load_row(job.words(), k, place.first + j, {}, row);
    round_row(job.words(), job.config.recipe.qk, row, k.channels);
    found.k_row[j] = row;
  }
  found.k = {found.k_row, Element::f32};
}

}  // namespace

void find_float_tile(const Job& job, std::int64_t b, const TilePlace& place, const TilePlace* next,
                     const Tile& tile, FoundFloats& found, Scratch& scratch) {
  const auto [head, first] = place;
  const Sequence k = job.k_sequence(b, head), v = job.v_sequence(b, head);
  const int count = tile_count(k, first);
  const auto is_exact = [](Format given, Format wanted) {
    return given == wanted || wanted == Format::f32;
  };
  point_at_rows(k, first, count, found.k_row);
  point_at_rows(v, first, count, found.v_row);
  found.k = {found.k_row, element_of(k.format)};
  found.v = {found.v_row, element_of(v.format)};
  if (next != nullptr) {
    point_at_next_rows(job.k_sequence(b, next->head), next->first, found.next_k);
    point_at_next_rows(job.v_sequence(b, next->head), next->first, found.next_v);
    found.k.next = found.next_k, found.v.next = found.next_v;
  }
  *tile.at<std::uint8_t>(&TileLayout::any_bad) = 0;
  // Reading rows in their order fetches them for products, which take several at a time.
  if (!is_exact(k.format, job.config.recipe.qk) ||
      !job.words().finite_rows(found.k, count, k.channels)) {
    bring_keys(job, b, place, found, scratch);
  }
  if (is_exact(v.format, job.config.recipe.v) &&
      job.words().finite_rows(found.v, count, v.channels)) {
    return;
  }
  load_values(job, v, b, head, first, count, tile, scratch);
  for (int j = 0; j < count; ++j) found.v_row[j] = scratch.rows + j * job.dv();
  found.v = {found.v_row, Element::f32};
}

}  // namespace qattn::cpu
