// libqattn_cuda without a GPU, for the tests of what calls it: its "devices" 0 and 1 are host
// memory. The kernel writes into every element of `out` (dense, f32) the number 1000 * device
// + stream, and into the workspace; an index of -1 in seqused_k sets the error word.
#include <cstdlib>
#include <cstring>

#include "core/backend.hpp"

namespace qattn {
namespace {

int current = 0;
std::uint32_t error_word = 0;

Status run(const detail::PlanData&, const Problem& p, void* workspace, Stream stream) {
  std::memset(workspace, 1, 1024);
  const TensorView& out = p.tensors.out;
  std::int64_t count = 1;
  for (int i = 0; i < out.rank; ++i) count *= out.shape[i];
  const auto value = static_cast<float>(1000 * current) +
                     static_cast<float>(reinterpret_cast<std::uintptr_t>(stream));
  for (std::int64_t i = 0; i < count; ++i) static_cast<float*>(out.data)[i] = value;
  if (p.tensors.seqused_k.present() &&
      *static_cast<const std::int32_t*>(p.tensors.seqused_k.data) < 0) {
    error_word |= detail::error_length;
  }
  return {};
}

detail::Backend make() {
  static const detail::Kernel kernels[] = {{"attn.fake_cuda",
                                            [](const Problem&) { return Status(); },
                                            [](const Problem& p) {
                                              auto plan = std::make_shared<detail::PlanData>();
                                              plan->recipe = p.recipe;
                                              plan->workspace = 1024;
                                              return plan;
                                            },
                                            run}};
  detail::Backend b;
  b.name = "cuda";
  b.device = DeviceType::cuda;
  b.kernels = kernels;
  b.enter = [](int index, int* previous) {
    if (index > 1) return Status(Code::unsupported, "invalid device ordinal");
    *previous = current;
    current = index;
    return Status();
  };
  b.leave = [](int previous) { current = previous; };
  b.architecture = [] { return 90; };
  b.allocate = [](std::size_t bytes, Stream) -> Result<void*> {
    return std::aligned_alloc(64, bytes);
  };
  b.release = [](void* memory, Stream) { std::free(memory); };
  b.copy_to_host = [](void* to, const void* from, std::size_t bytes, Stream) {
    std::memcpy(to, from, bytes);
    return Status();
  };
  b.take_errors = []() -> Result<std::uint32_t> {
    const std::uint32_t word = error_word;
    error_word = 0;
    return word;
  };
  return b;
}

}  // namespace
}  // namespace qattn

extern "C" __attribute__((visibility("default"))) const qattn::detail::Backend* qattn_backend(
    const char* version) {
  static const qattn::detail::Backend backend = qattn::make();
  return qattn::detail::backend_interface() == version ? &backend : nullptr;
}
