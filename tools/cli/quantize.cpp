// qattn quantize: codes and scales of one tensor, and what they lose.
#include <fmt/format.h>

#include <cmath>

#include "call.hpp"
#include "commands.hpp"
#include "console.hpp"
#include "io/half.hpp"
#include "io/npy.hpp"
#include "io/safetensors.hpp"
#include "scale_file.hpp"

namespace qattn::cli {

namespace {

struct QuantizeFlags {
  std::string input, format = "s8", granularity = "automatic", role = "k", layout = "bhsd";
  std::string output, scale, global, mean, static_scale, scales_for;
  int block = 0, warp = 0, threads = 0;
  bool smooth = false, rotate = false, bf16 = false, json = false;

  void add_to(CLI::App& app) {
    app.add_option("x", input, "x.npy or file.safetensors:tensor_name, 4 dimensions")->required();
    app.add_option("--format", format, "format of the codes (default s8)");
    app.add_option("--granularity", granularity, "which elements share a scale");
    app.add_option("--block", block, "tokens per block")->check(CLI::PositiveNumber);
    app.add_option("--warp", warp, "rows per warp (per_warp, per_thread)")
        ->check(CLI::PositiveNumber);
    app.add_option("--role", role, "q, k (default) or v")->check(CLI::IsMember({"q", "k", "v"}));
    app.add_option("--layout", layout, "bhsd (default) or bshd")
        ->check(CLI::IsMember({"bhsd", "bshd"}));
    app.add_option("-o,--output", output, "codes .npy")->required();
    app.add_option("--scale", scale,
                   "scales .npy, or .safetensors, which keeps what they were made for")
        ->required();
    app.add_option("--global", global, "second-level scale .npy (nvfp4)");
    app.add_flag("--smooth", smooth, "subtract the mean first; needs --mean");
    app.add_option("--mean", mean, "mean .npy");
    app.add_flag("--rotate", rotate, "Hadamard rotation (q and k)");
    app.add_option("--static-scale", static_scale,
                   "use these scales, positive and finite, instead of the data's: .npy, or "
                   "file.safetensors:scale, which are refused if made for something else");
    app.add_option("--scales-for", scales_for,
                   "recipe that a .npy file's static scales were made for: others are refused");
    app.add_flag("--bf16", bf16, "a uint16 .npy file holds bf16");
    app.add_option("--threads", threads, "CPU threads (default: all)");
    app.add_flag("--json", json, "print JSON");
  }
};

Result<QuantizeOptions> options_of(const QuantizeFlags& flags) {
  QuantizeOptions options;
  const auto format = format_named(flags.format);
  if (!format) return usage_error("--format " + flags.format + ": no such format (qattn info)");
  options.format = *format;
  const auto granularity = granularity_named(flags.granularity);
  if (!granularity) {
    return usage_error("--granularity " + flags.granularity + ": no such granularity");
  }
  options.scaling = {*granularity, flags.block, flags.warp};
  options.role = flags.role == "q" ? Role::q : flags.role == "k" ? Role::k : Role::v;
  options.layout = parse_layout(flags.layout);
  options.smooth = flags.smooth;
  options.rotate = flags.rotate;
  options.threads = flags.threads;
  if (flags.threads < 0) return usage_error(fmt::format("--threads {}: at least 0", flags.threads));
  if (flags.smooth == flags.mean.empty()) {
    return usage_error("--smooth and --mean: each needs the other");
  }
  return options;
}

Status check_outputs(const QuantizeFlags& flags, bool has_global) {
  if (has_global == flags.global.empty()) {
    return usage_error(fmt::format(
        "--global: format {} {}", flags.format,
        has_global ? "has a second-level scale, name a file for it" : "has no second-level scale"));
  }
  for (const std::string& path : {flags.output, flags.scale, flags.global, flags.mean}) {
    if (path.empty()) continue;
    const bool told = path == flags.scale && path.ends_with(".safetensors");
    if (!told && !path.ends_with(".npy")) {
      return usage_error(path + ": the name must end with .npy" +
                         (path == flags.scale ? " or .safetensors" : ""));
    }
    if (Status s = io::OutputFiles::check(path); !s.ok()) return s;
  }
  return {};
}

/// Every tensor of one call, owned; the absent ones are empty.
struct Quantized {
  io::Array x, codes, scale, global, mean, static_scale;
  std::int64_t saturated = 0;
  double relative_rms_error = 0;

  QuantizeTensors tensors() const {
    const auto view = [](const io::Array& a) {
      return a.format == Format::none ? TensorView{} : a.view();
    };
    QuantizeTensors tensors;
    tensors.x = x.view();
    tensors.codes = view(codes);
    tensors.scale = view(scale);
    tensors.global = view(global);
    tensors.mean = view(mean);
    tensors.static_scale = view(static_scale);
    return tensors;
  }
};

/// |dequantised - x| / |x|; 0 for an all-zero x that stays zero.
double relative_rms(const io::Array& x, const io::Array& dequantised) {
  double error = 0, norm = 0;
  for (std::int64_t i = 0; i < x.count(); ++i) {
    const double value = io::get(x, i), difference = io::get(dequantised, i) - value;
    error += difference * difference;
    norm += value * value;
  }
  return error == 0 ? 0 : std::sqrt(error / norm);
}

Status compute(Quantized& q, const QuantizeOptions& options, const QuantizeShapes& shapes) {
  q.codes = io::zeros_like(shapes.codes);
  q.scale = io::zeros_like(shapes.scale);
  if (shapes.global.present()) q.global = io::zeros_like(shapes.global);
  if (shapes.mean.present()) q.mean = io::zeros_like(shapes.mean);
  QuantizeTensors tensors = q.tensors();
  const Result<QuantizeReport> report = quantize(tensors, options);
  if (!report.ok()) return report.status();
  q.saturated = report->saturated;

  io::Array dequantised = io::zeros(Format::f32, q.x.shape);
  tensors.x = dequantised.view();
  tensors.static_scale = {};
  if (Status s = dequantize(tensors, options); !s.ok()) return s;
  q.relative_rms_error = relative_rms(q.x, dequantised);
  return {};
}

Status write(const QuantizeFlags& flags, const QuantizeOptions& options, const Quantized& q) {
  io::OutputFiles files;
  const std::pair<const std::string&, const io::Array&> outputs[] = {{flags.output, q.codes},
                                                                     {flags.scale, q.scale},
                                                                     {flags.global, q.global},
                                                                     {flags.mean, q.mean}};
  for (const auto& [path, array] : outputs) {
    if (path.empty()) continue;
    Status s = path.ends_with(".safetensors")
                   ? io::write_safetensors(files, path, scale_tensor, array, metadata_of(options))
                   : io::write_npy(files, path, array);
    if (!s.ok()) return s;
  }
  return files.commit();
}

void report(const QuantizeFlags& flags, const Quantized& q) {
  if (flags.json) {
    print_json(Json{{"format", flags.format},
                    {"granularity", flags.granularity},
                    {"role", flags.role},
                    {"shape", q.x.shape},
                    {"scale_shape", q.scale.shape},
                    {"scales", q.scale.count()},
                    {"code_bytes", q.codes.bytes.size()},
                    {"scale_bytes", q.scale.bytes.size() + q.global.bytes.size()},
                    {"saturated", q.saturated},
                    {"relative_rms_error", q.relative_rms_error}});
    return;
  }
  print(
      fmt::format("codes      {} {}, {} bytes\nscales     {} {}, {} of them\nsaturated  {}\n"
                  "relative rms error {}\n",
                  io::shape_text(q.codes.shape), flags.format, q.codes.bytes.size(),
                  io::shape_text(q.scale.shape), info(q.scale.format).name, q.scale.count(),
                  q.saturated, scientific(q.relative_rms_error)));
}

/// --static-scale, and what it was made for as its file or --scales-for says.
Status load_static_scale(const QuantizeFlags& flags, Quantized& q, QuantizeOptions& options) {
  if (flags.static_scale.empty()) {
    return flags.scales_for.empty() ? Status() : usage_error("--scales-for: needs --static-scale");
  }
  Metadata metadata;
  Result<io::Array> scale = load_tensor("static_scale", flags.static_scale, false, &metadata);
  if (!scale.ok()) return scale.status();
  q.static_scale = std::move(*scale);
  Result<std::optional<Recipe>> made = made_for(flags.static_scale, metadata, options.role);
  if (!made.ok()) {
    return Status(made.status().code(), "static_scale: " + made.status().message());
  }
  options.scales_for = *made;
  if (flags.scales_for.empty()) return {};
  if (*made) {
    return usage_error("--scales-for: " + flags.static_scale + " says itself what it is made for");
  }
  Result<Recipe> recipe = recipe_named(flags.scales_for);
  if (!recipe.ok()) return usage_error("--scales-for: " + recipe.status().message());
  options.scales_for = *recipe;
  return {};
}

Status run_quantize(const QuantizeFlags& flags) {
  Result<QuantizeOptions> options = options_of(flags);
  if (!options.ok()) return options.status();
  Quantized q;
  Result<io::Array> x = load_tensor("x", flags.input, flags.bf16);
  if (!x.ok()) return x.status();
  q.x = std::move(*x);
  const Result<QuantizeShapes> shapes = quantize_shapes(q.x.view(), *options);
  if (!shapes.ok()) return shapes.status();
  if (Status s = check_outputs(flags, shapes->global.present()); !s.ok()) return s;
  if (Status s = load_static_scale(flags, q, *options); !s.ok()) return s;
  if (Status s = compute(q, *options, *shapes); !s.ok()) return s;
  if (Status s = write(flags, *options, q); !s.ok()) return s;
  report(flags, q);
  if (!std::isfinite(q.relative_rms_error)) {
    warn_of_nan("x: holds NaN or Inf, or values whose squares are none");
  }
  return {};
}

}  // namespace

void add_quantize(CLI::App& program, Action& chosen) {
  add_command<QuantizeFlags>(program, chosen, "quantize", "codes and scales of one tensor",
                             run_quantize);
}

}  // namespace qattn::cli
