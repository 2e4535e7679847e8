// What recipe "auto" may be, on every device: the fastest whose error is at most that of int8_full.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>

#include "core/plan.hpp"

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
  for (const TensorView* x :
       {&t.q_scale, &t.k_scale, &t.v_scale, &t.k_mean, &t.v_mean, &t.saturated}) {
    if (x->present()) return false;
  }
  return !p.q_codes && !p.k_codes && !p.v_codes && is_float(p.q.format) && is_float(p.k.format) &&
         is_float(p.v.format);
}

/// Keys that a block of `rows` queries can see, at most.
inline std::int64_t visible_keys(const Problem& p, std::int64_t rows) {
  if (p.window_left < 0 || p.window_right < 0) return p.max_k;
  // No sum of these overflows: windows are compared with the keys first.
  const std::int64_t left = std::min(p.window_left, p.max_k);
  return std::min(p.max_k, left + std::min(p.window_right, p.max_k) + rows);
}

/// Do most rows see fewer keys than there are, since they end at the diagonal or near it?
inline bool ends_at_diagonal(const Problem& p) {
  return p.window_right >= 0 && p.window_right < p.max_k / 2;
}

/// Keys that a row sees, on average.
inline std::int64_t average_keys(const Problem& p) {
  const std::int64_t average = p.max_k - (ends_at_diagonal(p) ? std::min(p.max_q, p.max_k) / 2 : 0);
  return std::min(average, visible_keys(p, 1));
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
  return gains * (of_keys + 1.0) >= break_even(codes, std::max(p.d, p.dv)) * coded;
}

/// The plan's line, if the caller left the choice to us.
inline std::string text_of(const Automatic& chosen, const Problem& p) {
  return p.recipe.qk == Format::none ? "auto: " + chosen.reason + "\n" : "";
}

}  // namespace qattn::detail
