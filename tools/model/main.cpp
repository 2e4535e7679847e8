// qattn_model: what the GPU kernels do, counted in the emulator, as bounds on their time on a GPU,
// beside measured times.
#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <optional>
#include <set>

#include "cli/call.hpp"
#include "cli/console.hpp"
#include "cli/program.hpp"
#include "model/emulate.hpp"

namespace qattn::cli {

namespace {

using model::Choice;
using model::Machine;
using model::Prediction;
using model::Unit;

struct ModelFlags {
  std::vector<std::string> shapes;
  std::string recipes, measured, compiled;
  std::vector<std::string> devices = {model::h200().key};
  bool causal = false, portable = false, json = false;

  void add_to(CLI::App& app) {
    std::string known;
    for (const Machine& m : model::machines()) known += (known.empty() ? "" : ", ") + m.key;
    app.add_option("--device", devices, "one or more of " + known + ", separated by commas")
        ->delimiter(',');
    app.add_option("--shape", shapes,
                   "B,Hq,Hkv,Sq,Sk,D; may be given again (default on Hopper: D 128, 64 and 256, "
                   "heads 32/8, full and causal, and one query; else 8192 keys, D 128 and 64)")
        ->expected(1)
        ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
    app.add_option("--recipe", recipes,
                   "names separated by commas, or all (default: those that the device has)");
    app.add_flag("--causal", causal, "the shapes are causal; of the default ones the causal half");
    app.add_flag("--portable", portable, "the portable kernel, also where the device has its own");
    app.add_option("--compiled", compiled,
                   "a record of tools/gpu_slots.py: instructions of the machine code besides");
    app.add_option("--measured", measured, "a record of bench/bench.py, to compare with");
    app.add_flag("--json", json, "print JSON");
  }
};

bool is_hopper(const Machine& machine) { return machine.architecture.best == 90; }

std::string default_recipes(const Machine& machine) {
  const int gpu = machine.architecture.best;
  return std::string("bf16,int8,int8_full") + (gpu >= 89 ? ",int8_fp8,fp8" : "") +
         (gpu == 120 ? ",mxfp8,nvfp4_qk,nvfp4" : "");
}

std::vector<model::Shape> default_shapes(const Machine& machine, bool causal_only) {
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
  if (!is_hopper(machine)) {
    for (const std::int64_t dim : {128, 64}) sweep(32, 32, dim, {8192});
    return shapes;
  }
  sweep(32, 32, 128, {1024, 2048, 4096, 8192, 16384, 32768});
  sweep(32, 32, 64, {1024, 2048, 4096, 8192, 16384, 32768});
  sweep(16, 16, 256, {1024, 4096, 16384});
  sweep(32, 8, 128, {4096, 16384});
  for (const auto& [batch, keys] : {std::pair{16, 8192}, {16, 32768}, {1, 32768}, {1, 131072}}) {
    if (!causal_only) shapes.push_back({batch, 32, 8, 1, keys, 128, false});
  }
  return shapes;
}

Result<std::vector<model::Shape>> parse_shapes(const ModelFlags& flags, const Machine& machine) {
  if (flags.shapes.empty()) return default_shapes(machine, flags.causal);
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

// ---- Machine code -------------------------------------------------------------------------------

/// Targets of nvcc in such a record, and the GPUs that its machine code runs on.
const std::map<std::string, int> targets = {{"sm_80", 80}, {"sm_89", 89}, {"sm_120f", 120}};

bool is_slot_row(const Json& row) {
  const auto has = [&](const char* key, auto is_right) {
    return row.contains(key) && (row[key].*is_right)();
  };
  return row.is_object() && has("target", &Json::is_string) && has("kernel", &Json::is_string) &&
         has("recipe", &Json::is_string) && has("dim", &Json::is_number_integer) &&
         has("a_tile", &Json::is_object) && targets.contains(row["target"].get<std::string>()) &&
         std::all_of(row["a_tile"].begin(), row["a_tile"].end(),
                     [](const Json& n) { return n.is_number(); });
}

/// A record of tools/gpu_slots.py, in warp instructions.
Result<model::Compiled> load_compiled(const std::string& path) {
  model::Compiled made;
  if (path.empty()) return made;
  std::ifstream file(path);
  if (!file) return usage_error(fmt::format("--compiled {}: cannot be read", path));
  const Json record = Json::parse(file, nullptr, false);
  const bool rows = record.is_object() && record.contains("rows") && record["rows"].is_array();
  if (!rows || !std::all_of(record["rows"].begin(), record["rows"].end(), is_slot_row)) {
    return usage_error(fmt::format("--compiled {}: is no record of tools/gpu_slots.py", path));
  }
  for (const Json& row : record["rows"]) {
    model::Amounts amounts;
    for (int u = 0; u < model::units; ++u) {
      const auto unit = static_cast<Unit>(u);
      amounts[unit] = row["a_tile"].value(name(unit), 0.0) * (unit == Unit::issue ? 1 : 32);
    }
    made[{targets.at(row["target"].get<std::string>()), row["kernel"].get<std::string>(),
          row["recipe"].get<std::string>(), row["dim"].get<int>()}] = amounts;
  }
  return made;
}

// ---- Results ------------------------------------------------------------------------------------

struct Row {
  Prediction prediction;
  std::optional<double> measured_ms;

  double predicted_ms() const { return prediction.bound.predicted() * 1e3; }
  /// Of the products with Q, K, P and V that the mask leaves.
  double tflops(double seconds) const {
    const model::Shape& s = prediction.shape;
    const auto queries = static_cast<double>(s.queries), keys = static_cast<double>(s.keys);
    const double seen = s.causal ? queries * (keys - (queries - 1) / 2) : queries * keys;
    return 4.0 * static_cast<double>(s.batch * s.heads_q * s.dim) * seen / seconds / 1e12;
  }
};
struct Answer {
  const Machine* machine = nullptr;
  std::vector<Row> rows;
  std::set<std::string> refused;  ///< a reason each
};

Result<Answer> predict_all(const Machine& machine, const std::vector<model::Shape>& shapes,
                           const std::vector<Recipe>& recipes, Choice choice,
                           const Measured& measured, const model::Compiled& compiled) {
  Answer answer;
  answer.machine = &machine;
  for (const model::Shape& shape : shapes) {
    for (const Recipe& recipe : recipes) {
      const Result<Prediction> p = model::predict(recipe.name, shape, choice, machine, compiled);
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
double clocks(const Machine& machine, const model::Amounts& amounts, int unit) {
  const double rate = machine.per_clock[unit];
  return rate > 0 ? amounts.of[unit] / rate : 0;
}

/// Those of 128 x 128 scores in blocks of however many queries.
double clocks_a_tile(const Machine& machine, const Prediction& p, int unit) {
  return clocks(machine, p.per_tile.tile, unit) * static_cast<double>(model::tile) /
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
      cells.push_back(fixed(clocks_a_tile(*answer.machine, row.prediction, u), 0));
    }
    tiles.add(cells);
  }
  Table table({"B,Hq,Hkv,Sq,Sk,D", "recipe", "kernel", "limit", "bound_us", "TFLOP/s", "in turn",
               "measured_us", "measured/bound"});
  for (const Row& row : answer.rows) {
    const Prediction& p = row.prediction;
    const model::Shape& s = p.shape;
    table.add({fmt::format("{},{},{},{},{},{}{}", s.batch, s.heads_q, s.heads_kv, s.queries, s.keys,
                           s.dim, s.causal ? " causal" : ""),
               p.recipe, p.kernel, name(p.bound.limit), fixed(row.predicted_ms() * 1e3, 1),
               fixed(row.tflops(p.bound.predicted()), 0), fixed(row.tflops(p.bound.in_turn()), 0),
               row.measured_ms ? fixed(*row.measured_ms * 1e3, 1) : "",
               row.measured_ms ? fixed(*row.measured_ms / row.predicted_ms(), 2) : ""});
  }
  print(fmt::format("{}, {:.3f} GHz\n\n{}\n{}", answer.machine->name, answer.machine->hertz / 1e9,
                    tiles.text(), table.text()));
  for (const std::string& why : answer.refused) print("refused: " + why + "\n");
}

Json machine_json(const Machine& m) {
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

Json to_json(const Machine& machine, const Row& row) {
  const Prediction& p = row.prediction;
  Json tile, microseconds;
  for (int u = 0; u < model::units; ++u) {
    const auto unit = static_cast<Unit>(u);
    if (unit != Unit::dram) tile[name(unit)] = clocks_a_tile(machine, p, u);
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
  if (!is_hopper(machine)) {
    json["compiled"] = p.compiled;
    json["tflops"] = row.tflops(p.bound.predicted());
    json["tflops_in_turn"] = row.tflops(p.bound.in_turn());
  }
  if (row.measured_ms) {
    json["measured_ms"] = *row.measured_ms;
    json["measured_over_predicted"] = *row.measured_ms / row.predicted_ms();
  }
  return json;
}

Json to_json(const Answer& answer) {
  Json rows = Json::array();
  for (const Row& row : answer.rows) rows.push_back(to_json(*answer.machine, row));
  return {{"machine", machine_json(*answer.machine)}, {"rows", rows}, {"refused", answer.refused}};
}

Result<std::vector<const Machine*>> parse_devices(const ModelFlags& flags) {
  std::vector<const Machine*> found;
  for (const std::string& key : flags.devices) {
    found.push_back(model::machine_named(key));
    if (found.back() == nullptr) {
      return usage_error(fmt::format("--device {}: no GPU that the model knows", key));
    }
  }
  if (found.size() > 1 && !flags.measured.empty()) {
    return usage_error("--measured: is of one device, and --device names several");
  }
  return found;
}

Result<Answer> answer_for(const Machine& machine, const ModelFlags& flags, const Measured& measured,
                          const model::Compiled& compiled) {
  const Result<std::vector<Recipe>> recipes =
      parse_recipes(flags.recipes.empty() ? default_recipes(machine) : flags.recipes);
  if (!recipes.ok()) return recipes.status();
  const Result<std::vector<model::Shape>> shapes = parse_shapes(flags, machine);
  if (!shapes.ok()) return shapes.status();
  const Choice choice = flags.portable ? Choice::portable : Choice::best;
  return predict_all(machine, *shapes, *recipes, choice, measured, compiled);
}

Status run_model(const ModelFlags& flags) {
  const Result<std::vector<const Machine*>> devices = parse_devices(flags);
  if (!devices.ok()) return devices.status();
  const Result<Measured> measured = Measured::load(flags.measured);
  if (!measured.ok()) return measured.status();
  const Result<model::Compiled> compiled = load_compiled(flags.compiled);
  if (!compiled.ok()) return compiled.status();
  Json answers = Json::array();
  for (const Machine* machine : *devices) {
    const Result<Answer> answer = answer_for(*machine, flags, *measured, *compiled);
    if (!answer.ok()) return answer.status();
    if (flags.json) {
      answers.push_back(to_json(*answer));
    } else {
      print_tables(*answer);
    }
  }
  if (flags.json) print_json(answers.size() == 1 ? answers[0] : Json{{"devices", answers}});
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
  return cli::run_program(program, [&flags] { return cli::run_model(flags); }, argc, argv);
}
