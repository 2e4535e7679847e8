// Defines what launchers.hpp declares. QATTN_INSTANCE(...) instantiates one kernel.
#pragma once

#include "kernels/attention/sm90a/kernel.cuh"
#include "kernels/attention/sm90a/launchers.hpp"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

template <Sm90Config C>
isa::LaunchError launch_sm90a(const Sm90Params& params, isa::Index3 grid, void* stream,
                              isa::Start start) {
  return isa::launch<Sm90Attention<C>>(params, grid, stream, start);
}

template <Sm90Config C>
bool compiled_sm90a() {
  return isa::has_code<Sm90Attention<C>>();
}

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels

#define QATTN_SM90A_CONFIG(D, QK, PV, ...) \
  qattn::kernels::Sm90Config { D, qattn::isa::Element::QK, qattn::isa::Element::PV, __VA_ARGS__ }
#define QATTN_INSTANCE(...)                                                                       \
  template qattn::isa::LaunchError qattn::kernels::launch_sm90a<QATTN_SM90A_CONFIG(__VA_ARGS__)>( \
      const qattn::kernels::Sm90Params&, qattn::isa::Index3, void*, qattn::isa::Start);           \
  template bool qattn::kernels::compiled_sm90a<QATTN_SM90A_CONFIG(__VA_ARGS__)>();
