// decode() of a GpuKvCache: checks on the host, then the backend's kernels.
#include "core/guarded.hpp"
#include "core/problem.hpp"
#include "kernels/decode/call.hpp"
#include "kvcache/gpu/checks.hpp"
#include "kvcache/tensors.hpp"

namespace qattn {

namespace {

constexpr std::uintptr_t workspace_alignment = 256;

/// f(ops, call) for a call that everything is right with, on the cache's device.
template <class T, class Function>
T checked(const GpuKvCache& cache, std::int64_t layer, const TensorView& slots,
          const KvDecodeTensors& tensors, const KvDecodeOptions& options, Function f) {
  return guarded<T>([&]() -> T {
    const GpuKvCache::Data& d = cache.data();
    if (Status s = kv::check_layer(d.options(), layer); !s.ok()) return s;
    if (Status s = kv::check_decode_options(options); !s.ok()) return s;
    if (Status s = check_device("the KV cache", d.device, options.threads); !s.ok()) return s;
    if (Status s = kv::check_slots(d, slots); !s.ok()) return s;
    kv::DecodeExtents extents;
    extents.batch = slots.shape[0];
    extents.blocks = -1;
    Status s = kv::check_queries(d.options(), tensors, options.layout, d.device, extents);
    if (!s.ok()) return s;
    if (s = kv::check_the_rest(tensors, d.device, extents); !s.ok()) return s;
    const kv::NamedTensor with_slots[] = {
        {"out", &tensors.out}, {"lse", &tensors.lse}, {"mass", &tensors.mass}, {"slots", &slots}};
    if (s = kv::check_overlap(with_slots, 3); !s.ok()) return s;
    const detail::DeviceGuard guard(*d.backend, d.device);
    if (!guard.status().ok()) return guard.status();
    const kv::DeviceDecodeCall call{&d.state.cache, layer, slots, tensors, options};
    if (s = d.backend->kv->decode_supports(call); !s.ok()) return s;
    return f(*d.backend->kv, call);
  });
}

}  // namespace

Result<std::size_t> decode_workspace(const GpuKvCache& cache, std::int64_t layer,
                                     const TensorView& slots, const KvDecodeTensors& tensors,
                                     const KvDecodeOptions& options) {
  return checked<Result<std::size_t>>(
      cache, layer, slots, tensors, options,
      [](const kv::DeviceOps& ops, const kv::DeviceDecodeCall& call) -> Result<std::size_t> {
        return ops.decode_workspace(call);
      });
}

Status decode(const GpuKvCache& cache, std::int64_t layer, const TensorView& slots,
              const KvDecodeTensors& tensors, const KvDecodeOptions& options, void* workspace,
              std::size_t workspace_bytes, Stream stream) {
  return checked<Status>(
      cache, layer, slots, tensors, options,
      [&](const kv::DeviceOps& ops, const kv::DeviceDecodeCall& call) -> Status {
        const std::size_t needed = ops.decode_workspace(call);
        if (workspace_bytes < needed) {
          return kv::invalid("workspace: " + std::to_string(workspace_bytes) +
                             " bytes, should be at least " + std::to_string(needed));
        }
        if (workspace == nullptr ||
            reinterpret_cast<std::uintptr_t>(workspace) % workspace_alignment != 0) {
          return kv::invalid("workspace: address is null or no multiple of " +
                             std::to_string(workspace_alignment) + " bytes");
        }
        return ops.decode(call, workspace, stream);
      });
}

}  // namespace qattn
