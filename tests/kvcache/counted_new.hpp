// operator new of this program, which counts the bytes that the library holds.
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

}  // namespace qattn::test
