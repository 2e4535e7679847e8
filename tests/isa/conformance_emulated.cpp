// Writes what the emulator makes of every operation: conformance_emulated expected.bin
// Each runs under three schedules, which must agree to the bit.
#include "conformance_host.hpp"

namespace qattn::isa_test {
namespace {

template <class Op>
bool run(Op op, Results& results) {
  const std::string name = name_of(op);
  // Rows of TMA begin at multiples of 16.
  struct alignas(128) Line {
    Word32 words[32];
  };
  const WordList in = inputs_of(op);
  std::vector<Line> in_lines((in.size() + 31) / 32), out_lines((output_words(op) + 31) / 32);
  std::copy(in.begin(), in.end(), in_lines.data()->words);
  Word32* out = out_lines.data()->words;
  Data data{in_lines.data()->words, out, {}};
  if (Op::mapped != Mapped::nothing) {
    const std::string error = make_tensor_map(shape_of(op, data.in, out), data.map);
    if (!error.empty()) return std::fprintf(stderr, "%s: %s\n", name.c_str(), error.c_str()), false;
  }
  emu::options().architecture = Op::arch;
  for (const auto schedule : {emu::Schedule::early, emu::Schedule::late, emu::Schedule::random}) {
    std::fill(out_lines.begin(), out_lines.end(), Line{});
    emu::options().schedule = schedule;
    for (data.step = 0; data.step < Op::launches; ++data.step) {
      const std::string error = launch<ConformanceKernel<Op>>(
          data, {Op::cases, 1, 1}, nullptr, data.step > 0 ? Start::early : Start::after_all);
      if (error.empty()) continue;
      return std::fprintf(stderr, "%s: %s\n", name.c_str(), error.c_str()), false;
    }
    WordList words(out, out + output_words(op));
    if (const auto it = results.find(name); it != results.end() && it->second != words) {
      return std::fprintf(stderr, "%s: schedules disagree\n", name.c_str()), false;
    }
    results[name] = std::move(words);
  }
  return true;
}

}  // namespace
}  // namespace qattn::isa_test

int main(int argc, char** argv) {
  using namespace qattn::isa_test;
  if (argc != 2) return std::fprintf(stderr, "usage: %s expected.bin\n", argv[0]), 2;
  Results results;
  int operations = 0;
  bool good = true;
  for_each_operation([&](auto op) {
    ++operations;
    good = run(op, results) && good;
  });
  if (static_cast<int>(results.size()) != operations) {
    std::fprintf(stderr, "two operations have one name\n");
    good = false;
  }
  // What is read back is what was written.
  good = good && write_results(argv[1], results) && read_results(argv[1]) == results;
  std::printf("%zu operations\n", results.size());
  return good ? 0 : 1;
}
