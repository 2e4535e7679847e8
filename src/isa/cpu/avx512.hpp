// The CPU vocabulary on AVX-512 (F, BW, DQ, VL) with VNNI. scalar.hpp says what each word means.
// Only units compiled for this instruction set may include it, and nothing here has external
// linkage, no inline function and no inline variable: the linker must never pick an AVX-512 copy
// for another unit, and three units give `name` three values.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace qattn::isa::avx512vnni {

static constexpr int lanes = 16;
#if !defined(QATTN_ISA_NAME)
#define QATTN_ISA_NAME "avx512vnni"
#endif
static constexpr const char* name = QATTN_ISA_NAME;

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
static inline I load_bytes(const std::uint8_t* p) {
  return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
static inline void store_i(void* p, I a) { _mm512_storeu_si512(p, a); }
static inline I field(I a, int shift, std::uint32_t mask) {
  return _mm512_and_si512(_mm512_srl_epi32(a, _mm_cvtsi32_si128(shift)),
                          _mm512_set1_epi32(static_cast<std::int32_t>(mask)));
}
static inline I broadcast4(const void* p) {
  std::int32_t v;
  std::memcpy(&v, p, sizeof v);
  return _mm512_set1_epi32(v);
}

static inline F add(F a, F b) { return _mm512_add_ps(a, b); }
static inline F sub(F a, F b) { return _mm512_sub_ps(a, b); }
static inline F mul(F a, F b) { return _mm512_mul_ps(a, b); }
static inline F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
static inline F div(F a, F b) { return _mm512_div_ps(a, b); }
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
static inline F floor(F a) {
  return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
}
/// Lanes that would be too small are left out: each of them costs hundreds of cycles, an exception
/// that is masked but taken.
static inline F scale_by_power(F a, F n) {
  const __mmask16 normal = _mm512_cmp_ps_mask(n, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
  return _mm512_maskz_scalef_ps(normal, a, n);
}
static inline F round_mantissa(F a, int bits) {
  const I u = _mm512_castps_si512(a);
  const I odd = _mm512_and_si512(_mm512_srl_epi32(u, _mm_cvtsi32_si128(bits)), set_i(1));
  const I half = set_i((1 << (bits - 1)) - 1);
  const I up = _mm512_add_epi32(u, _mm512_add_epi32(half, odd));
  return _mm512_castsi512_ps(_mm512_and_si512(up, set_i(~((1 << bits) - 1))));
}
static inline F exponent(F a) { return _mm512_getexp_ps(a); }
static inline F mantissa(F a) {
  return _mm512_getmant_ps(a, _MM_MANT_NORM_1_2, _MM_MANT_SIGN_zero);
}
static inline F select_less(F a, F limit, F yes, F no) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, limit, _CMP_LT_OQ), no, yes);
}

template <int Distance>
static inline F exchange(F a) {
  if constexpr (Distance == 1) return _mm512_permute_ps(a, 0xB1);
  if constexpr (Distance == 2) return _mm512_permute_ps(a, 0x4E);
  if constexpr (Distance == 4) return _mm512_shuffle_f32x4(a, a, 0xB1);
  if constexpr (Distance == 8) return _mm512_shuffle_f32x4(a, a, 0x4E);
}

static inline float reduce_max(F a) { return _mm512_reduce_max_ps(a); }
static inline float reduce_add(F a) {
  const __m256 h = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
  const __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  const __m128 d = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(d, _mm_shuffle_ps(d, d, 1)));
}
/// Three shuffles a vector instead of four, and all additions at full width.
static inline void reduce_add_8(const F* a, float* out) {
  F x[4];  // lanes i + (i + 8) of vectors 2 n and 2 n + 1
  for (int n = 0; n < 4; ++n) {
    x[n] = _mm512_add_ps(_mm512_shuffle_f32x4(a[2 * n], a[2 * n + 1], 0x44),
                         _mm512_shuffle_f32x4(a[2 * n], a[2 * n + 1], 0xEE));
  }
  F y[2];  // four lanes left of vectors 4 n to 4 n + 3
  for (int n = 0; n < 2; ++n) {
    y[n] = _mm512_add_ps(_mm512_shuffle_f32x4(x[2 * n], x[2 * n + 1], 0x88),
                         _mm512_shuffle_f32x4(x[2 * n], x[2 * n + 1], 0xDD));
  }
  const __m512d lo = _mm512_castps_pd(y[0]), hi = _mm512_castps_pd(y[1]);
  const F two = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(lo, hi)),
                              _mm512_castpd_ps(_mm512_unpackhi_pd(lo, hi)));
  const F one = _mm512_add_ps(two, _mm512_permute_ps(two, 0xB1));
  const I order = _mm512_setr_epi32(0, 4, 8, 12, 2, 6, 10, 14, 0, 0, 0, 0, 0, 0, 0, 0);
  _mm256_storeu_ps(out, _mm512_castps512_ps256(_mm512_permutexvar_ps(order, one)));
}
// Not _mm512_reduce_add_epi32: GCC adds its last lanes as C++ ints, and the codes of a NaN row,
// each the smallest int, may overflow those.
static inline std::int32_t reduce_add(I a) {
  const __m256i h = _mm256_add_epi32(_mm512_castsi512_si256(a), _mm512_extracti64x4_epi64(a, 1));
  const __m128i q = _mm_add_epi32(_mm256_castsi256_si128(h), _mm256_extracti128_si256(h, 1));
  const __m128i d = _mm_add_epi32(q, _mm_shuffle_epi32(q, 0x4E));
  return _mm_cvtsi128_si32(_mm_add_epi32(d, _mm_shuffle_epi32(d, 0xB1)));
}
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

/// A 16 x 16 transpose of 32-bit values, 64 shuffles (unpack within 128-bit lanes, then lanes among
/// registers): out[t], lane i = r[i], lane t. Uses r.
static inline void transpose(I (&r)[16], I (&out)[16]) {
  I t[16];
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 4; ++i) {
    r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
  // r[4 g + c], lane L: values 4 L + c of rows 4 g to 4 g + 3.
  for (int c = 0; c < 4; ++c) {
    const I a = _mm512_shuffle_i32x4(r[c], r[4 + c], 0x88);
    const I b = _mm512_shuffle_i32x4(r[c], r[4 + c], 0xDD);
    const I d = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0x88);
    const I e = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0xDD);
    out[c] = _mm512_shuffle_i32x4(a, d, 0x88);
    out[8 + c] = _mm512_shuffle_i32x4(a, d, 0xDD);
    out[4 + c] = _mm512_shuffle_i32x4(b, e, 0x88);
    out[12 + c] = _mm512_shuffle_i32x4(b, e, 0xDD);
  }
}

/// Up to 16 packs of 16 rows; stores the first `packs` of their transpose.
static inline void transpose_block(const std::uint8_t* const* rows, int offset, int packs, I mask,
                                   std::uint8_t* out) {
  I r[16], turned[16];
  for (int i = 0; i < 16; ++i) {
    r[i] = packs == 16 ? _mm512_loadu_si512(rows[i] + offset)
                       : _mm512_maskz_loadu_epi32(first(packs), rows[i] + offset);
  }
  transpose(r, turned);
  for (int i = 0; i < 16; ++i) {
    if (i < packs) _mm512_storeu_si512(out + i * 64, _mm512_xor_si512(turned[i], mask));
  }
}
static inline void transpose_packs(const std::uint8_t* const* rows, int bytes, std::uint32_t flip,
                                   std::uint8_t* out) {
  const I mask = set_i(static_cast<std::int32_t>(flip));
  int t = 0;
  for (; t + 64 <= bytes; t += 64) transpose_block(rows, t, 16, mask, out + t * 16);
  if (t < bytes) transpose_block(rows, t, (bytes - t) / 4, mask, out + t * 16);
}
static inline void interleave_bytes(const std::uint8_t* const* rows, int n, std::uint8_t* out) {
  int i = 0;
  for (; i + 64 <= n; i += 64) {
    __m512i r[4];
    for (int k = 0; k < 4; ++k) r[k] = _mm512_loadu_si512(rows[k] + i);
    const __m512i a = _mm512_unpacklo_epi8(r[0], r[1]), b = _mm512_unpackhi_epi8(r[0], r[1]);
    const __m512i c = _mm512_unpacklo_epi8(r[2], r[3]), d = _mm512_unpackhi_epi8(r[2], r[3]);
    // Lane L of these holds channels 16 L + 0..3, 4..7, 8..11, 12..15.
    const __m512i w = _mm512_unpacklo_epi16(a, c), x = _mm512_unpackhi_epi16(a, c);
    const __m512i y = _mm512_unpacklo_epi16(b, d), z = _mm512_unpackhi_epi16(b, d);
    const __m512i wx0 = _mm512_shuffle_i32x4(w, x, 0x44), wx1 = _mm512_shuffle_i32x4(w, x, 0xEE);
    const __m512i yz0 = _mm512_shuffle_i32x4(y, z, 0x44), yz1 = _mm512_shuffle_i32x4(y, z, 0xEE);
    std::uint8_t* o = out + 4 * i;
    _mm512_storeu_si512(o, _mm512_shuffle_i32x4(wx0, yz0, 0x88));
    _mm512_storeu_si512(o + 64, _mm512_shuffle_i32x4(wx0, yz0, 0xDD));
    _mm512_storeu_si512(o + 128, _mm512_shuffle_i32x4(wx1, yz1, 0x88));
    _mm512_storeu_si512(o + 192, _mm512_shuffle_i32x4(wx1, yz1, 0xDD));
  }
  for (; i < n; ++i) {
    for (int k = 0; k < 4; ++k) out[4 * i + k] = rows[k][i];
  }
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

static inline void store_f16(std::uint16_t* p, F a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
}
static inline F load_f16_n(const std::uint16_t* p, int n) {
  return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first(n), p));
}
static inline F load_bf16_n(const std::uint16_t* p, int n) {
  const I wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first(n), p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

}  // namespace qattn::isa::avx512vnni
