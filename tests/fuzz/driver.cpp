// Stands in for libFuzzer where the compiler has none: replays every file of the folders given,
// then mutates them at random until the time is over. Takes libFuzzer's options that the tests use.
//   fuzz_x [-max_total_time=SECONDS] [-seed=N] FOLDER_OR_FILE...
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace {

namespace fs = std::filesystem;
using Input = std::vector<std::uint8_t>;
using Random = std::mt19937_64;

constexpr std::size_t longest = 4096;

Input read(const fs::path& path) {
  std::ifstream stream(path, std::ios::binary);
  return Input(std::istreambuf_iterator<char>(stream), {});
}

std::size_t position(const Input& x, Random& random) { return random() % (x.size() + 1); }

void mutate(Input& x, const std::vector<Input>& corpus, Random& random) {
  const std::size_t at = position(x, random);
  switch (random() % 7) {
    case 0:
    case 1:
      if (at < x.size()) x[at] = static_cast<std::uint8_t>(random());
      break;
    case 2:
      if (at < x.size()) x[at] ^= static_cast<std::uint8_t>(1u << random() % 8);
      break;
    case 3:
      x.insert(x.begin() + static_cast<std::ptrdiff_t>(at), static_cast<std::uint8_t>(random()));
      break;
    case 4:
      if (at < x.size()) x.erase(x.begin() + static_cast<std::ptrdiff_t>(at));
      break;
    case 5:
      x.resize(at);
      break;
    default: {  // the tail of another input
      const Input& other = corpus[random() % corpus.size()];
      const std::size_t from = position(other, random);
      x.resize(at);
      x.insert(x.end(), other.begin() + static_cast<std::ptrdiff_t>(from), other.end());
    }
  }
  if (x.size() > longest) x.resize(longest);
}

/// Written before each run, so that a crash leaves its input behind.
void keep(const Input& x) {
  if (const char* path = std::getenv("QATTN_FUZZ_LAST")) {
    std::ofstream(path, std::ios::binary)
        .write(reinterpret_cast<const char*>(x.data()), static_cast<std::streamsize>(x.size()));
  }
}

}  // namespace

int main(int argc, char** argv) {
  long seconds = 0;
  std::uint64_t seed = 1;
  std::vector<Input> corpus;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument.starts_with("-max_total_time=")) {
      seconds = std::stol(argument.substr(std::strlen("-max_total_time=")));
    } else if (argument.starts_with("-seed=")) {
      seed = std::stoull(argument.substr(std::strlen("-seed=")));
    } else if (argument.starts_with("-")) {
      std::fprintf(stderr, "unknown option %s\n", argv[i]);
      return 2;
    } else if (fs::is_directory(argument)) {
      std::vector<fs::path> files;
      for (const auto& file : fs::directory_iterator(argument)) files.push_back(file.path());
      std::sort(files.begin(), files.end());
      for (const fs::path& file : files) corpus.push_back(read(file));
    } else {
      corpus.push_back(read(argument));
    }
  }
  if (corpus.empty()) {
    std::fprintf(stderr, "no seeds\n");
    return 2;
  }
  long runs = 0;
  const auto run = [&runs](const Input& x) {
    keep(x);
    LLVMFuzzerTestOneInput(x.data(), x.size());
    ++runs;
  };
  for (const Input& x : corpus) run(x);
  Random random(seed);
  using Clock = std::chrono::steady_clock;
  const auto end = Clock::now() + std::chrono::seconds(seconds);
  while (Clock::now() < end) {
    Input x = corpus[random() % corpus.size()];
    for (std::uint64_t n = 1 + random() % 8; n > 0; --n) mutate(x, corpus, random);
    run(x);
  }
  std::printf("%ld runs, %zu seeds\n", runs, corpus.size());
  return 0;
}
