// Accesses of lanes to shared and global memory.
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

}  // namespace qattn::emu
