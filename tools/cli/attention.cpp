// qattn attention: one call, from files to files.
#include "attend.hpp"
#include "commands.hpp"

namespace qattn::cli {

namespace {

struct AttentionFlags {
  OperandFlags operands;
  CallFlags call;
  ResultFlags results;
  ProjectionFlags projection;

  void add_to(CLI::App& app) {
    operands.add_to(app);
    results.add_to(app);
    projection.add_to(app);
    call.add_to(app);
  }
};

Status run_attention(const AttentionFlags& flags) {
  const Result<AttentionOptions> options = flags.call.options();
  if (!options.ok()) return options.status();
  const Result<Computed> computed =
      attend(flags.operands, *options, flags.results, Device(), flags.projection);
  if (!computed.ok()) return computed.status();
  if (flags.results.json) {
    print_json(json_of(flags.results, *computed));
  } else {
    print(text_of(flags.results, *computed));
  }
  return {};
}

}  // namespace

void add_attention(CLI::App& program, Action& chosen) {
  add_command<AttentionFlags>(program, chosen, "attention", "computes attention on your tensors",
                              run_attention);
}

}  // namespace qattn::cli
