// Warpgroups, clusters, grids, emulated. Meanings: isa.hpp.
#pragma once

#include "isa/emu/units/units.hpp"
#include "isa/emu/words/places.hpp"

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

inline void cluster_sync(Where where = Where::current()) {
  emu::Block& block = emu::current_block();
  if (block.options().cluster > 1) {
    throw emu::Error("cluster_sync: blocks of a cluster run one after another here, at " +
                     emu::describe(where));
  }
  block.use(Word::cluster_sync, where);
  block.barrier(emu::kClusterBarrier, block.threads(), emu::BarrierUse::sync, where);
}
inline void grid_dependency_wait() { emu::current_lane->waited = true; }
inline void grid_dependency_launch() {}

}  // namespace QATTN_TARGET
}  // namespace qattn::isa
