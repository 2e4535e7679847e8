#include "attend.hpp"

#include <fmt/format.h>

#include <chrono>
#include <cmath>
#include <cstring>

#include "io/half.hpp"
#include "io/npy.hpp"

namespace qattn::cli {

namespace {

Status check_output(const char* option, const std::string& path) {
  if (!path.ends_with(".npy")) {
    return usage_error(fmt::format("{} {}: the name must end with .npy", option, path));
  }
  return io::OutputFiles::check(path);
}

AttentionTensors on(Device device, AttentionTensors tensors) {
  for (TensorView* view : {&tensors.q, &tensors.k, &tensors.v, &tensors.out, &tensors.lse}) {
    if (view->present()) view->device = device;
  }
  return tensors;
}

/// Weight and bias; the weight is empty where there is none.
struct Projection {
  io::Array weight, bias;
  bool given = false, biased = false;

  static Result<Projection> load(const ProjectionFlags& flags, bool bf16) {
    Projection made;
    made.given = !flags.weight.empty();
    made.biased = !flags.bias.empty();
    const struct {
      const char* name;
      const std::string& spec;
      io::Array& into;
    } list[] = {{"projection", flags.weight, made.weight},
                {"projection_bias", flags.bias, made.bias}};
    for (const auto& item : list) {
      if (item.spec.empty()) continue;
      Result<io::Array> array = load_tensor(item.name, item.spec, bf16);
      if (!array.ok()) return array.status();
      item.into = std::move(*array);
    }
    return made;
  }
};

/// out's view without memory, and weight and bias.
void add_outputs(const Case& c, const Projection& projection, Format format,
                 AttentionTensors& tensors) {
  const Geometry& g = c.geometry;
  if (projection.biased) tensors.projection_bias = projection.bias.view();
  if (projection.given) {
    tensors.projection = projection.weight.view();
    const std::int64_t features = tensors.projection.rank > 0 ? tensors.projection.shape[0] : 0;
    tensors.out =
        TensorView::dense(static_cast<void*>(nullptr), format, {g.batch, g.queries, features});
  } else {
    tensors.out = shapes_only(g, c.options.layout, format).out;
    tensors.out.format = format;
  }
}

Result<Computed> compute(const Case& c, const Projection& projection, Format output_format,
                         bool with_lse, Device device) {
  const Geometry& g = c.geometry;
  AttentionTensors tensors = c.operands.tensors();
  add_outputs(c, projection, output_format, tensors);
  const Result<Plan> first = plan(on(device, tensors), c.options);
  if (!first.ok()) return first.status();

  Computed computed;
  computed.out = io::zeros_like(tensors.out);
  tensors.out = computed.out.view();
  if (with_lse) {
    computed.lse = io::zeros(Format::f32, {g.batch, g.heads_q, g.queries});
    tensors.lse = computed.lse.view();
  }
  tensors = on(device, tensors);
  const Result<Plan> planned = plan(tensors, c.options);
  if (!planned.ok()) return planned.status();
  computed.kernel = planned->kernel();
  computed.plan = planned->to_string();
  io::Bytes workspace(planned->workspace_bytes());
  // Garbage, as an allocator gives it; pages are there when the clock starts.
  if (!workspace.empty()) std::memset(workspace.data(), 0xFF, workspace.size());
  const auto begin = std::chrono::steady_clock::now();
  const Status status = run(*planned, tensors, c.options, workspace.data(), workspace.size());
  if (!status.ok()) return status;
  computed.ms =
      std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
  computed.rows = g.batch * g.queries * (projection.given ? 1 : g.heads_q);
  const std::int64_t width = projection.given ? computed.out.shape[2] : g.dim_v;
  for (std::int64_t row = 0; row < computed.rows; ++row) {
    bool finite = true;
    for (std::int64_t channel = 0; channel < width; ++channel) {
      finite = finite && std::isfinite(io::get(computed.out, row * width + channel));
    }
    computed.nan_rows += finite ? 0 : 1;
  }
  return computed;
}

Status write(const ResultFlags& flags, const Computed& computed) {
  io::OutputFiles files;
  if (Status s = io::write_npy(files, flags.output, computed.out); !s.ok()) return s;
  if (!flags.lse.empty()) {
    if (Status s = io::write_npy(files, flags.lse, computed.lse); !s.ok()) return s;
  }
  return files.commit();
}

}  // namespace

void ResultFlags::add_to(CLI::App& app) {
  app.add_option("--recipe", recipe, "recipe (default auto)");
  app.add_option("-o,--output", output, "output .npy, in the layout of q")->required();
  app.add_option("--lse", lse, "log-sum-exp .npy, (B, Hq, Sq) f32");
  app.add_option("--output-format", output_format, "f32, f16 or bf16 (default: that of q)");
  app.add_flag("--json", json, "print JSON");
}

void ProjectionFlags::add_to(CLI::App& app) {
  app.add_option("--projection", weight, "(E, Hq*Dv) weight: the output is (B, Sq, E)");
  app.add_option("--projection-bias", bias, "(E), added to it");
}

Result<Computed> attend(const OperandFlags& operands, const AttentionOptions& options,
                        const ResultFlags& results, Device device,
                        const ProjectionFlags& projected) {
  const Result<Recipe> recipe = recipe_named(results.recipe);
  if (!recipe.ok()) return recipe.status();
  if (Status s = check_output("--output", results.output); !s.ok()) return s;
  if (!results.lse.empty()) {
    if (Status s = check_output("--lse", results.lse); !s.ok()) return s;
  }
  Result<Operands> loaded = Operands::load(operands);
  if (!loaded.ok()) return loaded.status();
  Result<Case> call = make_case(std::move(*loaded), options);
  if (!call.ok()) return call.status();
  call->options.recipe = *recipe;
  Format output_format = call->operands.q.format;
  if (!results.output_format.empty()) {
    const Result<Format> format = parse_input_format("--output-format", results.output_format);
    if (!format.ok()) return format.status();
    output_format = *format;
  }
  const Result<Projection> projection = Projection::load(projected, operands.bf16);
  if (!projection.ok()) return projection.status();
  Result<Computed> computed =
      compute(*call, *projection, output_format, !results.lse.empty(), device);
  if (!computed.ok()) return computed;
  if (Status s = write(results, *computed); !s.ok()) return s;
  if (computed->nan_rows > 0) {
    warn_of_nan(fmt::format("{}: {} of {} rows hold NaN or Inf", results.output, computed->nan_rows,
                            computed->rows));
  }
  return computed;
}

Json json_of(const ResultFlags& flags, const Computed& computed) {
  const auto file_json = [](const std::string& path, const io::Array& array) {
    return Json{{"file", path}, {"shape", array.shape}, {"format", info(array.format).name}};
  };
  Json json{{"recipe", flags.recipe},
            {"kernel", computed.kernel},
            {"ms", computed.ms},
            {"nan_rows", computed.nan_rows},
            {"out", file_json(flags.output, computed.out)}};
  if (!flags.lse.empty()) json["lse"] = file_json(flags.lse, computed.lse);
  return json;
}

std::string text_of(const ResultFlags& flags, const Computed& computed) {
  return fmt::format("{}: {} {}, recipe {} ({}), {:.2f} ms\n", flags.output,
                     io::shape_text(computed.out.shape), info(computed.out.format).name,
                     flags.recipe, computed.kernel, computed.ms);
}

}  // namespace qattn::cli
