// The header of a cache's file: options and counts in one line of metadata, from which all the rest
// follows.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kvcache/data.hpp"

namespace qattn::kv {

/// How a file goes on behind the length of its header.
inline constexpr const char* file_opening = "{\"__metadata__\":{\"qattn_kv_cache\":\"";

/// Options and counts: the metadata line.
struct FileCounts {
  KvCacheOptions options;
  std::int64_t next_id = 0, sequences = 0, entries = 0, means = 0;
  std::vector<std::int64_t> pages;  ///< [1 + tiers]
  bool drifted = false;             ///< some layer has more than one set

  std::string line() const;
  /// Errors: invalid_argument, without the path.
  static Result<FileCounts> parse(const std::string& line);
};

/// One tensor of the file.
struct FilePart {
  std::string name;
  const char* dtype;
  std::vector<std::int64_t> shape;
  std::int64_t bytes;
  std::int64_t place = 0;  ///< of its first byte behind the header
};

/// The tensors in the order of the file. Nothing overflows: load() has checked the total.
std::vector<FilePart> file_parts(const FileCounts& counts, const detail::KvCacheData& data);

/// The JSON header, padded with spaces to a multiple of 8.
std::string file_header(const FileCounts& counts, const std::vector<FilePart>& parts);
/// Does `header` say the same of the parts as file_header() would, in whatever order they lie? Then
/// it sets their places. So are files that safetensors wrote again.
bool find_places(const std::string& header, const FileCounts& counts, std::vector<FilePart>& parts);

}  // namespace qattn::kv
