// Launching a kernel, on a GPU or in the emulator, with the same call. A third target plans calls
// for GPUs that are not here, and launches nothing (described/).
//
// A kernel is a type:
//   struct K {
//     using Params = ...;                          // trivially copyable, passed by value
//     static constexpr int threads, min_blocks;    // per block; blocks per multiprocessor
//     static constexpr int shared_bytes;
//     static constexpr bool dependent = true;      // optional: it may start early, see Start
//     static constexpr int cluster = 2;            // optional, of sm_90 on: so many neighbouring
//                                                  // blocks run on neighbouring multiprocessors
//     static constexpr int warp_lanes = 64;        // optional: else 32, on every GPU; waves of 64
//                                                  // lanes are then two warps
//     static constexpr isa::Target target = isa::sm_90a;   // optional: what has all of its words,
//                                                  // to which the emulator holds it; else sm_80
//     static QATTN_DEVICE void run(const Params&);
//   };
#pragma once

#include <string>

#include "isa/isa.hpp"

namespace qattn::isa {

/// What went wrong with a launch; empty: nothing.
using LaunchError = std::string;

/// When a kernel starts.
///   after_all  when everything before it in the stream is complete
///   early      programmatic dependent launch: as soon as every block of the kernel before it has
///              called grid_dependency_launch() or ended. Kernels without `dependent`, and GPUs
///              before sm_90, take it for after_all.
///   beside     as early, but it reads what the kernel just before writes while both run, as far as
///              wait_global() has told that it is there. All blocks of that one have begun by then,
///              so that they may be waited for. It is the last of its chain, whose rule 1 does not
///              hold for it, and of rule 2 that one thread of each block waits.
/// A kernel that starts after_all and those that start early behind it are a chain. The rules of a
/// chain, which the emulator enforces:
///  1. Before grid_dependency_wait() a thread touches nothing that an earlier kernel of the chain
///     writes and writes nothing that one reads: of all of them, because the one just before may
///     have started early, too, and have triggered before it waited itself.
///  2. Every thread of a kernel that starts early waits, at the latest before it ends. The wait is
///     for the completion of the kernel just before, all its writes included; as that one cannot
///     end before its own wait is over, it is for the whole chain.
///  3. The kernel before one that starts early is `dependent`, too.
/// What came before the chain is complete when any of its kernels runs, because the first starts
/// after_all. So whoever enqueues several kernels on a caller's stream starts the first after_all:
/// it then may overwrite a workspace that the call before still read, and need not know whether a
/// stranger's kernel keeps rule 2.
enum class Start { after_all, early, beside };

template <class K>
concept Dependent = requires { requires K::dependent; };

/// Blocks that are launched together, of which a grid has a multiple. Two are a pair on one TPC,
/// whose multiprocessors share a cache of instructions (H200, by %smid; the manuals promise a GPC).
template <class K>
constexpr int cluster_of() {
  if constexpr (requires { K::cluster; }) return K::cluster;
  return 1;
}

/// Lanes of the kernel's warps.
template <class K>
constexpr int warp_lanes_of() {
  if constexpr (requires { K::warp_lanes; }) return K::warp_lanes;
  return 32;
}

/// What the kernel's code is for.
template <class K>
constexpr Target target_of() {
  if constexpr (requires { K::target; }) return K::target;
  return sm_80;
}

/// LaunchError launch<K>(const typename K::Params&, Index3 grid, void* stream,
///                       Start = Start::after_all);
/// bool has_code<K>(): was what the current device runs of the kernel compiled for target_of<K>(),
/// or newer? Elsewhere kernels are empty.
///
/// bool builds_for(Vendor): does this target have code for GPUs of that maker?
///
/// Gpu gpu(int device): its number is 0 if there is no such device.
/// int multiprocessors(): of the current device.
/// int code_architecture(): target_architecture of the code that runs on the current device. Less
/// than gpu()'s number where that is an older GPU's code, or came from PTX; 0 where none runs.
/// std::uint32_t* error_word(): the current device's sticky error word, which kernels get in their
/// Params; null where there is none. Asked for when a plan is made: the first time takes a while.

}  // namespace qattn::isa

#if defined(__CUDACC__)
#include "isa/cuda/launch.cuh"
#elif defined(QATTN_DESCRIBED)
#include "isa/described/launch.hpp"
#else
#include "isa/emu/launch.hpp"
#endif
