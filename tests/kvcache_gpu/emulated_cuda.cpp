// Stands in for libqattn_cuda: its GPU's memory is the host's and its KV cache's kernels run in the
// emulator, so that what calls them from Python is tested without a GPU.
#include "kv_backend.hpp"

namespace qattn {
namespace {

detail::Backend make() {
  detail::Backend b = test::emulated_kv_backend();
  b.name = "cuda";
  b.device = DeviceType::cuda;
  b.enter = [](int index, int* previous) {
    *previous = 0;
    return index == 0 ? Status() : Status(Code::unsupported, "invalid device ordinal");
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
