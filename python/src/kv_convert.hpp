// What the two KV caches' classes translate in the same way.
#pragma once

#include <optional>
#include <string>

#include "convert.hpp"

namespace qattn::python {

/// A view of the entry of that name, or none.
inline TensorView view_in(const nb::dict& entries, const char* name, bool writable, Views& views) {
  return entries.contains(name) ? views.add(name, entries[name], writable) : TensorView{};
}

inline KvDecodeTensors kv_decode_tensors(const nb::dict& entries, Views& views) {
  KvDecodeTensors t;
  t.q = view_in(entries, "q", false, views);
  t.out = view_in(entries, "out", true, views);
  t.lse = view_in(entries, "lse", true, views);
  t.sinks = view_in(entries, "sinks", false, views);
  t.tree_mask = view_in(entries, "tree_mask", false, views);
  t.mass = view_in(entries, "mass", true, views);
  return t;
}

/// All but the threads.
inline KvDecodeOptions kv_decode_options(const std::string& layout, std::optional<double> scale,
                                         bool causal, std::int64_t window_left, double softcap) {
  KvDecodeOptions o;
  o.layout = layout_from(layout);
  if (scale) o.softmax_scale = static_cast<float>(*scale);
  o.causal = causal;
  o.window_left = window_left;
  o.softcap = static_cast<float>(softcap);
  return o;
}

inline nb::dict kv_bytes(const KvBytes& b) {
  nb::dict d;
  d["codes"] = b.codes;
  d["scales"] = b.scales;
  d["window"] = b.window;
  d["tables"] = b.tables;
  d["means"] = b.means;
  d["spare"] = b.spare;
  d["total"] = b.total;
  return d;
}

}  // namespace qattn::python
