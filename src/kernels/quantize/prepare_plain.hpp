// The launches of the plain path.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "kernels/quantize/prepare_call.hpp"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

/// As many blocks as run at a time: each serves many tiles.
template <isa::Element Input, int Channels>
LaunchError launch_plain(const PlainParams& params, int multiprocessors, Launches& launches) {
  using Kernel = EncodePlain<Input, Channels>;
  const int most = multiprocessors * Kernel::min_blocks;
  return launches.launch<Kernel>(params, std::min(params.tiles, most));
}

template <isa::Element Input>
LaunchError launch_plain(const PlainParams& params, int padded, int multiprocessors,
                         Launches& launches) {
  switch (padded) {
    case 64:
      return launch_plain<Input, 64>(params, multiprocessors, launches);
    case 96:
      return launch_plain<Input, 96>(params, multiprocessors, launches);
    case 128:
      return launch_plain<Input, 128>(params, multiprocessors, launches);
    default:
      return launch_plain<Input, 256>(params, multiprocessors, launches);
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
    if (reads_twice(Role::k) || reads_twice(Role::v)) {
      if (LaunchError e = first_pass(); !e.empty()) return e;
      if (LaunchError e = finish(); !e.empty()) return e;
    }
    return encode();
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

  LaunchError launch(PlainParams& params, const bool (&wanted)[3]) {
    std::int64_t tiles = 0;
    for (const Role role : {Role::q, Role::k, Role::v}) {
      const int i = static_cast<int>(role);
      if (!wanted[i]) continue;
      params.count[i] = static_cast<std::int32_t>(call_.blocks(role));
      tiles += call_.blocks(role);
    }
    if (tiles > 0x7fffffff) return "prepare: " + std::to_string(tiles) + " tiles are over 2^31";
    params.tiles = static_cast<std::int32_t>(tiles);
    // Blocks that run while the first pass is finished. More would take from the L2 what that pass
    // left there. Those that need its results could only wait.
    constexpr std::int32_t meanwhile = 1024;
    const bool twice = reads_twice(Role::k) || reads_twice(Role::v);
    if (twice && !params.first_pass && params.row[0].mean == nullptr) {
      params.lead = std::min(meanwhile, params.count[0]);
    }
    const int multiprocessors = call_.layout.multiprocessors;
    return any_->tensor.format == Format::bf16
               ? launch_plain<isa::Element::bf16>(params, any_->padded, multiprocessors, launches_)
               : launch_plain<isa::Element::f16>(params, any_->padded, multiprocessors, launches_);
  }

  LaunchError first_pass() {
    PlainParams params = params_;
    params.first_pass = true;
    const bool wanted[3] = {false, reads_twice(Role::k), reads_twice(Role::v)};
    for (const Role role : {Role::k, Role::v}) {
      params.sums[static_cast<int>(role)] = at<float>(call_.workspace, call_.part(role).sums);
    }
    return launch(params, wanted);
  }

  LaunchError finish() {
    MeanParams params;
    std::int64_t blocks = 0;
    for (const Role role : {Role::k, Role::v}) {
      if (!reads_twice(role)) continue;
      const Facts& f = call_.facts[static_cast<std::size_t>(role)];
      MeanRole& m = params.role[role == Role::v ? 1 : 0];
      m.rows = call_.rows[static_cast<int>(role)];
      m.sums = at<float>(call_.workspace, call_.part(role).sums);
      m.tiles = call_.part(role).slots / slot_tile;
      m.padded = f.padded;
      if (role == Role::v) {
        m.mean = at<float>(call_.workspace, call_.layout.channel_scale);
        m.limit = formats::E4m3::max;  // two_passes() knows no other
      } else {
        m.mean = at<float>(call_.workspace, call_.part(role).mean);
      }
      const std::int64_t units = std::int64_t{m.rows.batches} * m.rows.heads;
      blocks = std::max(blocks, FinishMeans::blocks(units, m.padded));
    }
    return launches_.launch<FinishMeans>(params, blocks, 2);
  }

  LaunchError encode() {
    PlainParams params = params_;
    return launch(params, has_);
  }

  const Call& call_;
  Launches& launches_;
  PlainParams params_;
  bool has_[3] = {};
  const Facts* any_ = nullptr;
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
