// The CPU vocabulary on AVX2, FMA and F16C: sixteen lanes in two registers. scalar.hpp says what
// each word means. The linkage rule of avx512.hpp holds here too.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "isa/cpu/packs.hpp"

namespace qattn::isa::avx2 {

static constexpr int lanes = 16;
static constexpr const char* name = "avx2";

struct F {
  __m256 lo, hi;
};
struct I {
  __m256i lo, hi;
};

static inline F set(float v) { return {_mm256_set1_ps(v), _mm256_set1_ps(v)}; }
static inline I set_i(std::int32_t v) { return {_mm256_set1_epi32(v), _mm256_set1_epi32(v)}; }
static inline F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
static inline void store(float* p, F a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
static inline F load_n(const float* p, int n) {
  if (n >= lanes) return load(p);
  float x[lanes] = {};
  std::memcpy(x, p, sizeof(float) * static_cast<std::size_t>(n));
  return load(x);
}
static inline I load_i(const void* p) {
  const auto* q = static_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}
static inline I load_bytes(const std::uint8_t* p) {
  const __m128i a = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_cvtepu8_epi32(a), _mm256_cvtepu8_epi32(_mm_srli_si128(a, 8))};
}
static inline void store_i(void* p, I a) {
  auto* q = static_cast<__m256i*>(p);
  _mm256_storeu_si256(q, a.lo);
  _mm256_storeu_si256(q + 1, a.hi);
}
static inline I field(I a, int shift, std::uint32_t mask) {
  const __m128i count = _mm_cvtsi32_si128(shift);
  const __m256i m = _mm256_set1_epi32(static_cast<std::int32_t>(mask));
  return {_mm256_and_si256(_mm256_srl_epi32(a.lo, count), m),
          _mm256_and_si256(_mm256_srl_epi32(a.hi, count), m)};
}
static inline I broadcast4(const void* p) {
  std::int32_t v;
  std::memcpy(&v, p, sizeof v);
  return set_i(v);
}

static inline F add(F a, F b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
static inline F sub(F a, F b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
static inline F mul(F a, F b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
static inline F fma(F a, F b, F c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
static inline F div(F a, F b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
static inline F max(F a, F b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
static inline F min(F a, F b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
static inline F abs(F a) {
  const __m256 mask = _mm256_castsi256_ps(_mm256_set1_epi32(0x7FFFFFFF));
  return {_mm256_and_ps(a.lo, mask), _mm256_and_ps(a.hi, mask)};
}
static inline I add_i(I a, I b) {
  return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)};
}

static inline F to_float(I a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
static inline I round_to_int(F a) { return {_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)}; }
static inline F round_even(F a) {
  constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(a.lo, mode), _mm256_round_ps(a.hi, mode)};
}
static inline F floor(F a) { return {_mm256_floor_ps(a.lo), _mm256_floor_ps(a.hi)}; }
static inline __m256 scale_half(__m256 a, __m256 n) {
  const __m256i power =
      _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  const __m256 r = _mm256_mul_ps(a, _mm256_castsi256_ps(power));
  // Below 2^-126: 0. The comparison is false for NaN, which is then put back.
  const __m256 normal = _mm256_cmp_ps(n, _mm256_set1_ps(-126.0f), _CMP_GE_OQ);
  const __m256 nan = _mm256_cmp_ps(n, n, _CMP_UNORD_Q);
  return _mm256_or_ps(_mm256_and_ps(r, normal), _mm256_and_ps(n, nan));
}
static inline F scale_by_power(F a, F n) {
  return {scale_half(a.lo, n.lo), scale_half(a.hi, n.hi)};
}
static inline __m256 round_mantissa_half(__m256 a, int bits) {
  const __m256i u = _mm256_castps_si256(a);
  const __m128i shift = _mm_cvtsi32_si128(bits);
  const __m256i odd = _mm256_and_si256(_mm256_srl_epi32(u, shift), _mm256_set1_epi32(1));
  const __m256i half = _mm256_set1_epi32((1 << (bits - 1)) - 1);
  const __m256i up = _mm256_add_epi32(u, _mm256_add_epi32(half, odd));
  return _mm256_castsi256_ps(_mm256_and_si256(up, _mm256_set1_epi32(~((1 << bits) - 1))));
}
static inline F round_mantissa(F a, int bits) {
  return {round_mantissa_half(a.lo, bits), round_mantissa_half(a.hi, bits)};
}
static inline __m256 exponent_half(__m256 a) {
  const __m256i e = _mm256_srli_epi32(_mm256_castps_si256(a), 23);
  return _mm256_cvtepi32_ps(_mm256_sub_epi32(e, _mm256_set1_epi32(127)));
}
static inline F exponent(F a) { return {exponent_half(a.lo), exponent_half(a.hi)}; }
static inline __m256 mantissa_half(__m256 a) {
  const __m256i fraction = _mm256_and_si256(_mm256_castps_si256(a), _mm256_set1_epi32(0x7FFFFF));
  return _mm256_castsi256_ps(_mm256_or_si256(fraction, _mm256_set1_epi32(0x3F800000)));
}
static inline F mantissa(F a) { return {mantissa_half(a.lo), mantissa_half(a.hi)}; }
static inline F select_less(F a, F limit, F yes, F no) {
  return {_mm256_blendv_ps(no.lo, yes.lo, _mm256_cmp_ps(a.lo, limit.lo, _CMP_LT_OQ)),
          _mm256_blendv_ps(no.hi, yes.hi, _mm256_cmp_ps(a.hi, limit.hi, _CMP_LT_OQ))};
}

template <int Distance>
static inline F exchange(F a) {
  if constexpr (Distance == 1) {
    return {_mm256_permute_ps(a.lo, 0xB1), _mm256_permute_ps(a.hi, 0xB1)};
  }
  if constexpr (Distance == 2) {
    return {_mm256_permute_ps(a.lo, 0x4E), _mm256_permute_ps(a.hi, 0x4E)};
  }
  if constexpr (Distance == 4) {
    return {_mm256_permute2f128_ps(a.lo, a.lo, 1), _mm256_permute2f128_ps(a.hi, a.hi, 1)};
  }
  if constexpr (Distance == 8) return {a.hi, a.lo};
}

static inline float reduce_max(F a) {
  const __m256 h = _mm256_max_ps(a.lo, a.hi);
  const __m128 q = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  const __m128 d = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(d, _mm_shuffle_ps(d, d, 1)));
}
static inline float reduce_add(F a) {
  const __m256 h = _mm256_add_ps(a.lo, a.hi);
  const __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  const __m128 d = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(d, _mm_shuffle_ps(d, d, 1)));
}
using isa::reduce_add_8;
static inline std::int32_t reduce_add(I a) {
  std::int32_t x[8];
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(x), _mm256_add_epi32(a.lo, a.hi));
  std::uint32_t sum = 0;  // wraps, as the instruction does
  for (const std::int32_t y : x) sum += static_cast<std::uint32_t>(y);
  return static_cast<std::int32_t>(sum);
}
using Mask = std::uint32_t;
static inline Mask no_lanes() { return 0; }
static inline Mask or_nan(Mask m, F a) {
  const __m256 any = _mm256_or_ps(_mm256_cmp_ps(a.lo, a.lo, _CMP_UNORD_Q),
                                  _mm256_cmp_ps(a.hi, a.hi, _CMP_UNORD_Q));
  return m | static_cast<Mask>(_mm256_movemask_ps(any));
}
static inline bool any(Mask m) { return m != 0; }
static inline int count_greater(F a, F limit) {
  const auto count = [](__m256 x, __m256 y) {
    const int mask = _mm256_movemask_ps(_mm256_cmp_ps(x, y, _CMP_GT_OQ));
    return __builtin_popcount(static_cast<unsigned>(mask));
  };
  return count(a.lo, limit.lo) + count(a.hi, limit.hi);
}

/// Even and odd bytes as 16-bit values, then vpmaddwd: vpmaddubsw would saturate at 2 * 255 * 127.
static inline __m256i dot4_half(__m256i c, __m256i a, __m256i b) {
  const __m256i a_even = _mm256_and_si256(a, _mm256_set1_epi16(0xFF));
  const __m256i a_odd = _mm256_srli_epi16(a, 8);
  const __m256i b_even = _mm256_srai_epi16(_mm256_slli_epi16(b, 8), 8);
  const __m256i b_odd = _mm256_srai_epi16(b, 8);
  c = _mm256_add_epi32(c, _mm256_madd_epi16(a_even, b_even));
  return _mm256_add_epi32(c, _mm256_madd_epi16(a_odd, b_odd));
}
static inline I dot4(I c, I a, I b) {
  return {dot4_half(c.lo, a.lo, b.lo), dot4_half(c.hi, a.hi, b.hi)};
}
/// The low byte of every lane, in order.
static inline void store_bytes(void* p, I a) {
  const __m256i pick =
      _mm256_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, 0, 4, 8, 12, -1,
                       -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
  const auto quads = [&](__m256i x, char* out) {
    const __m256i y = _mm256_shuffle_epi8(x, pick);
    const std::int32_t first = _mm256_extract_epi32(y, 0), second = _mm256_extract_epi32(y, 4);
    std::memcpy(out, &first, 4);
    std::memcpy(out + 4, &second, 4);
  };
  quads(a.lo, static_cast<char*>(p));
  quads(a.hi, static_cast<char*>(p) + 8);
}
using isa::transpose_packs;
static inline void interleave_bytes(const std::uint8_t* const* rows, int n, std::uint8_t* out) {
  for (int i = 0; i < n; i += 16) {
    __m128i r[4];
    for (int k = 0; k < 4; ++k)
      r[k] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[k] + i));
    const __m128i a = _mm_unpacklo_epi8(r[0], r[1]), b = _mm_unpackhi_epi8(r[0], r[1]);
    const __m128i c = _mm_unpacklo_epi8(r[2], r[3]), d = _mm_unpackhi_epi8(r[2], r[3]);
    auto* o = reinterpret_cast<__m128i*>(out + 4 * i);
    _mm_storeu_si128(o, _mm_unpacklo_epi16(a, c));
    _mm_storeu_si128(o + 1, _mm_unpackhi_epi16(a, c));
    _mm_storeu_si128(o + 2, _mm_unpacklo_epi16(b, d));
    _mm_storeu_si128(o + 3, _mm_unpackhi_epi16(b, d));
  }
}
static inline void store_bf16(std::uint16_t* p, F a) {
  const __m256i lo = _mm256_srli_epi32(_mm256_castps_si256(a.lo), 16);
  const __m256i hi = _mm256_srli_epi32(_mm256_castps_si256(a.hi), 16);
  const __m256i mixed = _mm256_packus_epi32(lo, hi);  // 128-bit lanes interleave
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(mixed, 0xD8));
}

static inline void store_f16(std::uint16_t* p, F a) {
  constexpr int mode = _MM_FROUND_TO_NEAREST_INT;
  auto* q = reinterpret_cast<__m128i*>(p);
  _mm_storeu_si128(q, _mm256_cvtps_ph(a.lo, mode));
  _mm_storeu_si128(q + 1, _mm256_cvtps_ph(a.hi, mode));
}
static inline F load_f16_n(const std::uint16_t* p, int n) {
  std::uint16_t x[lanes] = {};
  std::memcpy(x, p, sizeof(std::uint16_t) * static_cast<std::size_t>(n < lanes ? n : lanes));
  const auto* q = reinterpret_cast<const __m128i*>(x);
  return {_mm256_cvtph_ps(_mm_loadu_si128(q)), _mm256_cvtph_ps(_mm_loadu_si128(q + 1))};
}
static inline F load_bf16_n(const std::uint16_t* p, int n) {
  std::uint16_t x[lanes] = {};
  std::memcpy(x, p, sizeof(std::uint16_t) * static_cast<std::size_t>(n < lanes ? n : lanes));
  const auto* q = reinterpret_cast<const __m128i*>(x);
  const auto widen = [](__m128i half) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
  };
  return {widen(_mm_loadu_si128(q)), widen(_mm_loadu_si128(q + 1))};
}

}  // namespace qattn::isa::avx2
