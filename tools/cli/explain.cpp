// qattn explain: which kernel a call would get, and why not the others.
#include <fmt/format.h>

#include <optional>

#include "backends/described/devices.hpp"
#include "call.hpp"
#include "commands.hpp"
#include "console.hpp"
#include "qattn/qattn.hpp"

namespace qattn::cli {

namespace {

struct ExplainFlags {
  CallFlags call;
  std::string recipe = "auto", shape, input_format = "f32", device;
  std::optional<int> multiprocessors;
  std::int64_t projection = 0;
  bool json = false;

  void add_to(CLI::App& app) {
    app.add_option("--recipe", recipe, "recipe (default auto)");
    app.add_option("--shape", shape, "B,Hq,Hkv,Sq,Sk,D")->required();
    app.add_option("--input-format", input_format, "of Q, K and V: f32 (default), f16 or bf16");
    call.add_to(app);
    app.add_option("--projection", projection, "E: out is projected to so many features")
        ->check(CLI::PositiveNumber);
    app.add_option("--device", device, "a GPU that need not be here: sm_90, sm_120, gfx950, ...");
    app.add_option("--multiprocessors", multiprocessors, "of that GPU (default: a product's)");
    app.add_flag("--json", json, "print JSON");
  }
};

/// The GPU that was asked for; none: this machine's CPU.
Result<std::optional<described::Gpu>> described_gpu(const ExplainFlags& flags) {
  if (flags.device.empty()) {
    if (!flags.multiprocessors) return std::optional<described::Gpu>();
    return usage_error("--multiprocessors: is of the GPU that --device names");
  }
  Result<described::Gpu> gpu = described::gpu_named(flags.device);
  if (!gpu.ok()) return usage_error("--" + gpu.status().message());
  if (flags.call.backend != "auto") {
    return usage_error(fmt::format("--backend {}: --device {} names the device", flags.call.backend,
                                   flags.device));
  }
  if (flags.multiprocessors) {
    gpu->multiprocessors = *flags.multiprocessors;
    if (gpu->multiprocessors < 1 || gpu->multiprocessors > 4096) {
      return usage_error(
          fmt::format("--multiprocessors {}: is not in [1, 4096]", gpu->multiprocessors));
    }
  }
  return std::optional(*gpu);
}

/// What is taken for given of a GPU that is not here.
std::string text_of(const described::Gpu& gpu) {
  std::string text = fmt::format("device: {} ({}), {} multiprocessors, described\n", gpu.name,
                                 gpu.products, gpu.multiprocessors);
  if (gpu.type == DeviceType::cuda) {
    text += fmt::format("library: libqattn_cuda with code for {}\n", described::released_code());
  }
  return text;
}

Json json_of(const described::Gpu& gpu) {
  return {{"name", gpu.name},
          {"products", gpu.products},
          {"multiprocessors", gpu.multiprocessors},
          {"code", gpu.type == DeviceType::cuda ? described::released_code() : ""}};
}

Status run_explain(const ExplainFlags& flags) {
  const Result<std::optional<described::Gpu>> gpu = described_gpu(flags);
  if (!gpu.ok()) return gpu.status();
  Result<AttentionOptions> options = flags.call.options();
  if (!options.ok()) return options.status();
  const Result<Recipe> recipe = recipe_named(flags.recipe);
  if (!recipe.ok()) return recipe.status();
  options->recipe = *recipe;
  const Result<Geometry> geometry = Geometry::parse(flags.shape);
  if (!geometry.ok()) return geometry.status();
  const Result<Format> format = parse_input_format("--input-format", flags.input_format);
  if (!format.ok()) return format.status();

  AttentionTensors tensors = shapes_only(*geometry, options->layout, *format);
  if (flags.projection > 0) {
    tensors.projection = TensorView::dense(static_cast<void*>(nullptr), Format::f32,
                                           {flags.projection, geometry->heads_q * geometry->dim_v});
    tensors.out = TensorView::dense(static_cast<void*>(nullptr), Format::f32,
                                    {geometry->batch, geometry->queries, flags.projection});
  }
  std::optional<described::OnGpu> there;
  std::string given;
  if (*gpu) {
    there.emplace(**gpu);
    given = text_of(**gpu);
    for (TensorView* view :
         {&tensors.q, &tensors.k, &tensors.v, &tensors.out, &tensors.projection}) {
      view->device = {(*gpu)->type, 0};
    }
  }
  const Result<Plan> planned = plan(tensors, *options);
  if (!planned.ok() && planned.status().code() != Code::unsupported) return planned.status();
  const std::string explanation = explain(tensors, *options);
  if (!flags.json) {
    print(given + explanation);
    if (!explanation.ends_with('\n')) print("\n");
  } else {
    Json json{{"recipe", flags.recipe},
              {"shape", geometry->text()},
              {"causal", options->causal},
              {"possible", planned.ok()},
              {"explanation", explanation}};
    if (*gpu) json["device"] = json_of(**gpu);
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
