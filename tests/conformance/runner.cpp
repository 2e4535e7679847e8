#include "conformance/runner.hpp"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <numeric>

namespace qattn::test {
namespace {

constexpr const char* isa_variable = "QATTN_CPU_ISA";
constexpr double nan = std::numeric_limits<double>::quiet_NaN();

}  // namespace

ForceIsa::ForceIsa(const std::string& isa) {
  if (const char* value = std::getenv(isa_variable)) {
    had_ = true;
    before_ = value;
  }
  setenv(isa_variable, isa.c_str(), 1);
  const Result<std::string> used = cpu_isa();
  available_ = used.ok();
  if (used.ok()) {
    EXPECT_EQ(*used, isa) << "forced by " << isa_variable;
  } else {
    EXPECT_EQ(used.status().code(), Code::unsupported) << used.status().message();
    EXPECT_NE(isa, "scalar") << "scalar must run anywhere";
  }
}

ForceIsa::~ForceIsa() {
  if (had_) {
    setenv(isa_variable, before_.c_str(), 1);
  } else {
    unsetenv(isa_variable);
  }
}

std::span<const std::string> isas() {
  static const std::vector<std::string> all = {"scalar", "avx2",         "avx512vnni", "avx512bf16",
                                               "amx",    "neon_dotprod", "neon_i8mm"};
  return all;
}

std::int64_t plan_number(const Plan& plan, const std::string& field) {
  const std::string text = plan.to_string(), key = field + ": ";
  const std::size_t at = text.find(key);
  return at == std::string::npos ? 0 : std::atoll(text.c_str() + at + key.size());
}

ModelOptions Outcome::model_options(Mutation mutation) const {
  return {resolved, split_keys, split_rows, mutation};
}

Outcome run_call(const Call& call, Laid& laid, const Recipe& recipe) {
  Outcome outcome;
  laid.out.clear();
  laid.lse.clear();
  laid.saturated.clear();
  const AttentionTensors tensors = laid.tensors();
  AttentionOptions options = call.options;
  options.recipe = recipe;
  const Result<Plan> planned = plan(tensors, options);
  outcome.status = planned.status();
  if (!planned.ok()) return outcome;
  outcome.resolved = planned->recipe();
  outcome.plan = planned->to_string();
  outcome.split_keys = plan_number(*planned, "split_keys");
  outcome.split_rows = plan_number(*planned, "split_rows");

  constexpr std::size_t alignment = 64;
  const std::size_t bytes = planned->workspace_bytes();
  // Garbage in the workspace must not matter, and nothing may be written past its end.
  constexpr std::size_t guard = 4096;
  std::vector<std::uint8_t> workspace(bytes + alignment + guard, 0xFF);
  const auto address = reinterpret_cast<std::uintptr_t>(workspace.data());
  std::uint8_t* begin = workspace.data() + (alignment - address % alignment) % alignment;
  outcome.status = run(*planned, tensors, options, bytes ? begin : nullptr, bytes);
  if (!outcome.status.ok()) return outcome;
  outcome.violation = laid.violation();
  for (std::uint8_t* at = begin + bytes; at < workspace.data() + workspace.size(); ++at) {
    if (*at != 0xFF) outcome.violation = "a byte past the workspace was written";
  }
  outcome.out = laid.read_out(call);
  outcome.lse = laid.read_lse(call);
  for (std::int64_t n = 0; tensors.saturated.present() && n < 3; ++n) {
    outcome.saturated.push_back(laid.saturated.get({n}));
  }
  return outcome;
}

Distance distance(std::span<const float> out, std::span<const double> want, std::int64_t row,
                  std::int64_t spared) {
  const auto rows = static_cast<std::int64_t>(want.size()) / row;
  if (out.size() != want.size()) return {nan, nan, nan, 0};
  std::vector<double> error(static_cast<std::size_t>(rows), 0.0);
  double norm = 0;
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t n = r * row; n < (r + 1) * row; ++n) {
      const double delta = out[n] - want[n];
      if (std::isnan(delta)) return {nan, nan, nan, r};
      error[r] += delta * delta;
      norm += want[n] * want[n];
    }
  }
  Distance d;
  if (rows == 0) return d;
  d.worst_at = std::max_element(error.begin(), error.end()) - error.begin();
  const double worst = error[d.worst_at];
  const auto ratio = [norm](double e) { return e == 0 ? 0.0 : std::sqrt(e / norm); };
  d.nrmse = ratio(std::accumulate(error.begin(), error.end(), 0.0));
  d.worst_row = ratio(worst * static_cast<double>(rows));
  std::sort(error.begin(), error.end());
  const auto kept = std::max<std::int64_t>(rows - spared, 0);
  d.trimmed = ratio(std::accumulate(error.begin(), error.begin() + kept, 0.0));
  return d;
}

double lse_distance(std::span<const float> lse, std::span<const double> want, std::int64_t spared) {
  if (lse.size() != want.size()) return nan;
  std::vector<double> error;
  for (std::size_t n = 0; n < lse.size(); ++n) {
    if (static_cast<double>(lse[n]) == want[n]) continue;  // infinities too
    const double delta = std::abs(lse[n] - want[n]);
    if (std::isnan(delta)) return nan;
    error.push_back(delta);
  }
  std::sort(error.begin(), error.end(), std::greater<>());
  const auto skip = static_cast<std::size_t>(spared);
  return error.size() > skip ? error[skip] : 0.0;
}

std::int64_t spared_rows(const Recipe& resolved, std::int64_t rows) {
  return resolved.p == Format::f32 ? 0 : 1 + rows / 200;
}

double tight_bound(Format output) { return output == Format::f32 ? 1e-4 : 2e-3; }

double loose_bound(const Recipe& resolved, Format output) {
  const auto of = [](Format format) {
    switch (format) {
      case Format::f32:
        return 1e-5;
      case Format::f16:
        return 2e-3;
      case Format::bf16:
        return 1e-2;
      case Format::s8:
      case Format::u8:
        return 2e-2;
      case Format::nvfp4:
        return 2e-1;
      default:
        return 5e-2;
    }
  };
  return of(resolved.qk) + of(resolved.p) + of(resolved.v) + of(output);
}

void expect_matches_model(const Outcome& outcome, const Call& call, Format output,
                          const ModelOutput& model) {
  ASSERT_TRUE(outcome.status.ok()) << outcome.status.message();
  EXPECT_EQ(outcome.violation, "");
  const std::int64_t spared = spared_rows(outcome.resolved, call.total_rows());
  const Distance d = distance(outcome.out, model.out, call.dim_v, spared);
  EXPECT_LE(d.trimmed, tight_bound(output))
      << "NRMSE " << d.nrmse << ", worst row " << d.worst_at << " of " << call.total_rows()
      << " with " << d.worst_row;
  EXPECT_LE(spared > 0 ? d.worst_row : 0.0, 0.1) << "row " << d.worst_at;
  const double lse = outcome.lse.empty() ? 0 : lse_distance(outcome.lse, model.lse, spared);
  EXPECT_LE(lse, 1e-4) << "LSE";
  EXPECT_LE(outcome.lse.empty() ? 0 : lse_distance(outcome.lse, model.lse), 0.05) << "any LSE";
  for (std::size_t n = 0; n < outcome.saturated.size(); ++n) {
    EXPECT_EQ(outcome.saturated[n], static_cast<double>(model.saturated[n])) << "operand " << n;
  }
}

}  // namespace qattn::test
