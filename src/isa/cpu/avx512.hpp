// The CPU vocabulary on AVX-512 (F, BW, DQ, VL) with VNNI. scalar.hpp says what each word means.
// Only units compiled for this instruction set may include it, and nothing here is an inline
// function with external linkage: the linker must never pick an AVX-512 copy for another unit.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace qattn::isa::avx512vnni {

inline constexpr int lanes = 16;
#if !defined(QATTN_ISA_NAME)
#define QATTN_ISA_NAME "avx512vnni"
#endif
inline constexpr const char* name = QATTN_ISA_NAME;

using F = __m512;
using I = __m512i;

static inline __mmask16 first(int n) {
  return static_cast<__mmask16>(n >= lanes ? 0xFFFF : (1 << n) - 1);
}

static inline F set(float v) { return _mm512_set1_ps(v); }
static inline I set_i(std::int32_t v) { return _mm512_set1_epi32(v); }
static inline F load(const float* p) { return _mm512_loadu_ps(p); }
static inline F load_n(const float* p, int n) { return _mm512_maskz_loadu_ps(first(n), p); }
static inline void store(float* p, F a) { _mm512_storeu_ps(p, a); }
static inline I load_i(const void* p) { return _mm512_loadu_si512(p); }
static inline I broadcast4(const void* p) {
  std::int32_t v;
  std::memcpy(&v, p, sizeof v);
  return _mm512_set1_epi32(v);
}

static inline F add(F a, F b) { return _mm512_add_ps(a, b); }
static inline F sub(F a, F b) { return _mm512_sub_ps(a, b); }
static inline F mul(F a, F b) { return _mm512_mul_ps(a, b); }
static inline F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
static inline F max(F a, F b) { return _mm512_max_ps(a, b); }
static inline F min(F a, F b) { return _mm512_min_ps(a, b); }
static inline F abs(F a) { return _mm512_abs_ps(a); }
static inline I add_i(I a, I b) { return _mm512_add_epi32(a, b); }
static inline I clamp_i(I a, std::int32_t lo, std::int32_t hi) {
  return _mm512_min_epi32(_mm512_max_epi32(a, set_i(lo)), set_i(hi));
}

static inline F to_float(I a) { return _mm512_cvtepi32_ps(a); }
static inline I round_to_int(F a) { return _mm512_cvtps_epi32(a); }
static inline F round_even(F a) {
  return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
static inline F scale_by_power(F a, F n) { return _mm512_scalef_ps(a, n); }
static inline F round_mantissa(F a, int bits) {
  const I u = _mm512_castps_si512(a);
  const I odd = _mm512_and_si512(_mm512_srl_epi32(u, _mm_cvtsi32_si128(bits)), set_i(1));
  const I half = set_i((1 << (bits - 1)) - 1);
  const I up = _mm512_add_epi32(u, _mm512_add_epi32(half, odd));
  return _mm512_castsi512_ps(_mm512_and_si512(up, set_i(~((1 << bits) - 1))));
}
static inline F select_less(F a, F limit, F yes, F no) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, limit, _CMP_LT_OQ), no, yes);
}

static inline float reduce_max(F a) { return _mm512_reduce_max_ps(a); }
static inline float reduce_add(F a) {
  const __m256 h = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
  const __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  const __m128 d = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(d, _mm_shuffle_ps(d, d, 1)));
}
static inline std::int32_t reduce_add(I a) { return _mm512_reduce_add_epi32(a); }
using Mask = __mmask16;
static inline Mask no_lanes() { return 0; }
static inline Mask or_nan(Mask m, F a) {
  return static_cast<Mask>(m | _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q));
}
static inline bool any(Mask m) { return m != 0; }
static inline int count_greater(F a, F limit) {
  return __builtin_popcount(_mm512_cmp_ps_mask(a, limit, _CMP_GT_OQ));
}

static inline I dot4(I c, I a, I b) { return _mm512_dpbusd_epi32(c, a, b); }
static inline void store_bytes(void* p, I a) {
  _mm_storeu_si128(static_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a));
}

static inline void store_bf16(std::uint16_t* p, F a) {
  const I upper = _mm512_srli_epi32(_mm512_castps_si512(a), 16);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(upper));
}
#if defined(__AVX512BF16__)
/// Per lane: c + a.lo * b.lo + a.hi * b.hi over pairs of bf16 (subnormals count as 0).
static inline F dot2(F c, I a, I b) {
  return _mm512_dpbf16_ps(c, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
}
#endif

static inline F load_f16_n(const std::uint16_t* p, int n) {
  return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first(n), p));
}
static inline F load_bf16_n(const std::uint16_t* p, int n) {
  const I wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first(n), p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

}  // namespace qattn::isa::avx512vnni
