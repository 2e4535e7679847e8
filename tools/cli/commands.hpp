// One function a command: it adds its subcommand and options to the program.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>

#include "qattn/status.hpp"

namespace qattn::cli {

/// What the command line asked for; main runs it once parsing is over.
using Action = std::function<Status()>;

void add_info(CLI::App& program, Action& chosen);
void add_explain(CLI::App& program, Action& chosen);
void add_compare(CLI::App& program, Action& chosen);
void add_attention(CLI::App& program, Action& chosen);
void add_quantize(CLI::App& program, Action& chosen);
void add_kv(CLI::App& program, Action& chosen);
void add_bench(CLI::App& program, Action& chosen);
void add_demo(CLI::App& program, Action& chosen);

/// Adds a subcommand whose options fill a Flags and which runs `run(flags)`.
template <class Flags>
void add_command(CLI::App& program, Action& chosen, const char* name, const char* description,
                 Status (*run)(const Flags&)) {
  const auto flags = std::make_shared<Flags>();
  CLI::App* command = program.add_subcommand(name, description);
  flags->add_to(*command);
  command->callback([&chosen, flags, run] { chosen = [flags, run] { return run(*flags); }; });
}

}  // namespace qattn::cli
