// Shared-memory accesses of lanes and copy_async.
#include <cstring>

#include "isa/emu/block/block.hpp"

namespace qattn::emu {

const std::uint8_t* Block::read_as(int thread, std::uint32_t address, std::uint32_t bytes,
                                   const char* what, const Where& where) {
  shared_.check_place(address, bytes, bytes, what, where);
  shared_.check_readable(address, bytes, what, where);
  if (options_.races) {
    races_.read(SharedMemory::offset(address), bytes, thread, Proxy::generic, where);
  }
  stats.shared_read += bytes;
  return shared_.at(address);
}

std::uint8_t* Block::write_as(int thread, std::uint32_t address, std::uint32_t bytes,
                              const char* what, const Where& where) {
  shared_.check_place(address, bytes, bytes, what, where);
  shared_.check_writable(address, bytes, what, where);
  if (options_.races) {
    races_.write(SharedMemory::offset(address), bytes, thread, Proxy::generic, where);
  }
  shared_.mark(address, bytes, ByteState::ready);
  shared_.mark_swizzle(address, bytes, 0);
  stats.shared_written += bytes;
  return shared_.at(address);
}

void Block::load(std::uint32_t address, std::uint32_t bytes, void* to, const Where& where) {
  use(Word::load_shared, where);
  std::memcpy(to, read_as(current_lane->thread, address, bytes, "load_shared", where), bytes);
}

void Block::store(std::uint32_t address, std::uint32_t bytes, const void* from,
                  const Where& where) {
  use(Word::store_shared, where);
  std::memcpy(write_as(current_lane->thread, address, bytes, "store_shared", where), from, bytes);
}

std::uint32_t* Block::atomic_shared(std::uint32_t address, const Where& where) {
  use(Word::atomic_shared, where);
  shared_.check_place(address, 4, 4, "atomic", where);
  shared_.check_readable(address, 4, "atomic", where);
  if (options_.races) {
    races_.atomic(SharedMemory::offset(address), 4, current_lane->thread, where);
  }
  stats.shared_read += 4;
  stats.shared_written += 4;
  return reinterpret_cast<std::uint32_t*>(shared_.at(address));
}

void Block::touch_global(const void* at, std::size_t bytes, Touch touch, bool waited,
                         const Where& where) {
  if (touch != Touch::write) stats.global_read += bytes;
  if (touch != Touch::read) stats.global_written += bytes;
  if (chain_ == Chain::none) return;
  if (chain_ == Chain::early && !waited && earlier_->conflicts(at, bytes, touch)) {
    throw Error(
        text("global memory %p: %s before grid_dependency_wait(), and an earlier kernel of "
             "the chain touches it, at %s",
             at, touch == Touch::read ? "read" : "written", describe(where).c_str()));
  }
  touched_.add(at, bytes, touch);
}

void Block::copy_async(int size, std::uint32_t to, const void* from, int bytes,
                       const Where& where) {
  use(Word::copy_async, where);
  const char* what = size == 16 ? "copy_async16" : size == 8 ? "copy_async8" : "copy_async4";
  if (bytes < 0 || bytes > size) {
    throw Error(text("%s: %d bytes, at %s", what, bytes, describe(where).c_str()));
  }
  if (reinterpret_cast<std::uintptr_t>(from) % static_cast<unsigned>(size) != 0) {
    throw Error(text("%s: misaligned source %p, at %s", what, from, describe(where).c_str()));
  }
  const auto width = static_cast<std::uint32_t>(size);
  write_as(current_lane->thread, to, width, what, where);
  touch_global(from, static_cast<std::size_t>(bytes), Touch::read, where);
  shared_.mark(to, width, ByteState::in_flight);
  const Copy copy{to, from, size, bytes, takes_effect_now(), where};
  if (copy.done) write_copy(copy);
  current_lane->copies.push_back(copy);
}

void Block::write_copy(const Copy& copy) {
  std::uint8_t* to = shared_.at(copy.to);
  if (copy.bytes) std::memcpy(to, copy.from, static_cast<std::size_t>(copy.bytes));
  std::memset(to + copy.bytes, 0, static_cast<std::size_t>(copy.size - copy.bytes));
}

void Block::land(const Copy& copy) {
  const auto width = static_cast<std::uint32_t>(copy.size);
  if (!copy.done) write_copy(copy);
  shared_.mark(copy.to, width, ByteState::ready);
  // The write happens here: a barrier between issue and wait orders nothing.
  if (options_.races) {
    races_.write(SharedMemory::offset(copy.to), width, current_lane->thread, Proxy::generic,
                 copy.where);
  }
}

void Block::copy_async_commit() {
  count(Word::copy_async_commit);
  Lane& me = *current_lane;
  int committed = 0;
  for (int n : me.copy_groups) committed += n;
  me.copy_groups.push_back(static_cast<int>(me.copies.size()) - committed);
}

void Block::copy_async_wait(int groups_in_flight) {
  count(Word::copy_async_wait);
  Lane& me = *current_lane;
  const int finished = static_cast<int>(me.copy_groups.size()) - groups_in_flight;
  if (finished <= 0) return;
  int copies = 0;
  for (int i = 0; i < finished; ++i) copies += me.copy_groups[static_cast<std::size_t>(i)];
  for (int i = 0; i < copies; ++i) land(me.copies[static_cast<std::size_t>(i)]);
  me.copies.erase(me.copies.begin(), me.copies.begin() + copies);
  me.copy_groups.erase(me.copy_groups.begin(), me.copy_groups.begin() + finished);
}

}  // namespace qattn::emu
