// The vocabulary of GPU kernels: what each word means. A kernel is written once over these words
// and runs in two places: on a GPU they are single instructions (cuda/), in tests on a CPU they are
// emulated (emu/), with the same signatures. The emulated words take one more, defaulted argument,
// the caller's source location, for their error messages.
//
// A kernel never touches shared memory through a pointer, only through these words and 32-bit
// addresses, so that the emulator sees every access. Words marked (warp) and (warpgroup) are
// collective: every lane of the warp, or of four consecutive warps, calls them at the same place.
// Which GPUs have which word is told once, in emu/vocabulary.cpp; the emulator refuses the others.
// Layouts are the PTX ISA's; g = lane / 4 and t = lane % 4 throughout.
//
//   Places
//     Index3 {x, y, z}
//     int target_architecture            a constant: of the GPU that this is compiled for, 89 for
//                                        sm_89; the emulator, which compiles a kernel once, says
//                                        120 and looks at the kernel's target (launch.hpp)
//     int thread(), lane()               within the block, within the warp
//     int warp_lanes()                   32, or 64 where the kernel says so (launch.hpp), as it may
//                                        on GPUs of AMD; warps of 32 lanes are halves there
//     int warp()                         (warp) of the block; uniform to the compiler
//     Index3 block(), grid()             this block's index; how many there are
//     SharedAddress shared_base()        first byte of the block's shared memory, 1024-byte aligned
//
//   Memory: T is 1, 2, 4, 8 or 16 bytes (Words2, Words4), the address a multiple of its size
//     T load_shared<T>(SharedAddress)                 void store_shared(SharedAddress, T)
//     T load_global(const T*)                         void store_global(T*, T)
//     Words4 load_once(const Words4*)                 read-only data used once: not kept in L1
//     void store_once(Words4*, Words4)                likewise
//     uint32 atomic_max_shared(SharedAddress, uint32), atomic_add_shared: the old value
//     uint32 atomic_max_global(uint32*, uint32), atomic_or_global, atomic_add_global
//     uint64 atomic_add_global(uint64*, uint64)
//     uint32 atomic_add_ordered(uint32*, uint32)      as atomic_add_global; release and acquire, of
//                                                     all blocks
//     void wait_global(const uint32*, uint32 least)   until the word is so large; acquire. What it
//                                                     waits for must not need blocks that do not
//                                                     run yet
//
//   Order
//     void sync_threads()                             all threads of the block
//     void barrier_sync(id, threads), barrier_arrive(id, threads)      named, id 0 to 15
//     void barrier_sync_anywhere(id, threads)         named; who waits may be at several places of
//                                                     the code, but at one in the two above
//     void sync_warp()                                (warp)
//     int opaque(int)                                 its argument; what follows from it is not
//                                                     known outside of a loop, nor kept from there
//     void schedule_fence()                           compilers move nothing across it
//     T shuffle_xor(T, mask), shuffle(T, source_lane), shuffle_up(T, delta), shuffle_down  (warp)
//     bool any(bool), all(bool)          (warp)
//     uint32 ballot(bool)                (warp) of 32 lanes; of 64: uint64 ballot64(bool)
//
//   Copies from global to shared memory, sm_80
//     void copy_async16(SharedAddress, const void*, int bytes)   16 bytes, those past `bytes` zero
//     void copy_async8(...), copy_async4(...)         8 and 4 bytes, which L1 keeps (.ca), likewise
//     void copy_async_commit(); void copy_async_wait<N>()        at most N groups still in flight
//
//   Matrices (warp). Arrays of N: one call for N instructions of the same kind.
//     void load_matrix<N>(uint32 (&r)[N][4], SharedAddress (&row)[N])       ldmatrix.x4.b16:
//        lane i gives the address of row i % 8 of matrix i / 8 (16 bytes each); r[.][m] of a lane
//        is bytes 4t..4t+3 of row g of matrix m
//     void load_matrix_transposed<N>(...)      .trans: the lane gets rows 2t, 2t+1 of column g
//     void load_matrix2 / load_matrix1 (and _transposed)         two and one matrices
//     void store_matrix<N>(SharedAddress (&row)[N], uint32 (&r)[N][4])       sm_90
//     void store_matrix_transposed; store_matrix2 / store_matrix1 (and _transposed): what the loads
//        of these names would read back
//     uint32 transpose_matrix(uint32)          movmatrix: 8 x 8 elements of 16 bits, a lane with
//        2t, 2t + 1 of row g before, with 2t, 2t + 1 of column g after
//     void mma<A, B, M, N>(Acc (&d)[M][N][4], uint32 (&a)[M][4], uint32 (&b)[N][2])
//        d[m][n] += a[m] * b[n]; 16 x 8 x 16 for f16, bf16 (Acc float, or uint32 [2] halves: see
//        mma_f16), 16 x 8 x 32 for s8, u8 (Acc int32) and e4m3, e5m2 (Acc float; has_mma())
//          accumulator i of a lane: row g + 8 (i / 2), column 2t + i % 2
//          16-bit A register r, half e: row g + 8 (r % 2), k = 2t + e + 8 (r / 2)
//          16-bit B register r, half e: k = 2t + e + 8r, column g
//          8-bit A register r, byte b: row g + 8 (r % 2), k = 4t + b + 16 (r / 2)
//          8-bit B register r, byte b: k = 4t + b + 16r, column g
//     void mma_zero<A, B, M, N>(d, a, b)                          d = a b
//     void mma_at<A, B, M, N, Total>(Acc (&d)[M][Total][4], first, a, b)   d[m][first + n] += a b
//     void mma_f16<M, N>(uint32 (&d)[M][N][2], a, b)             f16 accumulators
//
//   Arithmetic
//     float exp2(float), log2(float)           approximate (2 ulp); subnormals flushed
//     float reciprocal(float)                  approximate (1 ulp)
//     uint32 pack_f16(float lo, float hi), pack_bf16: round to nearest even
//     Pair {lo, hi} unpack_f16(uint32), unpack_bf16
//     uint32 multiply_f16(a, b)                two products, round to nearest even, subnormals kept
//     uint32 fma_f16(a, b, c)                  two a b + c, each rounded once; likewise
//     Pair fma_pair(Pair a, b, c), multiply_pair(a, b), add_pair(a, b)   each half as fmaf(), * and
//                                              +, rounded to nearest even, subnormals kept; fma
//                                              and sum are one instruction on sm_100 and 103
//     uint32 pack_u8(float, float, float, float)   round to nearest even, saturate to 0..255, first
//                                                  in the low byte; NaN gives 0
//     uint32 pack_s8(float, float, float, float)   likewise, to -128..127
//     uint16 pack_e4m3(lo, hi), pack_e5m2          round to nearest even, saturate; NaN stays NaN
//     uint32 unpack_e4m3(uint16)                   two f16, exact; NaN gives 0x7fff
//     uint32 byte_permute(a, b, selector)          prmt: bytes 0-3 of a, 4-7 of b
//     uint32 lop3<table>(a, b, c)
//     int32 dot4_s8(a, b, c), dot4_u8(a, b, c)     c + sum of four products of bytes
//     float to_float(int32), to_float(float)   a sum of a product, of whichever type, as a number
//     float to_float_22(int32), (float)        likewise, of -2^22 to 2^22
//     float max3(a, b, c); int32 max3(a, b, c); uint32 max3(a, b, c), min3(a, b, c)
//        of floats: NaN only if all are, +0 is larger than -0; one instruction on sm_100, 103, 110
//     uint32 max3_u16(a, b, c)                 of both halves
//     uint32 max_f16(a, b), min_f16, max_bf16, min_bf16   likewise; NaN, 0x7fff, if one is; -0 < +0
//
//   sm_90
//     void mbarrier_init(SharedAddress, arrivals); void fence_mbarrier_init()
//     void mbarrier_arrive(SharedAddress); void mbarrier_expect(SharedAddress, bytes): no arrival
//     void mbarrier_arrive_expect(SharedAddress, bytes)
//     void mbarrier_wait(SharedAddress, parity)    until the phase of that parity has completed
//     bool mbarrier_test(SharedAddress, parity)
//     void fence_async_proxy()                     orders this thread's shared-memory accesses
//                                                  before later ones of TMA and wgmma
//     void fence_async_global()                    the same of global memory and TMA; by who wrote,
//                                                  and by who was told so
//     void bulk_load(SharedAddress, const void*, bytes, SharedAddress mbarrier)   16-byte multiples
//     void bulk_store(void*, SharedAddress, bytes)                    joins the bulk group
//     void tma_load<Rank>(SharedAddress, const TensorMap&, int (&c)[Rank], SharedAddress mbarrier)
//     void tma_store<Rank>(const TensorMap&, int (&c)[Rank], SharedAddress)
//                                                  c[0] at a multiple of 16 bytes, even outside;
//                                                  stores: no c negative, rows of n * 16 bytes
//     void bulk_commit(); void bulk_wait<N>(); void bulk_wait_read<N>()    groups of stores
//     void tma_prefetch(const TensorMap&)
//     bool has_wgmma                               constant: this target has the next words
//     void wgmma_fence(), wgmma_commit(); void wgmma_wait<N>()             (warpgroup)
//     void wgmma<A, B, N, TransposeA, TransposeB>(Acc (&d)[N / 2], uint64 a, uint64 b, bool add)
//     void wgmma<A, B, N, TransposeB>(Acc (&d)[N / 2], uint32 (&a)[4], uint64 b, bool add)
//        64 x N x 32 bytes; d += or = a * b; a and b are matrix_descriptor()s of shared memory or
//        A's fragments in registers; lane layout as four stacked mma, warp w % 4 rows 16 w ...
//        8-bit floats: the accumulator keeps 13 fraction bits beside the largest addend, truncated
//        (docs/ISA_CONFORMANCE.md); the emulator adds exactly
//     uint64 matrix_descriptor(SharedAddress, leading_bytes, stride_bytes, Swizzle)
//     void registers_increase<N>(), registers_decrease<N>()                (warpgroup)
//     bool elect()                                 (warp) true in one lane
//     int cluster_rank(), cluster_blocks()         this block's place in its cluster; its blocks
//     void cluster_sync()                          all threads of the cluster
//     SharedAddress map_shared(SharedAddress, int rank)   the same place in that block of the
//                                                  cluster, for the next two words alone
//     T load_cluster<T>(SharedAddress), void store_cluster(SharedAddress, T)   4, 8 or 16 bytes;
//                                                  who owns them must not have ended
//
//   sm_120a
//     bool has_scaled_mma                          constant: this target has the next words
//     void mma_scaled<S, M, N, Byte>(float (&d)[M][N][4], uint32 (&a)[M][4], uint32 (&b)[N][2],
//                                    uint32 (&sa)[M], uint32 (&sb)[N])                     (warp)
//        d[m][n] += (a[m] times its scales) * (b[n] times its scales). mxfp8: 16 x 8 x 32 of e4m3,
//        registers as mma's; mxfp4 and nvfp4: 16 x 8 x 64 of e2m1, the lower nibble first
//          4-bit A register r, nibble b: row g + 8 (r % 2), k = 8t + b + 32 (r / 2)
//          4-bit B register r, nibble b: k = 8t + b + 32r, column g
//        A scale a row or column and block of k, one byte each, from byte Byte on: mxfp8 one of 32,
//        mxfp4 two of 32 (Byte 0 or 2), both ue8m0, NaN is 255; nvfp4 four of 16, e4m3, not < 0
//          sa of lane t = 0: row g, of t = 1: row g + 8; sb of lane t = 0: column g; others' not
//        Sums hold 25 bits and are truncated; the emulator adds floats
//     void mma_f8f6f4<A, B, M, N>(float (&d)[M][N][4], uint32 (&a)[M][4], uint32 (&b)[N][2])
//        (warp) as mma of bytes: 16 x 8 x 32, of e4m3, e5m2 and e2m1 in any mixture
//     void load_bytes_transposed<N>(uint32 (&r)[N][4], SharedAddress (&row)[N])            (warp)
//        lane i gives the address of row i % 16 of matrix i / 16 (16 x 16 bytes); byte b of r[.][i]
//        of a lane is row 4t + b, column g + 8 (i % 2), of matrix i / 2
//     uint32 pack_e2m1(float (&x)[8])              round to nearest even, saturate; the first in
//                                                  the low nibble; NaN is not looked at
//     uint16 pack_ue8m0(lo, hi), pack_ue8m0_up     of the magnitudes, rounded to a power of two
//        toward zero, or up; NaN gives 255, infinities 254, what is below 2^-127 code 0. Toward
//        zero it is formats::Ue8m0::floor_encode(x, 0) but for infinities, which are NaN there
//
//   Launches
//     void grid_dependency_wait()      until the kernels before have ended
//     void grid_dependency_launch()    the next kernel may start when all blocks have said so or
//                                      ended; both for Start::early (launch.hpp)
#pragma once

#include <cstdint>

#include "isa/constexpr.hpp"
#include "isa/target.hpp"

namespace qattn::isa {

using SharedAddress = std::uint32_t;

struct Index3 {
  int x = 1, y = 1, z = 1;
};

/// 8 and 16 bytes that move as one.
struct alignas(8) Words2 {
  std::uint32_t w[2];
};
struct alignas(16) Words4 {
  std::uint32_t w[4];
};

struct Pair {
  float lo, hi;
};

/// Element formats of matrix instructions. Two e2m1 lie in a byte, the first below, or, of
/// mma_f8f6f4, one in bits 2 to 5.
enum class Element { f16, bf16, s8, u8, e4m3, e5m2, e2m1 };
QATTN_CONSTEXPR bool is_integer(Element e) { return e == Element::s8 || e == Element::u8; }
QATTN_CONSTEXPR bool is_16bit(Element e) { return e == Element::f16 || e == Element::bf16; }
QATTN_CONSTEXPR int element_bits(Element e) {
  return is_16bit(e) ? 16 : e == Element::e2m1 ? 4 : 8;
}

/// Is mma of the element, without scales, one instruction there? FP8 products begin with sm_89;
/// sm_90 and sm_100 have theirs in wgmma and tcgen05, and ptxas makes mma of conversions and 16-bit
/// products.
QATTN_CONSTEXPR bool has_mma(Element e, int architecture) {
  const bool fp8 = e == Element::e4m3 || e == Element::e5m2;
  if (e == Element::e2m1 || vendor_of(architecture) != Vendor::nvidia) return false;
  return fp8 ? architecture == 89 || architecture >= 120 : architecture >= 80;
}

QATTN_CONSTEXPR bool is_f8f6f4(Element e) {
  return e == Element::e4m3 || e == Element::e5m2 || e == Element::e2m1;
}

/// Products whose operands have scales of blocks along the contraction, by their recipes' names.
enum class Scaled { mxfp8, mxfp4, nvfp4 };
/// May a product's scales begin at that byte of their registers?
template <Scaled S, int Byte>
inline constexpr bool has_scale_byte = S == Scaled::mxfp8   ? Byte >= 0 && Byte < 4
                                       : S == Scaled::mxfp4 ? Byte == 0 || Byte == 2
                                                            : Byte == 0;

template <bool Integer>
struct AccumulatorOf {
  using type = float;
};
template <>
struct AccumulatorOf<true> {
  using type = std::int32_t;
};
template <Element A>
using Accumulator = typename AccumulatorOf<is_integer(A)>::type;

/// Shared-memory swizzles of TMA and wgmma: XOR of address bits 4.. with bits 7..
enum class Swizzle { none, bytes32, bytes64, bytes128 };

}  // namespace qattn::isa

// Each target's words live in an inline namespace of their own, and so must every kernel
// (QATTN_TARGET), because the linker would silently merge equal names.
#if defined(__CUDACC__)
#define QATTN_DEVICE __device__ __forceinline__
#define QATTN_DEVICE_CALL inline __device__ __noinline__
#define QATTN_TARGET cuda_target
#include "isa/cuda/words.cuh"
#else
#define QATTN_DEVICE inline
#define QATTN_DEVICE_CALL inline  // one copy of rare code, which its many callers share
#if defined(QATTN_DESCRIBED)      // plans for GPUs that are not here: words are named, none runs
#define QATTN_TARGET described_target
#else
#define QATTN_TARGET emulated_target
#endif
#include "isa/emu/words.hpp"
#endif
