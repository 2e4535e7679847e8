// Arithmetic, emulated. Meanings: isa.hpp.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "formats/bf16.hpp"
#include "formats/e4m3.hpp"
#include "formats/e5m2.hpp"
#include "formats/f16.hpp"
#include "isa/emu/words/places.hpp"

namespace qattn::isa {
inline namespace QATTN_TARGET {

// These also work outside of kernels, where nobody counts them.
inline void count_word(Word word, std::uint64_t instructions = 1) {
  if (emu::current_lane) emu::current_block().count(word, instructions);
}
inline float flush_subnormal(float x) {
  return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x;
}

/// NaN has no sign, as GPUs give it: kernels count on that (no_sign() of Hopper's prefill kernel).
inline float exp2(float x) {
  count_word(Word::exp2);
  if (std::isnan(x)) return std::numeric_limits<float>::quiet_NaN();
  return flush_subnormal(std::exp2(flush_subnormal(x)));
}
inline float log2(float x) {
  count_word(Word::log2);
  return flush_subnormal(std::log2(flush_subnormal(x)));
}
inline float reciprocal(float x) {
  count_word(Word::reciprocal);
  return flush_subnormal(1.0f / flush_subnormal(x));
}
/// As maxima of the hardware: NaN (signalling ones too) only if all are, and +0 is larger than -0.
/// std::fmax leaves both open.
inline float max3(float a, float b, float c) {
  count_word(Word::min_max, 2);  // sm_90 has the three-operand one for integers only
  const auto larger = [](float x, float y) {
    if (std::isnan(x) || std::isnan(y)) return std::isnan(x) ? y : x;
    if (x == y) return std::signbit(x) ? y : x;
    return x > y ? x : y;
  };
  return larger(larger(a, b), c);
}
inline std::int32_t max3(std::int32_t a, std::int32_t b, std::int32_t c) {
  count_word(Word::min_max);
  return std::max({a, b, c});
}
inline std::uint32_t max3(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
  count_word(Word::min_max);
  return std::max({a, b, c});
}
inline std::uint32_t min3(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
  count_word(Word::min_max);
  return std::min({a, b, c});
}
inline std::uint32_t max3_u16(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
  count_word(Word::min_max);
  const std::uint32_t high = std::max({a >> 16, b >> 16, c >> 16});
  return high << 16 | std::max({a & 0xffffu, b & 0xffffu, c & 0xffffu});
}

/// The larger or smaller of two numbers in each half, as max.NaN and min.NaN have it.
template <class Format>
std::uint32_t extreme_halves(std::uint32_t a, std::uint32_t b, bool largest) {
  count_word(Word::min_max);
  const auto half = [&](int shift) -> std::uint32_t {
    const auto i = static_cast<std::uint16_t>(a >> shift),
               j = static_cast<std::uint16_t>(b >> shift);
    const float x = Format::decode(i), y = Format::decode(j);
    if (std::isnan(x) || std::isnan(y)) return 0x7fffu;
    const bool less = x != y ? x < y : std::signbit(x);
    return less == largest ? j : i;
  };
  return half(0) | half(16) << 16;
}
inline std::uint32_t max_f16(std::uint32_t a, std::uint32_t b) {
  return extreme_halves<formats::F16>(a, b, true);
}
inline std::uint32_t min_f16(std::uint32_t a, std::uint32_t b) {
  return extreme_halves<formats::F16>(a, b, false);
}
inline std::uint32_t max_bf16(std::uint32_t a, std::uint32_t b) {
  return extreme_halves<formats::Bf16>(a, b, true);
}
inline std::uint32_t min_bf16(std::uint32_t a, std::uint32_t b) {
  return extreme_halves<formats::Bf16>(a, b, false);
}

/// The hardware's conversions give one NaN.
inline std::uint32_t pack_f16(float lo, float hi) {
  count_word(Word::convert);
  const auto code = [](float x) -> std::uint32_t {
    return std::isnan(x) ? 0x7fffu : formats::F16::encode(x);
  };
  return code(lo) | code(hi) << 16;
}
inline std::uint32_t pack_bf16(float lo, float hi) {
  count_word(Word::convert);
  const auto code = [](float x) -> std::uint32_t {
    return std::isnan(x) ? 0x7fffu : formats::Bf16::encode(x);
  };
  return code(lo) | code(hi) << 16;
}
inline Pair unpack_f16(std::uint32_t v) {
  count_word(Word::convert, 2);
  return {formats::F16::decode(static_cast<std::uint16_t>(v)),
          formats::F16::decode(static_cast<std::uint16_t>(v >> 16))};
}
inline Pair unpack_bf16(std::uint32_t v) {
  count_word(Word::convert, 2);
  return {std::bit_cast<float>(v << 16), std::bit_cast<float>(v & 0xffff0000u)};
}
inline std::uint32_t multiply_f16(std::uint32_t a, std::uint32_t b) {
  count_word(Word::fma);
  const auto half = [&](int shift) -> std::uint32_t {
    // 22 bits of product are exact in float32, so it is rounded once.
    const float x = formats::F16::decode(static_cast<std::uint16_t>(a >> shift));
    const float product = x * formats::F16::decode(static_cast<std::uint16_t>(b >> shift));
    return std::isnan(product) ? 0x7fffu : formats::F16::encode(product);
  };
  return half(0) | half(16) << 16;
}
/// As a float whose last bit is set where bits were lost: coarser formats round that as they would
/// round x itself.
inline float float_to_odd(double x) {
  const auto f = static_cast<float>(x);
  const double lost = x - static_cast<double>(f);
  if (lost == 0 || !std::isfinite(x)) return f;
  auto bits = std::bit_cast<std::uint32_t>(f);
  if ((lost < 0) == (x > 0)) --bits;  // f lies beyond x
  return std::bit_cast<float>(bits | 1u);
}
inline std::uint32_t fma_f16(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
  count_word(Word::fma);
  const auto half = [&](int shift) -> std::uint32_t {
    const auto value = [shift](std::uint32_t x) {
      return static_cast<double>(formats::F16::decode(static_cast<std::uint16_t>(x >> shift)));
    };
    // Where float64 does not hold the sum, what is lost is far below half of f16's last place.
    const float sum = float_to_odd(value(a) * value(b) + value(c));
    return std::isnan(sum) ? 0x7fffu : formats::F16::encode(sum);
  };
  return half(0) | half(16) << 16;
}
/// Counted as the two instructions that they are on most GPUs.
inline Pair fma_pair(Pair a, Pair b, Pair c) {
  count_word(Word::fma, 2);
  return {std::fmaf(a.lo, b.lo, c.lo), std::fmaf(a.hi, b.hi, c.hi)};
}
inline Pair multiply_pair(Pair a, Pair b) {
  count_word(Word::fma, 2);
  return {a.lo * b.lo, a.hi * b.hi};
}
inline Pair add_pair(Pair a, Pair b) {
  count_word(Word::fma, 2);
  return {a.lo + b.lo, a.hi + b.hi};
}
inline std::uint32_t pack_u8(float x0, float x1, float x2, float x3) {
  count_word(Word::convert, 2);
  const auto code = [](float x) -> std::uint32_t {
    if (!(x > 0)) return 0;  // NaN too
    // Adding 2^23 leaves no fraction bits: the sum rounds half to even in every rounding library.
    return x >= 255 ? 255 : std::bit_cast<std::uint32_t>(x + 0x1p23f) & 0xffu;
  };
  return code(x0) | code(x1) << 8 | code(x2) << 16 | code(x3) << 24;
}
inline std::uint32_t pack_s8(float x0, float x1, float x2, float x3) {
  count_word(Word::convert, 2);
  const auto code = [](float x) -> std::uint32_t {
    if (std::isnan(x)) return 0;
    // Adding 1.5 * 2^23 leaves no fraction bits, as in pack_u8().
    const float kept = std::clamp(x, -128.0f, 127.0f) + 0x1.8p23f;
    return std::bit_cast<std::uint32_t>(kept) & 0xffu;
  };
  return code(x0) | code(x1) << 8 | code(x2) << 16 | code(x3) << 24;
}
/// Infinities saturate here, as the instruction has it; formats:: makes them NaN.
template <class Codec>
std::uint16_t pack_fp8(float lo, float hi) {
  count_word(Word::convert);
  const auto code = [](float x) -> std::uint32_t {
    if (std::isnan(x)) return 0x7fu;
    return Codec::encode(std::isinf(x) ? std::copysign(Codec::max, x) : x);
  };
  return static_cast<std::uint16_t>(code(lo) | code(hi) << 8);
}
inline std::uint16_t pack_e4m3(float lo, float hi) { return pack_fp8<formats::E4m3>(lo, hi); }
inline std::uint16_t pack_e5m2(float lo, float hi) { return pack_fp8<formats::E5m2>(lo, hi); }
inline std::uint32_t unpack_e4m3(std::uint16_t codes) {
  count_word(Word::convert);
  const auto half = [](std::uint32_t code) -> std::uint32_t {
    const float x = formats::E4m3::decode(static_cast<std::uint8_t>(code));
    return x != x ? 0x7fffu : formats::F16::encode(x);
  };
  return half(codes & 0xffu) | half(codes >> 8) << 16;
}

inline std::uint32_t byte_permute(std::uint32_t a, std::uint32_t b, std::uint32_t selector,
                                  Where where = Where::current()) {
  count_word(Word::byte_permute);
  if (selector & 0xffff8888u) {
    throw emu::Error(emu::text("byte_permute: selector 0x%x has a nibble above 7, at %s", selector,
                               emu::describe(where).c_str()));
  }
  const std::uint64_t bytes = a | static_cast<std::uint64_t>(b) << 32;
  std::uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const std::uint32_t from = selector >> (4 * i) & 7u;
    result |= static_cast<std::uint32_t>(bytes >> (8 * from) & 0xffu) << (8 * i);
  }
  return result;
}
template <int Table>
std::uint32_t lop3(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
  static_assert(Table >= 0 && Table < 256);
  count_word(Word::lop3);
  std::uint32_t result = 0;
  for (int i = 0; i < 8; ++i) {
    if (Table >> i & 1) result |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
  }
  return result;
}
inline float to_float(std::int32_t x) {
  count_word(Word::convert);
  return static_cast<float>(x);
}
inline float to_float(float x) { return x; }
inline float to_float_22(std::int32_t x, Where where = Where::current()) {
  if (x < -(1 << 22) || x > 1 << 22) {
    throw emu::Error(emu::text("to_float_22: %d, at %s", x, emu::describe(where).c_str()));
  }
  return to_float(x);
}
inline float to_float_22(float x) { return x; }
inline std::int32_t dot4_s8(std::uint32_t a, std::uint32_t b, std::int32_t c) {
  count_word(Word::dot4);
  std::uint32_t sum = static_cast<std::uint32_t>(c);
  for (int i = 0; i < 4; ++i) {
    const int x = static_cast<std::int8_t>(a >> (8 * i)),
              y = static_cast<std::int8_t>(b >> (8 * i));
    sum += static_cast<std::uint32_t>(x * y);
  }
  return static_cast<std::int32_t>(sum);
}
inline std::uint32_t dot4_u8(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
  count_word(Word::dot4);
  for (int i = 0; i < 4; ++i) c += (a >> (8 * i) & 0xffu) * (b >> (8 * i) & 0xffu);
  return c;
}

// C's functions of one instruction each. Kernels call them by their plain names, as CUDA has them,
// and find these, which count.
inline float fmaf(float a, float b, float c) {
  count_word(Word::fma);
  return std::fmaf(a, b, c);
}
inline float fmaxf(float a, float b) {
  count_word(Word::min_max);
  return std::fmax(a, b);
}
inline float fminf(float a, float b) {
  count_word(Word::min_max);
  return std::fmin(a, b);
}

}  // namespace QATTN_TARGET
}  // namespace qattn::isa

namespace qattn::kernels {
using isa::fmaf;
using isa::fmaxf;
using isa::fminf;
}  // namespace qattn::kernels
namespace qattn::tile {
using isa::fmaf;
using isa::fmaxf;
using isa::fminf;
}  // namespace qattn::tile
