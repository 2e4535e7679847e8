// qattn demo: every recipe on a real model's Q, K, V and on a synthetic long context.
#include "demo.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <limits>

#include "call.hpp"
#include "commands.hpp"
#include "io/file.hpp"
#include "io/safetensors.hpp"
#include "machine.hpp"
#include "synthetic.hpp"

namespace qattn::cli {

namespace {

constexpr double nan = std::numeric_limits<double>::quiet_NaN();
/// Two query heads' worth of GQA at a length where K and V leave the caches.
constexpr int long_tokens = 4096;
constexpr Geometry long_geometry(std::int64_t tokens) {
  return {1, 8, 2, tokens, tokens, 128, 128};
}
constexpr std::int64_t long_reference_rows = 64;
/// Seconds of timed runs per recipe: the whole demo stays under a minute on two cores.
constexpr double layer_budget_s = 0.08, long_budget_s = 1.0;
constexpr const char* data_file = "minilm_qkv.safetensors";

struct DemoFlags {
  std::string report = "report.html", data, embeddings;
  int threads = 0, runs = 0, tokens = long_tokens;
  bool json = false;

  void add_to(CLI::App& app) {
    app.add_option("--report", report, "HTML report (default report.html)");
    app.add_option("--data", data, "captured Q, K, V (.safetensors, layer{i}.q, .k, .v)");
    app.add_option("--embeddings", embeddings, "JSON of tools/capture/embed_minilm.py to include");
    app.add_option("--threads", threads, "CPU threads (default: all)");
    app.add_option("--runs", runs, "timed runs per recipe (default: as many as a second allows)");
    app.add_option("--tokens", tokens, "length of the synthetic context (default 4096)");
    app.add_flag("--json", json, "print JSON");
  }
};

/// Behind an installed program lie its data; else they are where it was built.
Result<io::SafetensorsFile> open_data(const std::string& named) {
  if (!named.empty()) return io::SafetensorsFile::open(named);
  namespace fs = std::filesystem;
  std::error_code error;
  const fs::path program = fs::read_symlink("/proc/self/exe", error);
  fs::path installed = program.parent_path().parent_path() / "share/qattn" / data_file;
  const fs::path built = fs::path(QATTN_DATA_DIR) / data_file;
  if (error) installed = built;  // this system does not say where the program lies
  for (const fs::path& path : {installed, built}) {
    if (fs::exists(path, error)) return io::SafetensorsFile::open(path.string());
  }
  return usage_error(fmt::format("{} and {}: no such file; name the captured tensors with --data",
                                 installed.string(), built.string()));
}

/// layer0, layer1, ... up to the first that is missing.
Result<std::vector<Case>> load_layers(io::SafetensorsFile& file, const AttentionOptions& options) {
  const std::vector<std::string> names = file.names();
  std::vector<Case> layers;
  while (std::binary_search(names.begin(), names.end(), fmt::format("layer{}.q", layers.size()))) {
    Operands operands;
    const std::string layer = fmt::format("layer{}.", layers.size());
    const std::pair<const char*, io::Array*> tensors[] = {
        {"q", &operands.q}, {"k", &operands.k}, {"v", &operands.v}};
    for (const auto& [role, into] : tensors) {
      Result<io::Array> array = file.tensor(layer + role);
      if (!array.ok()) return array.status();
      *into = std::move(*array);
    }
    Result<Case> c = make_case(std::move(operands), options);
    if (!c.ok()) return Status(c.status().code(), layer + c.status().message());
    layers.push_back(std::move(*c));
  }
  if (layers.empty()) return usage_error("--data: the file has no tensor layer0.q");
  return layers;
}

const Measurement* find(const Comparison& comparison, const std::string& recipe) {
  for (const Measurement& m : comparison.results) {
    if (m.recipe == recipe) return &m;
  }
  return nullptr;
}

/// NaN if one is, which std::max() may drop.
double larger(double a, double b) { return std::isnan(a) || std::isnan(b) ? nan : std::max(a, b); }

/// The recipe's measurements in every layer and in the long context (the last comparison).
DemoRow summarise(const std::string& recipe, const std::vector<Comparison>& layers,
                  const Comparison& long_context) {
  DemoRow row;
  row.recipe = recipe;
  for (const Comparison& layer : layers) {
    const Measurement* m = find(layer, recipe);
    const double share = 1.0 / static_cast<double>(layers.size());
    row.layer_nrmse.push_back(m ? m->error.nrmse : nan);
    row.nrmse_mean += row.layer_nrmse.back() * share;
    row.nrmse_worst = larger(row.nrmse_worst, row.layer_nrmse.back());
    row.worst_row_cosine = -larger(-row.worst_row_cosine, m ? -m->error.worst_row_cosine : nan);
    row.nan_rows += m ? m->nan_rows : 0;
    row.ms += (m ? m->ms : nan) * share;
    row.memory_vs_f16 += (m ? m->memory_vs_f16 : nan) * share;
  }
  const Measurement* m = find(long_context, recipe);
  row.nan_rows += m ? m->nan_rows : 0;
  row.long_nrmse = m ? m->error.nrmse : nan;
  row.long_worst_row_cosine = m ? m->error.worst_row_cosine : nan;
  row.long_ms = m ? m->ms : nan;
  return row;
}

Result<Comparison> measure_case(const Case& c, std::int64_t rows, TimingOptions timing,
                                Progress& progress, double& done, const std::string& label) {
  const Result<Reference> reference = make_reference(c, rows);
  if (!reference.ok()) return reference.status();
  const std::vector<Recipe> list(recipes().begin(), recipes().end());
  return compare_recipes(c, list, &*reference, timing, [&](std::string_view recipe) {
    progress.show(done++, fmt::format("{} {}", label, recipe));
  });
}

Status measure_demo(Demo& demo, const std::vector<Case>& layers, int runs, int tokens) {
  const Geometry geometry = long_geometry(tokens);
  Result<Operands> operands = long_context_operands(geometry);
  if (!operands.ok()) return operands.status();
  const Result<Case> long_case = make_case(std::move(*operands), layers.front().options);
  if (!long_case.ok()) return long_case.status();

  Progress progress(static_cast<double>((layers.size() + 1) * recipes().size()));
  double done = 0;
  std::vector<Comparison> by_layer;
  for (const Case& layer : layers) {
    Result<Comparison> comparison =
        measure_case(layer, layer.geometry.queries, {runs, layer_budget_s}, progress, done,
                     fmt::format("layer {}", by_layer.size()));
    if (!comparison.ok()) return comparison.status();
    warn_of_nan(fmt::format("layer {}: ", by_layer.size()), comparison->results);
    by_layer.push_back(std::move(*comparison));
    demo.f32_ms += by_layer.back().f32_ms / static_cast<double>(layers.size());
  }
  const Result<Comparison> long_context = measure_case(
      *long_case, long_reference_rows, {runs, long_budget_s}, progress, done, "long context");
  if (!long_context.ok()) return long_context.status();

  warn_of_nan("long context: ", long_context->results);
  demo.layer = layers.front().geometry;
  demo.long_context = geometry;
  demo.long_reference_rows = long_reference_rows;
  demo.f32_long_ms = long_context->f32_ms;
  demo.skipped = by_layer.front().skipped;
  for (const Measurement& m : by_layer.front().results) {
    demo.rows.push_back(summarise(m.recipe, by_layer, *long_context));
  }
  return {};
}

/// Three lines: what the columns are, what they say, what to do next.
std::string meaning(const Demo& demo, const std::string& report) {
  std::string fastest;
  double speedup = 0, error = nan;
  for (const DemoRow& row : demo.rows) {
    if (!(demo.f32_long_ms / row.long_ms > speedup)) continue;
    fastest = row.recipe, speedup = demo.f32_long_ms / row.long_ms, error = row.long_nrmse;
  }
  return fmt::format(
      "nrmse is the error against float64 (1e-2: 1 % of the output); vs_f32 is how many times as "
      "fast as f32.\n"
      "Fastest here on the long context: {}, {:.1f} times as fast as f32, with an error of {:.1g} "
      "%.\n"
      "Next: open {}, or try your own tensors: qattn compare --q q.npy --k k.npy --v v.npy\n",
      fastest, speedup, error * 100, report);
}

Status run_demo(const DemoFlags& flags) {
  if (flags.threads < 0) return usage_error(fmt::format("--threads {}: at least 0", flags.threads));
  if (flags.runs < 0) return usage_error(fmt::format("--runs {}: at least 0", flags.runs));
  if (flags.tokens < long_reference_rows) {
    return usage_error(fmt::format("--tokens {}: at least {}", flags.tokens, long_reference_rows));
  }
  if (Status s = io::OutputFiles::check(flags.report); !s.ok()) return s;
  Demo demo;
  if (!flags.embeddings.empty()) {
    Result<Embeddings> embeddings = read_embeddings(flags.embeddings);
    if (!embeddings.ok()) return embeddings.status();
    demo.embeddings = std::move(*embeddings);
  }
  Result<io::SafetensorsFile> file = open_data(flags.data);
  if (!file.ok()) return file.status();
  AttentionOptions options;
  options.layout = Layout::bhsd;
  options.threads = flags.threads;
  const Result<std::vector<Case>> layers = load_layers(*file, options);
  if (!layers.ok()) return layers.status();
  const Result<Json> machine = provenance(flags.threads);
  if (!machine.ok()) return machine.status();
  demo.machine = *machine;
  demo.source = file->metadata();
  if (Status s = measure_demo(demo, *layers, flags.runs, flags.tokens); !s.ok()) return s;

  io::OutputFiles files;
  if (Status s = files.add_text(flags.report, html_report(demo)); !s.ok()) return s;
  if (Status s = files.commit(); !s.ok()) return s;
  if (flags.json) {
    print_json(demo.json());
    return {};
  }
  print(
      fmt::format("{} layers of a real model (B,Hq,Hkv,Sq,Sk,D = {}) and a synthetic long "
                  "context ({}) on {} ({})\n\n",
                  layers->size(), demo.layer.text(), demo.long_context.text(),
                  demo.machine["cpu"].get<std::string>(), demo.machine["isa"].get<std::string>()));
  print(demo.table().text() + text_of(demo.skipped) + "\n" + meaning(demo, flags.report));
  return {};
}

}  // namespace

Result<Embeddings> read_embeddings(const std::string& path) {
  constexpr std::uint64_t max_bytes = 1 << 20;
  Result<io::InputFile> file = io::InputFile::open(path);
  if (!file.ok()) return file.status();
  if (file->size() > max_bytes) return io::file_error(path, "larger than 1 MiB");
  std::string text(file->size(), '\0');
  if (Status s = file->read(0, std::as_writable_bytes(std::span(text))); !s.ok()) return s;
  const Json json = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  const Status malformed = io::file_error(
      path, R"(not {"model", "sentences", "results": [{"recipe", "min_cosine", "mean_cosine"}]})");
  if (!json.is_object() || !json.contains("model") || !json["model"].is_string() ||
      !json.contains("sentences") || !json["sentences"].is_number_unsigned() ||
      !json.contains("results") || !json["results"].is_array()) {
    return malformed;
  }
  Embeddings embeddings{json["model"], json["sentences"], {}};
  for (const Json& row : json["results"]) {
    if (!row.is_object() || !row.contains("recipe") || !row["recipe"].is_string() ||
        !row.contains("min_cosine") || !row["min_cosine"].is_number() ||
        !row.contains("mean_cosine") || !row["mean_cosine"].is_number()) {
      return malformed;
    }
    embeddings.rows.push_back({row["recipe"], row["min_cosine"], row["mean_cosine"]});
  }
  return embeddings;
}

Table Demo::table() const {
  Table table({"recipe", "nrmse", "worst layer", "worst row cos", "nan rows", "ms", "vs_f32",
               "Q,K,V/f16", "long nrmse", "long ms", "vs_f32"});
  for (const DemoRow& row : rows) {
    table.add({row.recipe, scientific(row.nrmse_mean), scientific(row.nrmse_worst),
               fixed(row.worst_row_cosine, 5), std::to_string(row.nan_rows), fixed(row.ms, 2),
               fixed(f32_ms / row.ms, 2) + "x", fixed(row.memory_vs_f16, 3),
               scientific(row.long_nrmse), fixed(row.long_ms, 1),
               fixed(f32_long_ms / row.long_ms, 2) + "x"});
  }
  return table;
}

Json Demo::json() const {
  Json results = Json::array();
  for (const DemoRow& row : rows) {
    results.push_back({{"recipe", row.recipe},
                       {"nrmse_mean", row.nrmse_mean},
                       {"nrmse_worst_layer", row.nrmse_worst},
                       {"nrmse_by_layer", row.layer_nrmse},
                       {"worst_row_cosine", row.worst_row_cosine},
                       {"nan_rows", row.nan_rows},
                       {"ms", row.ms},
                       {"speedup_vs_f32", f32_ms / row.ms},
                       {"memory_vs_f16", row.memory_vs_f16},
                       {"long_nrmse", row.long_nrmse},
                       {"long_worst_row_cosine", row.long_worst_row_cosine},
                       {"long_ms", row.long_ms},
                       {"long_speedup_vs_f32", f32_long_ms / row.long_ms}});
  }
  return {{"provenance", machine},
          {"source", source},
          {"layer_shape", layer.text()},
          {"long_shape", long_context.text()},
          {"long_reference_rows", long_reference_rows},
          {"results", results},
          {"skipped", to_json(skipped)}};
}

void add_demo(CLI::App& program, Action& chosen) {
  add_command<DemoFlags>(program, chosen, "demo",
                         "every recipe on a real model's tensors, with a report", run_demo);
}

}  // namespace qattn::cli
