// mbarriers and the fences between proxies, emulated. Meanings: isa.hpp.
#pragma once

#include "isa/emu/units/async_engine.hpp"
#include "isa/emu/words/places.hpp"

namespace qattn::isa {
inline namespace QATTN_TARGET {

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

}  // namespace QATTN_TARGET
}  // namespace qattn::isa
