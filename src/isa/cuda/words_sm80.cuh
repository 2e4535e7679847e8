// Words that every supported architecture has (sm_80 and later); FP8 products and conversions need
// sm_89. Every word is declared on every architecture, only its body is guarded.
//
// Where libcu++ has the instruction (cuda/ptx), the word calls it. In CUDA 13.0 it has none of
// those that are written as asm here and beside.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cuda/ptx>

#include "isa/isa.hpp"

namespace qattn::isa {
inline namespace QATTN_TARGET {

inline constexpr bool is_emulated = false;
#if defined(__CUDA_ARCH__)
inline constexpr int target_architecture = __CUDA_ARCH__ / 10;
#else
inline constexpr int target_architecture = 120;  // the host's pass, which looks at every kernel
#endif

// ---- Places ------------------------------------------------------------------------------------

extern __shared__ __align__(1024) unsigned char shared_memory[];

QATTN_DEVICE int thread() { return static_cast<int>(threadIdx.x); }
QATTN_DEVICE int warp_lanes() { return 32; }
QATTN_DEVICE int lane() { return static_cast<int>(threadIdx.x) & 31; }
QATTN_DEVICE int warp() { return __shfl_sync(~0u, static_cast<int>(threadIdx.x) >> 5, 0); }
QATTN_DEVICE Index3 block() {
  return {static_cast<int>(blockIdx.x), static_cast<int>(blockIdx.y), static_cast<int>(blockIdx.z)};
}
QATTN_DEVICE Index3 grid() {
  return {static_cast<int>(gridDim.x), static_cast<int>(gridDim.y), static_cast<int>(gridDim.z)};
}
QATTN_DEVICE SharedAddress shared_base() {
  return static_cast<SharedAddress>(__cvta_generic_to_shared(shared_memory));
}

// ---- Memory ------------------------------------------------------------------------------------

template <class T>
QATTN_DEVICE T load_shared(SharedAddress a) {
  return *static_cast<const T*>(__cvta_shared_to_generic(a));
}
template <class T>
QATTN_DEVICE void store_shared(SharedAddress a, T value) {
  *static_cast<T*>(__cvta_shared_to_generic(a)) = value;
}
template <class T>
QATTN_DEVICE T load_global(const T* p) {
  return *p;
}
template <class T>
QATTN_DEVICE void store_global(T* p, T value) {
  *p = value;
}
QATTN_DEVICE Words4 load_once(const Words4* p) {
  return ::cuda::ptx::ld_nc_L1_no_allocate(::cuda::ptx::space_global, p);
}
QATTN_DEVICE void store_once(Words4* p, Words4 v) {
  __stcs(reinterpret_cast<uint4*>(p), make_uint4(v.w[0], v.w[1], v.w[2], v.w[3]));
}

QATTN_DEVICE std::uint32_t atomic_max_shared(SharedAddress a, std::uint32_t v) {
  return atomicMax(static_cast<std::uint32_t*>(__cvta_shared_to_generic(a)), v);
}
QATTN_DEVICE std::uint32_t atomic_add_shared(SharedAddress a, std::uint32_t v) {
  return atomicAdd(static_cast<std::uint32_t*>(__cvta_shared_to_generic(a)), v);
}
QATTN_DEVICE std::uint32_t atomic_max_global(std::uint32_t* p, std::uint32_t v) {
  return atomicMax(p, v);
}
QATTN_DEVICE std::uint32_t atomic_or_global(std::uint32_t* p, std::uint32_t v) {
  return atomicOr(p, v);
}
QATTN_DEVICE std::uint32_t atomic_add_global(std::uint32_t* p, std::uint32_t v) {
  return atomicAdd(p, v);
}
QATTN_DEVICE std::uint64_t atomic_add_global(std::uint64_t* p, std::uint64_t v) {
  return atomicAdd(reinterpret_cast<unsigned long long*>(p), static_cast<unsigned long long>(v));
}

QATTN_DEVICE std::uint32_t atomic_add_ordered(std::uint32_t* p, std::uint32_t v) {
  std::uint32_t old;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
               : "=r"(old)
               : "l"(__cvta_generic_to_global(p)), "r"(v)
               : "memory");
  return old;
}
QATTN_DEVICE void wait_global(const std::uint32_t* p, std::uint32_t least) {
  std::uint32_t now;
  while (true) {
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];"
                 : "=r"(now)
                 : "l"(__cvta_generic_to_global(p))
                 : "memory");
    if (now >= least) break;
    __nanosleep(100);
  }
  // Once, because it throws L1 away. A fence would wait for this thread's stores, too.
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];"
               : "=r"(now)
               : "l"(__cvta_generic_to_global(p))
               : "memory");
}

// ---- Order -------------------------------------------------------------------------------------

QATTN_DEVICE void sync_threads() { __syncthreads(); }
QATTN_DEVICE void barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
QATTN_DEVICE void barrier_sync_anywhere(int id, int threads) {
  asm volatile("barrier.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
QATTN_DEVICE void barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
QATTN_DEVICE void sync_warp() { __syncwarp(); }
QATTN_DEVICE int opaque(int v) {
  asm volatile("" : "+r"(v));
  return v;
}
// ptxas moves nothing across a branch: here an exit that no thread takes, because no grid is empty.
QATTN_DEVICE void schedule_fence() {
  asm volatile("{\n.reg .pred p;\nsetp.eq.u32 p, %0, 0;\n@p exit;\n}" ::"r"(gridDim.x) : "memory");
}

template <class T>
QATTN_DEVICE T shuffle_xor(T v, int mask) {
  return __shfl_xor_sync(~0u, v, mask);
}
template <class T>
QATTN_DEVICE T shuffle(T v, int source) {
  return __shfl_sync(~0u, v, source);
}
template <class T>
QATTN_DEVICE T shuffle_up(T v, int delta) {
  return __shfl_up_sync(~0u, v, delta);
}
template <class T>
QATTN_DEVICE T shuffle_down(T v, int delta) {
  return __shfl_down_sync(~0u, v, delta);
}
QATTN_DEVICE bool any(bool p) { return __any_sync(~0u, p) != 0; }
QATTN_DEVICE bool all(bool p) { return __all_sync(~0u, p) != 0; }
QATTN_DEVICE std::uint32_t ballot(bool p) { return __ballot_sync(~0u, p); }

// ---- Asynchronous copies -----------------------------------------------------------------------

QATTN_DEVICE void copy_async16(SharedAddress to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
               : "memory");
}
QATTN_DEVICE void copy_async8(SharedAddress to, const void* from, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(from), "r"(bytes)
               : "memory");
}
QATTN_DEVICE void copy_async4(SharedAddress to, const void* from, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(bytes)
               : "memory");
}
QATTN_DEVICE void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
QATTN_DEVICE void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// ---- Matrices ----------------------------------------------------------------------------------

template <int N>
QATTN_DEVICE void load_matrix(std::uint32_t (&r)[N][4], const SharedAddress (&row)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[i][0]), "=r"(r[i][1]), "=r"(r[i][2]), "=r"(r[i][3])
                 : "r"(row[i])
                 : "memory");
  }
}
template <int N>
QATTN_DEVICE void load_matrix_transposed(std::uint32_t (&r)[N][4], const SharedAddress (&row)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[i][0]), "=r"(r[i][1]), "=r"(r[i][2]), "=r"(r[i][3])
                 : "r"(row[i])
                 : "memory");
  }
}
template <int N>
QATTN_DEVICE void load_matrix2(std::uint32_t (&r)[N][2], const SharedAddress (&row)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(r[i][0]), "=r"(r[i][1])
                 : "r"(row[i])
                 : "memory");
  }
}
template <int N>
QATTN_DEVICE void load_matrix2_transposed(std::uint32_t (&r)[N][2], const SharedAddress (&row)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(r[i][0]), "=r"(r[i][1])
                 : "r"(row[i])
                 : "memory");
  }
}
template <int N>
QATTN_DEVICE void load_matrix1(std::uint32_t (&r)[N][1], const SharedAddress (&row)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];"
                 : "=r"(r[i][0])
                 : "r"(row[i])
                 : "memory");
  }
}
template <int N>
QATTN_DEVICE void load_matrix1_transposed(std::uint32_t (&r)[N][1], const SharedAddress (&row)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];"
                 : "=r"(r[i][0])
                 : "r"(row[i])
                 : "memory");
  }
}

QATTN_DEVICE std::uint32_t transpose_matrix(std::uint32_t v) {
  std::uint32_t r;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(v));
  return r;
}

// One instruction string a pair of element formats; the operand lists are the same for all.
#define QATTN_MMA_FLOAT(types)                                                                  \
  asm("mma.sync.aligned." types                                                                 \
      " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"                    \
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])                                          \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(d[0]), "f"(d[1]), \
        "f"(d[2]), "f"(d[3]))
#define QATTN_MMA_INTEGER(types)                                                                \
  asm("mma.sync.aligned." types                                                                 \
      " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"                    \
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])                                          \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(d[0]), "r"(d[1]), \
        "r"(d[2]), "r"(d[3]))

template <Element A, Element B>
QATTN_DEVICE void mma_one(float (&d)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2]) {
  using enum Element;
  if constexpr (A == f16 && B == f16) {
    QATTN_MMA_FLOAT("m16n8k16.row.col.f32.f16.f16.f32");
  } else if constexpr (A == bf16 && B == bf16) {
    QATTN_MMA_FLOAT("m16n8k16.row.col.f32.bf16.bf16.f32");
  } else {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 890
    if constexpr (A == e4m3 && B == e4m3) {
      QATTN_MMA_FLOAT("m16n8k32.row.col.f32.e4m3.e4m3.f32");
    } else if constexpr (A == e4m3 && B == e5m2) {
      QATTN_MMA_FLOAT("m16n8k32.row.col.f32.e4m3.e5m2.f32");
    } else if constexpr (A == e5m2 && B == e4m3) {
      QATTN_MMA_FLOAT("m16n8k32.row.col.f32.e5m2.e4m3.f32");
    } else {
      static_assert(A == e5m2 && B == e5m2, "no such product");
      QATTN_MMA_FLOAT("m16n8k32.row.col.f32.e5m2.e5m2.f32");
    }
#else
    __trap();  // FP8 products begin with sm_89; supports() keeps such kernels off this machine
#endif
  }
}
template <Element A, Element B>
QATTN_DEVICE void mma_one(std::int32_t (&d)[4], const std::uint32_t (&a)[4],
                          const std::uint32_t (&b)[2]) {
  using enum Element;
  if constexpr (A == s8 && B == s8) {
    QATTN_MMA_INTEGER("m16n8k32.row.col.s32.s8.s8.s32");
  } else if constexpr (A == u8 && B == s8) {
    QATTN_MMA_INTEGER("m16n8k32.row.col.s32.u8.s8.s32");
  } else if constexpr (A == s8 && B == u8) {
    QATTN_MMA_INTEGER("m16n8k32.row.col.s32.s8.u8.s32");
  } else {
    static_assert(A == u8 && B == u8, "no such product");
    QATTN_MMA_INTEGER("m16n8k32.row.col.s32.u8.u8.s32");
  }
}
#undef QATTN_MMA_FLOAT
#undef QATTN_MMA_INTEGER

template <Element A, Element B, int M, int N>
QATTN_DEVICE void mma(Accumulator<A> (&d)[M][N][4], const std::uint32_t (&a)[M][4],
                      const std::uint32_t (&b)[N][2]) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int m = 0; m < M; ++m) mma_one<A, B>(d[m][n], a[m], b[n]);
  }
}

/// The zeros become the zero register: no accumulator is cleared.
template <Element A, Element B, int M, int N>
QATTN_DEVICE void mma_zero(Accumulator<A> (&d)[M][N][4], const std::uint32_t (&a)[M][4],
                           const std::uint32_t (&b)[N][2]) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int m = 0; m < M; ++m) {
      Accumulator<A> zero[4] = {};
      mma_one<A, B>(zero, a[m], b[n]);
#pragma unroll
      for (int i = 0; i < 4; ++i) d[m][n][i] = zero[i];
    }
  }
}
template <Element A, Element B, int M, int N, int Total>
QATTN_DEVICE void mma_at(Accumulator<A> (&d)[M][Total][4], int first,
                         const std::uint32_t (&a)[M][4], const std::uint32_t (&b)[N][2]) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int m = 0; m < M; ++m) mma_one<A, B>(d[m][first + n], a[m], b[n]);
  }
}
template <int M, int N>
QATTN_DEVICE void mma_f16(std::uint32_t (&d)[M][N][2], const std::uint32_t (&a)[M][4],
                          const std::uint32_t (&b)[N][2]) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int m = 0; m < M; ++m) {
      asm("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0, %1}, {%2, %3, %4, %5}, {%6, %7}, "
          "{%0, %1};"
          : "+r"(d[m][n][0]), "+r"(d[m][n][1])
          : "r"(a[m][0]), "r"(a[m][1]), "r"(a[m][2]), "r"(a[m][3]), "r"(b[n][0]), "r"(b[n][1]));
    }
  }
}

// ---- Arithmetic --------------------------------------------------------------------------------

QATTN_DEVICE float exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
QATTN_DEVICE float log2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
QATTN_DEVICE float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
/// ptxas makes one instruction (FMNMX3) of it on sm_100, 103 and 110; sm_120 has none.
QATTN_DEVICE float max3(float a, float b, float c) { return fmaxf(fmaxf(a, b), c); }
/// One instruction (VIMNMX3) from sm_90 on.
QATTN_DEVICE std::int32_t max3(std::int32_t a, std::int32_t b, std::int32_t c) {
  return __vimax3_s32(a, b, c);
}
QATTN_DEVICE std::uint32_t max3(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
  return __vimax3_u32(a, b, c);
}
QATTN_DEVICE std::uint32_t min3(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
  return __vimin3_u32(a, b, c);
}
QATTN_DEVICE std::uint32_t max3_u16(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
  return __vimax3_u16x2(a, b, c);
}

QATTN_DEVICE std::uint32_t max_f16(std::uint32_t a, std::uint32_t b) {
  std::uint32_t d;
  asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
QATTN_DEVICE std::uint32_t min_f16(std::uint32_t a, std::uint32_t b) {
  std::uint32_t d;
  asm("min.NaN.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
QATTN_DEVICE std::uint32_t max_bf16(std::uint32_t a, std::uint32_t b) {
  std::uint32_t d;
  asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
QATTN_DEVICE std::uint32_t min_bf16(std::uint32_t a, std::uint32_t b) {
  std::uint32_t d;
  asm("min.NaN.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

QATTN_DEVICE std::uint32_t pack_f16(float lo, float hi) {
  const __half2 h = __floats2half2_rn(lo, hi);
  return reinterpret_cast<const std::uint32_t&>(h);
}
QATTN_DEVICE std::uint32_t pack_bf16(float lo, float hi) {
  const __nv_bfloat162 h = __floats2bfloat162_rn(lo, hi);
  return reinterpret_cast<const std::uint32_t&>(h);
}
QATTN_DEVICE Pair unpack_f16(std::uint32_t v) {
  const float2 f = __half22float2(reinterpret_cast<const __half2&>(v));
  return {f.x, f.y};
}
QATTN_DEVICE Pair unpack_bf16(std::uint32_t v) {
  return {__uint_as_float(v << 16), __uint_as_float(v & 0xffff0000u)};
}
QATTN_DEVICE std::uint32_t multiply_f16(std::uint32_t a, std::uint32_t b) {
  const __half2 p =
      __hmul2(reinterpret_cast<const __half2&>(a), reinterpret_cast<const __half2&>(b));
  return reinterpret_cast<const std::uint32_t&>(p);
}
QATTN_DEVICE std::uint32_t fma_f16(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
  const __half2 s =
      __hfma2(reinterpret_cast<const __half2&>(a), reinterpret_cast<const __half2&>(b),
              reinterpret_cast<const __half2&>(c));
  return reinterpret_cast<const std::uint32_t&>(s);
}
/// Two cvt.rni and one cvt.pack.sat become F2IP.U8.F32 (62 lanes a clock on an H200); a single
/// value's conversion runs at 16.
QATTN_DEVICE std::uint32_t pack_u8(float x0, float x1, float x2, float x3) {
  const int i0 = __float2int_rn(x0), i1 = __float2int_rn(x1);
  const int i2 = __float2int_rn(x2), i3 = __float2int_rn(x3);
  std::uint32_t high, all;
  asm("cvt.pack.sat.u8.s32.b32 %0, %1, %2, 0;" : "=r"(high) : "r"(i3), "r"(i2));
  asm("cvt.pack.sat.u8.s32.b32 %0, %1, %2, %3;" : "=r"(all) : "r"(i1), "r"(i0), "r"(high));
  return all;
}
QATTN_DEVICE std::uint32_t pack_s8(float x0, float x1, float x2, float x3) {
  const int i0 = __float2int_rn(x0), i1 = __float2int_rn(x1);
  const int i2 = __float2int_rn(x2), i3 = __float2int_rn(x3);
  std::uint32_t high, all;
  asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, 0;" : "=r"(high) : "r"(i3), "r"(i2));
  asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, %3;" : "=r"(all) : "r"(i1), "r"(i0), "r"(high));
  return all;
}
QATTN_DEVICE std::uint16_t pack_e4m3(float lo, float hi) {
  return __nv_cvt_float2_to_fp8x2(make_float2(lo, hi), __NV_SATFINITE, __NV_E4M3);
}
QATTN_DEVICE std::uint16_t pack_e5m2(float lo, float hi) {
  return __nv_cvt_float2_to_fp8x2(make_float2(lo, hi), __NV_SATFINITE, __NV_E5M2);
}
QATTN_DEVICE std::uint32_t unpack_e4m3(std::uint16_t codes) {
  const __half2_raw h = __nv_cvt_fp8x2_to_halfraw2(codes, __NV_E4M3);
  return std::uint32_t{h.x} | std::uint32_t{h.y} << 16;
}
QATTN_DEVICE std::uint32_t byte_permute(std::uint32_t a, std::uint32_t b, std::uint32_t selector) {
  return __byte_perm(a, b, selector);
}
template <int Table>
QATTN_DEVICE std::uint32_t lop3(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
  std::uint32_t d;
  asm("lop3.b32 %0, %1, %2, %3, %4;" : "=r"(d) : "r"(a), "r"(b), "r"(c), "n"(Table));
  return d;
}
QATTN_DEVICE float to_float(std::int32_t x) { return static_cast<float>(x); }
QATTN_DEVICE float to_float(float x) { return x; }
/// Up to sm_80 conversions of integers take the unit of exponentials, at 16 lanes a clock. Added to
/// the bits of 1.5 * 2^23 such an integer is that much more, as a float.
QATTN_DEVICE float to_float_22(std::int32_t x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 860
  constexpr float zero = 0x1.8p23f;
  return __int_as_float(x + __builtin_bit_cast(std::int32_t, zero)) - zero;
#else
  return to_float(x);
#endif
}
QATTN_DEVICE float to_float_22(float x) { return x; }
QATTN_DEVICE std::int32_t dot4_s8(std::uint32_t a, std::uint32_t b, std::int32_t c) {
  return __dp4a(static_cast<int>(a), static_cast<int>(b), c);
}
QATTN_DEVICE std::uint32_t dot4_u8(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
  return __dp4a(a, b, c);
}

}  // namespace QATTN_TARGET
}  // namespace qattn::isa
