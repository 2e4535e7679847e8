// Files read in parts whose size is known beforehand, and files written whole or not at all.
#pragma once

#include <cstdint>
#include <fstream>
#include <span>
#include <string>
#include <vector>

#include "qattn/status.hpp"

namespace qattn::io {

/// "k.npy: rule" as an invalid_argument.
Status file_error(const std::string& path, const std::string& rule);

/// A regular file; its size bounds every allocation that its contents ask for.
class InputFile {
 public:
  static Result<InputFile> open(const std::string& path);

  const std::string& path() const { return path_; }
  std::uint64_t size() const { return size_; }
  /// Fails if the file ends before `into` is full.
  Status read(std::uint64_t offset, std::span<std::byte> into);

 private:
  std::string path_;
  std::uint64_t size_ = 0;
  std::ifstream stream_;
};

/// Output files of one command: written beside their targets, renamed together by commit(). A file
/// that is written anew keeps its mode.
/// Whatever was not committed is deleted by the destructor.
class OutputFiles {
 public:
  OutputFiles() = default;
  OutputFiles(const OutputFiles&) = delete;
  OutputFiles& operator=(const OutputFiles&) = delete;
  ~OutputFiles();

  /// Refuses a target that could not be written, before any work is done for it.
  static Status check(const std::string& path);

  Status add(const std::string& path, std::span<const std::span<const std::byte>> parts);
  Status add_text(const std::string& path, const std::string& text);
  Status commit();

 private:
  struct Staged {
    std::string temporary, target;
  };
  std::vector<Staged> staged_;
};

}  // namespace qattn::io
