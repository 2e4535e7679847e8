// quantize() of tensors on a device. Compiled like prepare.cpp: by nvcc for GPUs, by the host
// compiler for the emulator.
#pragma once

#include <cstddef>

#include "isa/launch.hpp"
#include "kernels/quantize/host/quantize_check.hpp"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

/// Bytes of workspace, 16-byte aligned, that a call needs.
std::size_t quantize_workspace(const QuantizeTensors& tensors, const QuantizeOptions& options,
                               const QuantizeFacts& facts);

/// Enqueues a validated call on the stream; allocates nothing and waits for nothing. When the
/// stream has reached this point, the first 8 bytes of the workspace hold
/// QuantizeReport::saturated. cu_seqlens must have stride 1.
isa::LaunchError quantize_tokens(const QuantizeTensors& tensors, const QuantizeOptions& options,
                                 const QuantizeFacts& facts, void* workspace, void* stream);

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
