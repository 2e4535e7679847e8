// What isa/cuda/launch.cuh promises of a device.
#include <cuda_runtime.h>

#include <array>
#include <atomic>

#include "isa/launch.hpp"

namespace qattn::isa {
inline namespace cuda_target {
namespace {

/// One for every device, in the memory of that device. Only this unit may define it: without
/// relocatable device code every unit would have its own.
__device__ std::uint32_t sticky_errors;

constexpr int most_devices = 64;

/// This unit is compiled for every architecture of the library, as the kernels are whose supports()
/// asks (CMakeLists.txt).
__global__ void any_kernel() {}

}  // namespace

std::uint32_t* error_word() {
  static std::array<std::atomic<std::uint32_t*>, most_devices> known{};
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device >= most_devices) return nullptr;
  std::uint32_t* word = known[static_cast<std::size_t>(device)];
  if (word == nullptr) {
    void* address = nullptr;
    if (cudaGetSymbolAddress(&address, sticky_errors) != cudaSuccess) return nullptr;
    word = static_cast<std::uint32_t*>(address);
    known[static_cast<std::size_t>(device)] = word;
  }
  return word;
}

int multiprocessors() {
  int device = 0, count = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return 1;
  cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  return count > 0 ? count : 1;
}

Gpu gpu(int device) {
  static std::array<std::atomic<int>, most_devices> known{};
  if (device < 0 || device >= most_devices) return {};
  std::atomic<int>& slot = known[static_cast<std::size_t>(device)];
  if (slot == 0) {
    int major = 0, minor = 0;
    if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess ||
        cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) != cudaSuccess) {
      return {};
    }
    slot = 10 * major + minor;
  }
  return gpu_of(slot);
}

int code_architecture() {
  static std::array<std::atomic<int>, most_devices> known{};
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device >= most_devices) return 0;
  std::atomic<int>& slot = known[static_cast<std::size_t>(device)];
  if (slot == 0) {
    cudaFuncAttributes attributes{};
    if (cudaFuncGetAttributes(&attributes, any_kernel) != cudaSuccess) return 0;
    slot = attributes.ptxVersion;  // also of machine code: what it was compiled from
  }
  return slot;
}

}  // namespace cuda_target
}  // namespace qattn::isa
