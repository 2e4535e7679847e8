// Words of sm_90, emulated: mbarriers, TMA, wgmma. Meanings: isa.hpp.
#pragma once

#include "isa/emu/async_engine.hpp"
#include "isa/emu/wgmma.hpp"
#include "isa/emu/words_matrix.hpp"
#include "isa/emu/words_sm80.hpp"
#include "isa/isa.hpp"

namespace qattn::isa {
inline namespace QATTN_TARGET {

using emu::TensorMap;

// ---- mbarriers
// -----------------------------------------------------------------------------------

inline emu::AsyncEngine& async() { return emu::current_block().async(); }

inline void mbarrier_init(SharedAddress a, int arrivals, Where where = Where::current()) {
  async().init(a, arrivals, where);
}
inline void fence_mbarrier_init() { async().fence_init(); }
inline void mbarrier_arrive(SharedAddress a, Where where = Where::current()) {
  async().arrive(a, where);
}
inline void mbarrier_expect(SharedAddress a, std::uint32_t bytes, Where where = Where::current()) {
  async().expect(a, bytes, where);
}
inline void mbarrier_arrive_expect(SharedAddress a, std::uint32_t bytes,
                                   Where where = Where::current()) {
  async().expect(a, bytes, where);
  async().arrive(a, where);
}
inline void mbarrier_wait(SharedAddress a, std::uint32_t parity, Where where = Where::current()) {
  async().wait(a, parity, where);
}
inline bool mbarrier_test(SharedAddress a, std::uint32_t parity, Where where = Where::current()) {
  return async().test(a, parity, where);
}
inline void fence_async_proxy() {
  emu::Block& block = emu::current_block();
  block.count(Word::fence_async_proxy);
  block.async().fence_init();
  if (block.options().races) block.races().fence_async(emu::current_lane->thread);
}
/// Every access of the emulator to global memory is one of a single proxy.
inline void fence_async_global() { emu::current_block().count(Word::fence_async_proxy); }

// ---- Bulk copies, TMA
// ------------------------------------------------------------------------------

inline void bulk_load(SharedAddress to, const void* from, std::uint32_t bytes,
                      SharedAddress mbarrier, Where where = Where::current()) {
  async().bulk_load(to, from, bytes, mbarrier, where);
}
inline void bulk_store(void* to, SharedAddress from, std::uint32_t bytes,
                       Where where = Where::current()) {
  async().bulk_store(to, from, bytes, where);
}
inline void check_rank(const TensorMap& map, int rank, const Where& where) {
  if (map.rank != rank) {
    throw emu::Error(emu::text("TMA of rank %d with a tensor map of rank %d, at %s", rank, map.rank,
                               emu::describe(where).c_str()));
  }
}
template <int Rank>
void tma_load(SharedAddress to, const TensorMap& map, const int (&c)[Rank], SharedAddress mbarrier,
              Where where = Where::current()) {
  static_assert(Rank >= 2 && Rank <= 5);
  check_rank(map, Rank, where);
  async().tma_load(to, map, c, mbarrier, where);
}
template <int Rank>
void tma_store(const TensorMap& map, const int (&c)[Rank], SharedAddress from,
               Where where = Where::current()) {
  static_assert(Rank >= 2 && Rank <= 5);
  check_rank(map, Rank, where);
  async().tma_store(map, c, from, where);
}
inline void tma_prefetch(const TensorMap&) {}
inline void bulk_commit() { async().commit_stores(); }
template <int N>
void bulk_wait() {
  async().wait_stores(N, false);
}
template <int N>
void bulk_wait_read() {
  async().wait_stores(N, true);
}

// ---- wgmma
// -----------------------------------------------------------------------------------------

inline std::uint64_t matrix_descriptor(SharedAddress a, std::uint32_t leading_bytes,
                                       std::uint32_t stride_bytes, Swizzle swizzle,
                                       Where where = Where::current()) {
  if ((a | leading_bytes | stride_bytes) % 16 != 0) {
    throw emu::Error("matrix_descriptor: not in units of 16 bytes, at " + emu::describe(where));
  }
  return emu::make_descriptor(a, leading_bytes, stride_bytes, static_cast<int>(swizzle));
}

inline constexpr bool has_wgmma = true;

inline void wgmma_fence(Where where = Where::current()) {
  char none = 0;
  emu::warpgroup_collective(Word::wgmma_fence, none, where,
                            [](emu::Block& block, emu::Arguments<char>) { block.wgmma().fence(); });
}
inline void wgmma_commit(Where where = Where::current()) {
  char none = 0;
  emu::warpgroup_collective(
      Word::wgmma_commit, none, where,
      [](emu::Block& block, emu::Arguments<char>) { block.wgmma().commit(); });
}
template <int N>
void wgmma_wait(Where where = Where::current()) {
  char none = 0;
  emu::warpgroup_collective(
      Word::wgmma_wait, none, where,
      [&](emu::Block& block, emu::Arguments<char>) { block.wgmma().wait(N, where); });
}

/// The shapes that exist: 8-bit operands are K-major, integers skip most odd multiples of 8.
template <Element A, int N, bool TransposeA, bool TransposeB>
constexpr bool is_wgmma_shape() {
  if (N % 8 != 0 || N < 8 || N > 256) return false;
  if (is_integer(A) && N > 32 && N % 16 != 0) return false;
  return is_16bit(A) || !(TransposeA || TransposeB);
}
template <Element A, Element B, int N, bool TransposeA, bool TransposeB>
void issue_wgmma(emu::WgmmaArguments& mine, const Where& where) {
  static_assert(can_multiply<A, B>() && is_wgmma_shape<A, N, TransposeA, TransposeB>(),
                "no such product");
  emu::warpgroup_collective(
      Word::wgmma, mine, where, [&](emu::Block& block, emu::Arguments<emu::WgmmaArguments> lanes) {
        block.wgmma().issue({A, B, N, is_integer(A), TransposeA, TransposeB}, lanes, where);
      });
}
template <Element A, Element B, int N, bool TransposeA = false, bool TransposeB = false>
void wgmma(Accumulator<A> (&d)[N / 2], std::uint64_t a, std::uint64_t b, bool add,
           Where where = Where::current()) {
  emu::WgmmaArguments mine{reinterpret_cast<std::uint32_t*>(d), nullptr, a, b, add};
  issue_wgmma<A, B, N, TransposeA, TransposeB>(mine, where);
}
template <Element A, Element B, int N, bool TransposeB = false>
void wgmma(Accumulator<A> (&d)[N / 2], const std::uint32_t (&a)[4], std::uint64_t b, bool add,
           Where where = Where::current()) {
  emu::WgmmaArguments mine{reinterpret_cast<std::uint32_t*>(d), a, 0, b, add};
  issue_wgmma<A, B, N, false, TransposeB>(mine, where);
}

// ---- Warpgroups, clusters, grids
// -------------------------------------------------------------------

template <int N, bool Increase>
void set_registers(const Where& where) {
  static_assert(N >= 24 && N <= 256 && N % 8 == 0);
  char none = 0;
  emu::warpgroup_collective(Word::registers, none, where,
                            [&](emu::Block& block, emu::Arguments<char>) {
                              block.wgmma().set_registers(N, Increase, where);
                            });
}
template <int N>
void registers_increase(Where where = Where::current()) {
  set_registers<N, true>(where);
}
template <int N>
void registers_decrease(Where where = Where::current()) {
  set_registers<N, false>(where);
}

/// Always the same lane, but not always lane 0: nothing promises that.
inline bool elect(Where where = Where::current()) {
  char none = 0;
  emu::warp_collective(Word::elect, none, where, [](emu::Block&, emu::Arguments<char>) {});
  return lane() == emu::current_block().elected_lane();
}

inline void cluster_sync(Where where = Where::current()) {
  emu::Block& block = emu::current_block();
  if (block.options().cluster > 1) {
    throw emu::Error("cluster_sync: blocks of a cluster run one after another here, at " +
                     emu::describe(where));
  }
  block.count(Word::cluster_sync);
  block.barrier(emu::kClusterBarrier, block.threads(), emu::BarrierUse::sync, where);
}
inline void grid_dependency_wait() { emu::current_lane->waited = true; }
inline void grid_dependency_launch() {}

}  // namespace QATTN_TARGET
}  // namespace qattn::isa
