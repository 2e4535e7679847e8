// The .safetensors reader: any bytes are a file whose tensors tile its data, or a refusal that
// begins with the path.
#include "fuzz/file_of.hpp"
#include "io/safetensors.hpp"

using namespace qattn;

namespace {

void refused(const Status& s, const std::string& path) {
  fuzz::require(s.code() == Code::invalid_argument && s.message().starts_with(path),
                "a refusal names the file", s.message());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const fuzz::FileOf memory(data, size);
  Result<io::SafetensorsFile> file = io::SafetensorsFile::open(memory.path());
  if (!file.ok()) {
    refused(file.status(), memory.path());
    return 0;
  }
  std::size_t total = 0;
  for (const std::string& name : file->names()) {
    const Result<io::Array> array = file->tensor(name);
    if (!array.ok()) {
      refused(array.status(), memory.path());
      continue;
    }
    total += array->bytes.size();
    const auto bytes = io::dense_bytes(array->format, array->shape);
    fuzz::require(bytes && *bytes == static_cast<std::int64_t>(array->bytes.size()),
                  "the shape accounts for every byte");
  }
  fuzz::require(total <= size, "tensors do not overlap");
  refused(file->tensor("no such tensor\n").status(), memory.path());
  return 0;
}
