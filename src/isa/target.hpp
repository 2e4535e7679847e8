// What the code of a kernel is for.
#pragma once

#include "isa/gpu.hpp"

namespace qattn::isa {

/// Code by its GPU's number; `specific`: with what only such code may use, that no other GPU runs
/// (sm_90a) or, `family`, no other generation (sm_120f).
struct Target {
  int number = 80;
  bool specific = false, family = false;
};

inline constexpr Target sm_80{80}, sm_89{89}, sm_90{90}, sm_90a{90, true}, sm_120a{120, true},
    sm_120f{120, true, true}, gfx942{942, true};

constexpr Vendor vendor_of(Target t) { return vendor_of(t.number); }

/// May code for `code` use all that a kernel for `kernel` does?
constexpr bool has_all(Target code, Target kernel) {
  if (vendor_of(code) != vendor_of(kernel)) return false;
  if (kernel.family) {
    return code.specific && code.number / 10 == kernel.number / 10 && code.number >= kernel.number;
  }
  return kernel.specific ? code.specific && code.number == kernel.number
                         : code.number >= kernel.number;
}

/// Does a GPU run such code?
constexpr bool runs_on(Target code, const Gpu& gpu) {
  if (vendor_of(code) != gpu.vendor) return false;
  if (code.family) return code.number / 10 == gpu.number / 10 && code.number <= gpu.number;
  return code.specific ? code.number == gpu.number : code.number <= gpu.number;
}

}  // namespace qattn::isa
