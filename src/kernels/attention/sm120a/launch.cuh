// Makes the launchers that host.hpp declares. QATTN_INSTANCE(...) instantiates one kernel.
#pragma once

#include "kernels/attention/sm120a/host.hpp"
#include "kernels/attention/sm120a/kernel.cuh"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

template <Sm120Config C>
isa::LaunchError launch_sm120a(const Sm120Params<C>& params, isa::Index3 grid, void* stream) {
  return isa::launch<Sm120Attention<C>>(params, grid, stream);
}

template <Sm120Config C>
bool compiled_sm120a() {
  return isa::has_code<Sm120Attention<C>>();
}

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels

#define QATTN_SM120A_CONFIG(D, QK, QK_GROUP, PV, PV_GROUP, GENERAL)                  \
  qattn::kernels::Sm120Config {                                                      \
    D, qattn::isa::Element::QK, QK_GROUP, qattn::isa::Element::PV, PV_GROUP, GENERAL \
  }
#define QATTN_INSTANCE(...)                                                                     \
  template qattn::isa::LaunchError                                                              \
  qattn::kernels::launch_sm120a<QATTN_SM120A_CONFIG(__VA_ARGS__)>(                              \
      const qattn::kernels::Sm120Params<QATTN_SM120A_CONFIG(__VA_ARGS__)>&, qattn::isa::Index3, \
      void*);                                                                                   \
  template bool qattn::kernels::compiled_sm120a<QATTN_SM120A_CONFIG(__VA_ARGS__)>();
