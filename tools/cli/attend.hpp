// One attention call from files to files: what `qattn attention` and emulated_attention share.
#pragma once

#include <string>

#include "call.hpp"
#include "console.hpp"

namespace qattn::cli {

/// The recipe, and where the results go.
struct ResultFlags {
  std::string recipe = "auto", output, lse, output_format;
  bool json = false;

  void add_to(CLI::App& app);
};

/// The output projection, if there is one.
struct ProjectionFlags {
  std::string weight, bias;

  void add_to(CLI::App& app);
};

struct Computed {
  io::Array out, lse;
  std::int64_t rows = 0, nan_rows = 0;  ///< of out; those with NaN or Inf
  std::string kernel, plan;
  double ms = 0;
};

/// Reads the operands, computes on `device`, whose memory the host's is, and writes the results;
/// where something is refused no file is written. Says on standard error which rows are bad.
Result<Computed> attend(const OperandFlags& operands, const AttentionOptions& options,
                        const ResultFlags& results, Device device,
                        const ProjectionFlags& projection = {});

/// What was computed: the beginning of a report in JSON, and a line.
Json json_of(const ResultFlags& results, const Computed& computed);
std::string text_of(const ResultFlags& results, const Computed& computed);

}  // namespace qattn::cli
