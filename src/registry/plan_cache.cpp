#include "core/plan_cache.hpp"

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "core/threads.hpp"
#include "kernels/cpu/words.hpp"

namespace qattn::detail {
namespace {

constexpr std::size_t most_plans = 16;  // layers of a model share a few; a plan is some KiB

/// The last one used first. A list a thread needs no lock; plans themselves may be shared.
thread_local std::vector<std::pair<PlanKey, Plan>> plans;

/// Kernels ask for alignments up to that of a tensor map's 128 bytes.
void forget_address(TensorView& view) {
  view.data = reinterpret_cast<void*>(reinterpret_cast<std::uintptr_t>(view.data) % 128);
}

}  // namespace

PlanKey plan_key(const AttentionTensors& tensors, const AttentionOptions& options) {
  PlanKey key{tensors, options, cpu::select_words().words, most_threads(options.threads)};
  for (const AttentionTensor& x : all_attention_tensors) forget_address(key.tensors.*x.view);
  return key;
}

std::optional<Plan> known_plan(const PlanKey& key) {
  const auto found = std::find_if(plans.begin(), plans.end(),
                                  [&](const auto& entry) { return entry.first == key; });
  if (found == plans.end()) return {};
  std::rotate(plans.begin(), found, found + 1);
  return plans.front().second;
}

void keep_plan(const PlanKey& key, const Plan& plan) {
  if (plans.size() == most_plans) plans.pop_back();
  plans.emplace(plans.begin(), key, plan);
}

}  // namespace qattn::detail
