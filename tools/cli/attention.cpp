// qattn attention: one call, from files to files.
#include <fmt/format.h>

#include <chrono>
#include <cmath>

#include "call.hpp"
#include "commands.hpp"
#include "console.hpp"
#include "io/half.hpp"
#include "io/npy.hpp"
#include "measure.hpp"

namespace qattn::cli {

namespace {

struct AttentionFlags {
  OperandFlags operands;
  CallFlags call;
  std::string recipe = "auto", output, lse, output_format;
  bool json = false;

  void add_to(CLI::App& app) {
    operands.add_to(app);
    app.add_option("--recipe", recipe, "recipe (default auto)");
    app.add_option("-o,--output", output, "output .npy, in the layout of q")->required();
    app.add_option("--lse", lse, "log-sum-exp .npy, (B, Hq, Sq) f32");
    app.add_option("--output-format", output_format, "f32, f16 or bf16 (default: that of q)");
    call.add_to(app);
    app.add_flag("--json", json, "print JSON");
  }
};

Status check_output(const char* option, const std::string& path) {
  if (!path.ends_with(".npy")) {
    return usage_error(fmt::format("{} {}: the name must end with .npy", option, path));
  }
  return io::OutputFiles::check(path);
}

struct Computed {
  io::Array out, lse;
  std::int64_t rows = 0, nan_rows = 0;  ///< of out; those with NaN or Inf
  std::string kernel;
  double ms = 0;
};

Result<Computed> compute(const Case& c, Format output_format, bool with_lse) {
  const Geometry& g = c.geometry;
  AttentionTensors tensors = c.operands.tensors();
  tensors.out = shapes_only(g, c.options.layout, output_format).out;
  tensors.out.format = output_format;
  if (const Result<Plan> first = plan(tensors, c.options); !first.ok()) return first.status();

  Computed computed;
  computed.out = io::zeros_like(tensors.out);
  tensors.out = computed.out.view();
  if (with_lse) {
    computed.lse = io::zeros(Format::f32, {g.batch, g.heads_q, g.queries});
    tensors.lse = computed.lse.view();
  }
  const Result<Plan> planned = plan(tensors, c.options);
  if (!planned.ok()) return planned.status();
  computed.kernel = planned->kernel();
  io::Bytes workspace(planned->workspace_bytes());
  const auto begin = std::chrono::steady_clock::now();
  const Status status = run(*planned, tensors, c.options, workspace.data(), workspace.size());
  if (!status.ok()) return status;
  computed.ms =
      std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
  computed.rows = g.batch * g.heads_q * g.queries;
  for (std::int64_t row = 0; row < computed.rows; ++row) {
    bool finite = true;
    for (std::int64_t channel = 0; channel < g.dim_v; ++channel) {
      finite = finite && std::isfinite(io::get(computed.out, row * g.dim_v + channel));
    }
    computed.nan_rows += finite ? 0 : 1;
  }
  return computed;
}

Status write(const AttentionFlags& flags, const Computed& computed) {
  io::OutputFiles files;
  if (Status s = io::write_npy(files, flags.output, computed.out); !s.ok()) return s;
  if (!flags.lse.empty()) {
    if (Status s = io::write_npy(files, flags.lse, computed.lse); !s.ok()) return s;
  }
  return files.commit();
}

void report(const AttentionFlags& flags, const Computed& computed) {
  const auto file_json = [](const std::string& path, const io::Array& array) {
    return Json{{"file", path}, {"shape", array.shape}, {"format", info(array.format).name}};
  };
  if (flags.json) {
    Json json{{"recipe", flags.recipe},
              {"kernel", computed.kernel},
              {"ms", computed.ms},
              {"nan_rows", computed.nan_rows},
              {"out", file_json(flags.output, computed.out)}};
    if (!flags.lse.empty()) json["lse"] = file_json(flags.lse, computed.lse);
    print_json(json);
    return;
  }
  print(fmt::format("{}: {} {}, recipe {} ({}), {:.2f} ms\n", flags.output,
                    io::shape_text(computed.out.shape), info(computed.out.format).name,
                    flags.recipe, computed.kernel, computed.ms));
}

Status run_attention(const AttentionFlags& flags) {
  const Result<AttentionOptions> options = flags.call.options();
  if (!options.ok()) return options.status();
  const Result<Recipe> recipe = recipe_named(flags.recipe);
  if (!recipe.ok()) return recipe.status();
  if (Status s = check_output("--output", flags.output); !s.ok()) return s;
  if (!flags.lse.empty()) {
    if (Status s = check_output("--lse", flags.lse); !s.ok()) return s;
  }
  Result<Operands> operands = Operands::load(flags.operands);
  if (!operands.ok()) return operands.status();
  Result<Case> call = make_case(std::move(*operands), *options);
  if (!call.ok()) return call.status();
  call->options.recipe = *recipe;
  Format output_format = call->operands.q.format;
  if (!flags.output_format.empty()) {
    const Result<Format> format = parse_input_format("--output-format", flags.output_format);
    if (!format.ok()) return format.status();
    output_format = *format;
  }
  const Result<Computed> computed = compute(*call, output_format, !flags.lse.empty());
  if (!computed.ok()) return computed.status();
  if (Status s = write(flags, *computed); !s.ok()) return s;
  report(flags, *computed);
  if (computed->nan_rows > 0) {
    warn_of_nan(fmt::format("{}: {} of {} rows hold NaN or Inf", flags.output, computed->nan_rows,
                            computed->rows));
  }
  return {};
}

}  // namespace

void add_attention(CLI::App& program, Action& chosen) {
  add_command<AttentionFlags>(program, chosen, "attention", "computes attention on your tensors",
                              run_attention);
}

}  // namespace qattn::cli
