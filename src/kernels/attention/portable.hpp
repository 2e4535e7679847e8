// The portable prefill kernel, for kernels that leave some calls or blocks to it.
#pragma once

#include "kernels/attention/mma/host.hpp"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

/// Its plans are MmaPlan.
detail::Kernel sm80_prefill();

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
