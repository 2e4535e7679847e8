#include "measure.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>

namespace qattn::cli {

namespace {

constexpr std::int64_t sampled_rows = 256;
constexpr double full_reference_cost = 2e10;
constexpr int max_runs = 25;

/// Dense (B, Hq, Sq, Dv) memory, as the reference has it, seen in the order of `layout`.
TensorView output_view(io::Array& out, Layout layout) {
  TensorView view = out.view();
  if (layout == Layout::bshd) {
    std::swap(view.shape[1], view.shape[2]);
    std::swap(view.stride[1], view.stride[2]);
  }
  return view;
}

/// The rows of a dense (B, Hq, Sq, Dv) tensor that the reference has.
template <class T>
std::vector<T> gather(std::span<const T> dense, const Geometry& g,
                      const std::vector<std::int64_t>& rows) {
  if (rows.empty()) return {dense.begin(), dense.end()};
  std::vector<T> gathered;
  for (std::int64_t head = 0; head < g.batch * g.heads_q; ++head) {
    for (const std::int64_t row : rows) {
      const auto from = dense.begin() + (head * g.queries + row) * g.dim_v;
      gathered.insert(gathered.end(), from, from + g.dim_v);
    }
  }
  return gathered;
}

std::int64_t bytes_of(const TensorView& view) {
  if (!view.present()) return 0;
  return io::dense_bytes(view.format, {view.shape.begin(), view.shape.begin() + view.rank})
      .value_or(0);
}

/// Bytes of one operand as the plan multiplies it: as it is, or codes, scales and mean.
Result<double> operand_bytes(const TensorView& x, Format format, Layout layout,
                             QuantizeOptions options) {
  TensorView plain = x;
  plain.format = format == Format::none ? Format::f16 : format;
  if (info(plain.format).scale == Format::none) return static_cast<double>(bytes_of(plain));
  options.format = format;
  options.layout = layout;
  const Result<QuantizeShapes> shapes = quantize_shapes(x, options);
  if (!shapes.ok()) return shapes.status();
  return static_cast<double>(bytes_of(shapes->codes) + bytes_of(shapes->scale) +
                             bytes_of(shapes->global) + bytes_of(shapes->mean));
}

Result<double> memory_vs_f16(const AttentionTensors& t, const Recipe& r, Layout layout) {
  struct Operand {
    const TensorView& x;
    Format format;
    Role role;
    const Scaling& scaling;
    Toggle smooth;
  };
  const Operand operands[] = {{t.q, r.qk, Role::q, r.q_scale, r.smooth_q},
                              {t.k, r.qk, Role::k, r.k_scale, r.smooth_k},
                              {t.v, r.v, Role::v, r.v_scale, r.smooth_v}};
  double bytes = 0, half = 0;
  for (const Operand& operand : operands) {
    QuantizeOptions options;
    options.role = operand.role;
    options.scaling = operand.scaling;
    options.smooth = operand.smooth == Toggle::on;
    const Result<double> own = operand_bytes(operand.x, operand.format, layout, options);
    if (!own.ok()) return own;
    bytes += *own;
    TensorView as_half = operand.x;
    as_half.format = Format::f16;
    half += static_cast<double>(bytes_of(as_half));
  }
  return bytes / half;
}

/// Rows that hold NaN or Inf, of all rows: the reference may have a sample.
std::int64_t nan_rows(std::span<const float> dense, std::int64_t dim) {
  std::int64_t count = 0;
  for (auto row = dense.begin(); row != dense.end(); row += dim) {
    count += std::all_of(row, row + dim, [](float x) { return std::isfinite(x); }) ? 0 : 1;
  }
  return count;
}

double seconds(const std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

/// Median seconds of a run. A first run warms caches and threads up; where it alone is over the
/// budget it counts, so that slow recipes do not cost twice.
template <class Run>
Result<double> time_runs(const TimingOptions& timing, const Run& run) {
  std::vector<double> times;
  double total = 0;
  const auto timed = [&]() -> Status {
    const auto begin = std::chrono::steady_clock::now();
    Status status = run();
    times.push_back(seconds(begin));
    total += times.back();
    return status;
  };
  if (Status status = timed(); !status.ok()) return status;
  if (timing.runs > 0 || total < timing.budget_s) {
    times.clear();
    total = 0;
    const int limit = timing.runs > 0 ? timing.runs : max_runs;
    for (int i = 0; i < limit && (timing.runs > 0 || i < 1 || total < timing.budget_s); ++i) {
      if (Status status = timed(); !status.ok()) return status;
    }
  }
  const auto middle = times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2);
  std::nth_element(times.begin(), middle, times.end());
  return *middle;
}

}  // namespace

std::vector<std::int64_t> sample_rows(std::int64_t queries, std::int64_t count) {
  std::vector<std::int64_t> rows;
  if (count >= queries) return rows;
  for (std::int64_t i = 0; i < count; ++i) {
    rows.push_back(count == 1 ? 0 : i * (queries - 1) / (count - 1));
  }
  return rows;
}

std::int64_t default_reference_rows(const Geometry& g) {
  return g.flops(false) / 2 <= full_reference_cost ? g.queries : sampled_rows;
}

Result<Reference> make_reference(const Case& c, std::int64_t rows,
                                 const std::function<void(double)>& progress) {
  const Geometry& g = c.geometry;
  Reference reference{sample_rows(g.queries, rows), {}};
  std::vector<double> dense(static_cast<std::size_t>(g.batch * g.heads_q * g.queries * g.dim_v));
  AttentionTensors tensors = c.operands.tensors();
  tensors.out = shapes_only(g, c.options.layout, Format::f32).out;
  ReferenceOptions options;
  options.rows = reference.rows;
  options.threads = c.options.threads;
  options.progress = progress;
  if (Status s = reference_attention(tensors, c.options, dense, {}, options); !s.ok()) return s;
  reference.values = gather<double>(dense, g, reference.rows);
  return reference;
}

Result<Measurement> measure(const Case& c, const Recipe& recipe, const Reference* reference,
                            const TimingOptions& timing) {
  AttentionTensors tensors = c.operands.tensors();
  AttentionOptions options = c.options;
  options.recipe = recipe;
  const Geometry& g = c.geometry;
  tensors.out = shapes_only(g, options.layout, Format::f32).out;
  // Refusals come before memory is asked for.
  if (const Result<Plan> first = plan(tensors, options); !first.ok()) return first.status();

  io::Array out = io::zeros(Format::f32, {g.batch, g.heads_q, g.queries, g.dim_v});
  tensors.out = output_view(out, options.layout);
  const Result<Plan> planned = plan(tensors, options);
  if (!planned.ok()) return planned.status();
  io::Bytes workspace(planned->workspace_bytes());
  const Result<double> time = time_runs(
      timing, [&] { return run(*planned, tensors, options, workspace.data(), workspace.size()); });
  if (!time.ok()) return time.status();

  Measurement result;
  result.recipe = recipe.name;
  result.kernel = planned->kernel();
  result.ms = *time * 1e3;
  const Result<double> memory = memory_vs_f16(tensors, planned->recipe(), options.layout);
  if (!memory.ok()) return memory.status();
  result.memory_vs_f16 = *memory;
  const std::span<const float> dense(reinterpret_cast<const float*>(out.bytes.data()),
                                     static_cast<std::size_t>(out.count()));
  result.rows = g.batch * g.heads_q * g.queries;
  result.nan_rows = nan_rows(dense, g.dim_v);
  if (reference != nullptr) {
    const std::vector<float> rows = gather<float>(dense, g, reference->rows);
    result.error = qattn::compare(rows, reference->values, g.dim_v);
  }
  return result;
}

Result<Comparison> compare_recipes(const Case& c, const std::vector<Recipe>& list,
                                   const Reference* reference, const TimingOptions& timing,
                                   const std::function<void(std::string_view)>& step) {
  const Result<Recipe> f32 = recipe_named("f32");
  if (!f32.ok()) return f32.status();
  Comparison comparison;
  comparison.f32_ms = std::numeric_limits<double>::quiet_NaN();
  step("f32");
  const Result<Measurement> baseline = measure(c, *f32, reference, timing);
  if (baseline.ok()) comparison.f32_ms = baseline->ms;

  for (const Recipe& recipe : list) {
    if (recipe.name != "f32") step(recipe.name);
    const Result<Measurement> result =
        recipe.name == "f32" ? baseline : measure(c, recipe, reference, timing);
    if (result.ok()) {
      comparison.results.push_back(*result);
    } else if (result.status().code() == Code::unsupported) {
      comparison.skipped.push_back({recipe.name, result.status().message()});
    } else {
      return result.status();
    }
  }
  if (comparison.results.empty() && !comparison.skipped.empty()) {
    return Status(Code::unsupported, fmt::format("no recipe is possible on this device\n{}",
                                                 text_of(comparison.skipped)));
  }
  return comparison;
}

void warn_of_nan(const std::string& where, const std::vector<Measurement>& results) {
  std::int64_t of_reference = 0;
  for (const Measurement& m : results) {
    of_reference = std::max(of_reference, m.error.nan_ref_rows);
    if (m.nan_rows == 0) continue;
    warn_of_nan(fmt::format("{}{}: {} of {} output rows hold NaN or Inf", where, m.recipe,
                            m.nan_rows, m.rows));
  }
  if (of_reference == 0) return;
  warn_of_nan(fmt::format("{}float64: {} of {} rows hold NaN or Inf, which errors leave out", where,
                          of_reference, results.front().error.rows));
}

Json to_json(const std::vector<Skipped>& skipped) {
  Json list = Json::array();
  for (const Skipped& s : skipped) list.push_back({{"recipe", s.recipe}, {"reason", s.reason}});
  return list;
}

std::string text_of(const std::vector<Skipped>& skipped) {
  std::string text;
  for (const Skipped& s : skipped) text += fmt::format("{}: skipped: {}\n", s.recipe, s.reason);
  return text;
}

}  // namespace qattn::cli
