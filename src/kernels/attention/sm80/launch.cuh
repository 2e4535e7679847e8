// Makes the launchers that host.hpp declares. QATTN_INSTANCE(...) instantiates one kernel.
#pragma once

#include "isa/launch.hpp"
#include "kernels/attention/sm80/kernel.cuh"
#include "kernels/attention/sm80/host.hpp"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

template <PrefillConfig C>
isa::LaunchError launch_prefill(const PrefillParams& params, isa::Index3 grid, void* stream) {
  return isa::launch<Prefill<C>>(params, grid, stream);
}

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels

#define QATTN_INSTANCE(D, QK, PV, GENERAL)                                                       \
  template qattn::isa::LaunchError qattn::kernels::launch_prefill<qattn::kernels::PrefillConfig{ \
      D, qattn::isa::Element::QK, qattn::isa::Element::PV, GENERAL}>(                            \
      const qattn::kernels::PrefillParams&, qattn::isa::Index3, void*);
