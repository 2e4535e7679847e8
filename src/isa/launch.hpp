// Launching a kernel, on a GPU or in the emulator, with the same call.
//
// A kernel is a type:
//   struct K {
//     using Params = ...;                          // trivially copyable, passed by value
//     static constexpr int threads, min_blocks;    // per block; blocks per multiprocessor
//     static constexpr int shared_bytes;
//     static QATTN_DEVICE void run(const Params&);
//   };
#pragma once

#include <string>

#include "isa/isa.hpp"

namespace qattn::isa {

/// What went wrong with a launch; empty: nothing.
using LaunchError = std::string;

/// LaunchError launch<K>(const typename K::Params&, Index3 grid, void* stream);
/// KernelResources resources<K>();
///
/// int architecture(int device): 90 for sm_90, 0 if there is no such device.
/// int multiprocessors(): of the current device.
/// int code_architecture(): target_architecture of the code that runs on the current device. Less
/// than architecture() where that is an older GPU's code, or came from PTX; 0 where none runs.
/// std::uint32_t* error_word(): the current device's sticky error word, which kernels get in their
/// Params; null where there is none. Asked for when a plan is made: the first time takes a while.

/// Registers and memory of a compiled kernel (zeros in the emulator).
struct KernelResources {
  int registers = 0, local_bytes = 0, shared_bytes = 0;
};

}  // namespace qattn::isa

#if defined(__CUDACC__)
#include "isa/cuda/launch.cuh"
#else
#include "isa/emu/launch.hpp"
#endif
