// Launches on a CUDA stream. nvcc 13.0 mis-compiles the host stub of a __global__ template whose
// parameter is a namespaced struct, so kernels are passed as types.
#pragma once

#include <cuda_runtime.h>

#include "isa/launch.hpp"

namespace qattn::isa {
inline namespace QATTN_TARGET {

template <class K>
__global__ void __launch_bounds__(K::threads, K::min_blocks)
    entry(const __grid_constant__ typename K::Params params) {
  K::run(params);
}

int architecture(int device);  // backends/cuda/device.cu
int multiprocessors();
int code_architecture();
std::uint32_t* error_word();

template <class K>
LaunchError launch(const typename K::Params& params, Index3 grid, void* stream) {
  // At every launch: the limit belongs to the function on the current device. It is a host call.
  if constexpr (K::shared_bytes > 48 * 1024) {
    const cudaError_t e = cudaFuncSetAttribute(
        entry<K>, cudaFuncAttributeMaxDynamicSharedMemorySize, K::shared_bytes);
    if (e != cudaSuccess) return std::string("shared memory: ") + cudaGetErrorString(e);
  }
  entry<K><<<dim3(grid.x, grid.y, grid.z), K::threads, K::shared_bytes,
             static_cast<cudaStream_t>(stream)>>>(params);
  const cudaError_t e = cudaGetLastError();
  return e == cudaSuccess ? LaunchError() : LaunchError(cudaGetErrorString(e));
}

template <class K>
KernelResources resources() {
  cudaFuncAttributes a{};
  if (cudaFuncGetAttributes(&a, entry<K>) != cudaSuccess) return {};
  return {a.numRegs, static_cast<int>(a.localSizeBytes),
          static_cast<int>(a.sharedSizeBytes) + K::shared_bytes};
}

}  // namespace QATTN_TARGET
}  // namespace qattn::isa
