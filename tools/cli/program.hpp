// A program with commands: parsing, the exit status, errors on standard error.
#pragma once

#include "commands.hpp"

namespace qattn::cli {

/// Parses the arguments and runs what they chose. Exit status: 0; 2 bad usage or input; 3 not
/// possible on this device; 4 results hold NaN or Inf (warn_of_nan()); 1 a defect.
int run_program(CLI::App& program, const Action& chosen, int argc, char** argv);

}  // namespace qattn::cli
