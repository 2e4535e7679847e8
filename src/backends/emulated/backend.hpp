// A backend whose GPU is the emulator: its kernels are those of gpu_attention_kernels(), compiled
// for it, and its memory is the host's. Test programs put it in front (use_backend()).
#pragma once

#include "core/backend.hpp"

namespace qattn::emulated {

/// Serves tensors of CUDA devices in host memory; emu::options() say which GPU it is. Fields may be
/// set to others before it is put in front. quantize() and KV caches have no kernels there.
detail::Backend make_backend();

}  // namespace qattn::emulated
