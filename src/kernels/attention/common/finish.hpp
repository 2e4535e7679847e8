// The end of a query row: sink, normalisation, V's mean, LSE, and the way of the rows to memory.
#pragma once

#include <cstdint>

#include "kernels/attention/common/params.hpp"
#include "kernels/attention/common/score.hpp"

namespace qattn::tile {

/// How a row's accumulators become its output: out = accumulator * factor + mean * mean_weight.
struct RowEnd {
  float factor = 0;
  float mean_weight = 0;
  float lse = 0;
};

inline namespace QATTN_TARGET {

/// `max` and `sum` as the tiles left them, in units of log2 (offset too); `sees`: the row exists.
QATTN_DEVICE RowEnd finish_row(const kernels::AttentionParams& p, int b, int head, bool exists,
                               bool bad, float max, float sum, float offset) {
  RowEnd end;
  if (exists && is_nan(sum)) {  // maxima skip NaN: `max` may look as if the row saw no key
    end.factor = end.lse = quiet_nan();
    return end;
  }
  float top = max == -infinity() ? max : max + offset;
  // An infinite offset comes of a bad row of Q; it must not look like a row that sees no key.
  if (max != -infinity() && top == -infinity()) top = quiet_nan();
  float factor = 1.0f, sink_share = 0.0f;
  bool spoiled = bad;
  if (p.sinks.data != nullptr && exists) {
    const std::int64_t at = b * p.sinks.stride[0] + head * p.sinks.stride[1];
    const float sink = log2_e * squeeze(load_number(p.sinks.data, p.sinks.format, at));
    const float joint = sink > top || is_nan(sink) ? sink : top;
    if (joint != -infinity()) {
      factor = top == -infinity() ? 0.0f : isa::exp2(top - joint);
      const float weight = isa::exp2(sink - joint);
      sum = sum * factor + weight;
      sink_share = weight / sum;
      top = joint;
    }
  }
  if (!exists || top == -infinity()) {
    end.lse = -infinity();
    return end;
  }
  if (max == -infinity()) {  // the sink alone
    end.lse = unsqueeze(top * ln_2);
    return end;
  }
  spoiled = spoiled || !is_finite(top) || !(sum > 0.0f && sum < infinity());
  end.factor = spoiled ? quiet_nan() : factor / sum;
  end.mean_weight = 1.0f - sink_share;
  end.lse = spoiled ? quiet_nan() : unsqueeze((top + isa::log2(sum)) * ln_2);
  return end;
}

/// Two neighbouring channels in the output's 16-bit format.
QATTN_DEVICE std::uint32_t pack_output(Format format, float lo, float hi) {
  return format == Format::f16 ? isa::pack_f16(lo, hi) : isa::pack_bf16(lo, hi);
}

/// One number to a float tensor.
QATTN_DEVICE void store_number(void* data, Format format, std::int64_t at, float x) {
  if (format == Format::f32) {
    isa::store_global(static_cast<float*>(data) + at, x);
  } else {
    isa::store_global(static_cast<std::uint16_t*>(data) + at,
                      static_cast<std::uint16_t>(pack_output(format, x, 0.0f)));
  }
}

}  // namespace QATTN_TARGET
}  // namespace qattn::tile
