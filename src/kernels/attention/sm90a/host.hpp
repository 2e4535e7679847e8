// What the hosts of Hopper's two prefill kernels share.
#pragma once

#include <cstdint>
#include <string>

#include "isa/launch.hpp"
#include "kernels/attention/gpu.hpp"
#include "kernels/attention/schedule/split_kv.hpp"
#include "kernels/attention/schedule/tile_scheduler.hpp"
#include "kernels/attention/sm90a/launchers.hpp"
#include "kernels/operand/map_rows.hpp"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

/// For 16-bit V.
detail::Kernel sm90a_16bit_prefill();

struct Sm90Instance {
  Sm90Config config;
  isa::LaunchError (*launch)(const Sm90Params&, isa::Index3, void*, isa::Start);
  bool (*compiled)();
};
/// The padded head dimensions of the kernels that serve a problem.
struct Sm90Dims {
  int d, dv;
};
Sm90Dims sm90a_dims(const Problem& problem);

/// That one, or the one with P in the other place; null: there is none.
const Sm90Instance* find_sm90a(Sm90Config config);

/// Whether the current device can run the instance, and index what the problem has.
Status check_sm90a(const Problem& problem, const Sm90Instance* instance,
                   const PrepareLayout& layout);

/// What plan_split_kv() and split_last() are told of a kernel that so many multiprocessors run.
SplitKvLimits sm90a_limits(const Sm90Config& config, int multiprocessors);

/// Does something touch single scores of every tile?
bool is_general(const Problem& problem, const Recipe& recipe);

/// The maps of Q's and K's codes in the workspace. Empty, or why there are none.
std::string map_codes(const Sm90Config& config, const Problem& problem, Sm90Params& params);

inline constexpr int sm90a_rows = 128;  ///< of a block of work of two consumers

/// The kernel's part of a plan's text.
std::string sm90a_text(const Sm90Config& config);

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
