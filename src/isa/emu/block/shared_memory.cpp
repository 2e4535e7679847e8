#include "isa/emu/block/shared_memory.hpp"

#include <cstring>

namespace qattn::emu {
namespace {

/// A number that no kernel computes by accident and that is not zero.
constexpr std::uint8_t kPoison = 0xA5;

/// `bits`: of each state, those that must be as in `wanted`.
template <class T>
bool like(const std::uint8_t* states, std::uint64_t bits, std::uint64_t wanted) {
  T some;
  std::memcpy(&some, states, sizeof some);
  return (some & static_cast<T>(bits)) == static_cast<T>(wanted);
}
bool all_like(const std::uint8_t* states, std::uint32_t bytes, std::uint64_t bits,
              std::uint64_t wanted) {
  for (; bytes >= 8; bytes -= 8, states += 8) {
    if (!like<std::uint64_t>(states, bits, wanted)) return false;
  }
  if (bytes & 4) {
    if (!like<std::uint32_t>(states, bits, wanted)) return false;
    states += 4;
  }
  for (bytes &= 3; bytes > 0; --bytes, ++states) {
    if (!like<std::uint8_t>(states, bits, wanted)) return false;
  }
  return true;
}
constexpr std::uint64_t kOnes = 0x0101010101010101u;
bool all_ready(const std::uint8_t* states, std::uint32_t bytes) {
  return all_like(states, bytes, ~std::uint64_t{0}, kOnes);
}
bool all_below_2(const std::uint8_t* states, std::uint32_t bytes) {
  return all_like(states, bytes, 0xfe * kOnes, 0);
}

}  // namespace

void SharedMemory::prepare(std::uint32_t bytes) {
  bytes_.assign(bytes, kPoison);
  states_.assign(bytes, 0);
  swizzles_.assign(bytes / 16 + 1, 0);
}

void SharedMemory::fail_place(std::uint32_t address, std::uint32_t bytes, std::uint32_t alignment,
                              const char* what, const Where& where) const {
  if (address % alignment != 0) {
    throw Error(text("%s: misaligned shared address 0x%x, needs a multiple of %u, at %s", what,
                     address, alignment, describe(where).c_str()));
  }
  throw Error(
      text("%s: %u bytes at shared memory %+lld are out of bounds (the block has %zu bytes)"
           ", at %s",
           what, bytes, static_cast<long long>(address) - static_cast<long long>(kBase),
           bytes_.size(), describe(where).c_str()));
}

void SharedMemory::check_readable(std::uint32_t address, std::uint32_t bytes, const char* what,
                                  const Where& where) const {
  const std::uint8_t* states = &states_[address - kBase];
  if (all_ready(states, bytes)) [[likely]]
    return;
  std::uint32_t i = 0;
  while (states[i] == 1) ++i;
  const char* problem = "uninitialised bytes";
  if (ByteState{states[i]} == ByteState::in_flight) problem = "bytes with a copy in flight";
  if (ByteState{states[i]} == ByteState::mbarrier) problem = "an mbarrier";
  throw Error(text("%s: read of %s, shared memory +0x%x, at %s", what, problem, address - kBase + i,
                   describe(where).c_str()));
}

void SharedMemory::check_writable(std::uint32_t address, std::uint32_t bytes, const char* what,
                                  const Where& where) const {
  const std::uint8_t* states = &states_[address - kBase];
  if (all_below_2(states, bytes)) [[likely]]
    return;
  std::uint32_t i = 0;
  while (states[i] <= 1) ++i;
  const char* problem =
      ByteState{states[i]} == ByteState::mbarrier ? "an mbarrier" : "bytes with a copy in flight";
  throw Error(text("%s: write over %s, shared memory +0x%x, at %s", what, problem,
                   address - kBase + i, describe(where).c_str()));
}

void SharedMemory::mark(std::uint32_t address, std::uint32_t bytes, ByteState state) {
  std::memset(&states_[address - kBase], static_cast<int>(state), bytes);
}

}  // namespace qattn::emu
