// qattn bench: speed of recipes on shapes, end to end (f32, f16 or bf16 tensors in, f32 out).
#include <fmt/format.h>

#include "call.hpp"
#include "commands.hpp"
#include "console.hpp"
#include "machine.hpp"
#include "measure.hpp"
#include "synthetic.hpp"

namespace qattn::cli {

namespace {

/// A prefill with MHA, a longer one with GQA and a decode step: small enough for two cores.
const std::vector<std::string> default_shapes = {"1,8,8,1024,1024,64", "1,8,2,2048,2048,128",
                                                 "4,32,8,1,4096,128"};

struct BenchFlags {
  CallFlags call;
  std::vector<std::string> shapes;
  std::string recipes = "all", input_format = "f32";
  int runs = 0;
  bool json = false;

  void add_to(CLI::App& app) {
    app.add_option("--shape", shapes, "B,Hq,Hkv,Sq,Sk,D; may be given again")
        ->expected(1)
        ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
    app.add_option("--recipe", recipes, "all (default) or names separated by commas");
    app.add_option("--input-format", input_format, "of Q, K and V: f32 (default), f16 or bf16");
    call.add_to(app);
    app.add_option("--runs", runs, "timed runs per recipe (default: as many as 0.3 s allow)")
        ->check(CLI::PositiveNumber);
    app.add_flag("--json", json, "print JSON");
  }
};

struct Row {
  Geometry geometry;
  Comparison comparison;
};

double tflops(const Row& row, const Measurement& m, bool causal) {
  return row.geometry.flops(causal) / (m.ms * 1e-3) / 1e12;
}

Result<std::vector<Geometry>> parse_shapes(const std::vector<std::string>& texts) {
  std::vector<Geometry> geometries;
  for (const std::string& text : texts.empty() ? default_shapes : texts) {
    const Result<Geometry> geometry = Geometry::parse(text);
    if (!geometry.ok()) return geometry.status();
    geometries.push_back(*geometry);
  }
  return geometries;
}

Result<std::vector<Row>> measure_all(const std::vector<Geometry>& geometries,
                                     const std::vector<Recipe>& list, Format format,
                                     const AttentionOptions& options, int runs) {
  std::vector<Row> rows;
  Progress progress(static_cast<double>(geometries.size() * (list.size() + 1)));
  double done = 0;
  for (const Geometry& geometry : geometries) {
    Result<Operands> operands = normal_operands(geometry, options.layout, format);
    if (!operands.ok()) return operands.status();
    const Result<Case> c = make_case(std::move(*operands), options);
    if (!c.ok()) return c.status();
    const Result<Comparison> comparison =
        compare_recipes(*c, list, nullptr, {.runs = runs}, [&](std::string_view recipe) {
          progress.show(done++, fmt::format("{} {}", geometry.text(), recipe));
        });
    if (!comparison.ok()) return comparison.status();
    rows.push_back({geometry, *comparison});
  }
  return rows;
}

void print_tables(const std::vector<Row>& rows, bool causal) {
  for (const Row& row : rows) {
    print(fmt::format("\nB,Hq,Hkv,Sq,Sk,D = {}{}\n", row.geometry.text(), causal ? " causal" : ""));
    Table table({"recipe", "ms", "TFLOP/s", "vs_f32"});
    for (const Measurement& m : row.comparison.results) {
      table.add({m.recipe, fixed(m.ms, 2), fixed(tflops(row, m, causal), 4),
                 fixed(row.comparison.speedup(m), 2) + "x"});
    }
    print(table.text() + text_of(row.comparison.skipped));
  }
}

Json to_json(const std::vector<Row>& rows, bool causal, const Json& machine) {
  Json results = Json::array(), skipped = Json::array();
  for (const Row& row : rows) {
    for (const Measurement& m : row.comparison.results) {
      results.push_back({{"shape", row.geometry.text()},
                         {"causal", causal},
                         {"recipe", m.recipe},
                         {"kernel", m.kernel},
                         {"nan_rows", m.nan_rows},
                         {"ms", m.ms},
                         {"tflops", tflops(row, m, causal)},
                         {"speedup_vs_f32", row.comparison.speedup(m)}});
    }
    for (const Skipped& s : row.comparison.skipped) {
      skipped.push_back(
          {{"shape", row.geometry.text()}, {"recipe", s.recipe}, {"reason", s.reason}});
    }
  }
  return {{"provenance", machine}, {"results", results}, {"skipped", skipped}};
}

Status run_bench(const BenchFlags& flags) {
  const Result<AttentionOptions> options = flags.call.options();
  if (!options.ok()) return options.status();
  const Result<std::vector<Recipe>> list = parse_recipes(flags.recipes);
  if (!list.ok()) return list.status();
  const Result<Format> format = parse_input_format("--input-format", flags.input_format);
  if (!format.ok()) return format.status();
  if (flags.runs < 0) return usage_error(fmt::format("--runs {}: at least 0", flags.runs));
  const Result<std::vector<Geometry>> geometries = parse_shapes(flags.shapes);
  if (!geometries.ok()) return geometries.status();
  Result<Json> machine = provenance(options->threads);
  if (!machine.ok()) return machine.status();
  (*machine)["input_format"] = flags.input_format;

  const Result<std::vector<Row>> rows =
      measure_all(*geometries, *list, *format, *options, flags.runs);
  if (!rows.ok()) return rows.status();
  for (const Row& row : *rows) {
    warn_of_nan(row.geometry.text() + " ", row.comparison.results);
  }
  if (flags.json) {
    print_json(to_json(*rows, options->causal, *machine));
    return {};
  }
  print(fmt::format("{}, {}, {} threads, qattn {}, {} inputs\n", cpu_model(),
                    (*machine)["isa"].get<std::string>(), thread_count(options->threads), version(),
                    flags.input_format));
  print_tables(*rows, options->causal);
  return {};
}

}  // namespace

void add_bench(CLI::App& program, Action& chosen) {
  add_command<BenchFlags>(program, chosen, "bench", "speed of recipes on shapes", run_bench);
}

}  // namespace qattn::cli
