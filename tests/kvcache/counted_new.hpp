// operator new of this program, which counts the bytes that the library holds and fails when asked.
#pragma once

#include <cstdint>

namespace qattn::test {

/// Bytes allocated while a Counted object of the thread lived and not freed since.
std::int64_t counted_bytes();

class Counted {
 public:
  Counted();
  ~Counted();
  Counted(const Counted&) = delete;
  Counted& operator=(const Counted&) = delete;

 private:
  bool before_;
};

/// While it lives, the thread's operator new gives `allocations` times, then never.
class MemoryLimit {
 public:
  explicit MemoryLimit(std::int64_t allocations);
  ~MemoryLimit();
  MemoryLimit(const MemoryLimit&) = delete;
  MemoryLimit& operator=(const MemoryLimit&) = delete;
};

}  // namespace qattn::test
