#include "kernels/quantize/gpu/quantize_device.hpp"

#include <algorithm>
#include <string>

#include "kernels/quantize/gpu/encode/clear.cuh"
#include "kernels/quantize/gpu/quantize_tokens.cuh"

namespace qattn::kernels {
inline namespace QATTN_TARGET {
namespace {

using isa::LaunchError;

constexpr std::size_t counter_bytes = 16;

/// Entries of the table of maxima, one for all included.
std::int64_t maxima_words(const QuantizeOptions& o, const QuantizeFacts& f) {
  const std::int64_t units = f.batch * f.heads;
  if (info(o.format).group > 0) return units + 1;
  if (f.scaling.granularity == Granularity::per_tensor && units == 0) return 1 + 1;
  return units * scale_count(f.scaling, o.role, f.longest) *
             (by_channel(f.scaling.granularity) ? f.channels : 1) +
         1;
}

template <class K>
LaunchError launch_blocks(const typename K::Params& params, std::int64_t blocks, void* stream) {
  if (blocks == 0) return {};
  if (blocks > 0x7fffffff) return "quantize: " + std::to_string(blocks) + " blocks are over 2^31";
  return isa::launch<K>(params, {static_cast<int>(blocks), 1, 1}, stream);
}

tile::Rows token_rows(const QuantizeTensors& t, const QuantizeFacts& f) {
  tile::Rows r;
  r.data = t.x.data;
  r.batch = f.stride_batch;
  r.token = f.stride_token;
  r.head = f.stride_head;
  r.max_length = f.longest;
  r.total = f.tokens;
  if (f.packed) r.cu_seqlens = static_cast<const std::int32_t*>(t.cu_seqlens.data);
  r.batches = static_cast<std::int32_t>(f.batch);
  r.heads = static_cast<std::int32_t>(f.heads);
  r.channels = f.channels;
  return r;
}

TokenParams token_params(const QuantizeTensors& t, const QuantizeOptions& o, const QuantizeFacts& f,
                         void* workspace) {
  TokenParams p;
  p.rows = token_rows(t, f);
  p.role = o.role;
  const int size = info(t.x.format).bits / 8, unit = std::min(16, 8 * size);
  p.input = input_kind(t.x.format);
  p.aligned = reinterpret_cast<std::uintptr_t>(t.x.data) % static_cast<unsigned>(unit) == 0 &&
              (f.stride_batch | f.stride_token | f.stride_head) * size % unit == 0 &&
              f.channels % chunk_channels == 0;
  p.rotate = o.rotate;
  p.micro = micro_of(o.format);
  p.kind = code_kind(o.format);
  p.group = info(o.format).group;
  p.longest = f.longest;
  p.codes = static_cast<std::uint8_t*>(t.codes.data);
  const int first = f.packed ? 0 : 1;
  const int token = first + (o.layout == Layout::bshd ? 0 : 1), head = 2 * first + 1 - token;
  p.code_stride[0] = f.packed ? 0 : t.codes.stride[0];
  p.code_stride[1] = t.codes.stride[token];
  p.code_stride[2] = t.codes.stride[head];
  if (o.smooth) {
    p.mean = static_cast<float*>(t.mean.data);
    std::copy_n(t.mean.stride.begin(), 4, p.mean_stride);
    p.mean_blocks = o.role == Role::q ? t.mean.shape[2] : 1;
  }
  p.scale = t.scale.data;
  std::copy_n(t.scale.stride.begin(), 4, p.scale_stride);
  if (o.format == Format::nvfp4) {
    p.global = static_cast<float*>(t.global.data);
    std::copy_n(t.global.stride.begin(), 2, p.global_stride);
  }
  p.grouping.role = o.role;
  p.grouping.granularity = f.scaling.granularity;
  p.grouping.block = f.scaling.block;
  p.grouping.warp = f.scaling.warp;
  p.grouping.groups = scale_count(f.scaling, o.role, f.longest);
  p.grouping.maxima =
      reinterpret_cast<std::uint32_t*>(static_cast<std::uint8_t*>(workspace) + counter_bytes);
  if (t.static_scale.present()) {
    p.grouping.given = static_cast<const float*>(t.static_scale.data);
    std::copy_n(t.static_scale.stride.begin(), 4, p.grouping.given_stride);
  }
  p.words = maxima_words(o, f);
  p.saturated = static_cast<std::uint64_t*>(workspace);
  return p;
}

}  // namespace

std::size_t quantize_workspace(const QuantizeTensors&, const QuantizeOptions& o,
                               const QuantizeFacts& f) {
  return counter_bytes + static_cast<std::size_t>(maxima_words(o, f)) * 4;
}

LaunchError quantize_tokens(const QuantizeTensors& t, const QuantizeOptions& o,
                            const QuantizeFacts& f, void* workspace, void* stream) {
  if (f.packed && f.batch > 0 && t.cu_seqlens.stride[0] != 1) {
    return "cu_seqlens: stride " + std::to_string(t.cu_seqlens.stride[0]) + " should be 1";
  }
  const TokenParams p = token_params(t, o, f, workspace);
  ClearParams clear;
  clear.words[0] = static_cast<std::uint32_t*>(workspace);
  clear.counts[0] = static_cast<std::int64_t>(quantize_workspace(t, o, f) / 4);
  const std::int64_t blocks = std::clamp<std::int64_t>(clear.counts[0] / 1024, 1, 1024);
  if (LaunchError e = launch_blocks<ClearWords>(clear, blocks, stream); !e.empty()) return e;
  const std::int64_t units = f.batch * f.heads;
  if (o.smooth) {
    if (LaunchError e = launch_blocks<TokenMeans>(p, units * p.mean_blocks, stream); !e.empty()) {
      return e;
    }
  }
  constexpr std::int64_t rows = token_threads / 32;
  const std::int64_t row_blocks = (units * f.longest + rows - 1) / rows;
  const bool micro = p.micro != Micro::none;
  if (!micro || p.micro == Micro::nvfp4) {
    if (LaunchError e = launch_blocks<TokenMaxima>(p, row_blocks, stream); !e.empty()) return e;
    constexpr std::int64_t threads = TokenScales::threads;
    TokenParams scales = p;
    scales.longest = std::max<std::int64_t>(p.longest, 1);  // a scale for all tokens needs none
    scales.rows.heads = std::max(p.rows.heads, 1);          // nor any head
    if (LaunchError e =
            launch_blocks<TokenScales>(scales, (p.words - 1 + threads - 1) / threads, stream);
        !e.empty()) {
      return e;
    }
  }
  if (micro && o.role == Role::v) {
    const std::int64_t groups = (f.longest + p.group - 1) / p.group;
    return launch_blocks<TokenColumns>(p, units * groups, stream);
  }
  return launch_blocks<TokenCodes>(p, row_blocks, stream);
}

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
