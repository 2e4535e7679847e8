// The checks of quantize() and dequantize(): what a call means, or why it is wrong.
#pragma once

#include <cstdint>

#include "core/problem.hpp"
#include "qattn/quantize.hpp"

namespace qattn {

/// A validated call.
struct QuantizeFacts {
  std::int64_t batch = 0, heads = 0, tokens = 0, longest = 0;
  int channels = 0;
  bool packed = false;
  std::int64_t stride_batch = 0, stride_token = 0, stride_head = 0;  // of x
  Scaling scaling;
  QuantizeShapes shapes;
};

/// Everything that follows from x, the options and cu_seqlens.
Result<QuantizeFacts> quantize_facts(const TensorView& x, const QuantizeOptions& o,
                                     const TensorView& cu);

/// The other tensors against the facts: shapes, formats, pointers, aliasing. `writes_x`: x is the
/// output (dequantize), else codes, scale, global and mean are.
Status check_quantize_tensors(const QuantizeTensors& t, const QuantizeFacts& f,
                              const QuantizeOptions& o, bool writes_x);

/// What a static scale holds, by the rule of attention(): those of tokens that exist are positive
/// and finite. It and cu_seqlens must lie in host memory.
Status check_static_scale(const QuantizeTensors& t, const QuantizeFacts& f,
                          const QuantizeOptions& o);

}  // namespace qattn
