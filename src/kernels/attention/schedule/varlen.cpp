#include "kernels/attention/schedule/varlen.hpp"

#include <algorithm>
#include <cstdint>

#include "kernels/attention/common/call_params.hpp"
#include "kernels/attention/schedule/varlen.cuh"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

VarlenPlan plan_varlen(const Problem& p, int rows, std::size_t& workspace) {
  VarlenPlan plan;
  if (!p.varlen_q && !p.varlen_k) return plan;
  plan.rows = rows;
  plan.at = (workspace + 63) / 64 * 64;
  const auto blocks = static_cast<std::size_t>(p.varlen_q ? row_blocks(p, rows) : 0);
  workspace = plan.at + (1 + blocks) * 2 * sizeof(std::int32_t);
  return plan;
}

isa::LaunchError locate_varlen(const VarlenPlan& plan, const Problem& p, void* workspace,
                               AttentionParams& a, void* stream, isa::Start& start) {
  if (plan.rows == 0) return {};
  VarlenParams params;
  params.q = rows_of(p, Role::q);
  params.k = rows_of(p, Role::k);
  params.out = a.out;
  params.rows = plan.rows;
  params.q_blocks = p.varlen_q ? a.q_blocks : 0;
  auto* words = reinterpret_cast<std::int32_t*>(static_cast<std::byte*>(workspace) + plan.at);
  params.verdict = reinterpret_cast<std::uint32_t*>(words);
  params.blocks = words + 2;
  params.error = a.error;
  a.verdict = params.verdict;
  if (p.varlen_q) a.varlen_blocks = params.blocks;
  const int needed = (params.q_blocks + VarlenBlocks::threads - 1) / VarlenBlocks::threads;
  const int blocks = std::clamp(needed, 1, isa::multiprocessors());
  const isa::LaunchError e = isa::launch<VarlenBlocks>(params, {blocks, 1, 1}, stream, start);
  start = isa::Start::early;
  return e;
}

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
