#include "kernels/quantize/host/kv_rows.hpp"

#include <bit>
#include <cstring>

#include "formats/kv/quantize.hpp"

namespace qattn::cpu {
namespace {

/// F16::decode(F16::encode(x)) of 0 <= x < 65520, in a form that compilers vectorise.
float nearest_f16(float x) {
  // Subnormal f16 are multiples of 2^-24, which is the last place of floats from 0.5 on.
  const float tiny = (x + 0.5f) - 0.5f;
  const auto bits = std::bit_cast<std::uint32_t>(x);
  const std::uint32_t up = bits + 0xfff + (bits >> 13 & 1);
  return x < 0x1p-14f ? tiny : std::bit_cast<float>(up & ~0x1fffu);
}

}  // namespace

std::uint16_t encode_kv_row(const KernelTable& words, const float* x, int n, int bits,
                            std::uint8_t* codes) {
  const auto zeros = [&](int code) { std::memset(codes, code, static_cast<std::size_t>(n)); };
  const float amax = words.amax(x, n);
  if (!formats::kv_holds(amax, bits)) {
    zeros(0);
    return formats::kv_nan_scale;
  }
  constexpr int count = formats::kv_candidates;
  float scale[count], error[count];
  for (int i = 0; i < count; ++i) {
    scale[i] = nearest_f16(amax * formats::kv_factor(bits, i));
  }
  int best = 0;  // they grow: the smallest may vanish in f16, larger ones not
  while (best < count && scale[best] == 0.0f) ++best;
  if (best == count) {
    zeros(1 << (bits - 1));
    return 0;
  }
  words.kv_errors(x, n, bits, scale + best, count - best, error + best);
  for (int i = best + 1; i < count; ++i) best = error[i] < error[best] ? i : best;
  words.kv_codes(x, n, formats::reciprocal(scale[best]), bits, codes);
  return formats::F16::encode(scale[best]);
}

}  // namespace qattn::cpu
