// What the two KV caches' classes translate in the same way.
#pragma once

#include <nanobind/stl/vector.h>

#include <optional>
#include <string>
#include <string_view>

#include "convert.hpp"

namespace qattn::python {

/// A view of the entry of that name, or none.
inline TensorView view_in(const nb::dict& entries, const char* name, bool writable, Views& views) {
  return entries.contains(name) ? views.add(name, entries[name], writable) : TensorView{};
}

/// check() of a call that is given no text of the caller's: refusals name the arguments of the
/// Python classes, some of which are others in C++.
inline Status in_python(const Status& s) {
  std::string text = s.message();
  const std::string_view capacity = "capacity.";
  if (text.starts_with(capacity)) text.erase(0, capacity.size());
  if (text.starts_with("d: ")) text.replace(0, 1, "head_dim");
  if (text.starts_with("dv: ")) text.replace(0, 2, "v_head_dim");
  for (const auto& [word, other] :
       {std::pair{"heads_kv", "kv_heads"}, std::pair{"window_format", "window_dtype"},
        std::pair{"softmax_scale", "scale"}, std::pair{"slot", "sequence"},
        std::pair{"slots", "sequences"}}) {
    rename_word(text, word, other);
  }
  return Status(s.code(), std::move(text));
}
inline void kv_check(const Status& s) {
  if (!s.ok()) throw StatusError(in_python(s));
}
template <class T>
T kv_check(Result<T> result) {
  kv_check(result.status());
  return std::move(*result);
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
                                         bool causal, std::int64_t window_left, double softcap,
                                         bool debias) {
  KvDecodeOptions o;
  o.layout = layout_from(layout);
  if (scale) o.softmax_scale = static_cast<float>(*scale);
  o.causal = causal;
  o.window_left = window_left;
  o.softcap = static_cast<float>(softcap);
  o.debias = debias;
  return o;
}

/// (layers, heads_kv, d, dv), and the options as KvCache has them.
inline nb::tuple kv_shape(const KvCacheOptions& o) {
  return nb::make_tuple(o.layers, o.heads_kv, o.d, o.dv, o);
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

inline nb::dict kv_usage(const KvUsage& u) {
  nb::dict d;
  d["length"] = u.length;
  d["bytes"] = u.bytes;
  d["allowed_bytes"] = u.allowed_bytes;
  d["average_bits"] = u.average_bits;
  d["window_tokens"] = u.window_tokens;
  d["tier_tokens"] = nb::tuple(nb::cast(u.tier_tokens));
  d["balanced_channels"] = u.balanced_channels;
  d["shifted_heads"] = u.shifted_heads;
  return d;
}

}  // namespace qattn::python
