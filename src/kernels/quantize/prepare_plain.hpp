// The launch of the plain path.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/quantize/prepare_call.hpp"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

template <isa::Element Input>
LaunchError launch_plain(const PlainParams& params, int padded, std::int64_t blocks,
                         Launches& launches) {
  switch (padded) {
    case 64:
      return launches.launch<EncodePlain<Input, 64>>(params, blocks);
    case 96:
      return launches.launch<EncodePlain<Input, 96>>(params, blocks);
    case 128:
      return launches.launch<EncodePlain<Input, 128>>(params, blocks);
    default:
      return launches.launch<EncodePlain<Input, 256>>(params, blocks);
  }
}

/// The plain operands among those of a set of bits by Role, which share input format and padded
/// size.
class PlainRun {
 public:
  PlainRun(const Call& call, unsigned mask, Launches& launches) : call_(call), launches_(launches) {
    for (const Facts& f : call.facts) {
      if ((mask >> static_cast<int>(f.role) & 1) == 0 || !call.plain(f.role)) continue;
      any_ = &f;
      has_[static_cast<int>(f.role)] = true;
      f.role == Role::v ? add_values(f) : add_rows(f);
    }
  }

  LaunchError run() {
    if (any_ == nullptr) return {};
    const bool twice = reads_twice(Role::k) || reads_twice(Role::v);
    const auto all = static_cast<std::int32_t>(call_.problem.heads_kv);
    const std::int32_t heads = twice ? call_.layout.heads_at_once : all;
    params_.turns = all / heads;
    std::int64_t blocks = 0;
    for (const Role role : {Role::q, Role::k, Role::v}) {
      const int i = static_cast<int>(role);
      if (!has_[i]) continue;
      params_.heads[i] = role == Role::q ? heads * static_cast<int>(call_.problem.group()) : heads;
      const std::int64_t count = call_.part(role).slots / slot_tile * params_.heads[i];
      params_.blocks[i] = static_cast<std::int32_t>(count);
      if (reads_twice(role)) add_first_pass(role);
      blocks += params_.turns * count * (reads_twice(role) ? 2 : 1);
    }
    // launch() sees to it that there are fewer than 2^31.
    return any_->tensor.format == Format::bf16
               ? launch_plain<isa::Element::bf16>(params_, any_->padded, blocks, launches_)
               : launch_plain<isa::Element::f16>(params_, any_->padded, blocks, launches_);
  }

 private:
  bool has(Role role) const { return has_[static_cast<int>(role)]; }
  bool reads_twice(Role role) const { return has(role) && call_.reads_twice(role); }

  void add_values(const Facts& f) {
    params_.v = call_.rows[2];
    params_.v_out = call_.prepared_tiles();
    params_.v_shared = joins_groups(f.scaling, f.role)      ? SharedScales::joint
                       : scaled_by_token(f.scaling, f.role) ? SharedScales::none
                                                            : SharedScales::channel;
  }

  void add_rows(const Facts& f) {
    const int i = static_cast<int>(f.role);
    PlainRows& r = params_.row[i];
    r.rows = call_.rows[i];
    r.out = call_.prepared_rows(f.role);
    r.shared = f.scaling.granularity == Granularity::per_block    ? SharedScales::tile
               : f.scaling.granularity == Granularity::per_thread ? SharedScales::thread
                                                                  : SharedScales::none;
    params_.e4m3 = f.format == Format::e4m3;
    if (f.role == Role::k) r.mean = call_.mean(Role::k);
    if (f.role == Role::q && r.out.dot_mean != nullptr) {
      r.mean = call_.mean(Role::k);
      r.heads_per_mean = static_cast<std::int32_t>(call_.problem.group());
    }
  }

  void add_first_pass(Role role) {
    const int i = static_cast<int>(role);
    params_.twice[i] = true;
    params_.sums[i] = at<float>(call_.workspace, call_.part(role).sums);
    params_.result[i] = call_.first_pass_result(role);
    params_.done[i] = at<std::uint32_t>(call_.workspace, call_.part(role).done);
  }

  const Call& call_;
  Launches& launches_;
  PlainParams params_;
  bool has_[3] = {};
  const Facts* any_ = nullptr;
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
