// prepare() for operands that come in codes with built-in scales: what is refused, and the launch.
#pragma once

#include <algorithm>
#include <string>

#include "kernels/quantize/gpu/prepare_call.hpp"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

/// Groups of V's keys must not go over the end of a page, nor may the second level change inside a
/// tile. Empty: neither is so.
inline std::string gather_refusal(const Problem& p, const OperandSpec& f) {
  if (!gathered(f) || f.role != Role::v || !p.paged || p.pages_per_sequence < 2) return {};
  const int group = info(f.format).group;
  const std::string pages = "v: pages of " + std::to_string(p.page_size) + " keys ";
  if (p.page_size % group != 0) {
    return pages + "end inside groups of " + std::to_string(group) +
           ", which GPU kernels read across pages";
  }
  if (f.format == Format::nvfp4 && p.page_size % slot_tile != 0) {
    return pages + "have a v_global each; GPU kernels have one for " + std::to_string(slot_tile) +
           " keys";
  }
  return {};
}

inline GatherRole gather_role(const Call& call, const OperandSpec& f) {
  GatherRole r;
  r.rows = call.rows[static_cast<int>(f.role)];
  r.grouping = grouping_of(call, f);
  r.micro = micro_of(f.format);
  if (f.role != Role::q) r.order = call.layout.needs.key_order;
  r.codes = true;
  r.aligned = aligned_rows(f, r.rows);
  if (f.role != Role::v) r.out = call.prepared_rows(f.role);
  if (f.role == Role::q) r.heads_per_mean = static_cast<std::int32_t>(call.problem.group());
  if (r.out.dot_mean != nullptr) r.dot = call.mean(Role::k);
  r.groups = {f.role, Granularity::group, 0, 0, info(f.format).group};
  r.scales = static_cast<const std::uint8_t*>(f.groups.data);
  std::copy_n(f.groups.stride.begin(), 4, r.stride);
  r.entries = f.groups.shape[2];
  return r;
}

/// The operands among `mask` (bits by Role), which come in such codes and share a padded size.
inline LaunchError gather(const Call& call, unsigned mask, Launches& launches) {
  GatherParams params;
  params.v_out = call.prepared_tiles();
  std::int64_t blocks = 0;
  int padded = 0;
  for (const OperandSpec& f : call.facts) {
    const int i = static_cast<int>(f.role);
    if ((mask >> i & 1) == 0) continue;
    params.role[i] = gather_role(call, f);
    params.blocks[i] = call.blocks(f.role);
    blocks += params.blocks[i];
    padded = f.padded;
  }
  return launches.launch_encoder<Encoder::gather>(params, padded, blocks);
}

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
