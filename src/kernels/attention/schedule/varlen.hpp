// What packed sequences need besides: a table of the sequences of blocks of rows, and a look at
// cu_seqlens (varlen.cuh).
#pragma once

#include <cstddef>

#include "core/problem.hpp"
#include "isa/launch.hpp"
#include "kernels/attention/common/params.hpp"

namespace qattn::kernels {

/// Room in the workspace.
struct VarlenPlan {
  int rows = 0;        ///< of a block; 0: nothing is packed
  std::size_t at = 0;  ///< a verdict, and the table
};

inline namespace QATTN_TARGET {

/// Takes room behind `workspace`, which grows.
VarlenPlan plan_varlen(const Problem& problem, int rows, std::size_t& workspace);

/// Enqueues what makes the table, if sequences are packed, and says where it is. `start`: when the
/// kernel may start; afterwards, when the one behind it may.
isa::LaunchError locate_varlen(const VarlenPlan& plan, const Problem& problem, void* workspace,
                               AttentionParams& params, void* stream, isa::Start& start);

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
