#include "conformance/coded.hpp"

#include <gtest/gtest.h>

namespace qattn::test {

CodedTensor quantised(const TensorView& x, const QuantizeOptions& options,
                      const TensorView& cu_seqlens) {
  CodedTensor coded;
  const Status status = quantise(x, options, cu_seqlens, coded);
  EXPECT_TRUE(status.ok()) << status.message();
  return coded;
}

}  // namespace qattn::test
