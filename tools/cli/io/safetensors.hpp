// .safetensors files (https://github.com/huggingface/safetensors, "Format"): an 8-byte length, a
// JSON header, then the tensors without gaps. dtypes F32, F16, BF16, I8, U8, I32, I64, BOOL.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "io/array.hpp"
#include "io/file.hpp"

namespace qattn::io {

/// A file whose header was checked as a whole: every tensor lies inside the file, has the size that
/// its shape asks for, and overlaps no other.
class SafetensorsFile {
 public:
  /// Errors: invalid_argument "path: rule".
  static Result<SafetensorsFile> open(const std::string& path);

  /// In the order of their names.
  std::vector<std::string> names() const;
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  /// Errors: invalid_argument if there is no such tensor (lists what there is) or its dtype is not
  /// one of the above.
  Result<Array> tensor(const std::string& name, std::string* converted = nullptr);

 private:
  struct Entry {
    std::string dtype;
    std::vector<std::int64_t> shape;
    std::uint64_t begin = 0, end = 0;
  };
  struct HeaderReader;

  /// The names for a message, cut where a hostile file has too many.
  std::string listing() const;

  explicit SafetensorsFile(InputFile file) : file_(std::move(file)) {}

  InputFile file_;
  std::uint64_t data_begin_ = 0;
  std::map<std::string, Entry> entries_;
  std::map<std::string, std::string> metadata_;
};

/// A file of one tensor, whose metadata readers of tensors alone pass over. Formats without a dtype
/// of their own (codes) become U8. Errors: invalid_argument.
Status write_safetensors(OutputFiles& files, const std::string& path, const std::string& name,
                         const Array& array, const std::map<std::string, std::string>& metadata);

}  // namespace qattn::io
