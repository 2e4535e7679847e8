// Operands quantised by the public quantize(), for tests that take codes.
#pragma once

#include <ostream>

#include "support/coded_call.hpp"

namespace qattn::test {

/// How GoogleTest shows a case.
inline void PrintTo(const CodedCase& c, std::ostream* out) { *out << c.name; }

/// Records a failure where quantize() refuses.
CodedTensor quantised(const TensorView& x, const QuantizeOptions& options,
                      const TensorView& cu_seqlens = {});

}  // namespace qattn::test
