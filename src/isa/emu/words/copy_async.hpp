// Asynchronous copies of sm_80, emulated. Meanings: isa.hpp.
#pragma once

#include "isa/emu/units/units.hpp"
#include "isa/emu/words/places.hpp"

namespace qattn::isa {
inline namespace QATTN_TARGET {

inline void copy_async16(SharedAddress to, const void* from, int bytes,
                         Where where = Where::current()) {
  emu::current_block().units().copy_async.copy(16, to, from, bytes, where);
}
inline void copy_async8(SharedAddress to, const void* from, int bytes,
                        Where where = Where::current()) {
  emu::current_block().units().copy_async.copy(8, to, from, bytes, where);
}
inline void copy_async4(SharedAddress to, const void* from, int bytes,
                        Where where = Where::current()) {
  emu::current_block().units().copy_async.copy(4, to, from, bytes, where);
}
inline void copy_async_commit(Where where = Where::current()) {
  emu::units_for(Word::copy_async_commit, where).copy_async.commit();
}
template <int N>
void copy_async_wait(Where where = Where::current()) {
  emu::units_for(Word::copy_async_wait, where).copy_async.wait(N);
}

}  // namespace QATTN_TARGET
}  // namespace qattn::isa
