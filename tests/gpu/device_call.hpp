// Calls of the conformance table on a GPU: tensors in device memory, through the public interface.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "support/layout.hpp"

namespace qattn::test {

/// How tensors and workspaces lie in device memory.
enum class Memory {
  guarded,  ///< between guard bytes that are looked at afterwards; the workspace holds garbage
  exact,    ///< allocations end with the tensor and nothing is written that the caller need not
            ///< write: compute-sanitizer sees every access beside it and every uninitialised one
};

/// Device copies of tensors, back on the host with fetch().
class DeviceCopies {
 public:
  explicit DeviceCopies(Memory memory) : memory_(memory) {}
  ~DeviceCopies();
  DeviceCopies(const DeviceCopies&) = delete;
  DeviceCopies& operator=(const DeviceCopies&) = delete;

  /// The tensor's view in device memory; absent ones stay absent.
  TensorView add(Tensor& tensor) { return add(tensor, tensor.view()); }
  /// The same seen through `view`, which has other strides.
  TensorView add(Tensor& tensor, const TensorView& view);
  /// Memory without a tensor; null for no bytes.
  void* allocate(std::size_t bytes);
  void fetch();

 private:
  struct Copy {
    std::uint8_t *device, *host;
    std::size_t bytes;
  };
  Memory memory_;
  std::vector<Copy> copies_;
  std::vector<void*> allocations_;
};

struct DeviceOutcome {
  Status status;
  std::string plan;  ///< Plan::to_string()
  Recipe resolved;
  std::int64_t tile_keys = 128;
  std::int64_t splits = 1, tile_rows = 0;  ///< as ModelOptions'
  std::vector<float> out, lse;             ///< rows in Call::row() order
  std::string violation;  ///< what was written that should not have been, or a device error
};

/// Plans and runs on device 0. `laid` keeps the outputs.
DeviceOutcome run_on_device(const Call& call, Laid& laid, const Recipe& recipe, Memory memory);

/// Ends the program if the runtime reports an error: nothing after it would mean anything.
void need(int cuda_error, const char* what);

}  // namespace qattn::test
