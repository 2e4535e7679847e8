// The launches of the plain path.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "kernels/quantize/gpu/prepare_call.hpp"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

/// What balances K's channels. `params`: what else the kernel is told.
inline LaunchError find_factors(const Call& call, BalanceParams params, Launches& launches) {
  const OperandSpec& f = call.facts[1];
  params.rows = call.rows[1];
  params.format = f.tensor.format;
  params.seen = call.seen(Role::k);
  params.central = subtracts_mean(call.recipe, f);
  params.factors = at<float>(call.workspace, call.layout.factors);
  params.loud = at<std::uint32_t>(call.workspace, call.layout.loud);
  params.padded = f.padded;
  const std::int64_t blocks = call.problem.batch * f.heads;
  return f.padded <= 128 ? launches.launch<FindBalance<128>>(params, blocks)
                         : launches.launch<FindBalance<256>>(params, blocks);
}

/// The plain operands among those of a set of bits by Role, which share input format and padded
/// size.
class PlainRun {
 public:
  PlainRun(const Call& call, unsigned mask, Launches& launches) : call_(call), launches_(launches) {
    for (const OperandSpec& f : call.facts) {
      if ((mask >> static_cast<int>(f.role) & 1) == 0 || !call.plain(f.role)) continue;
      any_ = &f;
      has_[static_cast<int>(f.role)] = true;
      f.role == Role::v ? add_values(f) : add_rows(f);
      if (f.scale.present()) add_given(f);
    }
  }

  LaunchError run() {
    if (any_ == nullptr) return {};
    if (reads_twice(Role::k) || reads_twice(Role::v)) {
      if (LaunchError e = first_pass(); !e.empty()) return e;
      if (LaunchError e = balance(); !e.empty()) return e;
      if (LaunchError e = finish(); !e.empty()) return e;
    }
    return encode();
  }

  /// What its kernels are told.
  const PlainParams& params() const { return params_; }

 private:
  bool has(Role role) const { return has_[static_cast<int>(role)]; }
  bool reads_twice(Role role) const { return has(role) && call_.reads_twice(role); }

  void add_values(const OperandSpec& f) {
    params_.v = call_.rows[2];
    params_.v_out = call_.prepared_tiles();
    params_.v_shared = joins_groups(f.scaling, f.role)      ? SharedScales::joint
                       : scaled_by_token(f.scaling, f.role) ? SharedScales::none
                                                            : SharedScales::channel;
  }

  void add_rows(const OperandSpec& f) {
    const int i = static_cast<int>(f.role);
    PlainRows& r = params_.row[i];
    r.rows = call_.rows[i];
    r.out = call_.prepared_rows(f.role);
    r.shared = f.scaling.granularity == Granularity::per_block    ? SharedScales::tile
               : f.scaling.granularity == Granularity::per_thread ? SharedScales::thread
                                                                  : SharedScales::none;
    params_.e4m3 = f.format == Format::e4m3;
    const bool queries = f.role == Role::q;
    if (!queries || r.out.dot_mean != nullptr) r.mean = call_.mean(Role::k);
    if (queries) r.heads_per_mean = static_cast<std::int32_t>(call_.problem.group());
    r.factors = at<float>(call_.workspace, call_.layout.factors);
    r.loud = at<std::uint32_t>(call_.workspace, call_.layout.loud);
    if (queries && r.factors != nullptr) r.factors += f.padded;
  }

  void add_given(const OperandSpec& f) {
    const int i = static_cast<int>(f.role);
    given_ = true;
    params_.grouping[i] = grouping_of(call_, f);
    params_.saturated[i] = call_.saturated(f);
  }

  LaunchError launch(GivenParams& params, const bool (&wanted)[3]) {
    std::int64_t blocks = 0;
    for (const Role role : {Role::q, Role::k, Role::v}) {
      const int i = static_cast<int>(role);
      if (!wanted[i]) continue;
      params.blocks[i] = static_cast<std::int32_t>(call_.blocks(role));
      blocks += call_.blocks(role);  // launch() sees to it that this is below 2^31
    }
    // Blocks that run while the means are finished: about a wave of an H200. More would take from
    // the L2 what the first pass left there. Those that need its results could only wait.
    constexpr std::int32_t wave = 1024;
    const bool values = reads_twice(Role::v);
    const bool queries_wait = params.row[0].mean != nullptr || params.row[0].factors != nullptr;
    const bool keys_wait = params.row[1].mean != nullptr || params.row[1].factors != nullptr;
    params.values_lead = queries_wait && !values;
    if ((keys_wait || values) && !(queries_wait && values) && !params.first_pass) {
      const std::int32_t others = values ? 0 : params.blocks[2];
      const std::int32_t first = queries_wait ? others : std::max(params.blocks[0], others);
      params.lead = std::min(wave, first);
    }
    const bool bf16 = any_->tensor.format == Format::bf16;
    const int padded = any_->padded;
    if (given_ && !params.first_pass) {
      params.lead = 0;  // all of its blocks wait
      params.values_lead = false;
      return bf16 ? launches_.launch_encoder<Encoder::given_bf16>(params, padded, blocks)
                  : launches_.launch_encoder<Encoder::given_f16>(params, padded, blocks);
    }
    return bf16 ? launches_.launch_encoder<Encoder::plain_bf16>(params, padded, blocks)
                : launches_.launch_encoder<Encoder::plain_f16>(params, padded, blocks);
  }

  LaunchError first_pass() {
    GivenParams params = params_;
    params.first_pass = true;
    const bool wanted[3] = {false, reads_twice(Role::k), reads_twice(Role::v)};
    for (const Role role : {Role::k, Role::v}) {
      params.sums[static_cast<int>(role)] = at<float>(call_.workspace, call_.part(role).sums);
    }
    return launch(params, wanted);
  }

  /// Beside the end of the first pass, if that reads K.
  LaunchError balance() {
    if (!has(Role::k) || !call_.balances_late()) return {};
    BalanceParams params;
    params.after = true;
    return find_factors(call_, params, launches_);
  }

  LaunchError finish() {
    MeanParams params;
    std::int64_t blocks = 0;
    for (const Role role : {Role::k, Role::v}) {
      if (!reads_twice(role)) continue;
      const OperandSpec& f = call_.facts[static_cast<std::size_t>(role)];
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
    GivenParams params = params_;
    return launch(params, has_);
  }

  const Call& call_;
  Launches& launches_;
  GivenParams params_;
  bool given_ = false;  ///< are there scales that the caller gives?
  bool has_[3] = {};
  const OperandSpec* any_ = nullptr;
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
