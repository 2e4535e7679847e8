// What recipe "auto" may be, on every device: the fastest whose error is at most that of int8_full.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>

#include "core/plan.hpp"
#include "kernels/attention/schedule/average_keys.hpp"

namespace qattn::detail {

struct Automatic {
  std::string recipe, reason;
};

/// May it be anything but int8_full? Not where there are codes or scales, nor where somebody asks
/// for what belongs to codes.
inline bool may_choose(const Problem& p) {
  const Recipe& r = p.recipe;
  const AttentionTensors& t = p.tensors;
  for (const Toggle x : {r.smooth_k, r.smooth_q, r.smooth_v, r.rotate, r.balance_k}) {
    if (x == Toggle::on) return false;
  }
  for (const Scaling& x : {r.q_scale, r.k_scale, r.v_scale}) {
    if (!(x == Scaling{})) return false;
  }
  for (const TensorView* x : {&t.q_scale, &t.k_scale, &t.v_scale, &t.k_mean, &t.v_mean}) {
    if (x->present()) return false;
  }
  return !p.q_codes && !p.k_codes && !p.v_codes && is_float(p.q.format) && is_float(p.k.format) &&
         is_float(p.v.format);
}

/// From how many keys a row on codes gain what making them costs, where each KV head has as many
/// rows of Q as keys; by head dimension, between those of records in proportion.
struct BreakEven {
  int channels;
  double keys;
};

/// What codes a machine's kernels gain most from: of Q and K alone, or of V, too.
struct Codes {
  const char* recipe;
  bool of_v;
  std::array<BreakEven, 3> break_even;
  double causal = 1.0;  ///< how many times that, where rows end at the diagonal
};

inline double break_even(const Codes& codes, int channels) {
  const auto& all = codes.break_even;
  if (channels <= all.front().channels) return all.front().keys;
  for (std::size_t i = 1; i < all.size(); ++i) {
    const BreakEven &low = all[i - 1], &high = all[i];
    if (channels > high.channels) continue;
    const double part =
        static_cast<double>(channels - low.channels) / (high.channels - low.channels);
    return low.keys + part * (high.keys - low.keys);
  }
  return all.back().keys;
}

/// A row's products gain in proportion to its keys, codes cost in proportion to what is coded: with
/// few rows a row of K or V costs twice what one of Q does.
inline bool codes_gain(const Codes& codes, const Problem& p) {
  const auto rows = static_cast<double>(p.group() * p.max_q), keys = static_cast<double>(p.max_k);
  const double of_keys = codes.of_v ? 4.0 : 2.0, coded = of_keys * keys + rows;
  const double gains = rows * static_cast<double>(average_keys(p));
  const double least =
      break_even(codes, std::max(p.d, p.dv)) * (ends_at_diagonal(p) ? codes.causal : 1.0);
  return gains * (of_keys + 1.0) >= least * coded;
}

/// The plan's line, if the caller left the choice to us.
inline std::string text_of(const Automatic& chosen, const Problem& p) {
  return p.recipe.qk == Format::none ? "auto: " + chosen.reason + "\n" : "";
}

}  // namespace qattn::detail
