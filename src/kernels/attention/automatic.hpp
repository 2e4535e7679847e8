// What recipe "auto" may be, on every device: the fastest whose error is at most that of int8_full.
#pragma once

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

/// The plan's line, if the caller left the choice to us.
inline std::string text_of(const Automatic& chosen, const Problem& p) {
  return p.recipe.qk == Format::none ? "auto: " + chosen.reason + "\n" : "";
}

}  // namespace qattn::detail
