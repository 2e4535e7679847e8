// Launches on a CUDA stream. nvcc 13.0 mis-compiles the host stub of a __global__ template whose
// parameter is a namespaced struct, so kernels are passed as types.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <atomic>

#include "isa/launch.hpp"

namespace qattn::isa {
inline namespace QATTN_TARGET {

/// SharedBytes is in the name for tools/gpu_report.py: a cubin does not tell dynamic shared memory.
template <class K, int SharedBytes = K::shared_bytes>
__global__ void __launch_bounds__(K::threads, K::min_blocks)
    entry(const __grid_constant__ typename K::Params params) {
  K::run(params);
}

constexpr bool builds_for(Vendor vendor) { return vendor == Vendor::nvidia; }

Gpu gpu(int device);  // backends/cuda/device.cu
int multiprocessors();
int code_architecture();
std::uint32_t* error_word();

/// Does the current device run the kernel from code that has grid_dependency_wait()? In code for
/// older GPUs, also where PTX of it serves a newer one, the word is empty.
template <class K>
bool can_wait() {
  constexpr int most_devices = 64;
  enum : int { unknown, no, yes };
  static std::array<std::atomic<int>, most_devices> known{};
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device >= most_devices) return false;
  std::atomic<int>& slot = known[static_cast<std::size_t>(device)];
  if (slot == unknown) {
    cudaFuncAttributes a{};
    if (cudaFuncGetAttributes(&a, entry<K>) != cudaSuccess) return false;
    slot = a.ptxVersion >= 90 && a.binaryVersion >= 90 ? yes : no;
  }
  return slot == yes;
}

template <class K>
LaunchError launch(const typename K::Params& params, Index3 grid, void* stream,
                   Start start = Start::after_all) {
  static_assert(warp_lanes_of<K>() == 32);
  // At every launch: the limit belongs to the function on the current device. It is a host call.
  if constexpr (K::shared_bytes > 48 * 1024) {
    const cudaError_t e = cudaFuncSetAttribute(
        entry<K>, cudaFuncAttributeMaxDynamicSharedMemorySize, K::shared_bytes);
    if (e != cudaSuccess) return std::string("shared memory: ") + cudaGetErrorString(e);
  }
  std::array<cudaLaunchAttribute, 2> attributes{};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(grid.x, grid.y, grid.z);
  config.blockDim = dim3(K::threads);
  config.dynamicSmemBytes = K::shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = attributes.data();
  if constexpr (Dependent<K>) {
    if (start != Start::after_all && can_wait<K>()) {
      cudaLaunchAttribute& a = attributes[config.numAttrs++];
      a.id = cudaLaunchAttributeProgrammaticStreamSerialization;
      a.val.programmaticStreamSerializationAllowed = 1;
    }
  }
  if constexpr (cluster_of<K>() > 1) {
    cudaLaunchAttribute& a = attributes[config.numAttrs++];
    a.id = cudaLaunchAttributeClusterDimension;
    a.val.clusterDim = {cluster_of<K>(), 1, 1};
  }
  // Its own result: the runtime's last error may be of another call, which was told already.
  const cudaError_t e = cudaLaunchKernelEx(&config, entry<K>, params);
  if (e == cudaSuccess) return {};
  cudaGetLastError();  // this one is told, too
  return cudaGetErrorString(e);
}

template <class K>
bool has_code() {
  constexpr int of_an_empty_kernel = 40;  // it has a handful of registers
  cudaFuncAttributes a{};
  return cudaFuncGetAttributes(&a, entry<K>) == cudaSuccess && a.numRegs > of_an_empty_kernel;
}

}  // namespace QATTN_TARGET
}  // namespace qattn::isa
