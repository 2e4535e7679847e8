// The KV cache's kernels of this target. Compiled by nvcc for GPUs, by the host compiler for the
// emulator.
#pragma once

#include "isa/isa.hpp"
#include "kvcache/gpu/device_ops.hpp"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

const kv::DeviceOps& kv_device_ops();

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
