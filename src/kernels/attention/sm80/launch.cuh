// Makes the launchers that host.hpp declares. QATTN_INSTANCE(...) instantiates one kernel.
#pragma once

#include "isa/launch.hpp"
#include "kernels/attention/sm80/host.hpp"
#include "kernels/attention/sm80/kernel.cuh"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

template <Sm80Config C>
isa::LaunchError launch_sm80(const AttentionParams& params, isa::Index3 grid, void* stream) {
  return isa::launch<Sm80Attention<C>>(params, grid, stream);
}

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels

#define QATTN_INSTANCE(D, QK, PV, GENERAL)                                                 \
  template qattn::isa::LaunchError qattn::kernels::launch_sm80<qattn::kernels::Sm80Config{ \
      D, qattn::isa::Element::QK, qattn::isa::Element::PV, GENERAL}>(                      \
      const qattn::kernels::AttentionParams&, qattn::isa::Index3, void*);
