// The qattn program. Exit status: 0; 2 bad usage or input; 3 not possible on this device; 1 a
// defect.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>
#include <new>

#include "commands.hpp"
#include "console.hpp"
#include "qattn/qattn.hpp"

namespace {

using namespace qattn;

enum Exit { exit_ok = 0, exit_defect = 1, exit_usage = 2, exit_impossible = 3 };

Exit exit_status(Code code) {
  switch (code) {
    case Code::ok:
      return exit_ok;
    case Code::invalid_argument:
      return exit_usage;
    case Code::unsupported:
    case Code::out_of_memory:
      return exit_impossible;
    case Code::internal:
      break;
  }
  return exit_defect;
}

int fail(Exit status, const std::string& message) {
  fmt::print(stderr, "qattn: {}\n", cli::printable(message));
  return status;
}

int run(const cli::Action& action) {
  const Status status = action();
  if (!status.ok()) return fail(exit_status(status.code()), status.message());
  if (std::fflush(stdout) != 0 || std::ferror(stdout)) {
    return fail(exit_usage, "standard output cannot be written");
  }
  return exit_ok;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App program("qattn: attention with low-precision operands", "qattn");
  program.set_version_flag("--version", std::string(version()));
  program.require_subcommand(1);
  cli::Action action;
  cli::add_info(program, action);
  cli::add_explain(program, action);
  cli::add_compare(program, action);
  cli::add_attention(program, action);
  cli::add_quantize(program, action);
  cli::add_kv(program, action);
  cli::add_bench(program, action);
  cli::add_demo(program, action);
#ifdef QATTN_HAS_MODEL
  cli::add_model(program, action);
#endif
  try {
    program.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return program.exit(error) == 0 ? exit_ok : exit_usage;
  }
  // The library does not throw; files, JSON and containers may.
  try {
    return run(action);
  } catch (const std::bad_alloc&) {
    return fail(exit_impossible, "not enough memory");
  } catch (const std::exception& error) {
    return fail(exit_defect, error.what());
  }
}
