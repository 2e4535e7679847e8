// Chains of programmatic dependent launches (isa/launch.hpp): the emulator runs their kernels one
// after the other and remembers what each touched, so that a kernel that does not wait for what it
// needs is caught although it finds it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <unordered_map>

namespace qattn::emu {

/// Where a kernel stands: not of the kind that may overlap with others, the first of a chain, or
/// started while the ones before it may still run; `beside`: it may also read what they write.
enum class Chain : std::uint8_t { none, first, early, beside };
inline bool follows(Chain c) { return c == Chain::early || c == Chain::beside; }

/// How a word touches global memory. Atomics do not disturb each other.
enum class Touch : std::uint8_t { read, write, atomic };

/// Bytes of global memory and how they were touched.
class Footprint {
 public:
  Footprint() = default;
  Footprint(const Footprint&) = delete;  // last_ points into pages_
  Footprint& operator=(const Footprint&) = delete;
  void add(const void* at, std::size_t bytes, Touch touch);
  void add(const Footprint& other);
  void clear() {
    pages_.clear();
    last_ = nullptr;
  }
  /// Does the order of this access and those matter?
  bool conflicts(const void* at, std::size_t bytes, Touch touch) const;

 private:
  static constexpr std::size_t page_bytes = 4096;
  struct Page {
    std::array<std::array<std::uint64_t, page_bytes / 64>, 3> touched{};  ///< by Touch
  };
  std::unordered_map<std::uintptr_t, Page> pages_;
  std::uintptr_t last_number_ = 0;
  Page* last_ = nullptr;  ///< what add() met last
};

}  // namespace qattn::emu
