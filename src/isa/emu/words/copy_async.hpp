// Asynchronous copies of sm_80, emulated. Meanings: isa.hpp.
#pragma once

#include "isa/emu/words/places.hpp"

namespace qattn::isa {
inline namespace QATTN_TARGET {

inline void copy_async16(SharedAddress to, const void* from, int bytes,
                         Where where = Where::current()) {
  emu::current_block().copy_async(16, to, from, bytes, where);
}
inline void copy_async8(SharedAddress to, const void* from, int bytes,
                        Where where = Where::current()) {
  emu::current_block().copy_async(8, to, from, bytes, where);
}
inline void copy_async4(SharedAddress to, const void* from, int bytes,
                        Where where = Where::current()) {
  emu::current_block().copy_async(4, to, from, bytes, where);
}
inline void copy_async_commit(Where where = Where::current()) {
  emu::current_block().require(Word::copy_async_commit, where);
  emu::current_block().copy_async_commit();
}
template <int N>
void copy_async_wait(Where where = Where::current()) {
  emu::current_block().require(Word::copy_async_wait, where);
  emu::current_block().copy_async_wait(N);
}

}  // namespace QATTN_TARGET
}  // namespace qattn::isa
