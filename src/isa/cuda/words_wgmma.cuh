// wgmma for the values of N that kernels use. Meanings: isa.hpp.
#pragma once

#include "isa/cuda/wgmma_registers.cuh"
#include "isa/isa.hpp"

// wgmma exists on sm_90a alone; on others it is declared, and supports() keeps kernels off it.
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define QATTN_HAS_WGMMA 1
#endif

namespace qattn::isa {
inline namespace QATTN_TARGET {

#if defined(QATTN_HAS_WGMMA)
inline constexpr bool has_wgmma = true;
#else
inline constexpr bool has_wgmma = false;
#endif

/// Only 16-bit operands come in both majors. (is_16bit() is a host function to nvcc.)
template <Element A>
inline constexpr bool has_transposes = A == Element::f16 || A == Element::bf16;

#if defined(QATTN_HAS_WGMMA)
/// The instructions of one N; an N without a row below has none.
template <int N>
struct WgmmaOf;

#define QATTN_N 8
#define QATTN_D QATTN_D4
#define QATTN_OUT QATTN_O4
#define QATTN_P0 "%4"
#define QATTN_P1 "%5"
#define QATTN_P2 "%6"
#define QATTN_P3 "%7"
#define QATTN_P4 "%8"
#define QATTN_P5 "%9"
#define QATTN_P6 "%10"
#include "isa/cuda/wgmma_shape.inl"

#define QATTN_N 16
#define QATTN_D QATTN_D8
#define QATTN_OUT QATTN_O8
#define QATTN_P0 "%8"
#define QATTN_P1 "%9"
#define QATTN_P2 "%10"
#define QATTN_P3 "%11"
#define QATTN_P4 "%12"
#define QATTN_P5 "%13"
#define QATTN_P6 "%14"
#include "isa/cuda/wgmma_shape.inl"

#define QATTN_N 32
#define QATTN_D QATTN_D16
#define QATTN_OUT QATTN_O16
#define QATTN_P0 "%16"
#define QATTN_P1 "%17"
#define QATTN_P2 "%18"
#define QATTN_P3 "%19"
#define QATTN_P4 "%20"
#define QATTN_P5 "%21"
#define QATTN_P6 "%22"
#include "isa/cuda/wgmma_shape.inl"

#define QATTN_N 64
#define QATTN_D QATTN_D32
#define QATTN_OUT QATTN_O32
#define QATTN_P0 "%32"
#define QATTN_P1 "%33"
#define QATTN_P2 "%34"
#define QATTN_P3 "%35"
#define QATTN_P4 "%36"
#define QATTN_P5 "%37"
#define QATTN_P6 "%38"
#include "isa/cuda/wgmma_shape.inl"

#define QATTN_N 72
#define QATTN_D QATTN_D36
#define QATTN_OUT QATTN_O36
#define QATTN_P0 "%36"
#define QATTN_P1 "%37"
#define QATTN_P2 "%38"
#define QATTN_P3 "%39"
#define QATTN_P4 "%40"
#define QATTN_P5 "%41"
#define QATTN_P6 "%42"
#include "isa/cuda/wgmma_shape.inl"

#define QATTN_N 96
#define QATTN_D QATTN_D48
#define QATTN_OUT QATTN_O48
#define QATTN_P0 "%48"
#define QATTN_P1 "%49"
#define QATTN_P2 "%50"
#define QATTN_P3 "%51"
#define QATTN_P4 "%52"
#define QATTN_P5 "%53"
#define QATTN_P6 "%54"
#include "isa/cuda/wgmma_shape.inl"

#define QATTN_N 104
#define QATTN_D QATTN_D52
#define QATTN_OUT QATTN_O52
#define QATTN_P0 "%52"
#define QATTN_P1 "%53"
#define QATTN_P2 "%54"
#define QATTN_P3 "%55"
#define QATTN_P4 "%56"
#define QATTN_P5 "%57"
#define QATTN_P6 "%58"
#include "isa/cuda/wgmma_shape.inl"

#define QATTN_N 128
#define QATTN_D QATTN_D64
#define QATTN_OUT QATTN_O64
#define QATTN_P0 "%64"
#define QATTN_P1 "%65"
#define QATTN_P2 "%66"
#define QATTN_P3 "%67"
#define QATTN_P4 "%68"
#define QATTN_P5 "%69"
#define QATTN_P6 "%70"
#include "isa/cuda/wgmma_shape.inl"

#define QATTN_N 136
#define QATTN_D QATTN_D68
#define QATTN_OUT QATTN_O68
#define QATTN_P0 "%68"
#define QATTN_P1 "%69"
#define QATTN_P2 "%70"
#define QATTN_P3 "%71"
#define QATTN_P4 "%72"
#define QATTN_P5 "%73"
#define QATTN_P6 "%74"
#include "isa/cuda/wgmma_shape.inl"

#define QATTN_N 192
#define QATTN_D QATTN_D96
#define QATTN_OUT QATTN_O96
#define QATTN_P0 "%96"
#define QATTN_P1 "%97"
#define QATTN_P2 "%98"
#define QATTN_P3 "%99"
#define QATTN_P4 "%100"
#define QATTN_P5 "%101"
#define QATTN_P6 "%102"
#include "isa/cuda/wgmma_shape.inl"

#define QATTN_N 256
#define QATTN_D QATTN_D128
#define QATTN_OUT QATTN_O128
#define QATTN_P0 "%128"
#define QATTN_P1 "%129"
#define QATTN_P2 "%130"
#define QATTN_P3 "%131"
#define QATTN_P4 "%132"
#define QATTN_P5 "%133"
#define QATTN_P6 "%134"
#include "isa/cuda/wgmma_shape.inl"

#endif

QATTN_DEVICE void wgmma_fence() {
#if defined(QATTN_HAS_WGMMA)
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}
QATTN_DEVICE void wgmma_commit() {
#if defined(QATTN_HAS_WGMMA)
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}
template <int N>
QATTN_DEVICE void wgmma_wait() {
#if defined(QATTN_HAS_WGMMA)
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
#endif
}

template <Element A, Element B, int N, bool TransposeA = false, bool TransposeB = false>
QATTN_DEVICE void wgmma(Accumulator<A> (&d)[N / 2], std::uint64_t a, std::uint64_t b, bool add) {
  static_assert(has_transposes<A> || !(TransposeA || TransposeB), "8-bit operands are K-major");
#if defined(QATTN_HAS_WGMMA)
  WgmmaOf<N>::template shared<A, B, TransposeA, TransposeB>(d, a, b, add);
#else
  __trap();
#endif
}
template <Element A, Element B, int N, bool TransposeB = false>
QATTN_DEVICE void wgmma(Accumulator<A> (&d)[N / 2], const std::uint32_t (&a)[4], std::uint64_t b,
                        bool add) {
  static_assert(has_transposes<A> || !TransposeB, "8-bit operands are K-major");
#if defined(QATTN_HAS_WGMMA)
  WgmmaOf<N>::template registers<A, B, TransposeB>(d, a, b, add);
#else
  __trap();
#endif
}

}  // namespace QATTN_TARGET
}  // namespace qattn::isa
