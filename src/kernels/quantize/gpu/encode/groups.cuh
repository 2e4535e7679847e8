// Where the given scales of tokens and the maxima of large groups lie, on the device.
#pragma once

#include "kernels/operand/scale_groups.hpp"
#include "kernels/quantize/gpu/encode/means.cuh"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

enum class CodeKind : std::int32_t { s8, e4m3, e5m2, e4m3fnuz };

inline CodeKind code_kind(Format f) {
  return f == Format::e4m3   ? CodeKind::e4m3
         : f == Format::e5m2 ? CodeKind::e5m2
         : f == Format::s8   ? CodeKind::s8
                             : CodeKind::e4m3fnuz;
}

/// Formats with built-in scales, and the others.
enum class Micro : std::int32_t { none, mxfp8, mxfp4, nvfp4 };

inline Micro micro_of(Format f) {
  return f == Format::mxfp8   ? Micro::mxfp8
         : f == Format::mxfp4 ? Micro::mxfp4
         : f == Format::nvfp4 ? Micro::nvfp4
                              : Micro::none;
}

/// Largest magnitude of a code.
QATTN_CONSTEXPR float code_limit(CodeKind kind) {
  return kind == CodeKind::s8     ? 127.0f
         : kind == CodeKind::e4m3 ? 448.0f
         : kind == CodeKind::e5m2 ? 57344.0f
                                  : 240.0f;
}

/// Where a row's scale comes from.
enum class ScaleSource : std::int32_t {
  row,      ///< its own maximum
  tile,     ///< the maximum of a group that lies inside the tile
  maxima,   ///< of a larger group: an earlier pass found it
  given,    ///< by the caller
  channel,  ///< V: PreparedTiles::channel_scale
};

/// Which entry of a tensor of scales has those of a token, a sequence or a page, and the token's
/// number there. False: the page does not exist.
QATTN_DEVICE bool find_scales(const tile::Rows& r, int b, std::int64_t s, std::int64_t& outer,
                              std::int64_t& token) {
  outer = b, token = s;
  if (r.page_table == nullptr) return true;
  outer = isa::load_global(r.page_table + b * r.page_table_stride + s / r.page_size);
  if (outer < 0 || outer >= r.total) return false;
  token = s % r.page_size;
  return true;
}

struct Grouping : ScaleGroups {
  // Maxima: [heads][groups], by_channel [heads][groups][padded]; per_tensor: one.
  std::uint32_t* maxima = nullptr;
  std::int64_t groups = 0;           ///< per head, all sequences
  std::int64_t sequence_groups = 1;  ///< of a sequence that is not packed
  std::int32_t block_groups = 1;     ///< in a block
  // Given scales with their strides (ScaleMap).
  const float* given = nullptr;
  std::int64_t given_stride[4] = {};
  std::int64_t given_groups = 1;  ///< of a sequence, or a page

  QATTN_DEVICE bool by_channel() const { return qattn::by_channel(granularity); }
  QATTN_DEVICE bool one_per_sequence() const {
    return granularity == Granularity::per_head || granularity == Granularity::per_channel;
  }

  /// Place of a sequence's group 0 in `maxima`, in groups.
  QATTN_DEVICE std::int64_t base(const tile::Rows& r, const tile::Span& span, int b,
                                 int head) const {
    if (granularity == Granularity::per_tensor) return 0;
    const std::int64_t first = head * groups;
    if (one_per_sequence()) return first + b;
    if (r.cu_seqlens != nullptr) return first + (span.begin / block + b) * block_groups;
    return first + b * sequence_groups;
  }

  /// The scale that the caller gave for (token, channel); NaN where it is none: only `validate`
  /// looks at it on the host.
  QATTN_DEVICE float given_scale(const tile::Rows& r, int b, int head, std::int64_t s,
                                 int channel) const {
    const bool paged = r.page_table != nullptr;
    std::int64_t outer, token;
    if (!find_scales(r, b, s, outer, token)) return formats::quiet_nan();
    // The host cannot see how long packed sequences are.
    if (index(token) >= given_groups) return formats::quiet_nan();
    const float scale =
        isa::load_global(given + offset(given_stride, paged, outer, head, token, channel));
    return formats::is_scale(scale) ? scale : formats::quiet_nan();
  }
};

/// V's scales per channel, from maxima or as given, or nvfp4's second level: one block a (sequence,
/// head, group).
struct ChannelScaleParams {
  tile::Rows rows;
  Grouping grouping;
  float limit = 1.0f;  ///< what the scale brings the maximum to
  PreparedTiles out;
};

/// A block of the grid is a group of a head: of all packed sequences, or of one sequence.
struct FinishChannelScales {
  using Params = ChannelScaleParams;
  static constexpr int threads = 256, min_blocks = 1, shared_bytes = 0;
  static constexpr bool dependent = true;

  static QATTN_DEVICE void run(const Params& p) {
    isa::grid_dependency_launch();
    isa::grid_dependency_wait();
    const tile::Rows& r = p.rows;
    const std::int64_t place = isa::block().x, unit = place / p.out.groups;
    std::int64_t group = place % p.out.groups;
    const int c = isa::thread();
    if (c >= p.out.channels) return;
    int b = static_cast<int>(unit / r.heads);
    if (p.out.packed_groups) b = sequence_of_block(r, group, p.out.channel_block);
    const int head = static_cast<int>(unit % r.heads);
    const tile::Span span = tile::span_of(r, b);
    if (p.out.packed_groups) group -= tile::first_block(r, span, b, p.out.channel_block);
    const std::int64_t s = group * p.out.channel_block;
    if (s != 0 && (s < 0 || s >= span.length)) return;
    float scale = 0.0f;
    const bool here = c < r.channels || p.out.group > 0;
    if (here && s < span.length && !span.bad) {
      if (p.grouping.given != nullptr) {
        scale = p.grouping.given_scale(r, b, head, s, c);
      } else {
        std::int64_t at = p.grouping.base(r, span, b, head) + p.grouping.index(s);
        if (p.grouping.by_channel()) at = at * p.out.channels + c;
        const std::uint32_t amax = isa::load_global(p.grouping.maxima + at);
        scale = formats::amax_scale(formats::float_of(amax), p.limit);
      }
    }
    isa::store_global(p.out.channel_scale + place * p.out.channels + c, scale);
  }
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
