// qattn explain: which kernel a call would get, and why not the others.
#include <fmt/format.h>

#include "call.hpp"
#include "commands.hpp"
#include "console.hpp"
#include "qattn/qattn.hpp"

namespace qattn::cli {

namespace {

struct ExplainFlags {
  CallFlags call;
  std::string recipe = "auto", shape, input_format = "f32";
  bool json = false;

  void add_to(CLI::App& app) {
    app.add_option("--recipe", recipe, "recipe (default auto)");
    app.add_option("--shape", shape, "B,Hq,Hkv,Sq,Sk,D")->required();
    app.add_option("--input-format", input_format, "of Q, K and V: f32 (default), f16 or bf16");
    call.add_to(app);
    app.add_flag("--json", json, "print JSON");
  }
};

Status run_explain(const ExplainFlags& flags) {
  Result<AttentionOptions> options = flags.call.options();
  if (!options.ok()) return options.status();
  const Result<Recipe> recipe = recipe_named(flags.recipe);
  if (!recipe.ok()) return recipe.status();
  options->recipe = *recipe;
  const Result<Geometry> geometry = Geometry::parse(flags.shape);
  if (!geometry.ok()) return geometry.status();
  const Result<Format> format = parse_input_format("--input-format", flags.input_format);
  if (!format.ok()) return format.status();

  const AttentionTensors tensors = shapes_only(*geometry, options->layout, *format);
  const Result<Plan> planned = plan(tensors, *options);
  if (!planned.ok() && planned.status().code() != Code::unsupported) return planned.status();
  const std::string explanation = explain(tensors, *options);
  if (!flags.json) {
    print(explanation);
    if (!explanation.ends_with('\n')) print("\n");
  } else {
    Json json{{"recipe", flags.recipe},
              {"shape", geometry->text()},
              {"causal", options->causal},
              {"possible", planned.ok()},
              {"explanation", explanation}};
    if (planned.ok()) {
      json["kernel"] = planned->kernel();
      json["plan"] = planned->to_string();
      json["workspace_bytes"] = planned->workspace_bytes();
    }
    print_json(json);
  }
  return planned.ok() ? Status() : planned.status();
}

}  // namespace

void add_explain(CLI::App& program, Action& chosen) {
  add_command<ExplainFlags>(program, chosen, "explain", "which kernel a call gets, and why",
                            run_explain);
}

}  // namespace qattn::cli
