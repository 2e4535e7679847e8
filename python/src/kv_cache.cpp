// qattn::KvCache as a class of the extension; python/qattn/_kv_cache.py gives it its Python face.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "kv_convert.hpp"

namespace qattn::python {
namespace {

using nb::literals::operator""_a;
using Ids = std::vector<std::int64_t>;

KvImportance importance_from(const std::string& name) {
  if (name == "uniform") return KvImportance::uniform;
  if (name == "key_norm") return KvImportance::key_norm;
  throw StatusError(
      Status(Code::invalid_argument, "importance: '" + name + "' is neither uniform nor key_norm"));
}

Granularity granularity_from(const std::string& name) {
  if (const std::optional<Granularity> found = granularity_named(name)) return *found;
  throw StatusError(Status(Code::invalid_argument,
                           "k_granularity: '" + name + "' is neither per_token nor per_channel"));
}

/// As an int, or one that no tier has: create() says what is wrong.
int bits_from(std::int64_t bits) { return bits > 0 && bits < 64 ? static_cast<int>(bits) : 0; }

KvCacheOptions make_options(std::int64_t layers, std::int64_t heads_kv, std::int64_t d,
                            std::int64_t dv, const std::string& window_format,
                            std::int64_t page_size, std::int64_t window, std::int64_t sinks,
                            const std::vector<std::pair<std::int64_t, std::int64_t>>& tiers,
                            double average_bits, std::int64_t budget_from, bool smooth_k,
                            bool rotate, bool balance_k, bool smooth_v,
                            const std::string& k_granularity, const std::string& importance,
                            double decay, double hysteresis, std::int64_t threads) {
  KvCacheOptions o;
  o.layers = layers;
  o.heads_kv = heads_kv;
  o.d = d;
  o.dv = dv;
  o.window_format = format_from("window_dtype", window_format);
  o.page_size = page_size;
  o.window = window;
  o.sinks = sinks;
  o.tiers.clear();
  for (const auto& [k_bits, v_bits] : tiers) {
    o.tiers.push_back({bits_from(k_bits), bits_from(v_bits)});
  }
  o.average_bits = average_bits;
  o.budget_from = budget_from;
  o.smooth_k = smooth_k;
  o.rotate = rotate;
  o.balance_k = balance_k;
  o.smooth_v = smooth_v;
  o.k_granularity = granularity_from(k_granularity);
  o.importance = importance_from(importance);
  o.importance_decay = static_cast<float>(decay);
  o.hysteresis = static_cast<float>(hysteresis);
  o.threads = threads_from(threads);
  return o;
}

void append(KvCache& cache, std::int64_t layer, const Ids& sequences, const nb::dict& entries,
            const std::string& layout) {
  Views views;
  KvAppendTensors t;
  t.k = view_in(entries, "k", false, views);
  t.v = view_in(entries, "v", false, views);
  t.cu_seqlens = view_in(entries, "cu_seqlens", false, views);
  t.importance = view_in(entries, "importance", false, views);
  const Layout order = layout_from(layout);
  Status status;
  {
    const nb::gil_scoped_release unlocked;
    status = cache.append(layer, sequences, t, order);
  }
  kv_check(status);
}

void observe(KvCache& cache, std::int64_t layer, const Ids& sequences, const nb::dict& entries) {
  Views views;
  kv_check(cache.observe(layer, sequences, view_in(entries, "mass", false, views)));
}

void set_importance(KvCache& cache, std::int64_t sequence, std::int64_t layer,
                    const nb::dict& entries) {
  Views views;
  kv_check(cache.set_importance(sequence, layer, view_in(entries, "importance", false, views)));
}

void read(const KvCache& cache, std::int64_t sequence, std::int64_t layer,
          const nb::dict& entries) {
  Views views;
  kv_check(cache.read(sequence, layer, view_in(entries, "k", true, views),
                      view_in(entries, "v", true, views), view_in(entries, "tiers", true, views)));
}

void run_decode(const KvCache& cache, std::int64_t layer, const Ids& sequences,
                const nb::dict& entries, const std::string& layout, std::optional<double> scale,
                bool causal, std::int64_t window_left, double softcap, bool debias,
                std::int64_t threads) {
  Views views;
  const KvDecodeTensors t = kv_decode_tensors(entries, views);
  KvDecodeOptions o = kv_decode_options(layout, scale, causal, window_left, softcap, debias);
  o.threads = threads_from(threads);
  Status status;
  {
    const nb::gil_scoped_release unlocked;
    status = decode(cache, layer, sequences, t, o);
  }
  kv_check(status);
}

}  // namespace

void add_kv_cache(nb::module_& m) {
  nb::class_<KvCacheOptions>(m, "KvOptions");
  m.def("kv_options", &make_options, nb::kw_only(), "layers"_a, "heads_kv"_a, "d"_a, "dv"_a,
        "window_format"_a, "page_size"_a, "window"_a, "sinks"_a, "tiers"_a, "average_bits"_a,
        "budget_from"_a, "smooth_k"_a, "rotate"_a, "balance_k"_a, "smooth_v"_a, "k_granularity"_a,
        "importance"_a, "decay"_a, "hysteresis"_a, "threads"_a);
  m.def("kv_shortest_length",
        [](const KvCacheOptions& o) { return kv_check(KvCache::shortest_length(o)); });
  m.def("kv_create", [](const KvCacheOptions& o) { return kv_check(KvCache::create(o)); });
  m.def("kv_load", [](const std::string& path, std::int64_t threads) {
    return check(KvCache::load(path, threads_from(threads)));
  });
  nb::class_<KvCache>(m, "KvCache")
      .def("add_sequence", [](KvCache& c) { return kv_check(c.add_sequence()); })
      .def("fork", [](KvCache& c, std::int64_t id) { return kv_check(c.fork(id)); })
      .def("release", [](KvCache& c, std::int64_t id) { kv_check(c.release(id)); })
      .def("length", [](const KvCache& c, std::int64_t id,
                        std::int64_t layer) { return kv_check(c.length(id, layer)); })
      .def("append", &append)
      .def("truncate",
           [](KvCache& c, std::int64_t id, std::int64_t n) { kv_check(c.truncate(id, n)); })
      .def("evict", [](KvCache& c, std::int64_t id, std::int64_t layer, std::int64_t head,
                       std::int64_t begin,
                       std::int64_t end) { kv_check(c.evict(id, layer, head, begin, end)); })
      .def("observe", &observe)
      .def("set_importance", &set_importance)
      .def("read", &read)
      .def("shape", [](const KvCache& c) { return kv_shape(c.options()); })
      .def("save", [](const KvCache& c, const std::string& path) { check(c.save(path)); })
      .def("bytes", [](const KvCache& c) { return kv_bytes(c.bytes()); })
      .def("usage", [](const KvCache& c, std::int64_t id,
                       std::int64_t layer) { return kv_usage(kv_check(c.usage(id, layer))); })
      .def("decode", &run_decode, "layer"_a, "sequences"_a, "tensors"_a, nb::kw_only(), "layout"_a,
           "scale"_a.none(), "causal"_a, "window_left"_a, "softcap"_a, "debias"_a, "threads"_a);
}

}  // namespace qattn::python
