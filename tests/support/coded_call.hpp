// Calls whose K and V come as codes of 8 bits: made from those in floats, and put into pages.
#pragma once

#include <string>
#include <vector>

#include "conformance/feature.hpp"
#include "qattn/quantize.hpp"
#include "support/layout.hpp"

namespace qattn::test {

/// Codes of one operand with everything that goes with them.
struct CodedTensor {
  Tensor codes, scale, global, mean;
};

QuantizeOptions options_for(Role role, Format format, const Scaling& scaling, Layout layout);

/// By the public quantize().
Status quantise(const TensorView& x, const QuantizeOptions& options, const TensorView& cu_seqlens,
                CodedTensor& coded);

/// K and V of the call become codes with the recipe's granularities.
Status put_codes(Laid& laid, const Recipe& recipe);

/// Dense K and V as codes, and their scales of tokens, go into pages that nobody else has, the last
/// ones first. What no token has in a page is NaN, 127 or, of scales, huge.
void put_into_pages(Laid& laid, const Call& call, std::int64_t page_size);

/// A call that uniform8_decode serves.
struct CodedCase {
  std::string name;
  Recipe recipe;
  Feature feature;
  std::int64_t page_size = 0;  ///< of put_into_pages(); 0: not
};

/// Everything that kernel has code for, with int8_full and fp8.
std::vector<CodedCase> coded_decode_cases();

}  // namespace qattn::test
