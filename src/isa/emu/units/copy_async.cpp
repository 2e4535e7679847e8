#include "isa/emu/units/copy_async.hpp"

#include <cstring>

namespace qattn::emu {

void CopyAsync::reset() {
  lanes_.resize(static_cast<std::size_t>(block_.threads()));
  for (Groups<Copy>& lane : lanes_) lane.clear();
}

void CopyAsync::copy(int size, std::uint32_t to, const void* from, int bytes, const Where& where) {
  block_.use(Word::copy_async, where);
  const char* what = size == 16 ? "copy_async16" : size == 8 ? "copy_async8" : "copy_async4";
  if (bytes < 0 || bytes > size) {
    throw Error(text("%s: %d bytes, at %s", what, bytes, describe(where).c_str()));
  }
  if (reinterpret_cast<std::uintptr_t>(from) % static_cast<unsigned>(size) != 0) {
    throw Error(text("%s: misaligned source %p, at %s", what, from, describe(where).c_str()));
  }
  const auto width = static_cast<std::uint32_t>(size);
  block_.write_as(current_lane->thread, to, width, what, where);
  block_.touch_global(from, static_cast<std::size_t>(bytes), Touch::read, where);
  block_.shared().mark(to, width, ByteState::in_flight);
  const Copy copy{to, from, size, bytes, at_once(), where};
  if (copy.done) write(copy);
  mine().begin(copy);
}

void CopyAsync::write(const Copy& copy) {
  std::uint8_t* to = block_.shared().at(copy.to);
  if (copy.bytes) std::memcpy(to, copy.from, static_cast<std::size_t>(copy.bytes));
  std::memset(to + copy.bytes, 0, static_cast<std::size_t>(copy.size - copy.bytes));
}

void CopyAsync::land(const Copy& copy) {
  const auto width = static_cast<std::uint32_t>(copy.size);
  if (!copy.done) write(copy);
  block_.shared().mark(copy.to, width, ByteState::ready);
  // The write happens here: a barrier between issue and wait orders nothing.
  if (block_.options().races) {
    block_.races().write(SharedMemory::offset(copy.to), width, current_lane->thread, Proxy::generic,
                         copy.where);
  }
}

void CopyAsync::commit() {
  block_.count(Word::copy_async_commit);
  mine().commit();
}

void CopyAsync::wait(int groups_in_flight) {
  block_.count(Word::copy_async_wait);
  mine().wait(groups_in_flight, [&](const Copy& copy) { land(copy); });
}

}  // namespace qattn::emu
