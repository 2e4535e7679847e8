#include "program.hpp"

#include <fmt/format.h>

#include <cstdio>
#include <exception>
#include <new>
#include <string>
#include <string_view>

#include "console.hpp"

namespace qattn::cli {

namespace {

enum Exit { exit_ok = 0, exit_defect = 1, exit_usage = 2, exit_impossible = 3, exit_nan = 4 };

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

int fail(const CLI::App& program, Exit status, const std::string& message) {
  fmt::print(stderr, "{}: {}\n", program.get_name(), printable(message));
  return status;
}

}  // namespace

/// An option that was given without a value: CLI11 takes "" for a number that is not there, and for
/// a text like any other.
std::string empty_option(const CLI::App& app) {
  for (const CLI::Option* option : app.get_options()) {
    for (const std::string& value : option->results()) {
      if (value.empty()) return option->get_name();
    }
  }
  for (const CLI::App* command : app.get_subcommands()) {
    if (std::string name = empty_option(*command); !name.empty()) return name;
  }
  return {};
}

/// A message of the library with the name that the program has for what it is about.
std::string in_program(std::string text) {
  constexpr std::string_view word = "softmax_scale";
  for (std::size_t at = 0; (at = text.find(word, at)) != std::string::npos;) {
    text.replace(at, word.size(), "--scale");
  }
  return text;
}

int run_program(CLI::App& program, const Action& chosen, int argc, char** argv) {
  try {
    program.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return program.exit(error) == 0 ? exit_ok : exit_usage;
  }
  if (const std::string name = empty_option(program); !name.empty()) {
    return fail(program, exit_usage, name + ": has an empty value");
  }
  // The library does not throw; files, JSON and containers may.
  try {
    const Status status = chosen();
    if (!status.ok()) {
      return fail(program, exit_status(status.code()), in_program(status.message()));
    }
    if (std::fflush(stdout) != 0 || std::ferror(stdout)) {
      return fail(program, exit_usage, "standard output cannot be written");
    }
    return nan_was_found() ? exit_nan : exit_ok;
  } catch (const std::bad_alloc&) {
    return fail(program, exit_impossible, "not enough memory");
  } catch (const std::exception& error) {
    return fail(program, exit_defect, error.what());
  }
}

}  // namespace qattn::cli
