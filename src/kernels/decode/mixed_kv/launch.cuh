// Makes the launchers that host.hpp declares. QATTN_INSTANCE(...) instantiates one kernel with what
// goes before and behind it.
#pragma once

#include "isa/launch.hpp"
#include "kernels/decode/mixed_kv/combine.cuh"
#include "kernels/decode/mixed_kv/host.hpp"
#include "kernels/decode/mixed_kv/kernel.cuh"
#include "kernels/decode/mixed_kv/prepare.cuh"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

template <DecodeConfig C>
isa::LaunchError launch_decode(const DecodeParams& p, void* stream) {
  const auto grid = [](std::int64_t blocks) { return isa::Index3{static_cast<int>(blocks), 1, 1}; };
  isa::LaunchError e =
      isa::launch<DecodePrepare<C.d>>(p, grid(p.units() + p.pairs() * p.parts()), stream);
  constexpr isa::Start early = isa::Start::early;
  if (e.empty()) e = isa::launch<Decode<C>>(p, grid(p.blocks), stream, early);
  if (e.empty()) e = isa::launch<DecodeCombine<C.dv>>(p, grid(p.combine_blocks()), stream, early);
  return e;
}

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels

#define QATTN_INSTANCE(D, DV, N, BY_CHANNEL, SMALL)                                         \
  template qattn::isa::LaunchError                                                          \
  qattn::kernels::launch_decode<qattn::kernels::DecodeConfig{D, DV, N, BY_CHANNEL, SMALL}>( \
      const qattn::kernels::DecodeParams&, void*);
