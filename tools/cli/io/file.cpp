#include "io/file.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>

namespace qattn::io {

namespace fs = std::filesystem;

namespace {

std::string errno_text() { return std::generic_category().message(errno); }

/// Where a rename must land so that a symbolic link keeps pointing at the new contents.
fs::path resolved(const std::string& path) {
  std::error_code error;
  if (!fs::is_symlink(path, error)) return path;
  const fs::path target = fs::canonical(path, error);
  return error ? fs::path(path) : target;
}

Status write_all(int descriptor, const std::string& path, std::span<const std::byte> part) {
  while (!part.empty()) {
    const ssize_t written = ::write(descriptor, part.data(), part.size());
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return file_error(path, "cannot be written: " + errno_text());
    part = part.subspan(static_cast<std::size_t>(written));
  }
  return {};
}

}  // namespace

Status file_error(const std::string& path, const std::string& rule) {
  return {Code::invalid_argument, path + ": " + rule};
}

Result<InputFile> InputFile::open(const std::string& path) {
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  if (!fs::exists(status)) return file_error(path, "no such file");
  // Devices and pipes have no size to check a header against.
  if (!fs::is_regular_file(status)) return file_error(path, "not a regular file");
  InputFile file;
  file.path_ = path;
  file.size_ = fs::file_size(path, error);
  if (error) return file_error(path, "size unknown: " + error.message());
  file.stream_.open(path, std::ios::binary);
  if (!file.stream_) return file_error(path, "cannot be opened for reading");
  return file;
}

Status InputFile::read(std::uint64_t offset, std::span<std::byte> into) {
  if (offset > size_ || into.size() > size_ - offset) {
    return file_error(path_, "truncated: " + std::to_string(into.size()) + " bytes needed at " +
                                 std::to_string(offset) + ", the file has " +
                                 std::to_string(size_));
  }
  stream_.clear();
  stream_.seekg(static_cast<std::streamoff>(offset));
  stream_.read(reinterpret_cast<char*>(into.data()), static_cast<std::streamsize>(into.size()));
  if (!stream_ || static_cast<std::size_t>(stream_.gcount()) != into.size()) {
    return file_error(path_, "could not be read to its end");
  }
  return {};
}

OutputFiles::~OutputFiles() {
  for (const Staged& file : staged_) ::unlink(file.temporary.c_str());
}

Status OutputFiles::check(const std::string& path) {
  std::error_code error;
  const fs::path target = resolved(path);
  const fs::file_status status = fs::status(target, error);
  if (fs::exists(status) && !fs::is_regular_file(status)) {
    return file_error(path, "exists and is not a regular file");
  }
  if (fs::exists(status) && ::access(target.c_str(), W_OK) != 0) {
    return file_error(path, "cannot be written: " + errno_text());
  }
  const fs::path folder = target.has_parent_path() ? target.parent_path() : fs::path(".");
  if (!fs::is_directory(folder, error)) {
    return file_error(path, "cannot be written: no such directory");
  }
  if (::access(folder.c_str(), W_OK) != 0) {
    return file_error(path, "cannot be written: " + errno_text());
  }
  return {};
}

Status OutputFiles::add(const std::string& path,
                        std::span<const std::span<const std::byte>> parts) {
  if (Status status = check(path); !status.ok()) return status;
  const std::string target = resolved(path).string();
  for (const Staged& other : staged_) {
    if (other.target == target) return file_error(path, "named for two outputs");
  }
  const std::string temporary = target + ".partial-" + std::to_string(::getpid());
  const int descriptor = ::open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL, 0666);
  if (descriptor < 0) return file_error(path, "cannot be written: " + errno_text());
  staged_.push_back({temporary, target});
  Status status;
  if (struct stat old{};
      ::stat(target.c_str(), &old) == 0 && ::fchmod(descriptor, old.st_mode & 07777) != 0) {
    status = file_error(path, "cannot keep its mode: " + errno_text());
  }
  for (const auto& part : parts) {
    if (status.ok()) status = write_all(descriptor, path, part);
  }
  if (::close(descriptor) != 0 && status.ok()) {
    status = file_error(path, "cannot be written: " + errno_text());
  }
  return status;
}

Status OutputFiles::add_text(const std::string& path, const std::string& text) {
  const std::span<const std::byte> part = std::as_bytes(std::span(text));
  return add(path, std::span(&part, 1));
}

Status OutputFiles::commit() {
  while (!staged_.empty()) {
    const Staged& file = staged_.back();
    if (::rename(file.temporary.c_str(), file.target.c_str()) != 0) {
      return file_error(file.target, "cannot be written: " + errno_text());
    }
    staged_.pop_back();
  }
  return {};
}

}  // namespace qattn::io
