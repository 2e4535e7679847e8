// The shared memory of one block: bytes, and what state each is in.
#pragma once

#include <cstdint>
#include <vector>

#include "isa/emu/error.hpp"

namespace qattn::emu {

/// What a read or write of one byte would meet.
enum class ByteState : std::uint8_t {
  uninitialised = 0,
  ready = 1,
  in_flight = 2,  ///< an asynchronous copy writes it, at a time the kernel has not waited for
  mbarrier = 4
};

class SharedMemory {
 public:
  /// Addresses begin here, not at 0, so that a forgotten shared_base() is out of bounds.
  static constexpr std::uint32_t kBase = 1024;

  void prepare(std::uint32_t bytes);
  std::uint32_t bytes() const { return static_cast<std::uint32_t>(bytes_.size()); }

  static std::uint32_t offset(std::uint32_t address) { return address - kBase; }
  std::uint8_t* at(std::uint32_t address) { return &bytes_[address - kBase]; }

  /// Alignment and bounds; `what` is the word's name.
  void check_place(std::uint32_t address, std::uint32_t bytes, std::uint32_t alignment,
                   const char* what, const Where& where) const {
    if (address % alignment == 0 && address >= kBase &&
        std::uint64_t{address} + bytes <= kBase + bytes_.size()) [[likely]] {
      return;
    }
    fail_place(address, bytes, alignment, what, where);
  }
  void check_readable(std::uint32_t address, std::uint32_t bytes, const char* what,
                      const Where& where) const;
  void check_writable(std::uint32_t address, std::uint32_t bytes, const char* what,
                      const Where& where) const;
  void mark(std::uint32_t address, std::uint32_t bytes, ByteState state);
  ByteState state(std::uint32_t address) const { return ByteState{states_[address - kBase]}; }

  /// The swizzle (isa::Swizzle) under which TMA wrote each 16 bytes, 0 where under none. Whatever
  /// else writes there says 0 too: lanes may keep any layout, and one that is not told cannot be
  /// checked.
  void mark_swizzle(std::uint32_t address, std::uint32_t bytes, int swizzle) {
    const std::uint32_t first = offset(address) / 16, last = (offset(address) + bytes - 1) / 16;
    for (std::uint32_t i = first; i <= last; ++i) swizzles_[i] = static_cast<std::uint8_t>(swizzle);
  }
  int swizzle(std::uint32_t address) const { return swizzles_[offset(address) / 16]; }

 private:
  [[noreturn]] void fail_place(std::uint32_t address, std::uint32_t bytes, std::uint32_t alignment,
                               const char* what, const Where& where) const;

  std::vector<std::uint8_t> bytes_, states_, swizzles_;
};

}  // namespace qattn::emu
