#include "kernels/quantize/kv_rows.hpp"

#include <cstring>

#include "formats/kv_quantize.hpp"

namespace qattn::cpu {

std::uint16_t encode_kv_row(const Words& words, const float* x, int n, int bits,
                            std::uint8_t* codes) {
  const auto zeros = [&](int code) { std::memset(codes, code, static_cast<std::size_t>(n)); };
  const float amax = words.amax(x, n);
  if (!formats::kv_holds(amax, bits)) {
    zeros(0);
    return formats::kv_nan_scale;
  }
  std::uint16_t candidate[formats::kv_candidates];
  float scale[formats::kv_candidates], error[formats::kv_candidates];
  int count = 0;
  for (int i = 0; i < formats::kv_candidates; ++i) {
    const std::uint16_t code = formats::kv_candidate(amax, bits, i);
    if (code == 0) continue;  // it vanishes in f16; a larger one may not
    candidate[count] = code;
    scale[count++] = formats::F16::decode(code);
  }
  if (count == 0) {
    zeros(1 << (bits - 1));
    return 0;
  }
  words.kv_errors(x, n, bits, scale, count, error);
  int best = 0;
  for (int i = 1; i < count; ++i) best = error[i] < error[best] ? i : best;
  words.kv_codes(x, n, formats::reciprocal(scale[best]), bits, codes);
  return candidate[best];
}

}  // namespace qattn::cpu
