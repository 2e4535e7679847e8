// A file in memory: the readers take paths, and a fuzzer should not wear out a disk.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "fuzz/check.hpp"

namespace qattn::fuzz {

class FileOf {
 public:
  FileOf(const std::uint8_t* data, std::size_t size) : descriptor_(::memfd_create("fuzz", 0)) {
    require(descriptor_ >= 0, "memfd_create works");
    require(::write(descriptor_, data, size) == static_cast<ssize_t>(size), "memory is enough");
  }
  FileOf(const FileOf&) = delete;
  FileOf& operator=(const FileOf&) = delete;
  ~FileOf() { ::close(descriptor_); }

  std::string path() const { return "/proc/self/fd/" + std::to_string(descriptor_); }

 private:
  int descriptor_;
};

}  // namespace qattn::fuzz
