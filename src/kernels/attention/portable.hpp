// The portable prefill kernel, for kernels that leave some calls or blocks to it.
#pragma once

#include "kernels/attention/mma/host.hpp"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

/// Its plans are MmaPlan.
detail::Kernel sm80_prefill();

/// Its general instance for 64 or 128 channels, in tiles of 128 rows; null: there is none.
const MmaInstance* portable_instance(int channels, isa::Element qk, isa::Element pv);

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
