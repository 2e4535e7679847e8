// The library's one entry, and the hooks of core/backend.hpp on the CUDA runtime.
#include <cuda_runtime.h>

#include <cstring>
#include <string>

#include "core/backend.hpp"
#include "isa/launch.hpp"
#include "kernels/attention/gpu.hpp"
#include "kernels/kv_append/kv_device.hpp"
#include "kernels/operand/sequence.hpp"
#include "kernels/quantize/gpu/quantize_device.hpp"
#include "kernels/quantize/host/quantize_check.hpp"

namespace qattn {
namespace {

/// What CUDA says, as a Status; clears the error unless it is one that stays.
Status failed(const char* what, cudaError_t error) {
  cudaGetLastError();
  const Code code = error == cudaErrorMemoryAllocation ? Code::out_of_memory
                    : error == cudaErrorNoDevice || error == cudaErrorInsufficientDriver ||
                            error == cudaErrorInvalidDevice
                        ? Code::unsupported
                        : Code::internal;
  return Status(code, std::string(what) + ": " + cudaGetErrorString(error));
}

Status enter(int index, int* previous) {
  if (const cudaError_t e = cudaGetDevice(previous); e != cudaSuccess) return failed("device", e);
  if (*previous == index) return {};
  if (const cudaError_t e = cudaSetDevice(index); e != cudaSuccess) {
    return failed(("device " + std::to_string(index)).c_str(), e);
  }
  return {};
}

void leave(int previous) {
  int now = previous;
  if (cudaGetDevice(&now) == cudaSuccess && now != previous) cudaSetDevice(previous);
}

int current_architecture() {
  int device = 0;
  return cudaGetDevice(&device) == cudaSuccess ? isa::gpu(device).number : 0;
}

Result<void*> allocate(std::size_t bytes, Stream stream) {
  void* memory = nullptr;
  const cudaError_t e = cudaMallocAsync(&memory, bytes > 0 ? bytes : 64,  // 256-byte aligned
                                        static_cast<cudaStream_t>(stream));
  if (e == cudaSuccess) return memory;
  return failed(("workspace of " + std::to_string(bytes) + " bytes").c_str(), e);
}

void release(void* memory, Stream stream) {
  cudaFreeAsync(memory, static_cast<cudaStream_t>(stream));
}

cudaError_t copy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind,
                 Stream stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  const cudaError_t e = cudaMemcpyAsync(to, from, bytes, kind, s);
  return e == cudaSuccess ? cudaStreamSynchronize(s) : e;
}

Status copy_to_host(void* to, const void* from, std::size_t bytes, Stream stream) {
  const cudaError_t e = copy(to, from, bytes, cudaMemcpyDeviceToHost, stream);
  return e == cudaSuccess ? Status() : failed("reading tensors of the device", e);
}

Status copy_to_device(void* to, const void* from, std::size_t bytes, Stream stream) {
  const cudaError_t e = copy(to, from, bytes, cudaMemcpyHostToDevice, stream);
  return e == cudaSuccess ? Status() : failed("writing memory of the device", e);
}

Result<std::uint32_t> take_errors() {
  if (const cudaError_t e = cudaDeviceSynchronize(); e != cudaSuccess) {
    return failed("an earlier launch", e);
  }
  std::uint32_t* word = isa::error_word();
  if (word == nullptr) return Status(Code::internal, "the device has no error word");
  std::uint32_t value = 0;
  if (const cudaError_t e = cudaMemcpy(&value, word, sizeof value, cudaMemcpyDeviceToHost);
      e != cudaSuccess) {
    return failed("error word", e);
  }
  if (value == 0) return value;
  if (const cudaError_t e = cudaMemset(word, 0, sizeof value); e != cudaSuccess) {
    return failed("error word", e);
  }
  return value;
}

/// In a workspace of `quantize_workspace` bytes. Only a static scale leaves something to count, for
/// which the call waits.
Result<QuantizeReport> quantize_in(void* memory, const QuantizeTensors& t, const QuantizeOptions& o,
                                   const QuantizeFacts& facts, Stream stream) {
  const isa::LaunchError error = kernels::quantize_tokens(t, o, facts, memory, stream);
  if (!error.empty()) return Status(Code::internal, "quantize: " + error);
  QuantizeReport report;
  if (!t.static_scale.present()) return report;
  const Status read = copy_to_host(&report.saturated, memory, sizeof report.saturated, stream);
  if (!read.ok()) return read;
  return report;
}

Result<QuantizeReport> quantize(const QuantizeTensors& t, const QuantizeOptions& o,
                                const QuantizeFacts& facts, Stream stream) {
  if (t.cu_seqlens.present() && t.cu_seqlens.shape[0] > 1 && t.cu_seqlens.stride[0] != 1) {
    return Status(
        Code::invalid_argument,
        "cu_seqlens: stride " + std::to_string(t.cu_seqlens.stride[0]) + " should be 1 on a GPU");
  }
  const Result<void*> memory = allocate(kernels::quantize_workspace(t, o, facts), stream);
  if (!memory.ok()) return memory.status();
  Result<QuantizeReport> report = quantize_in(*memory, t, o, facts, stream);
  release(*memory, stream);
  return report;
}

// The kernels know nothing of core/backend.hpp.
static_assert(static_cast<int>(tile::error_sequence) == static_cast<int>(detail::error_length));
static_assert(static_cast<int>(tile::error_page) == static_cast<int>(detail::error_page));
static_assert(kv::device_error_bit == static_cast<std::uint32_t>(detail::error_cache));

detail::Backend make_backend() {
  detail::Backend b;
  b.name = "cuda";
  b.device = DeviceType::cuda;
  b.kernels = kernels::gpu_attention_kernels();
  b.enter = enter;
  b.leave = leave;
  b.architecture = current_architecture;
  b.allocate = allocate;
  b.release = release;
  b.copy_to_host = copy_to_host;
  b.copy_to_device = copy_to_device;
  b.take_errors = take_errors;
  b.quantize = quantize;
  b.kv = &kernels::kv_device_ops();
  return b;
}

}  // namespace
}  // namespace qattn

extern "C" __attribute__((visibility("default"))) const qattn::detail::Backend* qattn_backend(
    const char* version) {
  const std::string own = qattn::detail::backend_interface();
  if (version != nullptr && own == version) {
    static const qattn::detail::Backend backend = qattn::make_backend();
    return &backend;
  }
  static std::string text;
  static qattn::detail::Backend refusal;
  text = "was built for libqattn " + own + ", and this one is " + (version ? version : "unknown");
  refusal.refusal = text.c_str();
  return &refusal;
}
