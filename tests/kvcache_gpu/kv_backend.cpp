#include "kv_backend.hpp"

#include <cstdlib>
#include <cstring>
#include <map>
#include <utility>

#include "isa/launch.hpp"
#include "kernels/kv_append/kv_device.hpp"

namespace qattn::test {
namespace {

std::map<void*, std::size_t>& sizes() {
  static std::map<void*, std::size_t> map;
  return map;
}
std::int64_t memory_calls = 0;

}  // namespace

detail::Backend emulated_kv_backend() {
  detail::Backend b;
  b.name = "emulated";
  b.enter = [](int, int*) { return Status(); };
  b.leave = [](int) {};
  b.architecture = [] { return isa::gpu(0).number; };
  b.allocate = [](std::size_t bytes, Stream) -> Result<void*> {
    void* memory = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
    std::memset(memory, 0xFF, bytes);  // garbage, as on a GPU
    sizes()[memory] = bytes;
    ++memory_calls;
    return memory;
  };
  b.release = [](void* memory, Stream) {
    sizes().erase(memory);
    ++memory_calls;
    std::free(memory);
  };
  b.copy_to_host = b.copy_to_device = [](void* to, const void* from, std::size_t bytes, Stream) {
    std::memcpy(to, from, bytes);
    return Status();
  };
  b.take_errors = []() -> Result<std::uint32_t> { return std::exchange(*isa::error_word(), 0u); };
  b.kv = &kernels::kv_device_ops();
  return b;
}

KvBackend::KvBackend() : backend_(emulated_kv_backend()) {
  backend_.device = DeviceType::cpu;
  backend_.host_memory = true;
  detail::use_backend(&backend_);
}
KvBackend::~KvBackend() { detail::use_backend(nullptr); }

std::size_t KvBackend::allocated() {
  std::size_t sum = 0;
  for (const auto& [memory, bytes] : sizes()) sum += bytes;
  return sum;
}
std::int64_t KvBackend::calls() { return memory_calls; }

Timing::Timing(unsigned n) : before_(emu::options()) {
  emu::Options& o = emu::options();
  o.schedule = n % 3 == 0   ? emu::Schedule::late
               : n % 3 == 1 ? emu::Schedule::early
                            : emu::Schedule::random;
  o.order = n % 3 == 0   ? emu::LaneOrder::forward
            : n % 3 == 1 ? emu::LaneOrder::reverse
                         : emu::LaneOrder::random;
  o.seed = n;
}

}  // namespace qattn::test
