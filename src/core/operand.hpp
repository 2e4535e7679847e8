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

/// Refuses a static scale of an operand that was made for codes of another format, or for rows that
/// are not the call's. `name`: of its tensor. `call`: the call's recipe, or a nameless one.
Status check_made_for(const std::string& name, Role role, const Recipe& made_for,
                      const Recipe& call);

/// Refuses what static scales were made for where there are none, of any operand: it would be
/// ignored. `any_scale`: is there one, beside numbers or beside codes? `names`: what to give.
Status check_made_for_something(bool any_scale, const char* names);

/// Are all toggles of a recipe something? `name`: the argument that it is.
Status check_toggles(const char* name, const Recipe& recipe);

inline constexpr Role all_roles[] = {Role::q, Role::k, Role::v};

// Which head dimensions there are: the one home of the rule.

/// On CPUs: the longest keys are those of latent attention, 512 channels and 64 with positions.
inline constexpr int most_key_channels = 576, most_value_channels = 512;
/// On GPUs, Q, K and V.
inline constexpr int most_device_channels = 256;

/// Channels that a row has in products: zeros fill it to whole eights.
constexpr int filled(int channels) { return (channels + 7) / 8 * 8; }

/// Why CPUs cannot compute an operand ("q", "k", "v" or "x") whose rows have `channels`, and what
/// to do; empty: they can.
std::string head_size_refusal(const std::string& name, Role role, std::int64_t channels);

/// The same of GPUs.
std::string device_head_size_refusal(const std::string& name, Role role, std::int64_t channels);

/// Of GPUs, all operands of a call.
Status check_device_head_sizes(const Problem& problem);

}  // namespace qattn
