// qattn compare: error against float64 and speed of recipes on the caller's tensors.
#include <fmt/format.h>

#include "call.hpp"
#include "commands.hpp"
#include "console.hpp"
#include "measure.hpp"

namespace qattn::cli {

namespace {

struct CompareFlags {
  OperandFlags operands;
  CallFlags call;
  std::string recipes = "all";
  std::int64_t reference_rows = 0;
  int runs = 0;
  bool json = false;

  void add_to(CLI::App& app) {
    operands.add_to(app);
    app.add_option("--recipe", recipes, "all (default) or names separated by commas");
    call.add_to(app);
    app.add_option("--ref-rows", reference_rows,
                   "query rows compared with float64 (default: all if that is cheap, else 256)");
    app.add_option("--runs", runs, "timed runs per recipe (default: as many as 0.3 s allow)")
        ->check(CLI::PositiveNumber);
    app.add_flag("--json", json, "print JSON");
  }
};

void print_table(const Comparison& comparison, std::int64_t rows, std::int64_t queries) {
  Table table(
      {"recipe", "nrmse", "max_abs_err", "cosine", "worst_row", "nan_rows", "ms", "vs_f32"});
  for (const Measurement& m : comparison.results) {
    table.add({m.recipe, scientific(m.error.nrmse), scientific(m.error.max_abs_err),
               fixed(m.error.cosine, 6), fixed(m.error.worst_row_cosine, 6),
               std::to_string(m.nan_rows), fixed(m.ms, 2), fixed(comparison.speedup(m), 2) + "x"});
  }
  print(table.text());
  print(fmt::format("errors against float64 on {} of {} query rows\n", rows, queries));
  print(text_of(comparison.skipped));
}

Json to_json(const Comparison& comparison, std::int64_t rows) {
  Json results = Json::array();
  for (const Measurement& m : comparison.results) {
    results.push_back({{"recipe", m.recipe},
                       {"nrmse", m.error.nrmse},
                       {"max_abs_err", m.error.max_abs_err},
                       {"cosine", m.error.cosine},
                       {"worst_row_cosine", m.error.worst_row_cosine},
                       {"output_rows", m.rows},
                       {"nan_rows", m.nan_rows},
                       {"reference_nan_rows", m.error.nan_ref_rows},
                       {"ms", m.ms},
                       {"speedup_vs_f32", comparison.speedup(m)}});
  }
  return {{"results", results}, {"skipped", to_json(comparison.skipped)}, {"reference_rows", rows}};
}

Status run_compare(const CompareFlags& flags) {
  const Result<AttentionOptions> options = flags.call.options();
  if (!options.ok()) return options.status();
  const Result<std::vector<Recipe>> list = parse_recipes(flags.recipes);
  if (!list.ok()) return list.status();
  if (flags.reference_rows < 0) {
    return usage_error(fmt::format("--ref-rows {}: at least 0", flags.reference_rows));
  }
  if (flags.runs < 0) return usage_error(fmt::format("--runs {}: at least 0", flags.runs));
  Result<Operands> operands = Operands::load(flags.operands);
  if (!operands.ok()) return operands.status();
  const Result<Case> call = make_case(std::move(*operands), *options);
  if (!call.ok()) return call.status();

  const std::int64_t queries = call->geometry.queries;
  const std::int64_t rows =
      std::min(queries, flags.reference_rows > 0 ? flags.reference_rows
                                                 : default_reference_rows(call->geometry));
  Result<Comparison> comparison = Status();
  {
    Progress progress(static_cast<double>(list->size()) + 2);
    const Result<Reference> reference =
        make_reference(*call, rows, [&](double part) { progress.show(part, "float64 reference"); });
    if (!reference.ok()) return reference.status();
    double done = 1;
    comparison = compare_recipes(*call, *list, &*reference, {.runs = flags.runs},
                                 [&](std::string_view recipe) { progress.show(done++, recipe); });
  }
  if (!comparison.ok()) return comparison.status();
  if (flags.json) {
    print_json(to_json(*comparison, rows));
  } else {
    print_table(*comparison, rows, queries);
  }
  warn_of_nan("", comparison->results);
  return {};
}

}  // namespace

void add_compare(CLI::App& program, Action& chosen) {
  add_command<CompareFlags>(program, chosen, "compare",
                            "error against float64 and speed of recipes on your tensors; nan_rows: "
                            "output rows with NaN or Inf, for which the exit status is 4",
                            run_compare);
}

}  // namespace qattn::cli
