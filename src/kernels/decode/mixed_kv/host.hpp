// Decode attention on a GPU over a cache on it: a device array of slots instead of a list of
// sequences, capacities instead of lengths, so that a captured call replays on the cache as it then
// is. Meaning: docs/NUMERICS.md, "Mixed-precision KV cache", as qattn::decode() has it on CPUs.
#pragma once

#include <cstddef>
#include <cstdint>

#include "isa/launch.hpp"
#include "kernels/decode/mixed_kv/params.hpp"
#include "kvcache/gpu/device_ops.hpp"
#include "qattn/status.hpp"

namespace qattn::kernels {

using kv::DeviceDecodeCall;

inline namespace QATTN_TARGET {

/// Everything that the host can know is wrong, and what the kernels cannot do.
Status supports(const DeviceDecodeCall& call);

/// Bytes that run() wants, aligned to 256; the call was found good.
std::size_t workspace_bytes(const DeviceDecodeCall& call);

/// What run() gives the kernels: for those who launch one of them alone.
DecodeParams params_in(const DeviceDecodeCall& call, void* workspace);

/// Enqueues the call; allocates nothing and waits for nothing.
Status run(const DeviceDecodeCall& call, void* workspace, void* stream);

/// Launches one instance with what goes before and behind it; defined in the units that instantiate
/// kernels (launch.cuh).
template <DecodeConfig C>
isa::LaunchError launch_decode(const DecodeParams& params, void* stream);

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
