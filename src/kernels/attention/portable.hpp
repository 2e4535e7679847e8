// What the portable prefill kernel's plans hold, for kernels that leave some calls or blocks to it.
#pragma once

#include "core/problem.hpp"
#include "kernels/attention/common/params.hpp"
#include "kernels/attention/gpu.hpp"
#include "kernels/attention/schedule/split_kv.hpp"
#include "kernels/attention/schedule/tile_scheduler.hpp"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

struct Sm80Instance {
  Sm80Config config;
  isa::LaunchError (*launch)(const AttentionParams&, isa::Index3, void*);
};

struct Sm80Plan : GpuPlan {
  /// Both have the same tiles. run() takes the plain one, if there is one, where is_unmasked() says
  /// so of the call at hand: a plan knows neither its addresses nor its strides.
  const Sm80Instance *plain = nullptr, *general = nullptr;
  std::size_t bad_keys = 0;  ///< offset in the workspace
  SplitKv split_kv;
  TileScheduler order;
};

detail::Kernel sm80_prefill();

/// Is an operand of the format quantised?
inline bool coded(Format format) { return format == Format::s8 || format == Format::e4m3; }
/// Of a key's and a value's channel together, as kernels read them.
inline int read_bytes(const Recipe& r) { return (coded(r.qk) ? 1 : 2) + (coded(r.v) ? 1 : 2); }

/// Does the plain variant serve the call with these addresses, strides and values?
bool is_unmasked(const Problem& problem, const Recipe& recipe);

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
