// Launches in the emulator, with emu::options(). Included by isa/launch.hpp.
#pragma once

#include "isa/emu/options.hpp"
#include "isa/launch.hpp"

namespace qattn::isa {
inline namespace QATTN_TARGET {

/// Runs to the end before it returns; `stream` means nothing here. emu::last_stats() tells what the
/// kernel did.
template <class K>
LaunchError launch(const typename K::Params& params, Index3 grid, void* /*stream*/,
                   Start start = Start::after_all) {
  emu::Options options = emu::options();
  options.cluster = cluster_of<K>();
  options.target = target_of<K>();
  options.warp_lanes = warp_lanes_of<K>();
  options.kernel = &typeid(K);
  if (std::string error = emu::check_target(options); !error.empty()) return error;
  const typename K::Params copy = params;
  const emu::Chain chain = !Dependent<K>            ? emu::Chain::none
                           : start == Start::early  ? emu::Chain::early
                           : start == Start::beside ? emu::Chain::beside
                                                    : emu::Chain::first;
  try {
    emu::run(grid, K::threads, K::shared_bytes, options, [&copy] { K::run(copy); }, chain);
  } catch (const emu::Error& e) {
    return e.what();
  }
  return {};
}

constexpr bool builds_for(Vendor /*vendor*/) { return true; }

inline Gpu gpu(int /*device*/) { return gpu_of(emu::options().architecture); }
inline int code_architecture() {
  const emu::Options& o = emu::options();
  return o.code_architecture > 0 ? o.code_architecture : o.architecture;
}

inline int multiprocessors() { return emu::options().multiprocessors; }

/// The sticky error word of the one emulated device.
inline std::uint32_t* error_word() {
  static std::uint32_t word = 0;
  return &word;
}

template <class K>
bool has_code() {
  return runs_on(target_of<K>(), gpu_of(code_architecture()));
}

}  // namespace QATTN_TARGET
}  // namespace qattn::isa
