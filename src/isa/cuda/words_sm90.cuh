// Words of sm_90: mbarriers, TMA, warpgroups. libcu++ has most of the instructions; the others are
// here. Meanings: isa.hpp. Every word is declared on every architecture, only its body is guarded.
#pragma once

#include <cuda.h>

#include <cuda/ptx>

#include "isa/cuda/words_wgmma.cuh"
#include "isa/isa.hpp"

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define QATTN_HAS_SM90 1
#endif
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
#define QATTN_LOADS_TO_BLOCK 1
#endif
// setmaxnreg belongs to the architecture-specific targets: ptxas refuses it for sm_120.
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL) || \
    defined(__CUDA_ARCH_SPECIFIC__) || defined(__CUDA_ARCH_FAMILY_SPECIFIC__)
#define QATTN_HAS_SETMAXNREG 1
#endif

namespace qattn::isa {
inline namespace QATTN_TARGET {

using TensorMap = CUtensorMap;

/// libcu++ takes generic pointers and turns them back into shared addresses, at no cost.
template <class T = void>
QATTN_DEVICE T* shared_pointer(SharedAddress a) {
  return static_cast<T*>(__cvta_shared_to_generic(a));
}

// ---- Matrices ----------------------------------------------------------------------------------

template <int N>
QATTN_DEVICE void store_matrix(const SharedAddress (&row)[N], const std::uint32_t (&r)[N][4]) {
#if defined(QATTN_HAS_SM90)
#pragma unroll
  for (int i = 0; i < N; ++i) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row[i]),
                 "r"(r[i][0]), "r"(r[i][1]), "r"(r[i][2]), "r"(r[i][3])
                 : "memory");
  }
#endif
}
template <int N>
QATTN_DEVICE void store_matrix_transposed(const SharedAddress (&row)[N],
                                          const std::uint32_t (&r)[N][4]) {
#if defined(QATTN_HAS_SM90)
#pragma unroll
  for (int i = 0; i < N; ++i) {
    asm volatile(
        "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row[i]),
        "r"(r[i][0]), "r"(r[i][1]), "r"(r[i][2]), "r"(r[i][3])
        : "memory");
  }
#endif
}
template <int N>
QATTN_DEVICE void store_matrix2(const SharedAddress (&row)[N], const std::uint32_t (&r)[N][2]) {
#if defined(QATTN_HAS_SM90)
#pragma unroll
  for (int i = 0; i < N; ++i) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" ::"r"(row[i]),
                 "r"(r[i][0]), "r"(r[i][1])
                 : "memory");
  }
#endif
}
template <int N>
QATTN_DEVICE void store_matrix2_transposed(const SharedAddress (&row)[N],
                                           const std::uint32_t (&r)[N][2]) {
#if defined(QATTN_HAS_SM90)
#pragma unroll
  for (int i = 0; i < N; ++i) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(row[i]),
                 "r"(r[i][0]), "r"(r[i][1])
                 : "memory");
  }
#endif
}
template <int N>
QATTN_DEVICE void store_matrix1(const SharedAddress (&row)[N], const std::uint32_t (&r)[N][1]) {
#if defined(QATTN_HAS_SM90)
#pragma unroll
  for (int i = 0; i < N; ++i) {
    asm volatile("stmatrix.sync.aligned.m8n8.x1.shared.b16 [%0], {%1};" ::"r"(row[i]), "r"(r[i][0])
                 : "memory");
  }
#endif
}
template <int N>
QATTN_DEVICE void store_matrix1_transposed(const SharedAddress (&row)[N],
                                           const std::uint32_t (&r)[N][1]) {
#if defined(QATTN_HAS_SM90)
#pragma unroll
  for (int i = 0; i < N; ++i) {
    asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};" ::"r"(row[i]),
                 "r"(r[i][0])
                 : "memory");
  }
#endif
}

// ---- mbarriers ---------------------------------------------------------------------------------

QATTN_DEVICE void mbarrier_init(SharedAddress a, int arrivals) {
#if defined(QATTN_HAS_SM90)
  ::cuda::ptx::mbarrier_init(shared_pointer<std::uint64_t>(a),
                             static_cast<std::uint32_t>(arrivals));
#endif
}
QATTN_DEVICE void fence_mbarrier_init() {
#if defined(QATTN_HAS_SM90)
  ::cuda::ptx::fence_mbarrier_init(::cuda::ptx::sem_release, ::cuda::ptx::scope_cluster);
#endif
}
QATTN_DEVICE void mbarrier_arrive(SharedAddress a) {
#if defined(QATTN_HAS_SM90)
  ::cuda::ptx::mbarrier_arrive(shared_pointer<std::uint64_t>(a));
#endif
}
QATTN_DEVICE void mbarrier_expect(SharedAddress a, std::uint32_t bytes) {
#if defined(QATTN_HAS_SM90)
  ::cuda::ptx::mbarrier_expect_tx(::cuda::ptx::sem_relaxed, ::cuda::ptx::scope_cta,
                                  ::cuda::ptx::space_shared, shared_pointer<std::uint64_t>(a),
                                  bytes);
#endif
}
QATTN_DEVICE void mbarrier_arrive_expect(SharedAddress a, std::uint32_t bytes) {
#if defined(QATTN_HAS_SM90)
  ::cuda::ptx::mbarrier_arrive_expect_tx(::cuda::ptx::sem_release, ::cuda::ptx::scope_cta,
                                         ::cuda::ptx::space_shared,
                                         shared_pointer<std::uint64_t>(a), bytes);
#endif
}
QATTN_DEVICE void mbarrier_wait(SharedAddress a, std::uint32_t parity) {
#if defined(QATTN_HAS_SM90)
  // try_wait suspends the thread for a while by itself.
  while (!::cuda::ptx::mbarrier_try_wait_parity(shared_pointer<std::uint64_t>(a), parity)) {
  }
#endif
}
QATTN_DEVICE bool mbarrier_test(SharedAddress a, std::uint32_t parity) {
#if defined(QATTN_HAS_SM90)
  return ::cuda::ptx::mbarrier_test_wait_parity(shared_pointer<std::uint64_t>(a), parity);
#else
  return true;
#endif
}
QATTN_DEVICE void fence_async_proxy() {
#if defined(QATTN_HAS_SM90)
  ::cuda::ptx::fence_proxy_async(::cuda::ptx::space_shared);
#endif
}

QATTN_DEVICE void fence_async_global() {
#if defined(QATTN_HAS_SM90)
  ::cuda::ptx::fence_proxy_async(::cuda::ptx::space_global);
#endif
}

// ---- Bulk copies, TMA --------------------------------------------------------------------------

// Loads to the block's own shared memory. Those to a cluster's are, beyond Hopper, code that asks
// whose it is and may call the system; and where there is a call, ptxas ignores setmaxnreg.
QATTN_DEVICE void bulk_load(SharedAddress to, const void* from, std::uint32_t bytes,
                            SharedAddress mbarrier) {
#if defined(QATTN_LOADS_TO_BLOCK)
  ::cuda::ptx::cp_async_bulk(::cuda::ptx::space_shared, ::cuda::ptx::space_global,
                             shared_pointer(to), from, bytes,
                             shared_pointer<std::uint64_t>(mbarrier));
#elif defined(QATTN_HAS_SM90)
  ::cuda::ptx::cp_async_bulk(::cuda::ptx::space_cluster, ::cuda::ptx::space_global,
                             shared_pointer(to), from, bytes,
                             shared_pointer<std::uint64_t>(mbarrier));
#endif
}
QATTN_DEVICE void bulk_store(void* to, SharedAddress from, std::uint32_t bytes) {
#if defined(QATTN_HAS_SM90)
  ::cuda::ptx::cp_async_bulk(::cuda::ptx::space_global, ::cuda::ptx::space_shared, to,
                             shared_pointer(from), bytes);
#endif
}
template <int Rank>
QATTN_DEVICE void tma_load(SharedAddress to, const TensorMap& map, const int (&c)[Rank],
                           SharedAddress mbarrier) {
#if defined(QATTN_LOADS_TO_BLOCK)
  ::cuda::ptx::cp_async_bulk_tensor(::cuda::ptx::space_shared, ::cuda::ptx::space_global,
                                    shared_pointer(to), &map, c,
                                    shared_pointer<std::uint64_t>(mbarrier));
#elif defined(QATTN_HAS_SM90)
  ::cuda::ptx::cp_async_bulk_tensor(::cuda::ptx::space_cluster, ::cuda::ptx::space_global,
                                    shared_pointer(to), &map, c,
                                    shared_pointer<std::uint64_t>(mbarrier));
#endif
}
template <int Rank>
QATTN_DEVICE void tma_store(const TensorMap& map, const int (&c)[Rank], SharedAddress from) {
#if defined(QATTN_HAS_SM90)
  ::cuda::ptx::cp_async_bulk_tensor(::cuda::ptx::space_global, ::cuda::ptx::space_shared, &map, c,
                                    shared_pointer(from));
#endif
}
QATTN_DEVICE void tma_prefetch(const TensorMap& map) {
#if defined(QATTN_HAS_SM90)
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
#endif
}
QATTN_DEVICE void bulk_commit() {
#if defined(QATTN_HAS_SM90)
  ::cuda::ptx::cp_async_bulk_commit_group();
#endif
}
template <int N>
QATTN_DEVICE void bulk_wait() {
#if defined(QATTN_HAS_SM90)
  ::cuda::ptx::cp_async_bulk_wait_group(::cuda::ptx::n32_t<N>());
#endif
}
template <int N>
QATTN_DEVICE void bulk_wait_read() {
#if defined(QATTN_HAS_SM90)
  ::cuda::ptx::cp_async_bulk_wait_group_read(::cuda::ptx::n32_t<N>());
#endif
}

// ---- Warpgroups, clusters, grids ---------------------------------------------------------------

QATTN_DEVICE std::uint64_t matrix_descriptor(SharedAddress a, std::uint32_t leading_bytes,
                                             std::uint32_t stride_bytes, Swizzle swizzle) {
  const auto units = [](std::uint32_t bytes) -> std::uint64_t { return bytes >> 4 & 0x3fffu; };
  // 1, 2, 3 mean 128, 64 and 32 bytes.
  const std::uint64_t mode = (4u - static_cast<std::uint32_t>(swizzle)) & 3u;
  return units(a & 0x3ffffu) | units(leading_bytes) << 16 | units(stride_bytes) << 32 | mode << 62;
}

template <int N>
QATTN_DEVICE void registers_increase() {
#if defined(QATTN_HAS_SETMAXNREG)
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
#endif
}
template <int N>
QATTN_DEVICE void registers_decrease() {
#if defined(QATTN_HAS_SETMAXNREG)
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
#endif
}

QATTN_DEVICE bool elect() {
#if defined(QATTN_HAS_SM90)
  std::uint32_t chosen;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}"
               : "=r"(chosen));
  return chosen != 0;
#else
  return (threadIdx.x & 31) == 0;
#endif
}
QATTN_DEVICE void cluster_sync() {
#if defined(QATTN_HAS_SM90)
  ::cuda::ptx::barrier_cluster_arrive();
  ::cuda::ptx::barrier_cluster_wait();
#endif
}
QATTN_DEVICE int cluster_rank() {
#if defined(QATTN_HAS_SM90)
  return static_cast<int>(::cuda::ptx::get_sreg_cluster_ctarank());
#else
  return 0;
#endif
}
QATTN_DEVICE int cluster_blocks() {
#if defined(QATTN_HAS_SM90)
  return static_cast<int>(::cuda::ptx::get_sreg_cluster_nctarank());
#else
  return 1;
#endif
}
QATTN_DEVICE SharedAddress map_shared(SharedAddress a, int rank) {
#if defined(QATTN_HAS_SM90)
  SharedAddress there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(a), "r"(rank));
  return there;
#else
  return a;
#endif
}
template <class T>
QATTN_DEVICE T load_cluster(SharedAddress a) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16);
  std::uint32_t w[sizeof(T) / 4]{};
#if defined(QATTN_HAS_SM90)
  if constexpr (sizeof(T) == 4) {
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(w[0]) : "r"(a) : "memory");
  } else if constexpr (sizeof(T) == 8) {
    asm volatile("ld.shared::cluster.v2.u32 {%0, %1}, [%2];"
                 : "=r"(w[0]), "=r"(w[1])
                 : "r"(a)
                 : "memory");
  } else {
    asm volatile("ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
                 : "r"(a)
                 : "memory");
  }
#endif
  T value;
  memcpy(&value, w, sizeof value);
  return value;
}
template <class T>
QATTN_DEVICE void store_cluster(SharedAddress a, T value) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16);
  std::uint32_t w[sizeof(T) / 4];
  memcpy(w, &value, sizeof value);
#if defined(QATTN_HAS_SM90)
  if constexpr (sizeof(T) == 4) {
    asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(a), "r"(w[0]) : "memory");
  } else if constexpr (sizeof(T) == 8) {
    asm volatile("st.shared::cluster.v2.u32 [%0], {%1, %2};" ::"r"(a), "r"(w[0]), "r"(w[1])
                 : "memory");
  } else {
    asm volatile("st.shared::cluster.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(a), "r"(w[0]), "r"(w[1]),
                 "r"(w[2]), "r"(w[3])
                 : "memory");
  }
#endif
}
QATTN_DEVICE void grid_dependency_wait() {
#if defined(QATTN_HAS_SM90)
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
QATTN_DEVICE void grid_dependency_launch() {
#if defined(QATTN_HAS_SM90)
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace QATTN_TARGET
}  // namespace qattn::isa
