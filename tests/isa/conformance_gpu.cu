// Runs every operation on the GPU and compares with the emulator's results:
//   conformance_gpu expected.bin report.json
#include <cuda_runtime.h>

#include <ctime>

#include "conformance_host.hpp"

namespace qattn::isa_test {
namespace {

struct Row {
  std::string name;
  Verdict verdict;
  std::string error;
};

/// A device copy of words, 256-byte aligned as cudaMalloc gives it.
class DeviceWords {
 public:
  explicit DeviceWords(const WordList& words) : bytes_(4 * words.size()) {
    if (cudaMalloc(&data_, bytes_) != cudaSuccess) data_ = nullptr;
    if (data_) cudaMemcpy(data_, words.data(), bytes_, cudaMemcpyHostToDevice);
  }
  ~DeviceWords() { cudaFree(data_); }
  DeviceWords(const DeviceWords&) = delete;
  DeviceWords& operator=(const DeviceWords&) = delete;
  Word32* get() const { return data_; }
  WordList read() const {
    WordList words(bytes_ / 4);
    cudaMemcpy(words.data(), data_, bytes_, cudaMemcpyDeviceToHost);
    return words;
  }

 private:
  std::size_t bytes_;
  Word32* data_ = nullptr;
};

/// A stream of its own, ordered with the copies: no launch there starts before those have ended.
cudaStream_t stream() {
  static const cudaStream_t the_stream = [] {
    cudaStream_t s = nullptr;
    return cudaStreamCreate(&s) == cudaSuccess ? s : nullptr;
  }();
  return the_stream;
}

template <class Op>
Row run(Op op, const Results& expected) {
  Row row{name_of(op), {}, {}};
  const auto want = expected.find(row.name);
  if (want == expected.end()) return row.error = "not in the expected results", row;
  const DeviceWords in(inputs_of(op)), out(WordList(output_words(op), 0));
  if (!in.get() || !out.get()) return row.error = "no device memory", row;
  Data data{in.get(), out.get(), {}};
  if (Op::mapped != Mapped::nothing) {
    row.error = make_tensor_map(shape_of(op, in.get(), out.get()), data.map);
    if (!row.error.empty()) return row;
  }
  for (; data.step < Op::launches && row.error.empty(); ++data.step) {
    row.error = launch<ConformanceKernel<Op>>(data, {Op::cases, 1, 1}, stream(),
                                              data.step > 0 ? Start::early : Start::after_all);
  }
  const cudaError_t e = cudaDeviceSynchronize();
  if (row.error.empty() && e != cudaSuccess) row.error = cudaGetErrorString(e);
  if (!row.error.empty()) return row;
  row.verdict = judge(Op::compare, Op::operand, out.read(), want->second,
                      static_cast<std::size_t>(Op::threads) * Op::outputs);
  return row;
}

bool write_report(const char* path, const std::vector<Row>& rows, const cudaDeviceProp& gpu) {
  std::FILE* file = std::fopen(path, "w");
  if (!file) return false;
  int driver = 0, runtime = 0;
  cudaDriverGetVersion(&driver);
  cudaRuntimeGetVersion(&runtime);
  char date[32];
  const std::time_t now = std::time(nullptr);
  std::strftime(date, sizeof date, "%Y-%m-%dT%H:%M:%SZ", std::gmtime(&now));
  std::fprintf(file,
               "{\n  \"date\": \"%s\",\n  \"gpu\": \"%s\",\n  \"compute_capability\": \"%d.%d\",\n"
               "  \"driver\": %d,\n  \"runtime\": %d,\n  \"compiler\": \"nvcc %d.%d.%d\",\n"
               "  \"operations\": [\n",
               date, gpu.name, gpu.major, gpu.minor, driver, runtime, __CUDACC_VER_MAJOR__,
               __CUDACC_VER_MINOR__, __CUDACC_VER_BUILD__);
  for (const Row& row : rows) {
    std::fprintf(file,
                 "    {\"name\": \"%s\", \"words\": %zu, \"mismatches\": %zu, \"max_ulp\": %.17g, "
                 "\"max_relative\": %.17g, \"error\": \"%s\"}%s\n",
                 row.name.c_str(), row.verdict.words, row.verdict.mismatches, row.verdict.max_ulp,
                 row.verdict.max_relative, row.error.c_str(), &row == &rows.back() ? "" : ",");
  }
  std::fprintf(file, "  ]\n}\n");
  return std::fclose(file) == 0;
}

}  // namespace
}  // namespace qattn::isa_test

int main(int argc, char** argv) {
  using namespace qattn::isa_test;
  if (argc != 3) return std::fprintf(stderr, "usage: %s expected.bin report.json\n", argv[0]), 2;
  const Results expected = read_results(argv[1]);
  cudaDeviceProp gpu{};
  if (cudaGetDeviceProperties(&gpu, 0) != cudaSuccess) return std::fprintf(stderr, "no GPU\n"), 2;
  const int arch = 10 * gpu.major + gpu.minor;
  std::vector<Row> rows;
  bool good = true;
  std::printf("%-52s %9s %10s %8s %12s\n", "operation", "words", "mismatches", "max ulp",
              "max relative");
  for_each_operation([&](auto op) {
    using Op = decltype(op);
    if (Op::arch > arch || (Op::hopper_only && arch != 90)) return;
    const Row row = run(op, expected);
    std::printf("%-52s %9zu %10zu %8.0f %12.3g %s\n", row.name.c_str(), row.verdict.words,
                row.verdict.mismatches, row.verdict.max_ulp, row.verdict.max_relative,
                row.error.c_str());
    good = good && row.error.empty() && row.verdict.mismatches == 0;
    rows.push_back(row);
  });
  good = write_report(argv[2], rows, gpu) && good;
  return good ? 0 : 1;
}
