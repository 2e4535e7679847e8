// Writes the seeds of the fuzz targets: folders validator, npy and safetensors below the one given.
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>

namespace {

namespace fs = std::filesystem;

void write(const fs::path& folder, const std::string& name, const std::string& bytes) {
  fs::create_directories(folder);
  std::ofstream(folder / name, std::ios::binary) << bytes;
}

std::string little_endian(std::uint64_t value, int bytes) {
  std::string text;
  for (int i = 0; i < bytes; ++i) text += static_cast<char>(value >> (8 * i) & 0xff);
  return text;
}

/// Bytes are decisions (choices.hpp): nothing but zeros is a plain call, most others are rich ones.
void validator(const fs::path& folder) {
  std::mt19937_64 random(6);
  for (int mode = 0; mode < 4; ++mode) {
    const std::string first(1, static_cast<char>(mode));
    write(folder, "plain" + std::to_string(mode), first);
    for (int n = 0; n < 12; ++n) {
      std::string bytes = first + static_cast<char>(n);  // the recipe, or the format
      for (int i = 0; i < 120; ++i) {
        const auto draw = random();
        bytes += static_cast<char>(draw % 4 < static_cast<unsigned>(n % 4) ? draw >> 8 : 0);
      }
      write(folder, "rich" + std::to_string(mode) + "_" + std::to_string(n), bytes);
    }
  }
}

void npy(const fs::path& folder) {
  const auto file = [](const std::string& descr, const std::string& shape, std::size_t bytes,
                       int version = 1) {
    std::string header =
        "{'descr': '" + descr + "', 'fortran_order': False, 'shape': " + shape + ", }\n";
    return std::string("\x93NUMPY") + static_cast<char>(version) + '\0' +
           little_endian(header.size(), version == 1 ? 2 : 4) + header + std::string(bytes, '\0');
  };
  write(folder, "f4", file("<f4", "(2, 3)", 24));
  write(folder, "f2", file("<f2", "(1, 2, 1, 8)", 32));
  write(folder, "u2", file("<u2", "(4,)", 8));
  write(folder, "scalar", file("<i8", "()", 8, 2));
  write(folder, "bool", file("|b1", "(3,)", 3, 3));
  write(folder, "empty", file("|i1", "(0, 5)", 0));
  write(folder, "huge", file("<f4", "(9223372036854775807, 9223372036854775807)", 4));
  write(folder, "magic", "\x93NUMPY");
}

void safetensors(const fs::path& folder) {
  const auto file = [](const std::string& header, std::size_t bytes) {
    return little_endian(header.size(), 8) + header + std::string(bytes, '\0');
  };
  write(folder, "none", file("{}", 0));
  write(folder, "one", file(R"({"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}})", 24));
  write(folder, "two",
        file(R"({"__metadata__":{"format":"pt"},"k":{"dtype":"BF16","shape":[1,2],)"
             R"("data_offsets":[0,4]},"m":{"dtype":"BOOL","shape":[3],"data_offsets":[4,7]}})",
             7));
  write(folder, "other", file(R"({"a":{"dtype":"F64","shape":[],"data_offsets":[0,8]}})", 8));
  write(folder, "deep", file(R"({"a":[[[[[[1]]]]]]})", 0));
  write(folder, "long", little_endian(~std::uint64_t{0}, 8));
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  const fs::path root = argv[1];
  validator(root / "validator");
  npy(root / "npy");
  safetensors(root / "safetensors");
  return 0;
}
