// A backend is a type of device: its kernels, its memory and how a call gets onto one of them. The
// CPU's is built in. CUDA's is a shared library of its own, so that libqattn needs neither a driver
// nor a toolkit; it is loaded when the first CUDA tensor arrives.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/plan.hpp"
#include "qattn/quantize.hpp"

namespace qattn {
struct QuantizeFacts;
}
namespace qattn::kv {
struct DeviceOps;
}

namespace qattn::detail {

/// Bits of a device's error word, which kernels set where they can tell nobody else.
enum DeviceError : std::uint32_t {
  error_length = 1,  ///< cu_seqlens or seqused out of range
  error_page = 2,    ///< page_table out of range
  error_cache = 4,   ///< a slot of a KV cache could not be appended to, observed or told
};

struct Backend {
  /// Why a library refuses the libqattn that loads it; null: it does not. The first field of every
  /// version; all others may be read only where this is null.
  const char* refusal = nullptr;
  const char* name = "";
  DeviceType device = DeviceType::cpu;
  std::span<const Kernel> kernels;
  /// The host can read what index tensors and scales contain, so run() always checks it.
  bool host_memory = false;

  /// Makes device `index` the calling thread's current one, and puts the one before back.
  Status (*enter)(int index, int* previous) = nullptr;
  void (*leave)(int previous) = nullptr;

  // The rest is called inside enter() and leave(), for the current device.
  int (*architecture)() = nullptr;  ///< 90 for sm_90; 0: the device has none
  Result<void*> (*allocate)(std::size_t bytes, Stream stream) = nullptr;  ///< 64-byte aligned
  void (*release)(void* memory, Stream stream) = nullptr;
  /// Waits for the stream.
  Status (*copy_to_host)(void* to, const void* from, std::size_t bytes, Stream stream) = nullptr;
  /// Likewise; only caches in this memory are filled so.
  Status (*copy_to_device)(void* to, const void* from, std::size_t bytes, Stream stream) = nullptr;
  /// Waits for the device, reads its error word and clears it.
  Result<std::uint32_t> (*take_errors)() = nullptr;
  /// A validated call of qattn::quantize(); null: this backend has none.
  Result<QuantizeReport> (*quantize)(const QuantizeTensors& tensors, const QuantizeOptions& options,
                                     const QuantizeFacts& facts, Stream stream) = nullptr;
  /// Kernels of a KV cache in this memory; null: there are none.
  const kv::DeviceOps* kv = nullptr;
};

/// Makes a device current as long as this object lives.
class DeviceGuard {
 public:
  DeviceGuard(const Backend& backend, Device device)
      : backend_(backend), status_(backend.enter(device.index, &previous_)) {}
  ~DeviceGuard() {
    if (status_.ok()) backend_.leave(previous_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;
  const Status& status() const { return status_; }

 private:
  const Backend& backend_;
  int previous_ = 0;
  Status status_;
};

/// Backends whose kernels a call on such a device is shown, in order: the one of use_backend(), the
/// device's own (loaded if need be; `missing` says why it is not there), and what else is loaded.
struct Backends {
  std::vector<const Backend*> list;
  Status missing;
};
Backends backends_for(DeviceType device);

/// The backend that owns the memory of such devices.
Result<const Backend*> backend_of(Device device);

/// Around fork(): makes what is made once, and lets no thread load a library meanwhile.
void hold_backends();
void release_backends();

/// Puts a backend before all others: test programs run emulated GPU kernels on CPU tensors so. Null
/// takes it away. Not while other threads call qattn.
void use_backend(const Backend* backend);
/// Is there one in front? It may be another GPU at every call, so no plan is kept.
bool is_backend_replaced();

/// What a backend's library and libqattn must share: the version and the layout of what crosses
/// between them. The library's one symbol is
///   extern "C" const qattn::detail::Backend* qattn_backend(const char* version);
std::string backend_interface();

/// A view whose elements lie in host memory, wherever they came from.
class HostCopy {
 public:
  /// Copies the bytes that `view` spans; afterwards view.data points into this object.
  Status take(const Backend& backend, TensorView& view, Stream stream);

 private:
  std::vector<std::byte> bytes_;
};

}  // namespace qattn::detail
