// mbarriers and the fences between proxies, emulated. Meanings: isa.hpp.
#pragma once

#include "isa/emu/units/units.hpp"
#include "isa/emu/words/places.hpp"

namespace qattn::isa {
inline namespace QATTN_TARGET {

inline emu::Mbarriers& mbarriers(Word word, const Where& where) {
  return emu::units_for(word, where).mbarriers;
}

inline void mbarrier_init(SharedAddress a, int arrivals, Where where = Where::current()) {
  mbarriers(Word::mbarrier_init, where).init(a, arrivals, where);
}
inline void fence_mbarrier_init(Where where = Where::current()) {
  mbarriers(Word::fence_mbarrier_init, where).fence_init();
}
inline void mbarrier_arrive(SharedAddress a, Where where = Where::current()) {
  mbarriers(Word::mbarrier_arrive, where).arrive(a, where);
}
inline void mbarrier_expect(SharedAddress a, std::uint32_t bytes, Where where = Where::current()) {
  mbarriers(Word::mbarrier_expect, where).expect(a, bytes, where);
}
inline void mbarrier_arrive_expect(SharedAddress a, std::uint32_t bytes,
                                   Where where = Where::current()) {
  mbarriers(Word::mbarrier_expect, where).expect(a, bytes, where);
  mbarriers(Word::mbarrier_arrive, where).arrive(a, where);
}
inline void mbarrier_wait(SharedAddress a, std::uint32_t parity, Where where = Where::current()) {
  mbarriers(Word::mbarrier_wait, where).wait(a, parity, where);
}
inline bool mbarrier_test(SharedAddress a, std::uint32_t parity, Where where = Where::current()) {
  return mbarriers(Word::mbarrier_test, where).test(a, parity, where);
}
inline void fence_async_proxy(Where where = Where::current()) {
  emu::Block& block = emu::current_block();
  block.use(Word::fence_async_proxy, where);
  block.units().mbarriers.fence_init();
  if (block.options().races) block.races().fence_async(emu::current_lane->thread);
}
/// Every access of the emulator to global memory is one of a single proxy.
inline void fence_async_global(Where where = Where::current()) {
  emu::current_block().use(Word::fence_async_global, where);
}

}  // namespace QATTN_TARGET
}  // namespace qattn::isa
