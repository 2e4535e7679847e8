// The CPU vocabulary in plain C++: sixteen lanes at a time, no instruction set assumed. It is the
// definition of every word that the other files of this folder implement, and it serves any CPU.
#pragma once

#include <cstdint>
#include <cstring>

#include "isa/cpu/packs.hpp"

namespace qattn::isa::scalar {

static constexpr int lanes = 16;
static constexpr const char* name = "scalar";

struct F {
  float x[lanes];
};
struct I {
  std::int32_t x[lanes];
};

template <class Result, class Function>
static inline Result each(Function f) {
  Result r;
  for (int i = 0; i < lanes; ++i) r.x[i] = f(i);
  return r;
}

static inline F set(float v) {
  return each<F>([&](int) { return v; });
}
static inline I set_i(std::int32_t v) {
  return each<I>([&](int) { return v; });
}
static inline F load(const float* p) {
  return each<F>([&](int i) { return p[i]; });
}
/// The first n lanes from memory, zeros behind.
static inline F load_n(const float* p, int n) {
  return each<F>([&](int i) { return i < n ? p[i] : 0.0f; });
}
static inline void store(float* p, F a) { std::memcpy(p, a.x, sizeof a.x); }
static inline I load_i(const void* p) {
  I r;
  std::memcpy(r.x, p, sizeof r.x);
  return r;
}
static inline void store_i(void* p, I a) { std::memcpy(p, a.x, sizeof a.x); }
/// Sixteen bytes, unsigned.
static inline I load_bytes(const std::uint8_t* p) {
  return each<I>([&](int i) { return p[i]; });
}
/// (a >> shift) & mask, bits coming in as zeros.
static inline I field(I a, int shift, std::uint32_t mask) {
  return each<I>([&](int i) {
    return static_cast<std::int32_t>((static_cast<std::uint32_t>(a.x[i]) >> shift) & mask);
  });
}
/// The same four bytes in every lane.
static inline I broadcast4(const void* p) {
  std::int32_t v;
  std::memcpy(&v, p, sizeof v);
  return set_i(v);
}

static inline F add(F a, F b) {
  return each<F>([&](int i) { return a.x[i] + b.x[i]; });
}
static inline F sub(F a, F b) {
  return each<F>([&](int i) { return a.x[i] - b.x[i]; });
}
static inline F mul(F a, F b) {
  return each<F>([&](int i) { return a.x[i] * b.x[i]; });
}
static inline F div(F a, F b) {
  return each<F>([&](int i) { return a.x[i] / b.x[i]; });
}
/// a * b + c; one or two roundings, as the instruction set has it.
static inline F fma(F a, F b, F c) {
  return each<F>([&](int i) { return a.x[i] * b.x[i] + c.x[i]; });
}
/// The larger one; b where either is NaN.
static inline F max(F a, F b) {
  return each<F>([&](int i) { return a.x[i] > b.x[i] ? a.x[i] : b.x[i]; });
}
static inline F min(F a, F b) {
  return each<F>([&](int i) { return a.x[i] < b.x[i] ? a.x[i] : b.x[i]; });
}
static inline F abs(F a) {
  return each<F>([&](int i) { return __builtin_fabsf(a.x[i]); });
}
static inline I add_i(I a, I b) {  // wraps, as the instruction does
  return each<I>([&](int i) {
    return static_cast<std::int32_t>(static_cast<std::uint32_t>(a.x[i]) +
                                     static_cast<std::uint32_t>(b.x[i]));
  });
}
static inline I clamp_i(I a, std::int32_t lo, std::int32_t hi) {
  return each<I>([&](int i) { return a.x[i] < lo ? lo : a.x[i] > hi ? hi : a.x[i]; });
}

static inline F to_float(I a) {
  return each<F>([&](int i) { return static_cast<float>(a.x[i]); });
}
/// formats::whole_numbers, whose header units of one instruction set do not include.
static constexpr float whole_numbers = 12582912.0f;
/// Round half to even; |a| < 2^22 (larger magnitudes and NaN give any value).
static inline I round_to_int(F a) {
  return each<I>([&](int i) {
    const float biased = a.x[i] + whole_numbers;
    std::uint32_t bits;
    std::memcpy(&bits, &biased, sizeof bits);
    return static_cast<std::int32_t>(bits - 0x4B400000u);
  });
}
/// Nearest integer as a float, ties to even; |a| < 2^22.
static inline F round_even(F a) {
  return each<F>([&](int i) { return (a.x[i] + whole_numbers) - whole_numbers; });
}
/// The largest integer that is not above a; |a| < 2^22.
static inline F floor(F a) {
  return each<F>([&](int i) {
    const float nearest = (a.x[i] + whole_numbers) - whole_numbers;
    return nearest > a.x[i] ? nearest - 1.0f : nearest;
  });
}
/// a * 2^n for integral n in [-200, 127]; results below 2^-126 are 0. a in [0.5, 2).
static inline F scale_by_power(F a, F n) {
  return each<F>([&](int i) {
    if (n.x[i] != n.x[i]) return n.x[i];
    if (n.x[i] < -126.0f) return 0.0f;
    const std::int32_t bits = (static_cast<std::int32_t>(n.x[i]) + 127) << 23;
    float power;
    std::memcpy(&power, &bits, sizeof power);
    return a.x[i] * power;
  });
}
/// Drops `bits` bits of the mantissa, ties to even.
static inline F round_mantissa(F a, int bits) {
  return each<F>([&](int i) {
    std::uint32_t u;
    std::memcpy(&u, &a.x[i], sizeof u);
    u += (1u << (bits - 1)) - 1 + ((u >> bits) & 1);
    u &= ~((1u << bits) - 1);
    float r;
    std::memcpy(&r, &u, sizeof r);
    return r;
  });
}
/// floor(log2 a) and a / 2^that, in [1, 2); a positive and normal.
static inline F exponent(F a) {
  return each<F>([&](int i) {
    std::int32_t u;
    std::memcpy(&u, &a.x[i], sizeof u);
    return static_cast<float>((u >> 23) - 127);
  });
}
static inline F mantissa(F a) {
  return each<F>([&](int i) {
    std::uint32_t u;
    std::memcpy(&u, &a.x[i], sizeof u);
    u = (u & 0x7FFFFFu) | 0x3F800000u;
    float r;
    std::memcpy(&r, &u, sizeof r);
    return r;
  });
}
/// Per lane: a < limit ? yes : no.
static inline F select_less(F a, F limit, F yes, F no) {
  return each<F>([&](int i) { return a.x[i] < limit.x[i] ? yes.x[i] : no.x[i]; });
}

/// Lane i holds what lane i ^ Distance held; Distance 1, 2, 4 or 8.
template <int Distance>
static inline F exchange(F a) {
  return each<F>([&](int i) { return a.x[i ^ Distance]; });
}

static inline float reduce_max(F a) {
  float m = a.x[0];
  for (int i = 1; i < lanes; ++i) m = m > a.x[i] ? m : a.x[i];
  return m;
}
/// The sum by halving: lane i with lane i + 8, then 4, 2, 1. Every instruction set adds in this
/// order.
static inline float reduce_add(F a) {
  for (int step = lanes / 2; step > 0; step /= 2) {
    for (int i = 0; i < step; ++i) a.x[i] += a.x[i + step];
  }
  return a.x[0];
}
/// out[i] = reduce_add(a[i]) of eight.
using isa::reduce_add_8;
static inline std::int32_t reduce_add(I a) {
  std::uint32_t sum = 0;  // wraps, as the instruction does
  for (int i = 0; i < lanes; ++i) sum += static_cast<std::uint32_t>(a.x[i]);
  return static_cast<std::int32_t>(sum);
}
/// A set of lanes, collected with or_nan().
using Mask = std::uint32_t;
static inline Mask no_lanes() { return 0; }
static inline Mask or_nan(Mask m, F a) {
  for (int i = 0; i < lanes; ++i) m |= static_cast<Mask>(a.x[i] != a.x[i]) << i;
  return m;
}
static inline bool any(Mask m) { return m != 0; }
/// Lanes whose value exceeds the limit.
static inline int count_greater(F a, F limit) {
  int n = 0;
  for (int i = 0; i < lanes; ++i) n += a.x[i] > limit.x[i];
  return n;
}

/// Per lane: c + sum over four bytes of (unsigned byte of a) * (signed byte of b), exact in 32
/// bits.
static inline I dot4(I c, I a, I b) {
  std::uint8_t ua[4 * lanes];
  std::int8_t sb[4 * lanes];
  std::memcpy(ua, a.x, sizeof ua);
  std::memcpy(sb, b.x, sizeof sb);
  for (int i = 0; i < lanes; ++i) {
    for (int j = 0; j < 4; ++j) c.x[i] += ua[4 * i + j] * sb[4 * i + j];
  }
  return c;
}
/// The low byte of every lane; the value must fit.
static inline void store_bytes(void* p, I a) {
  auto* out = static_cast<std::uint8_t*>(p);
  for (int i = 0; i < lanes; ++i) out[i] = static_cast<std::uint8_t>(a.x[i]);
}

using isa::transpose_packs;
/// 4 rows of n bytes (a multiple of 16) to [n][4].
static inline void interleave_bytes(const std::uint8_t* const* rows, int n, std::uint8_t* out) {
  for (int i = 0; i < n; ++i) {
    for (int r = 0; r < 4; ++r) out[4 * i + r] = rows[r][i];
  }
}
/// The upper halves: exact for values that bf16 holds.
static inline void store_bf16(std::uint16_t* p, F a) {
  for (int i = 0; i < lanes; ++i) {
    std::uint32_t bits;
    std::memcpy(&bits, &a.x[i], sizeof bits);
    p[i] = static_cast<std::uint16_t>(bits >> 16);
  }
}

static inline float float_of_half(std::uint16_t h) {
  const std::uint32_t sign = static_cast<std::uint32_t>(h & 0x8000u) << 16;
  const std::uint32_t magnitude = h & 0x7FFFu;
  std::uint32_t bits;
  if (magnitude >= 0x7C00u) {
    bits = 0x7F800000u | (magnitude & 0x3FFu) << 13;
  } else if (magnitude >= 0x0400u) {
    bits = (magnitude << 13) + (112u << 23);
  } else {
    const float value = static_cast<float>(magnitude) * 0x1p-24f;
    std::memcpy(&bits, &value, sizeof bits);
  }
  bits |= sign;
  float r;
  std::memcpy(&r, &bits, sizeof r);
  return r;
}
/// Nearest half, ties to even, as conversion instructions have it: overflow gives the infinity, NaN
/// stays NaN with its sign and the top of its payload, quiet.
static inline std::uint16_t half_of_float(float x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const std::uint32_t sign = bits >> 31 << 15, magnitude = bits & 0x7FFFFFFFu;
  std::uint32_t code;
  if (magnitude > 0x7F800000u) {
    code = 0x7E00u | (magnitude >> 13 & 0x1FFu);
  } else if (magnitude >= 0x38800000u) {
    code = (magnitude + 0xFFFu + (magnitude >> 13 & 1u) - (112u << 23)) >> 13;
    if (code > 0x7C00u) code = 0x7C00u;
  } else {  // a multiple of 2^-24: the sum's last bit is worth that
    const float sum = __builtin_fabsf(x) + 0.5f;
    std::memcpy(&code, &sum, sizeof code);
    code -= 0x3F000000u;
  }
  return static_cast<std::uint16_t>(sign | code);
}
static inline void store_f16(std::uint16_t* p, F a) {
  for (int i = 0; i < lanes; ++i) p[i] = half_of_float(a.x[i]);
}
static inline F load_f16_n(const std::uint16_t* p, int n) {
  return each<F>([&](int i) { return i < n ? float_of_half(p[i]) : 0.0f; });
}
static inline F load_bf16_n(const std::uint16_t* p, int n) {
  return each<F>([&](int i) {
    const std::uint32_t bits = i < n ? static_cast<std::uint32_t>(p[i]) << 16 : 0u;
    float r;
    std::memcpy(&r, &bits, sizeof r);
    return r;
  });
}

}  // namespace qattn::isa::scalar
