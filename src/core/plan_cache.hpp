// Plans that a thread made before. A call's plan follows from a key; calls with equal keys have
// one.
#pragma once

#include <optional>

#include "qattn/attention.hpp"

namespace qattn::detail {

/// All that a plan follows from: the call without its addresses, of which alignment is left, and
/// what else plans read of this process.
struct PlanKey {
  AttentionTensors tensors;  ///< data: the address modulo 128
  AttentionOptions options;
  const void* words = nullptr;  ///< of the CPU, by QATTN_CPU_ISA
  int threads = 0;              ///< that a call may have here
  bool operator==(const PlanKey&) const = default;
};

PlanKey plan_key(const AttentionTensors& tensors, const AttentionOptions& options);

/// Of this thread's last 16 keys.
std::optional<Plan> known_plan(const PlanKey& key);
void keep_plan(const PlanKey& key, const Plan& plan);

}  // namespace qattn::detail
