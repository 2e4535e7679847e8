// The qattn program.
#include "program.hpp"
#include "qattn/qattn.hpp"

int main(int argc, char** argv) {
  namespace cli = qattn::cli;
  CLI::App program("qattn: attention with low-precision operands", "qattn");
  program.set_version_flag("--version", std::string(qattn::version()));
  program.require_subcommand(1);
  program.footer(
      "Exit status: 0; 2 bad usage or input; 3 not possible on this device; 4 results (printed all "
      "the same) hold NaN or Inf; 1 a defect.");
  cli::Action action;
  cli::add_info(program, action);
  cli::add_explain(program, action);
  cli::add_compare(program, action);
  cli::add_attention(program, action);
  cli::add_quantize(program, action);
  cli::add_kv(program, action);
  cli::add_bench(program, action);
  cli::add_demo(program, action);
  return cli::run_program(program, action, argc, argv);
}
