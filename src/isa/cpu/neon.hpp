// The CPU vocabulary on Armv8.2 with dot products (FEAT_DotProd), or with mixed-sign ones
// (FEAT_I8MM): sixteen lanes in four registers. scalar.hpp says what each word means. The linkage
// rule of avx512.hpp holds here too.
#pragma once

#include <arm_neon.h>

#include <cstdint>
#include <cstring>

#include "isa/cpu/packs.hpp"

namespace qattn::isa::neon {

static constexpr int lanes = 16;
#if !defined(QATTN_ISA_NAME)
#define QATTN_ISA_NAME "neon"
#endif
static constexpr const char* name = QATTN_ISA_NAME;

struct F {
  float32x4_t x[4];
};
struct I {
  int32x4_t x[4];
};

/// Applies f to the four quarters.
template <class Result, class Function>
static inline Result quarters(Function f) {
  return {f(0), f(1), f(2), f(3)};
}

static inline F set(float v) {
  return quarters<F>([&](int) { return vdupq_n_f32(v); });
}
static inline I set_i(std::int32_t v) {
  return quarters<I>([&](int) { return vdupq_n_s32(v); });
}
static inline F load(const float* p) {
  return quarters<F>([&](int i) { return vld1q_f32(p + 4 * i); });
}
static inline void store(float* p, F a) {
  for (int i = 0; i < 4; ++i) vst1q_f32(p + 4 * i, a.x[i]);
}
static inline F load_n(const float* p, int n) {
  if (n >= lanes) return load(p);
  float x[lanes] = {};
  std::memcpy(x, p, sizeof(float) * static_cast<std::size_t>(n));
  return load(x);
}
static inline I load_i(const void* p) {
  const auto* q = static_cast<const std::int8_t*>(p);
  return quarters<I>([&](int i) { return vreinterpretq_s32_s8(vld1q_s8(q + 16 * i)); });
}
static inline I load_bytes(const std::uint8_t* p) {
  const uint8x16_t a = vld1q_u8(p);
  const uint16x8_t lo = vmovl_u8(vget_low_u8(a)), hi = vmovl_u8(vget_high_u8(a));
  const auto wide = [](uint16x4_t x) { return vreinterpretq_s32_u32(vmovl_u16(x)); };
  return {wide(vget_low_u16(lo)), wide(vget_high_u16(lo)), wide(vget_low_u16(hi)),
          wide(vget_high_u16(hi))};
}
static inline void store_i(void* p, I a) {
  auto* q = static_cast<std::int8_t*>(p);
  for (int i = 0; i < 4; ++i) vst1q_s8(q + 16 * i, vreinterpretq_s8_s32(a.x[i]));
}
static inline I field(I a, int shift, std::uint32_t mask) {
  const int32x4_t right = vdupq_n_s32(-shift);
  return quarters<I>([&](int i) {
    const uint32x4_t moved = vshlq_u32(vreinterpretq_u32_s32(a.x[i]), right);
    return vreinterpretq_s32_u32(vandq_u32(moved, vdupq_n_u32(mask)));
  });
}
static inline I broadcast4(const void* p) {
  std::int32_t v;
  std::memcpy(&v, p, sizeof v);
  return set_i(v);
}

static inline F add(F a, F b) {
  return quarters<F>([&](int i) { return vaddq_f32(a.x[i], b.x[i]); });
}
static inline F sub(F a, F b) {
  return quarters<F>([&](int i) { return vsubq_f32(a.x[i], b.x[i]); });
}
static inline F mul(F a, F b) {
  return quarters<F>([&](int i) { return vmulq_f32(a.x[i], b.x[i]); });
}
static inline F div(F a, F b) {
  return quarters<F>([&](int i) { return vdivq_f32(a.x[i], b.x[i]); });
}
static inline F fma(F a, F b, F c) {
  return quarters<F>([&](int i) { return vfmaq_f32(c.x[i], a.x[i], b.x[i]); });
}
/// FMAX would spread NaN from either side; the vocabulary's rule is a compare and select.
static inline F max(F a, F b) {
  return quarters<F>([&](int i) { return vbslq_f32(vcgtq_f32(a.x[i], b.x[i]), a.x[i], b.x[i]); });
}
static inline F min(F a, F b) {
  return quarters<F>([&](int i) { return vbslq_f32(vcltq_f32(a.x[i], b.x[i]), a.x[i], b.x[i]); });
}
static inline F abs(F a) {
  return quarters<F>([&](int i) { return vabsq_f32(a.x[i]); });
}
static inline I add_i(I a, I b) {
  return quarters<I>([&](int i) { return vaddq_s32(a.x[i], b.x[i]); });
}

static inline F to_float(I a) {
  return quarters<F>([&](int i) { return vcvtq_f32_s32(a.x[i]); });
}
static inline I round_to_int(F a) {
  return quarters<I>([&](int i) { return vcvtnq_s32_f32(a.x[i]); });
}
static inline F round_even(F a) {
  return quarters<F>([&](int i) { return vrndnq_f32(a.x[i]); });
}
static inline F floor(F a) {
  return quarters<F>([&](int i) { return vrndmq_f32(a.x[i]); });
}
static inline F scale_by_power(F a, F n) {
  return quarters<F>([&](int i) {
    const int32x4_t power = vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(n.x[i]), vdupq_n_s32(127)), 23);
    const float32x4_t r = vmulq_f32(a.x[i], vreinterpretq_f32_s32(power));
    const uint32x4_t normal = vcgeq_f32(n.x[i], vdupq_n_f32(-126.0f));
    const uint32x4_t number = vceqq_f32(n.x[i], n.x[i]);
    const float32x4_t flushed = vbslq_f32(normal, r, vdupq_n_f32(0.0f));
    return vbslq_f32(number, flushed, n.x[i]);
  });
}
static inline F round_mantissa(F a, int bits) {
  return quarters<F>([&](int i) {
    const uint32x4_t u = vreinterpretq_u32_f32(a.x[i]);
    const uint32x4_t odd = vandq_u32(vshlq_u32(u, vdupq_n_s32(-bits)), vdupq_n_u32(1));
    const uint32x4_t half = vdupq_n_u32((1u << (bits - 1)) - 1);
    const uint32x4_t up = vaddq_u32(u, vaddq_u32(half, odd));
    return vreinterpretq_f32_u32(vandq_u32(up, vdupq_n_u32(~((1u << bits) - 1))));
  });
}
static inline F exponent(F a) {
  return quarters<F>([&](int i) {
    const uint32x4_t e = vshrq_n_u32(vreinterpretq_u32_f32(a.x[i]), 23);
    return vcvtq_f32_s32(vsubq_s32(vreinterpretq_s32_u32(e), vdupq_n_s32(127)));
  });
}
static inline F mantissa(F a) {
  return quarters<F>([&](int i) {
    const uint32x4_t f = vandq_u32(vreinterpretq_u32_f32(a.x[i]), vdupq_n_u32(0x7FFFFF));
    return vreinterpretq_f32_u32(vorrq_u32(f, vdupq_n_u32(0x3F800000)));
  });
}
static inline F select_less(F a, F limit, F yes, F no) {
  return quarters<F>(
      [&](int i) { return vbslq_f32(vcltq_f32(a.x[i], limit.x[i]), yes.x[i], no.x[i]); });
}

template <int Distance>
static inline F exchange(F a) {
  return quarters<F>([&](int i) {
    if constexpr (Distance == 1) return vrev64q_f32(a.x[i]);
    if constexpr (Distance == 2) return vextq_f32(a.x[i], a.x[i], 2);
    if constexpr (Distance >= 4) return a.x[i ^ Distance / 4];
  });
}

static inline float reduce_max(F a) {
  const F b = {a.x[0], a.x[1], a.x[2], a.x[3]};
  return vmaxvq_f32(vmaxq_f32(vmaxq_f32(b.x[0], b.x[1]), vmaxq_f32(b.x[2], b.x[3])));
}
static inline float reduce_add(F a) {
  const float32x4_t h0 = vaddq_f32(a.x[0], a.x[2]), h1 = vaddq_f32(a.x[1], a.x[3]);
  const float32x4_t q = vaddq_f32(h0, h1);
  const float32x2_t d = vadd_f32(vget_low_f32(q), vget_high_f32(q));
  return vget_lane_f32(d, 0) + vget_lane_f32(d, 1);
}
using isa::reduce_add_8;
static inline std::int32_t reduce_add(I a) {
  return vaddvq_s32(vaddq_s32(vaddq_s32(a.x[0], a.x[1]), vaddq_s32(a.x[2], a.x[3])));
}
using Mask = std::uint32_t;
static inline Mask no_lanes() { return 0; }
static inline Mask or_nan(Mask m, F a) {
  uint32x4_t number = vceqq_f32(a.x[0], a.x[0]);
  for (int i = 1; i < 4; ++i) number = vandq_u32(number, vceqq_f32(a.x[i], a.x[i]));
  return m | static_cast<Mask>(vminvq_u32(number) == 0);
}
static inline bool any(Mask m) { return m != 0; }
static inline int count_greater(F a, F limit) {
  uint32x4_t n = vdupq_n_u32(0);
  for (int i = 0; i < 4; ++i) n = vsubq_u32(n, vcgtq_f32(a.x[i], limit.x[i]));
  return static_cast<int>(vaddvq_u32(n));
}

/// USDOT where it exists. SDOT knows one sign only: u = s + 128 with s = u xor 0x80, and 128 times
/// the sum of b's bytes is a dot product with 64 twice over.
static inline I dot4(I c, I a, I b) {
  return quarters<I>([&](int i) {
    const int8x16_t sb = vreinterpretq_s8_s32(b.x[i]);
#if defined(__ARM_FEATURE_MATMUL_INT8)
    return vusdotq_s32(c.x[i], vreinterpretq_u8_s32(a.x[i]), sb);
#else
    const uint8x16_t ua = vreinterpretq_u8_s32(a.x[i]);
    const int8x16_t sa = vreinterpretq_s8_u8(veorq_u8(ua, vdupq_n_u8(0x80)));
    const int8x16_t half = vdupq_n_s8(64);
    return vdotq_s32(vdotq_s32(vdotq_s32(c.x[i], sa, sb), half, sb), half, sb);
#endif
  });
}
static inline void store_bytes(void* p, I a) {
  const int16x8_t lo = vcombine_s16(vmovn_s32(a.x[0]), vmovn_s32(a.x[1]));
  const int16x8_t hi = vcombine_s16(vmovn_s32(a.x[2]), vmovn_s32(a.x[3]));
  vst1q_s8(static_cast<std::int8_t*>(p), vcombine_s8(vmovn_s16(lo), vmovn_s16(hi)));
}
using isa::transpose_packs;
static inline void interleave_bytes(const std::uint8_t* const* rows, int n, std::uint8_t* out) {
  for (int i = 0; i < n; i += 16) {
    const uint8x16x4_t r = {vld1q_u8(rows[0] + i), vld1q_u8(rows[1] + i), vld1q_u8(rows[2] + i),
                            vld1q_u8(rows[3] + i)};
    vst4q_u8(out + 4 * i, r);
  }
}
static inline void store_bf16(std::uint16_t* p, F a) {
  for (int i = 0; i < 4; ++i) {
    vst1_u16(p + 4 * i, vshrn_n_u32(vreinterpretq_u32_f32(a.x[i]), 16));
  }
}

static inline void store_f16(std::uint16_t* p, F a) {
  for (int i = 0; i < 4; ++i) {
    vst1_u16(p + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(a.x[i])));
  }
}
static inline F load_f16_n(const std::uint16_t* p, int n) {
  std::uint16_t x[lanes] = {};
  std::memcpy(x, p, sizeof(std::uint16_t) * static_cast<std::size_t>(n < lanes ? n : lanes));
  return quarters<F>(
      [&](int i) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(x + 4 * i))); });
}
static inline F load_bf16_n(const std::uint16_t* p, int n) {
  std::uint16_t x[lanes] = {};
  std::memcpy(x, p, sizeof(std::uint16_t) * static_cast<std::size_t>(n < lanes ? n : lanes));
  return quarters<F>(
      [&](int i) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(x + 4 * i), 16)); });
}

}  // namespace qattn::isa::neon
