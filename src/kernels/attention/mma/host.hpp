// What plans have whose kernel is MmaAttention: which variant runs, and the launches of a call.
#pragma once

#include "core/problem.hpp"
#include "kernels/attention/common/supports.hpp"
#include "kernels/attention/gpu.hpp"
#include "kernels/attention/mma/ring_params.hpp"
#include "kernels/attention/mma/shape.hpp"
#include "kernels/attention/schedule/split_kv.hpp"
#include "kernels/attention/schedule/tile_scheduler.hpp"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

struct MmaInstance {
  MmaConfig config;
  isa::LaunchError (*launch)(const AttentionParams&, isa::Index3, void*) = nullptr;
  isa::LaunchError (*launch_ring)(const RingParams&, isa::Index3, void*) = nullptr;
};

struct MmaPlan : GpuPlan {
  /// Both have the same tiles. run() takes the plain one, if there is one, where is_unmasked() says
  /// so of the call at hand, and TMA can read its operands if it has a ring: a plan knows neither
  /// addresses nor strides.
  const MmaInstance *plain = nullptr, *general = nullptr;
  std::size_t bad_keys = 0;  ///< offset in the workspace
  SplitKv split_kv;
  TileScheduler order;
};

/// Of a key's and a value's channel together, as kernels read them.
inline int read_bytes(const Recipe& r) {
  const auto bits = [](Format f) { return coded(f) ? info(f).bits : 16; };
  return (bits(r.qk) + bits(r.v) + 7) / 8;
}

/// Does the plain variant of a kernel for so many channels serve the call with these addresses,
/// strides and values?
bool is_unmasked(const Problem& problem, const Recipe& recipe, int channels);

PrepareNeeds needs_of(const Problem& problem, const Recipe& recipe);

/// The formats that go together, and how inputs must come for them. `serves`: the formats with
/// scales that have products.
Status check_formats(const Problem& problem, const Recipe& recipe, bool (*serves)(Format));

/// Options without an effect, and lengths.
Status check_options(const Problem& problem, const Recipe& recipe);
/// What tiles cannot do, whatever the GPU. `config`: the general variant's.
Status check_tiles(const Problem& problem, const Recipe& recipe, const MmaConfig& config);

/// Fills in what follows from the recipe and the variants. `resident`: blocks that a multiprocessor
/// has at a time.
void plan_mma(MmaPlan& plan, const Problem& problem, int resident);

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
