// Which head dimensions there are: the one home of the rule.
#pragma once

#include <cstdint>
#include <string>

#include "core/problem.hpp"

namespace qattn {

/// On CPUs: the longest keys are those of latent attention, 512 channels and 64 with positions.
inline constexpr int most_key_channels = 576, most_value_channels = 512;
/// On GPUs, and multiples of 8 alone.
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
