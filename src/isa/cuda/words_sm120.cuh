// Products with scales of blocks and what goes with them, for GeForce Blackwell. Meanings: isa.hpp.
#pragma once

#include "isa/cuda/words_sm80.cuh"

// For code of sm_120a and its family. On others the words are declared, and supports() keeps
// kernels off them.
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM120_ALL) || \
    (defined(__CUDA_ARCH_FAMILY_SPECIFIC__) && __CUDA_ARCH_FAMILY_SPECIFIC__ / 10 == 120)
#define QATTN_HAS_SCALED_MMA 1
#endif

namespace qattn::isa {
inline namespace QATTN_TARGET {

#if defined(QATTN_HAS_SCALED_MMA)
inline constexpr bool has_scaled_mma = true;

// The operands of all three kinds, but for the selectors of scales' bytes.
#define QATTN_SCALED_MMA(kind, types)                                                       \
  asm("mma.sync.aligned." kind ".row.col.f32." types                                        \
      " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3}, {%10}, {%12, 0}, "  \
      "{%11}, {%12, 0};"                                                                    \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                      \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(sa), "r"(sb), \
        "n"(Byte))

template <Scaled S, int Byte>
QATTN_DEVICE void mma_scaled_one(float (&d)[4], const std::uint32_t (&a)[4],
                                 const std::uint32_t (&b)[2], std::uint32_t sa, std::uint32_t sb) {
  if constexpr (S == Scaled::mxfp8) {
    QATTN_SCALED_MMA("kind::mxf8f6f4.block_scale.scale_vec::1X.m16n8k32", "e4m3.e4m3.f32.ue8m0");
  } else if constexpr (S == Scaled::mxfp4) {
    QATTN_SCALED_MMA("kind::mxf4nvf4.block_scale.scale_vec::2X.m16n8k64", "e2m1.e2m1.f32.ue8m0");
  } else {
    QATTN_SCALED_MMA("kind::mxf4nvf4.block_scale.scale_vec::4X.m16n8k64", "e2m1.e2m1.f32.ue4m3");
  }
}
#undef QATTN_SCALED_MMA
#else
inline constexpr bool has_scaled_mma = false;
#endif

template <Scaled S, int M, int N, int Byte = 0>
QATTN_DEVICE void mma_scaled(float (&d)[M][N][4], const std::uint32_t (&a)[M][4],
                             const std::uint32_t (&b)[N][2], const std::uint32_t (&sa)[M],
                             const std::uint32_t (&sb)[N]) {
  static_assert(has_scale_byte<S, Byte>, "no such byte of scales");
#if defined(QATTN_HAS_SCALED_MMA)
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int m = 0; m < M; ++m) mma_scaled_one<S, Byte>(d[m][n], a[m], b[n], sa[m], sb[n]);
  }
#endif
}

#if defined(QATTN_HAS_SCALED_MMA)
#define QATTN_F8F6F4_MMA(types)                                              \
  asm("mma.sync.aligned.kind::f8f6f4.m16n8k32.row.col.f32." types            \
      ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                       \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))

template <Element A, Element B>
QATTN_DEVICE void mma_f8f6f4_one(float (&d)[4], const std::uint32_t (&a)[4],
                                 const std::uint32_t (&b)[2]) {
  using enum Element;
  if constexpr (A == e4m3) {
    if constexpr (B == e4m3) QATTN_F8F6F4_MMA("e4m3.e4m3");
    if constexpr (B == e5m2) QATTN_F8F6F4_MMA("e4m3.e5m2");
    if constexpr (B == e2m1) QATTN_F8F6F4_MMA("e4m3.e2m1");
  } else if constexpr (A == e5m2) {
    if constexpr (B == e4m3) QATTN_F8F6F4_MMA("e5m2.e4m3");
    if constexpr (B == e5m2) QATTN_F8F6F4_MMA("e5m2.e5m2");
    if constexpr (B == e2m1) QATTN_F8F6F4_MMA("e5m2.e2m1");
  } else {
    if constexpr (B == e4m3) QATTN_F8F6F4_MMA("e2m1.e4m3");
    if constexpr (B == e5m2) QATTN_F8F6F4_MMA("e2m1.e5m2");
    if constexpr (B == e2m1) QATTN_F8F6F4_MMA("e2m1.e2m1");
  }
}
#undef QATTN_F8F6F4_MMA
#endif

template <Element A, Element B, int M, int N>
QATTN_DEVICE void mma_f8f6f4(float (&d)[M][N][4], const std::uint32_t (&a)[M][4],
                             const std::uint32_t (&b)[N][2]) {
  static_assert(is_f8f6f4(A) && is_f8f6f4(B), "no such product");
#if defined(QATTN_HAS_SCALED_MMA)
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int m = 0; m < M; ++m) mma_f8f6f4_one<A, B>(d[m][n], a[m], b[n]);
  }
#endif
}

template <int N>
QATTN_DEVICE void load_bytes_transposed(std::uint32_t (&r)[N][4], const SharedAddress (&row)[N]) {
#if defined(QATTN_HAS_SCALED_MMA)
#pragma unroll
  for (int n = 0; n < N; ++n) {
    asm volatile("ldmatrix.sync.aligned.m16n16.x2.trans.shared.b8 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[n][0]), "=r"(r[n][1]), "=r"(r[n][2]), "=r"(r[n][3])
                 : "r"(row[n])
                 : "memory");
  }
#endif
}

QATTN_DEVICE std::uint32_t pack_e2m1(const float (&x)[8]) {
  std::uint32_t word = 0;
#if defined(QATTN_HAS_SCALED_MMA)
  asm("{\n"
      ".reg .b8 b0, b1, b2, b3;\n"
      "cvt.rn.satfinite.e2m1x2.f32 b0, %2, %1;\n"
      "cvt.rn.satfinite.e2m1x2.f32 b1, %4, %3;\n"
      "cvt.rn.satfinite.e2m1x2.f32 b2, %6, %5;\n"
      "cvt.rn.satfinite.e2m1x2.f32 b3, %8, %7;\n"
      "mov.b32 %0, {b0, b1, b2, b3};\n"
      "}"
      : "=r"(word)
      : "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]), "f"(x[4]), "f"(x[5]), "f"(x[6]), "f"(x[7]));
#endif
  return word;
}

QATTN_DEVICE std::uint16_t pack_ue8m0(float lo, float hi) {
  std::uint16_t codes = 0;
#if defined(QATTN_HAS_SCALED_MMA)
  asm("cvt.rz.satfinite.ue8m0x2.f32 %0, %2, %1;" : "=h"(codes) : "f"(lo), "f"(hi));
#endif
  return codes;
}
QATTN_DEVICE std::uint16_t pack_ue8m0_up(float lo, float hi) {
  std::uint16_t codes = 0;
#if defined(QATTN_HAS_SCALED_MMA)
  asm("cvt.rp.satfinite.ue8m0x2.f32 %0, %2, %1;" : "=h"(codes) : "f"(lo), "f"(hi));
#endif
  return codes;
}

}  // namespace QATTN_TARGET
}  // namespace qattn::isa
