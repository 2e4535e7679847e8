// quantize() on the device: codes in x's own layout and scales in the public shapes, bit-equal with
// the CPU's. One warp a row; made to be right rather than fast.
#pragma once

#include "kernels/quantize/gpu/encode/general_tile.cuh"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

struct TokenParams {
  tile::Rows rows;
  Role role = Role::k;
  InputKind input = InputKind::bf16;
  bool aligned = false, rotate = false;
  Micro micro = Micro::none;
  CodeKind kind = CodeKind::s8;
  std::int32_t group = 0;    ///< of a micro format
  std::int64_t longest = 0;  ///< tokens that the shapes of scales count
  std::uint8_t* codes = nullptr;
  std::int64_t code_stride[3] = {};  ///< batch, token, head
  float* mean = nullptr;
  std::int64_t mean_stride[4] = {};  ///< Q: batch, head, block, channel; K, V: batch, head, channel
  std::int64_t mean_blocks = 1;
  void* scale = nullptr;
  std::int64_t scale_stride[4] = {};
  float* global = nullptr;
  std::int64_t global_stride[2] = {};
  /// Bits of max |x|: [batches * heads][groups] (by_channel: [..][channels]), then one of all.
  Grouping grouping;  ///< `given` is the static scale
  std::int64_t words = 0;
  std::uint64_t* saturated = nullptr;

  QATTN_DEVICE std::int64_t unit(int b, int head) const {
    return std::int64_t{b} * rows.heads + head;
  }
  QATTN_DEVICE std::uint32_t* maximum(int b, int head, std::int64_t s, int channel) const {
    if (micro != Micro::none) return grouping.maxima + unit(b, head);
    const std::int64_t at = unit(b, head) * grouping.groups + grouping.index(s);
    return grouping.maxima + (grouping.by_channel() ? at * rows.channels + channel : at);
  }
  QATTN_DEVICE float mean_of(int b, int head, std::int64_t s, int channel) const {
    const std::int64_t* st = mean_stride;
    const std::int64_t at =
        b * st[0] + head * st[1] +
        (role == Role::q ? s / grouping.block * st[2] + channel * st[3] : channel * st[2]);
    return isa::load_global(mean + at);
  }
  /// Element offset of channel 0 in `codes`.
  QATTN_DEVICE std::int64_t code_offset(const tile::Span& span, int b, int head,
                                        std::int64_t s) const {
    return b * code_stride[0] + (span.begin + s) * code_stride[1] + head * code_stride[2];
  }
  QATTN_DEVICE float global_scale(int b, int head) const {
    const std::uint32_t amax = isa::load_global(grouping.maxima + unit(b, head));
    return micro == Micro::nvfp4 ? formats::nvfp4_global(formats::float_of(amax)) : 1.0f;
  }
  /// Scale of a token (and channel) in a format with a free scale.
  /// Of the finite tokens of V in a group of per_thread.
  QATTN_DEVICE float group_maximum(int b, int head, std::int64_t s) const {
    const std::int64_t first = s / slot_tile * slot_tile + s % 8 / 2 * 2;
    float top = 0.0f;
    for (std::int64_t n = first; n < first + slot_tile && n < longest; n += 8) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (n + e >= longest) continue;
        const float m = formats::float_of(isa::load_global(maximum(b, head, n + e, 0)));
        if (formats::is_finite(m) && m > top) top = m;
      }
    }
    return top;
  }

  QATTN_DEVICE float scale_of(int b, int head, std::int64_t s, int channel) const {
    const bool tensor = grouping.granularity == Granularity::per_tensor;
    const std::uint32_t* at = tensor ? grouping.maxima + words - 1 : maximum(b, head, s, channel);
    const float own = formats::float_of(isa::load_global(at));
    if (grouping.given != nullptr) {
      if (formats::is_nan(own)) return formats::quiet_nan();
      return isa::load_global(grouping.given +
                              grouping.offset(grouping.given_stride, false, b, head, s, channel));
    }
    float amax = own;
    if (grouping.joins()) amax = formats::joint_amax(own, group_maximum(b, head, s));
    return formats::amax_scale(amax, code_limit(kind));
  }
};

/// Eight channels of a token from `first` on, as load_row() of the CPU gives them, before rotation.
QATTN_DEVICE void load_token(const TokenParams& p, const tile::Span& span, int b, int head,
                             std::int64_t s, int first, float (&x)[8]) {
  const int left = p.rows.channels - first;
  const std::int64_t at = tile::row_offset(p.rows, span, b, head, s) + first;
  with_input(p.input, p.aligned, [&](auto kind, auto aligned) {
    Octet<decltype(kind)::value> octet;
    octet.fill(false);
    if (left > 0) octet.template load<decltype(aligned)::value>(p.rows.data, at, left);
    octet.unpack(x);
  });
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    x[j] = formats::add_rn(x[j], formats::add_rn(x[j], -x[j]));
    if (p.mean != nullptr && j < left)
      x[j] = formats::add_rn(x[j], -p.mean_of(b, head, s, first + j));
  }
}

/// A row of a warp: lane l holds channels 8 l to 8 l + 7.
struct TokenRow {
  int b, head;
  std::int64_t s;
  tile::Span span;
  bool exists;
  float x[8];
};
inline constexpr int token_threads = 256;

QATTN_DEVICE TokenRow load_token_row(const TokenParams& p) {
  TokenRow t;
  const std::int64_t row = std::int64_t{isa::block().x} * (token_threads / 32) + isa::warp();
  const std::int64_t heads = p.rows.heads, unit = row / p.longest;
  t.s = row % p.longest;
  t.b = static_cast<int>(unit / heads);
  t.head = static_cast<int>(unit % heads);
  t.exists = t.b < p.rows.batches;
  if (t.exists) {
    t.span = tile::span_of(p.rows, t.b);
    t.exists = !t.span.bad && t.s < t.span.length;
  }
#pragma unroll
  for (int j = 0; j < 8; ++j) t.x[j] = 0.0f;
  if (!t.exists) return t;
  load_token(p, t.span, t.b, t.head, t.s, 8 * isa::lane(), t.x);
  if (p.rotate) GeneralTile<256>::rotate(isa::lane(), p.rows.channels, t.x);
  return t;
}

QATTN_DEVICE std::uint32_t octet_maximum(const float (&x)[8]) {
  std::uint32_t top = 0;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const std::uint32_t m = formats::bits_of(formats::fold_amax(0.0f, x[j]));
    top = top > m ? top : m;
  }
  return top;
}

/// Means of K and V (a block a sequence and head) and of Q's blocks, in the CPU's order.
struct TokenMeans {
  using Params = TokenParams;
  static constexpr int threads = 256, min_blocks = 1, shared_bytes = 0;

  static QATTN_DEVICE float element(const Params& p, std::int64_t at) {
    if (p.input == InputKind::f32)
      return isa::load_global(static_cast<const float*>(p.rows.data) + at);
    const std::uint32_t half =
        isa::load_global(static_cast<const std::uint16_t*>(p.rows.data) + at);
    return p.input == InputKind::bf16 ? isa::unpack_bf16(half).lo : isa::unpack_f16(half).lo;
  }

  static QATTN_DEVICE void run(const Params& p) {
    const int c = isa::thread();
    if (c >= p.rows.channels) return;
    const std::int64_t i = isa::block().x % p.mean_blocks, unit = isa::block().x / p.mean_blocks;
    const int b = static_cast<int>(unit / p.rows.heads),
              head = static_cast<int>(unit % p.rows.heads);
    const tile::Span span = tile::span_of(p.rows, b);
    const std::int64_t length = span.bad ? 0 : span.length;
    const bool q = p.role == Role::q;
    const std::int64_t begin = q ? i * p.grouping.block : 0;
    std::int64_t end = q ? begin + p.grouping.block : length;
    end = end < length ? end : length;
    double total = 0.0;
    for (std::int64_t s = begin; s < end;) {
      float partial = 0.0f;
      for (const std::int64_t stop = s + 64 < end ? s + 64 : end; s < stop; ++s) {
        const float x = element(p, tile::row_offset(p.rows, span, b, head, s) + c);
        partial = formats::add_rn(partial, formats::add_rn(x, formats::add_rn(x, -x)));
      }
      total += static_cast<double>(partial);
    }
    const float mean =
        end > begin ? static_cast<float>(total / static_cast<double>(end - begin)) : 0.0f;
    const std::int64_t* st = p.mean_stride;
    const std::int64_t at = b * st[0] + head * st[1] + (q ? i * st[2] + c * st[3] : c * st[2]);
    isa::store_global(p.mean + at, mean);
  }
};

/// Maxima of groups; of matrices for nvfp4.
struct TokenMaxima {
  using Params = TokenParams;
  static constexpr int threads = token_threads, min_blocks = 1, shared_bytes = 0;

  static QATTN_DEVICE void run(const Params& p) {
    const TokenRow t = load_token_row(p);
    if (p.micro == Micro::none && p.grouping.by_channel()) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const int c = 8 * isa::lane() + j;
        if (!t.exists || c >= p.rows.channels) continue;
        isa::atomic_max_global(p.maximum(t.b, t.head, t.s, c),
                               formats::bits_of(formats::fold_amax(0.0f, t.x[j])));
      }
      return;
    }
    const std::uint32_t top = warp_max(octet_maximum(t.x));
    if (isa::lane() == 0 && t.exists) {
      isa::atomic_max_global(p.maximum(t.b, t.head, t.s, 0), top);
      isa::atomic_max_global(p.grouping.maxima + p.words - 1, top);
    }
  }
};

/// Scale tensors of free formats, and nvfp4's second level: one thread an entry of the maxima.
struct TokenScales {
  using Params = TokenParams;
  static constexpr int threads = 256, min_blocks = 1, shared_bytes = 0;

  static QATTN_DEVICE void run(const Params& p) {
    const std::int64_t i = std::int64_t{isa::block().x} * threads + isa::thread();
    const Grouping& g = p.grouping;
    if (i >= p.words - 1) return;
    if (p.micro != Micro::none) {
      if (p.global == nullptr) return;
      const int b = static_cast<int>(i / p.rows.heads), head = static_cast<int>(i % p.rows.heads);
      isa::store_global(p.global + b * p.global_stride[0] + head * p.global_stride[1],
                        p.global_scale(b, head));
      return;
    }
    const std::int64_t width = g.by_channel() ? p.rows.channels : 1;
    const int channel = static_cast<int>(i % width);
    const std::int64_t group = i / width % g.groups, unit = i / width / g.groups;
    const int b = static_cast<int>(unit / p.rows.heads),
              head = static_cast<int>(unit % p.rows.heads);
    if (g.granularity == Granularity::per_tensor && unit != 0) return;
    const std::int64_t token = g.first_token(group);
    auto* out = static_cast<float*>(p.scale);
    if (token < p.longest) {
      isa::store_global(out + g.offset(p.scale_stride, false, b, head, token, channel),
                        p.scale_of(b, head, token, channel));
    } else if (g.granularity == Granularity::per_warp || g.granularity == Granularity::per_thread) {
      // Groups behind the last token exist in the shape only.
      isa::store_global(
          out + b * p.scale_stride[0] + head * p.scale_stride[1] + group * p.scale_stride[2],
          formats::amax_scale(0.0f, code_limit(p.kind)));
    }
  }
};

/// Codes of rows: free formats, and micro formats of Q and K with their scales.
struct TokenCodes {
  using Params = TokenParams;
  static constexpr int threads = token_threads, min_blocks = 1, shared_bytes = 0;

  static QATTN_DEVICE void free_codes(const Params& p, const TokenRow& t) {
    const int first = 8 * isa::lane(), left = p.rows.channels - first;
    std::uint32_t clipped = 0;
    if (t.exists && left > 0) {
      std::uint8_t* out = p.codes + p.code_offset(t.span, t.b, t.head, t.s) + first;
      float scale = p.scale_of(t.b, t.head, t.s, first);
      with_codes(p.kind, true, [&](auto codes) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          float y[4];
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const int c = 4 * n + j;
            if (c < left && p.grouping.by_channel()) {
              scale = p.scale_of(t.b, t.head, t.s, first + c);
            }
            y[j] = c < left ? formats::mul_rn(t.x[c], formats::reciprocal(scale)) : 0.0f;
          }
          const std::uint32_t word = decltype(codes)::exact_word(y, clipped);
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            if (4 * n + j < left) {
              isa::store_global(out + 4 * n + j, static_cast<std::uint8_t>(word >> 8 * j));
            }
          }
        }
      });
    }
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) clipped += isa::shuffle_xor(clipped, mask);
    if (isa::lane() == 0 && clipped > 0) {
      isa::atomic_add_global(p.saturated, std::uint64_t{clipped});
    }
  }

  static QATTN_DEVICE void micro_codes(const Params& p, const TokenRow& t) {
    const int first = 8 * isa::lane(), left = p.rows.channels - first;
    std::uint32_t top = octet_maximum(t.x);
    for (int mask = 1; mask < p.group / 8; mask *= 2) {
      const std::uint32_t other = isa::shuffle_xor(top, mask);
      top = top > other ? top : other;
    }
    if (t.b >= p.rows.batches || left <= 0) return;
    auto* scales = static_cast<std::uint8_t*>(p.scale) + t.b * p.scale_stride[0] +
                   t.head * p.scale_stride[1] + t.s * p.scale_stride[2] +
                   first / p.group * p.scale_stride[3];
    const bool leader = first % p.group == 0;
    if (!t.exists) {  // a scale that exists in the shape only
      if (leader) isa::store_global(scales, std::uint8_t{0});
      return;
    }
    const formats::GroupScale scale =
        group_scale(p.micro, formats::float_of(top), p.global_scale(t.b, t.head));
    const float inverse = scale.inverse;
    const bool usable = inverse > 0.0f;
    if (leader) isa::store_global(scales, scale.code);
    const std::int64_t at = p.code_offset(t.span, t.b, t.head, t.s) + first;
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      if (j >= left) continue;
      const float y0 = formats::mul_rn(t.x[j], inverse), y1 = formats::mul_rn(t.x[j + 1], inverse);
      if (p.micro == Micro::mxfp8) {
        isa::store_global(p.codes + at + j, usable ? formats::E4m3::encode(y0) : std::uint8_t{0});
        if (j + 1 >= left) continue;
        isa::store_global(p.codes + at + j + 1,
                          usable ? formats::E4m3::encode(y1) : std::uint8_t{0});
      } else {  // rows have whole bytes
        const std::uint32_t pair = formats::E2m1::encode(y0) | formats::E2m1::encode(y1) << 4;
        isa::store_global(p.codes + (at + j) / 2, static_cast<std::uint8_t>(usable ? pair : 0));
      }
    }
  }

  static QATTN_DEVICE void run(const Params& p) {
    const TokenRow t = load_token_row(p);
    if (p.micro == Micro::none) {
      free_codes(p, t);
    } else {
      micro_codes(p, t);
    }
  }
};

/// Micro formats of V, whose groups lie along the tokens. One thread two channels of a group.
struct TokenColumns {
  using Params = TokenParams;
  static constexpr int threads = 128, min_blocks = 1, shared_bytes = 0;

  static QATTN_DEVICE void run(const Params& p) {
    const std::int64_t groups = (p.longest + p.group - 1) / p.group, unit = isa::block().x / groups;
    const std::int64_t s0 = isa::block().x % groups * p.group;
    const int b = static_cast<int>(unit / p.rows.heads),
              head = static_cast<int>(unit % p.rows.heads);
    const int c0 = 2 * isa::thread(), channels = p.rows.channels - c0 < 2 ? 1 : 2;
    if (c0 >= p.rows.channels) return;
    const tile::Span span = tile::span_of(p.rows, b);
    const std::int64_t left = span.bad ? 0 : span.length - s0;
    const int count = left < 0 ? 0 : left < p.group ? static_cast<int>(left) : p.group;
    std::uint8_t codes[2][formats::kMxGroup];
    for (int n = 0; n < channels; ++n) {
      float column[formats::kMxGroup];
      for (int j = 0; j < count; ++j) {
        const float x =
            TokenMeans::element(p, tile::row_offset(p.rows, span, b, head, s0 + j) + c0 + n);
        column[j] = formats::add_rn(x, formats::add_rn(x, -x));
        if (p.mean != nullptr) {
          column[j] = formats::add_rn(column[j], -p.mean_of(b, head, s0 + j, c0 + n));
        }
      }
      std::uint8_t scale = 0;  // behind the end it exists in the shape only
      if (count > 0) {
        scale = p.micro == Micro::mxfp8 ? formats::encode_group_mxfp8(column, count, codes[n])
                : p.micro == Micro::mxfp4
                    ? formats::encode_group_mxfp4(column, count, codes[n])
                    : formats::encode_group_nvfp4(column, count, p.global_scale(b, head), codes[n]);
      }
      auto* scales = static_cast<std::uint8_t*>(p.scale) + b * p.scale_stride[0] +
                     head * p.scale_stride[1] + s0 / p.group * p.scale_stride[2] +
                     (c0 + n) * p.scale_stride[3];
      isa::store_global(scales, scale);
    }
    for (int j = 0; j < count; ++j) {
      const std::int64_t at = p.code_offset(span, b, head, s0 + j) + c0;
      if (p.micro == Micro::mxfp8) {
        isa::store_global(p.codes + at, codes[0][j]);
        if (channels > 1) isa::store_global(p.codes + at + 1, codes[1][j]);
      } else {
        isa::store_global(p.codes + at / 2,
                          static_cast<std::uint8_t>(codes[0][j] | codes[1][j] << 4));
      }
    }
  }
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
