// qattn::GpuKvCache as a class of the extension; python/qattn/_kv_cache_gpu.py gives it its face.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "kv_convert.hpp"

namespace qattn::python {
namespace {

using nb::literals::operator""_a;
using Handle = std::uintptr_t;  ///< of a stream

GpuKvCache create(const KvCacheOptions& options, std::int64_t sequences, std::int64_t tokens,
                  const std::vector<std::int64_t>& pages, std::int32_t device_type,
                  std::int32_t device_index, Handle stream) {
  const Device device{static_cast<DeviceType>(device_type), device_index};
  return kv_check(
      GpuKvCache::create(options, {sequences, tokens, pages}, device, stream_from(stream)));
}

/// kv_check() of a call that is given a path: refusals begin with it, and nothing of it is renamed.
void path_check(const Status& s) { s.message().starts_with("path: ") ? check(s) : kv_check(s); }

GpuKvCache load(const std::string& path, std::int64_t sequences, std::int64_t tokens,
                const std::vector<std::int64_t>& pages, std::int32_t device_type,
                std::int32_t device_index, Handle stream) {
  const Device device{static_cast<DeviceType>(device_type), device_index};
  const auto loaded = [&] {
    const nb::gil_scoped_release unlocked;
    return GpuKvCache::load(path, {sequences, tokens, pages}, device, stream_from(stream));
  };
  Result<GpuKvCache> cache = loaded();
  path_check(cache.status());
  return std::move(*cache);
}

void save(const GpuKvCache& cache, const std::string& path, Handle stream) {
  Status status;
  {
    const nb::gil_scoped_release unlocked;
    status = cache.save(path, stream_from(stream));
  }
  path_check(status);
}

void append(GpuKvCache& cache, std::int64_t layer, const nb::dict& entries,
            const std::string& layout, Handle stream) {
  Views views;
  KvGpuAppendTensors t;
  t.slots = view_in(entries, "sequences", false, views);
  t.k = view_in(entries, "k", false, views);
  t.v = view_in(entries, "v", false, views);
  t.counts = view_in(entries, "counts", false, views);
  t.importance = view_in(entries, "importance", false, views);
  kv_check(cache.append(layer, t, layout_from(layout), stream_from(stream)));
}

void observe(GpuKvCache& cache, std::int64_t layer, const nb::dict& entries, Handle stream) {
  Views views;
  const TensorView slots = view_in(entries, "sequences", false, views);
  kv_check(
      cache.observe(layer, slots, view_in(entries, "mass", false, views), stream_from(stream)));
}

void set_importance(GpuKvCache& cache, std::int64_t slot, std::int64_t layer,
                    const nb::dict& entries, Handle stream) {
  Views views;
  const TensorView importance = view_in(entries, "importance", false, views);
  kv_check(cache.set_importance(slot, layer, importance, stream_from(stream)));
}

void read(const GpuKvCache& cache, std::int64_t slot, std::int64_t layer, const nb::dict& entries,
          Handle stream) {
  Views views;
  const TensorView k = view_in(entries, "k", true, views), v = view_in(entries, "v", true, views);
  const TensorView tiers = view_in(entries, "tiers", true, views);
  Status status;
  {
    const nb::gil_scoped_release unlocked;
    status = cache.read(slot, layer, k, v, tiers, stream_from(stream));
  }
  kv_check(status);
}

/// `memory`: a function of the bytes that gives (address, bytes, its owner). It is released once
/// everything is enqueued, which is right for an allocator that knows the stream.
void run_decode(const GpuKvCache& cache, std::int64_t layer, const nb::dict& entries,
                const std::string& layout, std::optional<double> scale, bool causal,
                std::int64_t window_left, double softcap, bool debias, const nb::object& memory,
                Handle stream) {
  Views views;
  const TensorView slots = view_in(entries, "sequences", false, views);
  const KvDecodeTensors t = kv_decode_tensors(entries, views);
  const KvDecodeOptions o = kv_decode_options(layout, scale, causal, window_left, softcap, debias);
  const std::size_t needed = kv_check(decode_workspace(cache, layer, slots, t, o));
  const nb::tuple given = nb::cast<nb::tuple>(memory(needed));
  void* const address = reinterpret_cast<void*>(nb::cast<std::uintptr_t>(given[0]));
  kv_check(decode(cache, layer, slots, t, o, address, nb::cast<std::size_t>(given[1]),
                  stream_from(stream)));
}

}  // namespace

void add_gpu_kv_cache(nb::module_& m) {
  m.def("kv_gpu_create", &create, "options"_a, "sequences"_a, "tokens"_a, "pages"_a,
        "device_type"_a, "device_index"_a, "stream"_a);
  m.def("kv_gpu_load", &load, "path"_a, "sequences"_a, "tokens"_a, "pages"_a, "device_type"_a,
        "device_index"_a, "stream"_a);
  nb::class_<GpuKvCache>(m, "GpuKvCache")
      .def("add_sequence",
           [](GpuKvCache& c, Handle stream) {
             return kv_check(c.add_sequence(stream_from(stream)));
           })
      .def("fork", [](GpuKvCache& c, std::int64_t slot,
                      Handle stream) { return kv_check(c.fork(slot, stream_from(stream))); })
      .def("release", [](GpuKvCache& c, std::int64_t slot,
                         Handle stream) { kv_check(c.release(slot, stream_from(stream))); })
      .def("length",
           [](const GpuKvCache& c, std::int64_t slot, std::int64_t layer, Handle stream) {
             return kv_check(c.length(slot, layer, stream_from(stream)));
           })
      .def("status", [](const GpuKvCache& c, std::int64_t slot,
                        Handle stream) { kv_check(c.status(slot, stream_from(stream))); })
      .def("usage",
           [](const GpuKvCache& c, std::int64_t slot, std::int64_t layer, Handle stream) {
             return kv_usage(kv_check(c.usage(slot, layer, stream_from(stream))));
           })
      .def("append", &append)
      .def("truncate", [](GpuKvCache& c, std::int64_t slot, std::int64_t n,
                          Handle stream) { kv_check(c.truncate(slot, n, stream_from(stream))); })
      .def("evict",
           [](GpuKvCache& c, std::int64_t slot, std::int64_t layer, std::int64_t head,
              std::int64_t begin, std::int64_t end, Handle stream) {
             kv_check(c.evict(slot, layer, head, begin, end, stream_from(stream)));
           })
      .def("observe", &observe)
      .def("set_importance", &set_importance)
      .def("save", &save)
      .def("shape", [](const GpuKvCache& c) { return kv_shape(c.options()); })
      .def("holds", [](const GpuKvCache& c, std::int64_t slot) { return c.holds(slot); })
      .def("read", &read)
      .def("bytes", [](const GpuKvCache& c) { return kv_bytes(c.bytes()); })
      .def("decode", &run_decode, "layer"_a, "tensors"_a, nb::kw_only(), "layout"_a,
           "scale"_a.none(), "causal"_a, "window_left"_a, "softcap"_a, "debias"_a, "memory"_a,
           "stream"_a);
}

}  // namespace qattn::python
