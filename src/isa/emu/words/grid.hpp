// Warpgroups, clusters, grids, emulated. Meanings: isa.hpp.
#pragma once

#include "isa/emu/units/units.hpp"
#include "isa/emu/words/memory.hpp"

namespace qattn::isa {
inline namespace QATTN_TARGET {

template <int N, bool Increase>
void set_registers(const Where& where) {
  static_assert(N >= 24 && N <= 256 && N % 8 == 0);
  char none = 0;
  emu::warpgroup_collective(Word::registers, none, where,
                            [&](emu::Block& block, emu::Arguments<char>) {
                              block.units().wgmma.set_registers(N, Increase, where);
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

inline int cluster_rank() { return emu::current_block().rank(); }
inline int cluster_blocks() { return emu::current_block().cluster_blocks(); }
inline void cluster_sync(Where where = Where::current()) {
  emu::current_block().cluster_barrier(where);
}
inline SharedAddress map_shared(SharedAddress a, int rank, Where where = Where::current()) {
  emu::Block& block = emu::current_block();
  block.use(Word::map_shared, where);
  if (rank < 0 || rank >= block.cluster_blocks()) {
    throw emu::Error(emu::text("map_shared: block %d of a cluster of %d, at %s", rank,
                               block.cluster_blocks(), emu::describe(where).c_str()));
  }
  block.shared().check_place(a, 0, 1, "map_shared", where);
  return a | static_cast<SharedAddress>(rank + 1) << emu::kRankShift;
}
template <class T>
T load_cluster(SharedAddress a, Where where = Where::current()) {
  static_assert(is_memory_type<T> && sizeof(T) >= 4);
  T value;
  emu::current_block().load_cluster(a, sizeof(T), &value, where);
  return value;
}
template <class T>
void store_cluster(SharedAddress a, T value, Where where = Where::current()) {
  static_assert(is_memory_type<T> && sizeof(T) >= 4);
  emu::current_block().store_cluster(a, sizeof(T), &value, where);
}
inline void grid_dependency_wait() { emu::current_lane->waited = true; }
inline void grid_dependency_launch() {}

}  // namespace QATTN_TARGET
}  // namespace qattn::isa
