// What the code of a kernel is for.
#pragma once

namespace qattn::isa {

/// A GPU by its maker's number, 90 for sm_90 and 942 for gfx942; `specific`: code with what only
/// such code may use, that no other GPU runs (sm_90a) or, `family`, no other generation (sm_120f).
struct Target {
  int number = 80;
  bool specific = false, family = false;
};

inline constexpr Target sm_80{80}, sm_89{89}, sm_90{90}, sm_90a{90, true}, sm_120a{120, true},
    sm_120f{120, true, true}, gfx942{942, true};

/// Numbers of AMD begin with 900, and NVIDIA's are far below.
constexpr int first_amd = 900;
constexpr bool is_amd(int number) { return number >= first_amd; }
constexpr bool is_amd(Target t) { return is_amd(t.number); }

/// Lanes of a warp, which AMD calls a wavefront.
constexpr int lanes_of_warp(int gpu) { return is_amd(gpu) ? 64 : 32; }

/// May code for `code` use all that a kernel for `kernel` does?
constexpr bool has_all(Target code, Target kernel) {
  if (is_amd(code) != is_amd(kernel)) return false;
  if (kernel.family) {
    return code.specific && code.number / 10 == kernel.number / 10 && code.number >= kernel.number;
  }
  return kernel.specific ? code.specific && code.number == kernel.number
                         : code.number >= kernel.number;
}

/// Does a GPU run such code?
constexpr bool runs_on(Target code, int gpu) {
  if (is_amd(code) != is_amd(gpu)) return false;
  if (code.family) return code.number / 10 == gpu / 10 && code.number <= gpu;
  return code.specific ? code.number == gpu : code.number <= gpu;
}

}  // namespace qattn::isa
