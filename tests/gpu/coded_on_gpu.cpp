// Decode over codes of K and V (kernels/decode/uniform8/kernel.cuh) on a GPU: every case of the
// table against the semantic model.
//   coded_on_gpu [--exact] [--run-only]: as sanitize_kernels has them
#include <algorithm>
#include <cstdio>
#include <cstring>

#include "gpu/device_call.hpp"
#include "support/coded_call.hpp"
#include "support/measure.hpp"
#include "support/model.hpp"

namespace qattn::test {
namespace {

/// Empty: as it should be.
std::string fault_of(const CodedCase& c, Memory memory, bool compare, double& worst) {
  const Call call = make_call(c.feature, 46);
  Laid laid = lay_out(call, c.feature.how);
  if (Status s = put_codes(laid, c.recipe); !s.ok()) return s.message();
  if (c.page_size > 0) put_into_pages(laid, call, c.page_size);
  laid.freeze();
  const DeviceOutcome now = run_on_device(call, laid, c.recipe, memory);
  if (!now.status.ok()) return now.status.message();
  if (!now.violation.empty()) return now.violation;
  if (now.plan.find("kernel: uniform8_decode\n") == std::string::npos) return now.plan;
  const DeviceOutcome again = run_on_device(call, laid, c.recipe, memory);
  const auto same = [](const std::vector<float>& a, const std::vector<float>& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
  };
  if (!same(now.out, again.out) || !same(now.lse, again.lse)) return "a second run differs";
  if (!compare) return {};
  ModelOptions options{.recipe = now.resolved, .tile_keys = now.tile_keys};
  options.lost_mass = lost_mass_of(now.plan);
  options.whole_references = has_whole_references(now.plan);
  options.given_codes = true;
  options.splits = now.splits, options.tile_rows = now.tile_rows;
  const ModelOutput model = model_attention(call, options);
  const double error = distance(now.out, model.out, call.dim_v).nrmse;
  const double lse = now.lse.empty() ? 0 : lse_distance(now.lse, model.lse);
  worst = std::max(worst, error);
  if (error <= tight_bound(Format::f16) && lse <= 1e-3) return {};
  return "NRMSE " + std::to_string(error) + ", LSE " + std::to_string(lse);
}

}  // namespace
}  // namespace qattn::test

int main(int argc, char** argv) {
  using namespace qattn::test;
  Memory memory = Memory::guarded;
  bool compare = true;
  for (int n = 1; n < argc; ++n) {
    const std::string argument = argv[n];
    if (argument == "--exact") memory = Memory::exact;
    if (argument == "--run-only") compare = false;
  }
  int failures = 0;
  double worst = 0;
  const std::vector<CodedCase> cases = coded_decode_cases();
  for (const CodedCase& c : cases) {
    const std::string fault = fault_of(c, memory, compare, worst);
    if (fault.empty()) continue;
    ++failures;
    std::printf("FAIL %s: %s\n", c.name.c_str(), fault.c_str());
  }
  std::printf("%zu cases of coded decode, worst NRMSE %.2e, %d failures\n", cases.size(), worst,
              failures);
  return failures == 0 ? 0 : 1;
}
