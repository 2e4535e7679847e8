// Operands quantised by the public quantize(), for calls that take codes.
#pragma once

#include "qattn/quantize.hpp"
#include "support/tensor.hpp"

namespace qattn::test {

/// Codes of one operand with everything that goes with them.
struct CodedTensor {
  Tensor codes, scale, global, mean;
};

QuantizeOptions options_for(Role role, Format format, const Scaling& scaling, Layout layout);

/// Records a failure where quantize() refuses.
CodedTensor quantised(const TensorView& x, const QuantizeOptions& options,
                      const TensorView& cu_seqlens = {});

}  // namespace qattn::test
