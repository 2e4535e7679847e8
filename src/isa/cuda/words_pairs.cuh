// Arithmetic on pairs of floats. Meanings: isa.hpp.
#pragma once

#include "isa/isa.hpp"

// ptxas takes f32x2 from sm_100 on, but makes two plain instructions of it on sm_110, 120 and 121.
// There the compiler chooses its registers freely instead.
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ == 1000 || __CUDA_ARCH__ == 1030)
#define QATTN_HAS_PAIRS 1
#endif

namespace qattn::isa {
inline namespace QATTN_TARGET {

QATTN_DEVICE Pair fma_pair(Pair a, Pair b, Pair c) {
#if defined(QATTN_HAS_PAIRS)
  Pair d;
  asm("{\n"
      ".reg .b64 a, b, c, d;\n"
      "mov.b64 a, {%2, %3};\n"
      "mov.b64 b, {%4, %5};\n"
      "mov.b64 c, {%6, %7};\n"
      "fma.rn.f32x2 d, a, b, c;\n"
      "mov.b64 {%0, %1}, d;\n"
      "}"
      : "=f"(d.lo), "=f"(d.hi)
      : "f"(a.lo), "f"(a.hi), "f"(b.lo), "f"(b.hi), "f"(c.lo), "f"(c.hi));
  return d;
#else
  return {__fmaf_rn(a.lo, b.lo, c.lo), __fmaf_rn(a.hi, b.hi, c.hi)};
#endif
}

/// Never mul.rn.f32x2: ptxas 13.0 makes one fma of it and a following add.rn.f32x2, which rounds
/// once, with --fmad=false too. Of this function and a sum it makes none.
QATTN_DEVICE Pair multiply_pair(Pair a, Pair b) {
  return {__fmul_rn(a.lo, b.lo), __fmul_rn(a.hi, b.hi)};
}

QATTN_DEVICE Pair add_pair(Pair a, Pair b) {
#if defined(QATTN_HAS_PAIRS)
  Pair d;
  asm("{\n"
      ".reg .b64 a, b, d;\n"
      "mov.b64 a, {%2, %3};\n"
      "mov.b64 b, {%4, %5};\n"
      "add.rn.f32x2 d, a, b;\n"
      "mov.b64 {%0, %1}, d;\n"
      "}"
      : "=f"(d.lo), "=f"(d.hi)
      : "f"(a.lo), "f"(a.hi), "f"(b.lo), "f"(b.hi));
  return d;
#else
  return {__fadd_rn(a.lo, b.lo), __fadd_rn(a.hi, b.hi)};
#endif
}

}  // namespace QATTN_TARGET
}  // namespace qattn::isa
