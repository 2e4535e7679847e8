#include "conformance/runner.hpp"

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "qattn/reference.hpp"

namespace qattn::test {

ModelOptions Outcome::model_options(Mutation mutation) const {
  ModelOptions options{resolved, split_keys, split_rows, mutation, tile_keys, splits, tile_rows};
  options.lost_mass = lost_mass_of(plan);
  options.whole_references = has_whole_references(plan);
  options.rising_rows = rising_rows;
  options.finds_hidden_keys = plan.find("hidden_keys: none") == std::string::npos;
  options.given_codes = plan.find("kernel: uniform8_decode") != std::string::npos;
  return options;
}

namespace {

// memcmp refuses null, which an empty vector's data() may be.
template <class T>
bool same_vectors(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof a[0]) == 0);
}

/// FNV-1a.
std::uint64_t hash(const std::vector<float>& x, std::uint64_t from = 0xcbf29ce484222325) {
  for (const float value : x) {
    std::uint32_t bits = 0;
    std::memcpy(&bits, &value, sizeof bits);
    for (int i = 0; i < 4; ++i) from = (from ^ (bits >> 8 * i & 0xff)) * 0x100000001b3;
  }
  return from;
}

/// Appends to the file that QATTN_HASHES names, if it does: the running test, the number of its
/// call, and a hash of the bits of outputs and LSE. tools/compare_hashes.py compares two such
/// files.
void record_hash(const Outcome& outcome) {
  const char* file = std::getenv("QATTN_HASHES");
  if (file == nullptr) return;
  static std::string last;
  static int calls = 0;
  const testing::TestInfo& test = *testing::UnitTest::GetInstance()->current_test_info();
  const std::string name = std::string(test.test_suite_name()) + "." + test.name();
  calls = name == last ? calls + 1 : 0;
  last = name;
  std::FILE* to = std::fopen(file, "a");
  ASSERT_NE(to, nullptr) << file;
  std::fprintf(to, "%s %d %016" PRIx64 "\n", name.c_str(), calls,
               hash(outcome.lse, hash(outcome.out)));
  std::fclose(to);
}

}  // namespace

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return same_vectors(a, b);
}

bool same_bits(const Outcome& a, const Outcome& b) {
  return same_bits(a.out, b.out) && same_bits(a.lse, b.lse) &&
         same_vectors(a.saturated, b.saturated);
}

Exact reference(const Call& call, const Laid& laid) {
  Exact exact;
  exact.out.resize(static_cast<std::size_t>(call.total_rows() * call.dim_v));
  exact.lse.resize(static_cast<std::size_t>(call.total_rows()));
  const Status status = reference_attention(laid.tensors(), call.options, exact.out, exact.lse);
  EXPECT_TRUE(status.ok()) << status.message();
  return exact;
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
  outcome.rising_rows = plan_number(*planned, "rising_rows");
  if (const std::int64_t keys = plan_number(*planned, "tile_keys")) outcome.tile_keys = keys;
  const PlanSplitKv spread = split_kv_of(*planned);
  outcome.splits = spread.splits, outcome.tile_rows = spread.tile_rows;

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
  record_hash(outcome);
  return outcome;
}

void expect_matches_model(const Outcome& outcome, const Call& call, Format output,
                          const ModelOutput& model) {
  ASSERT_TRUE(outcome.status.ok()) << outcome.status.message();
  EXPECT_EQ(outcome.violation, "");
  const std::int64_t spared = spared_rows(outcome.resolved, call.total_rows());
  const std::vector<double> want = in_format(model.out, output);
  const Distance d = distance(outcome.out, want, call.dim_v, spared);
  const double step = resolution(model.out, output);
  EXPECT_LE(d.trimmed, tight_bound(output) + step)
      << "NRMSE " << d.nrmse << ", worst row " << d.worst_at << " of " << call.total_rows()
      << " with " << d.worst_row;
  EXPECT_LE(spared > 0 ? d.worst_row : 0.0, 0.1 + step) << "row " << d.worst_at;
  const double lse = outcome.lse.empty() ? 0 : lse_distance(outcome.lse, model.lse, spared);
  // A code of P that falls on the other side of a tie is worth 1e-4 of a short row's sum.
  // So is the rounding of a sum of few codes of 16 bits, but for that of a dominating key.
  const Format p = outcome.resolved.p;
  const bool coarse = p == Format::u8 || p == Format::f16 || p == Format::bf16;
  EXPECT_LE(lse, coarse ? 2e-4 : 1e-4) << "LSE";
  EXPECT_LE(outcome.lse.empty() ? 0 : lse_distance(outcome.lse, model.lse), 0.05) << "any LSE";
  for (std::size_t n = 0; n < outcome.saturated.size(); ++n) {
    EXPECT_EQ(outcome.saturated[n], static_cast<double>(model.saturated[n])) << "operand " << n;
  }
}

}  // namespace qattn::test
