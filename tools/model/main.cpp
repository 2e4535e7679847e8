// qattn_model: what the GPU kernels do, counted in the emulator, as bounds on their time on an
// H200, beside measured times.
#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <optional>
#include <set>

#include "cli/call.hpp"
#include "cli/console.hpp"
#include "cli/program.hpp"
#include "model/emulate.hpp"

namespace qattn::cli {

namespace {

using model::Choice;
using model::Prediction;
using model::Unit;

struct ModelFlags {
  std::vector<std::string> shapes;
  std::string recipes = "bf16,int8,int8_full,int8_fp8,fp8", measured;
  bool causal = false, portable = false, json = false;

  void add_to(CLI::App& app) {
    app.add_option("--shape", shapes,
                   "B,Hq,Hkv,Sq,Sk,D; may be given again (default: D 128, 64 and 256, heads "
                   "32/8, full and causal, and one query)")
        ->expected(1)
        ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
    app.add_option("--recipe", recipes, "names separated by commas, or all");
    app.add_flag("--causal", causal, "the shapes are causal; of the default ones the causal half");
    app.add_flag("--portable", portable, "the portable kernel, also where Hopper has its own");
    app.add_option("--measured", measured, "a record of bench/bench.py, to compare with");
    app.add_flag("--json", json, "print JSON");
  }
};

std::vector<model::Shape> default_shapes(bool causal_only) {
  std::vector<model::Shape> shapes;
  const auto sweep = [&](std::int64_t heads, std::int64_t heads_kv, std::int64_t dim,
                         std::initializer_list<std::int64_t> lengths) {
    for (const bool causal : {false, true}) {
      if (causal_only && !causal) continue;
      for (const std::int64_t s : lengths) {
        const std::int64_t batch = std::max<std::int64_t>(16384 / s, 1);
        shapes.push_back({batch, heads, heads_kv, s, s, dim, causal});
      }
    }
  };
  sweep(32, 32, 128, {1024, 2048, 4096, 8192, 16384, 32768});
  sweep(32, 32, 64, {1024, 2048, 4096, 8192, 16384, 32768});
  sweep(16, 16, 256, {1024, 4096, 16384});
  sweep(32, 8, 128, {4096, 16384});
  for (const auto& [batch, keys] : {std::pair{16, 8192}, {16, 32768}, {1, 32768}, {1, 131072}}) {
    if (!causal_only) shapes.push_back({batch, 32, 8, 1, keys, 128, false});
  }
  return shapes;
}

Result<std::vector<model::Shape>> parse_shapes(const ModelFlags& flags) {
  if (flags.shapes.empty()) return default_shapes(flags.causal);
  std::vector<model::Shape> shapes;
  for (const std::string& text : flags.shapes) {
    const Result<Geometry> g = Geometry::parse(text);
    if (!g.ok()) return g.status();
    shapes.push_back(
        {g->batch, g->heads_q, g->heads_kv, g->queries, g->keys, g->dim, flags.causal});
  }
  return shapes;
}

// ---- Measured times -----------------------------------------------------------------------------

Json to_json(const model::Shape& s) {
  return {{"batch", s.batch},     {"heads_q", s.heads_q}, {"heads_kv", s.heads_kv},
          {"queries", s.queries}, {"keys", s.keys},       {"dim", s.dim},
          {"causal", s.causal}};
}

bool is_cell(const Json& cell) {
  const auto has = [&](const char* key, auto is_right) {
    return cell.contains(key) && (cell[key].*is_right)();
  };
  return cell.is_object() && has("candidate", &Json::is_string) && has("step", &Json::is_string) &&
         has("shape", &Json::is_object) &&
         (!cell.contains("median_ms") || cell["median_ms"].is_number());
}

/// A record of bench/bench.py run.
class Measured {
 public:
  static Result<Measured> load(const std::string& path) {
    Measured m;
    if (path.empty()) return m;
    std::ifstream file(path);
    if (!file) return usage_error(fmt::format("--measured {}: cannot be read", path));
    const Json record = Json::parse(file, nullptr, false);
    const bool cells = record.is_object() && record.contains("cells") && record["cells"].is_array();
    if (!cells || !std::all_of(record["cells"].begin(), record["cells"].end(), is_cell)) {
      return usage_error(fmt::format("--measured {}: is no record of bench/bench.py", path));
    }
    m.cells_ = record["cells"];
    return m;
  }

  /// Milliseconds of the attention step, if the record has the shape and the kernel.
  std::optional<double> of(const Prediction& p, Choice choice) const {
    const char* step = p.quantises ? "kernel" : "e2e";
    for (const Json& cell : cells_) {
      if (cell["candidate"] != p.recipe || cell["step"] != step || !cell.contains("median_ms")) {
        continue;
      }
      // Records of before kernels were named are of the best.
      const bool same =
          cell.contains("kernel") ? cell["kernel"] == p.kernel : choice == Choice::best;
      Json shape = cell["shape"];
      shape.erase("group");
      if (same && shape == to_json(p.shape)) return cell["median_ms"].get<double>();
    }
    return std::nullopt;
  }

 private:
  Json cells_ = Json::array();
};

// ---- Results ------------------------------------------------------------------------------------

struct Row {
  Prediction prediction;
  std::optional<double> measured_ms;

  double predicted_ms() const { return prediction.bound.predicted() * 1e3; }
};
struct Answer {
  std::vector<Row> rows;
  std::set<std::string> refused;  ///< a reason each
};

Result<Answer> predict_all(const std::vector<model::Shape>& shapes,
                           const std::vector<Recipe>& recipes, Choice choice,
                           const Measured& measured) {
  Answer answer;
  for (const model::Shape& shape : shapes) {
    for (const Recipe& recipe : recipes) {
      const Result<Prediction> p = model::predict(recipe.name, shape, choice, model::h200());
      if (p.ok()) {
        answer.rows.push_back({*p, measured.of(*p, choice)});
      } else if (p.status().code() == Code::unsupported) {
        answer.refused.insert(p.status().message());
      } else {
        return p.status();
      }
    }
  }
  if (answer.rows.empty()) {
    std::string reasons;
    for (const std::string& why : answer.refused) reasons += "\n  " + why;
    return Status(Code::unsupported, "no kernel serves any of this:" + reasons);
  }
  return answer;
}

/// Clocks that one multiprocessor needs for `amounts`.
double clocks(const model::Amounts& amounts, int unit) {
  const double rate = model::h200().per_clock[unit];
  return rate > 0 ? amounts.of[unit] / rate : 0;
}

/// Those of 128 x 128 scores in blocks of however many queries.
double clocks_a_tile(const Prediction& p, int unit) {
  return clocks(p.per_tile.tile, unit) * static_cast<double>(model::tile) /
         static_cast<double>(p.block.rows);
}

/// What a tile depends on.
std::string tile_text(const Prediction& p) {
  return fmt::format("{} {} D {} {}{}", p.recipe, p.kernel, p.shape.dim,
                     p.shape.causal ? "causal" : "full",
                     p.block.rows > model::tile ? fmt::format(" {} queries", p.block.rows) : "");
}

void print_tables(const Answer& answer) {
  std::vector<std::string> header = {"clocks a tile of 128 x 128 scores"};
  for (int u = 0; u < model::units; ++u) {
    if (static_cast<Unit>(u) != Unit::dram) header.emplace_back(name(static_cast<Unit>(u)));
  }
  Table tiles(header);
  std::set<std::string> shown;
  for (const Row& row : answer.rows) {
    const std::string text = tile_text(row.prediction);
    if (!shown.insert(text).second) continue;
    std::vector<std::string> cells = {text};
    for (int u = 0; u < model::units; ++u) {
      if (static_cast<Unit>(u) == Unit::dram) continue;
      cells.push_back(fixed(clocks_a_tile(row.prediction, u), 0));
    }
    tiles.add(cells);
  }
  Table table({"B,Hq,Hkv,Sq,Sk,D", "recipe", "kernel", "limit", "bound_us", "measured_us",
               "measured/bound"});
  for (const Row& row : answer.rows) {
    const Prediction& p = row.prediction;
    const model::Shape& s = p.shape;
    table.add({fmt::format("{},{},{},{},{},{}{}", s.batch, s.heads_q, s.heads_kv, s.queries, s.keys,
                           s.dim, s.causal ? " causal" : ""),
               p.recipe, p.kernel, name(p.bound.limit), fixed(row.predicted_ms() * 1e3, 1),
               row.measured_ms ? fixed(*row.measured_ms * 1e3, 1) : "",
               row.measured_ms ? fixed(*row.measured_ms / row.predicted_ms(), 2) : ""});
  }
  print(fmt::format("{}, {:.3f} GHz\n\n{}\n{}", model::h200().name, model::h200().hertz / 1e9,
                    tiles.text(), table.text()));
  for (const std::string& why : answer.refused) print("refused: " + why + "\n");
}

Json machine_json() {
  const model::Machine& m = model::h200();
  Json rates;
  for (int u = 0; u < model::units; ++u) {
    const auto unit = static_cast<Unit>(u);
    if (unit == Unit::dram) continue;
    rates[name(unit)] = {{"of", quantity(unit)}, {"a_clock", m.per_clock[u]}};
  }
  return {{"name", m.name},     {"multiprocessors", m.multiprocessors},
          {"hertz", m.hertz},   {"dram_bytes_per_second", m.dram_bytes_per_second},
          {"source", m.source}, {"a_clock_and_multiprocessor", rates}};
}

Json to_json(const Row& row) {
  const Prediction& p = row.prediction;
  Json tile, microseconds;
  for (int u = 0; u < model::units; ++u) {
    const auto unit = static_cast<Unit>(u);
    if (unit != Unit::dram) tile[name(unit)] = clocks_a_tile(p, u);
    microseconds[name(unit)] = p.bound.seconds[u] * 1e6;
  }
  Json json = {{"shape", to_json(p.shape)},
               {"recipe", p.recipe},
               {"kernel", p.kernel},
               {"block_queries", p.block.rows},
               {"step", p.quantises ? "kernel" : "e2e"},
               {"clocks_a_tile", tile},
               {"bound_us", microseconds},
               {"limit", name(p.bound.limit)},
               {"predicted_ms", row.predicted_ms()}};
  if (row.measured_ms) {
    json["measured_ms"] = *row.measured_ms;
    json["measured_over_predicted"] = *row.measured_ms / row.predicted_ms();
  }
  return json;
}

Status run_model(const ModelFlags& flags) {
  const Result<std::vector<Recipe>> recipes = parse_recipes(flags.recipes);
  if (!recipes.ok()) return recipes.status();
  const Result<std::vector<model::Shape>> shapes = parse_shapes(flags);
  if (!shapes.ok()) return shapes.status();
  const Result<Measured> measured = Measured::load(flags.measured);
  if (!measured.ok()) return measured.status();
  const Choice choice = flags.portable ? Choice::portable : Choice::best;
  const Result<Answer> answer = predict_all(*shapes, *recipes, choice, *measured);
  if (!answer.ok()) return answer.status();
  if (!flags.json) {
    print_tables(*answer);
    return {};
  }
  Json rows = Json::array();
  for (const Row& row : answer->rows) rows.push_back(to_json(row));
  print_json({{"machine", machine_json()}, {"rows", rows}, {"refused", answer->refused}});
  return {};
}

}  // namespace
}  // namespace qattn::cli

int main(int argc, char** argv) {
  namespace cli = qattn::cli;
  CLI::App program("qattn_model: bounds on the GPU kernels' time, from counts in the emulator",
                   "qattn_model");
  cli::ModelFlags flags;
  flags.add_to(program);
  return cli::run_program(
      program, [&flags] { return cli::run_model(flags); }, argc, argv);
}
