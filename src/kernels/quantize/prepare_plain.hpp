// The launches of the plain path: where tokens of K or V are read twice, so many heads at a time as
// the L2 keeps from the first time to the second.
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
    const std::int32_t step = twice ? call_.layout.heads_at_once : all;
    for (std::int32_t first = 0; first < all; first += step) {
      const HeadRange heads{first, std::min(step, all - first)};
      if (twice) {
        if (LaunchError e = first_pass(heads); !e.empty()) return e;
        if (LaunchError e = finish(heads); !e.empty()) return e;
      }
      if (LaunchError e = encode(heads); !e.empty()) return e;
    }
    return {};
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

  /// Heads of K and V, and those of Q that belong to them.
  std::int64_t select(HeadRange heads, bool (&wanted)[3], PlainParams& params) const {
    std::int64_t blocks = 0;
    for (const Role role : {Role::q, Role::k, Role::v}) {
      const int i = static_cast<int>(role);
      const auto group = role == Role::q ? static_cast<std::int32_t>(call_.problem.group()) : 1;
      params.heads[i] = {heads.first * group, heads.count * group};
      const std::int64_t count =
          wanted[i] ? call_.part(role).slots / slot_tile * params.heads[i].count : 0;
      params.blocks[i] = static_cast<std::int32_t>(count);
      blocks += count;  // launch() sees to it that this is below 2^31
    }
    return blocks;
  }

  LaunchError launch(const PlainParams& params, std::int64_t blocks) {
    return any_->tensor.format == Format::bf16
               ? launch_plain<isa::Element::bf16>(params, any_->padded, blocks, launches_)
               : launch_plain<isa::Element::f16>(params, any_->padded, blocks, launches_);
  }

  LaunchError first_pass(HeadRange heads) {
    PlainParams params = params_;
    params.first_pass = true;
    bool wanted[3] = {false, reads_twice(Role::k), reads_twice(Role::v)};
    for (const Role role : {Role::k, Role::v}) {
      params.sums[static_cast<int>(role)] = at<float>(call_.workspace, call_.part(role).sums);
    }
    const std::int64_t blocks = select(heads, wanted, params);
    return launch(params, blocks);
  }

  LaunchError finish(HeadRange heads) {
    MeanParams params;
    std::int64_t blocks = 0;
    for (const Role role : {Role::k, Role::v}) {
      if (!reads_twice(role)) continue;
      const Facts& f = call_.facts[static_cast<std::size_t>(role)];
      MeanRole& m = params.role[role == Role::v ? 1 : 0];
      m.rows = call_.rows[static_cast<int>(role)];
      m.heads = heads;
      m.sums = at<float>(call_.workspace, call_.part(role).sums);
      m.tiles = call_.part(role).slots / slot_tile;
      m.padded = f.padded;
      if (role == Role::v) {
        m.mean = at<float>(call_.workspace, call_.layout.channel_scale);
        m.limit = formats::E4m3::max;  // two_passes() knows no other
      } else {
        m.mean = at<float>(call_.workspace, call_.part(role).mean);
      }
      const std::int64_t units = std::int64_t{m.rows.batches} * heads.count;
      blocks = std::max(blocks, FinishMeans::blocks(units, m.padded));
    }
    return launches_.launch<FinishMeans>(params, blocks, 2);
  }

  LaunchError encode(HeadRange heads) {
    PlainParams params = params_;
    const std::int64_t blocks = select(heads, has_, params);
    // Blocks that run while the first pass is finished: about a wave of an H200. More would take
    // from the L2 what that pass left there. Those that need its results could only wait.
    constexpr std::int32_t wave = 1024;
    const bool waits = params.row[0].mean != nullptr;
    if ((params.row[1].mean != nullptr || reads_twice(Role::v)) && !waits) {
      const std::int32_t free =
          reads_twice(Role::v) ? params.blocks[0] : std::max(params.blocks[0], params.blocks[2]);
      params.lead = std::min(wave, free);
    }
    return launch(params, blocks);
  }

  const Call& call_;
  Launches& launches_;
  PlainParams params_;
  bool has_[3] = {};
  const Facts* any_ = nullptr;
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
