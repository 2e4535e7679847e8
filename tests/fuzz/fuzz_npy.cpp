// The .npy reader: any bytes are an array whose shape accounts for every byte, or a refusal that
// begins with the path.
#include "fuzz/file_of.hpp"
#include "io/npy.hpp"

using namespace qattn;

namespace {

void target(const std::string& path, std::size_t size, const io::ReadOptions& options) {
  const Result<io::Array> array = io::read_npy(path, options);
  if (!array.ok()) {
    fuzz::require(array.status().code() == Code::invalid_argument &&
                      array.status().message().starts_with(path + ": "),
                  "a refusal names the file", array.status().message());
    return;
  }
  fuzz::require(array->bytes.size() <= size, "no more memory than the file's size");
  const auto bytes = io::dense_bytes(array->format, array->shape);
  fuzz::require(bytes && *bytes == static_cast<std::int64_t>(array->bytes.size()),
                "the shape accounts for every byte");
  fuzz::require(array->view().rank <= max_rank, "the rank is one that views have");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const fuzz::FileOf file(data, size);
  target(file.path(), size, {});
  target(file.path(), size, {.bf16 = true});
  return 0;
}
