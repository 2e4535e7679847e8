// One of Q, K and V with everything of a call and of a recipe that belongs to it: what asks
// "whose?" asks here.
#pragma once

#include "core/problem.hpp"

namespace qattn {

/// Of a problem, which must outlive it.
struct Operand {
  Role role;
  const char* name;           ///< "q", "k" or "v"
  const TokenTensor& tokens;  ///< numbers or codes
  bool codes;                 ///< it comes quantised
  /// Scales, the second level of nvfp4, and the mean that codes lack: each as given or absent.
  const TensorView &scale, &global, &mean;
  const TensorView &cu_seqlens, &seqused;
  bool varlen, paged;
  std::int64_t heads;
  std::int64_t longest;    ///< sequence that there can be
  std::int64_t in_memory;  ///< tokens of all sequences
  int channels;
};
Operand operand_of(const Problem& problem, Role role);

/// What a recipe asks of an operand.
struct OperandRecipe {
  Format format;  ///< of its codes
  Scaling scaling;
  Toggle smooth;
};
OperandRecipe operand_recipe(const Recipe& recipe, Role role);

inline constexpr Role all_roles[] = {Role::q, Role::k, Role::v};

}  // namespace qattn
