// Order between lanes, and what they tell each other, emulated. Meanings: isa.hpp.
#pragma once

#include "isa/emu/words/memory.hpp"

namespace qattn::isa {
inline namespace QATTN_TARGET {

inline void sync_threads(Where where = Where::current()) {
  emu::Block& block = emu::current_block();
  block.use(Word::sync_threads, where);
  block.barrier(0, block.threads(), emu::BarrierUse::sync, where);
}
inline void barrier_sync(int id, int threads, Where where = Where::current()) {
  emu::current_block().use(Word::barrier_sync, where);
  emu::current_block().barrier(id, threads, emu::BarrierUse::sync, where);
}
inline void barrier_sync_anywhere(int id, int threads, Where where = Where::current()) {
  emu::current_block().use(Word::barrier_sync_anywhere, where);
  emu::current_block().barrier(id, threads, emu::BarrierUse::sync_anywhere, where);
}
inline void barrier_arrive(int id, int threads, Where where = Where::current()) {
  emu::current_block().use(Word::barrier_arrive, where);
  emu::current_block().barrier(id, threads, emu::BarrierUse::arrive, where);
}
inline int opaque(int v) { return v; }
inline void schedule_fence() {}
inline void sync_warp(Where where = Where::current()) { emu::current_block().sync_warp(where); }

template <class T>
struct Shuffled {
  T value;
  int source;  ///< of no lane: keep one's own
  T result;
};
template <class T>
T shuffle_from(T value, int source, const Where& where) {
  static_assert(is_memory_type<T>);
  Shuffled<T> mine{value, source, value};
  emu::warp_collective(Word::shuffle, mine, where,
                       [](emu::Block& block, emu::Arguments<Shuffled<T>> lanes) {
                         const int count = block.warp_lanes();
                         for (int i = 0; i < count; ++i) {
                           const int from = lanes[i].source;
                           if (from >= 0 && from < count) lanes[i].result = lanes[from].value;
                         }
                       });
  return mine.result;
}
template <class T>
T shuffle_xor(T v, int mask, Where where = Where::current()) {
  return shuffle_from(v, lane() ^ mask, where);
}
template <class T>
T shuffle(T v, int source, Where where = Where::current()) {
  return shuffle_from(v, source & (warp_lanes() - 1), where);
}
template <class T>
T shuffle_up(T v, int delta, Where where = Where::current()) {
  return shuffle_from(v, lane() - delta, where);
}
template <class T>
T shuffle_down(T v, int delta, Where where = Where::current()) {
  return shuffle_from(v, lane() + delta, where);
}

/// A shuffle on GPUs, which is what makes it uniform.
inline int warp(Where where = Where::current()) {
  int mine = emu::current_lane->warp;
  emu::warp_collective(Word::warp, mine, where, [](emu::Block&, emu::Arguments<int>) {});
  return mine;
}

struct Vote {
  bool yes;
  std::uint64_t result;
};
inline std::uint64_t vote(bool p, const Where& where) {
  Vote mine{p, 0};
  emu::warp_collective(Word::vote, mine, where, [](emu::Block& block, emu::Arguments<Vote> lanes) {
    const int count = block.warp_lanes();
    std::uint64_t all = 0;
    for (int i = 0; i < count; ++i) all |= static_cast<std::uint64_t>(lanes[i].yes) << i;
    for (int i = 0; i < count; ++i) lanes[i].result = all;
  });
  return mine.result;
}
inline std::uint32_t ballot(bool p, Where where = Where::current()) {
  emu::current_block().require_lanes(32, Word::ballot, where);
  return static_cast<std::uint32_t>(vote(p, where));
}
inline std::uint64_t ballot64(bool p, Where where = Where::current()) {
  emu::current_block().require_lanes(64, Word::ballot64, where);
  return vote(p, where);
}
inline bool any(bool p, Where where = Where::current()) { return vote(p, where) != 0; }
inline bool all(bool p, Where where = Where::current()) { return vote(!p, where) == 0; }

}  // namespace QATTN_TARGET
}  // namespace qattn::isa
