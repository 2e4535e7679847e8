#include "io/load.hpp"

#include <string_view>

#include "io/safetensors.hpp"

namespace qattn::io {

Result<Array> load(const std::string& spec, const ReadOptions& options) {
  constexpr std::string_view extension = ".safetensors";
  const std::size_t split = spec.rfind(std::string(extension) + ":");
  if (split != std::string::npos) {
    const std::size_t path_length = split + extension.size();
    Result<SafetensorsFile> file = SafetensorsFile::open(spec.substr(0, path_length));
    if (!file.ok()) return file.status();
    if (options.metadata) *options.metadata = file->metadata();
    return file->tensor(spec.substr(path_length + 1), options.converted);
  }
  if (spec.ends_with(extension)) {
    return file_error(spec, "name the tensor: " + spec + ":tensor_name");
  }
  if (!spec.ends_with(".npy")) {
    return file_error(spec, "neither .npy nor .safetensors:tensor_name");
  }
  return read_npy(spec, options);
}

}  // namespace qattn::io
