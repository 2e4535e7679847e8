#include "backends/emulated/backend.hpp"

#include <cstdlib>
#include <cstring>
#include <utility>

#include "isa/launch.hpp"
#include "kernels/attention/gpu.hpp"

namespace qattn::emulated {
namespace {

Result<void*> allocate(std::size_t bytes, Stream) {
  // Garbage, as on a GPU.
  const std::size_t room = (bytes + 127) / 64 * 64;
  void* memory = std::aligned_alloc(64, room);
  std::memset(memory, 0xFF, room);
  return memory;
}

}  // namespace

detail::Backend make_backend() {
  detail::Backend b;
  b.name = "emulated";
  b.device = DeviceType::cuda;
  b.kernels = kernels::gpu_attention_kernels();
  b.host_memory = true;
  b.enter = [](int, int*) { return Status(); };
  b.leave = [](int) {};
  b.architecture = [] { return isa::gpu(0).number; };
  b.allocate = allocate;
  b.release = [](void* memory, Stream) { std::free(memory); };
  b.copy_to_host = b.copy_to_device = [](void* to, const void* from, std::size_t bytes, Stream) {
    std::memcpy(to, from, bytes);
    return Status();
  };
  b.take_errors = []() -> Result<std::uint32_t> { return std::exchange(*isa::error_word(), 0u); };
  return b;
}

}  // namespace qattn::emulated
