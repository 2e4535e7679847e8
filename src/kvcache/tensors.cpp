#include "kvcache/tensors.hpp"

#include <omp.h>

#include <algorithm>

#include "core/index_tensor.hpp"
#include "core/layout_hint.hpp"
#include "core/problem.hpp"
#include "formats/bits.hpp"

namespace qattn::kv {
namespace {

std::string text(std::int64_t value) { return std::to_string(value); }

/// Where dimensions are in k and v.
struct Axes {
  int token, head;
};

Axes axes_of(Layout layout, bool packed) {
  const int first = packed ? 0 : 1;
  return layout == Layout::bshd ? Axes{first, first + 1} : Axes{first + 1, first};
}

Status check_cu_seqlens(const TensorView& view, std::int64_t batch, std::int64_t tokens) {
  if (view.present()) {
    if (Status s = check_index_format("cu_seqlens", view); !s.ok()) return s;
  }
  if (Status s = check_tensor("cu_seqlens", view, view.format, {batch + 1}, true); !s.ok())
    return s;
  std::int64_t before = 0;
  for (std::int64_t b = 0; b <= batch; ++b) {
    const std::int64_t now = index_entry(view, b);
    const bool right = b == 0 ? now == 0 : now >= before;
    if (!right || now > tokens || (b == batch && now != tokens)) {
      return invalid("cu_seqlens: entry " + text(b) + " is " + text(now) +
                     "; entries should rise from 0 to the tokens of k, " + text(tokens));
    }
    before = now;
  }
  return {};
}

Status check_lengths(const detail::KvCacheData& cache, std::int64_t layer,
                     std::span<const std::int64_t> sequences, const std::vector<Rows>& rows) {
  for (std::size_t b = 0; b < rows.size(); ++b) {
    const Layer& l = cache.find(sequences[b])->layers[static_cast<std::size_t>(layer)];
    if (l.length + rows[b].count > most_tokens) {
      return invalid("k: sequence " + text(sequences[b]) + " would have " +
                     text(l.length + rows[b].count) + " tokens, should have at most 2^30");
    }
  }
  return {};
}

}  // namespace

int thread_index() { return omp_get_thread_num(); }

Status check_tensor(const std::string& name, const TensorView& view, Format format,
                    std::initializer_list<std::int64_t> extent, bool strided, Device device) {
  if (!view.present()) return invalid(name + ": is missing");
  const auto rank = static_cast<int>(extent.size());
  if (Status s = check_view(name.c_str(), view, rank); !s.ok()) return s;
  if (view.device != device) {
    return Status(Code::unsupported,
                  name + ": lies on " + device_text(view.device) + ", and the KV cache lies " +
                      (device == Device{} ? "in host memory" : "on " + device_text(device)));
  }
  if (format == Format::none ? !is_float(view.format) : view.format != format) {
    return invalid(name + ": format " + std::string(info(view.format).name) + " is not " +
                   (format == Format::none ? "f32, f16 or bf16" : std::string(info(format).name)));
  }
  std::int64_t dense = 1;
  bool empty = false;
  for (int i = rank - 1; i >= 0; --i) {
    const std::int64_t want = extent.begin()[i];
    if (want >= 0 && view.shape[i] != want) {
      return invalid(name + ": shape " + shape_text(view.shape.data(), rank) + " should be " +
                     shape_text(extent.begin(), rank) + " (-1: any)");
    }
    if ((!strided || (i == rank - 1 && rank > 1)) && view.shape[i] > 1 && view.stride[i] != dense) {
      return invalid(name + ": stride " + text(view.stride[i]) + " of dimension " +
                     text(std::int64_t{i}) + " should be " + text(dense));
    }
    dense *= view.shape[i];
    empty |= view.shape[i] == 0;
  }
  if (!empty && view.data == nullptr) return invalid(name + ": data pointer is null");
  return {};
}

Status check_overlap(std::span<const NamedTensor> tensors, std::size_t outputs) {
  for (std::size_t a = 0; a < outputs; ++a) {
    if (!tensors[a].view->present()) continue;
    const ByteRange ra = byte_range(*tensors[a].view);
    for (std::size_t b = a + 1; b < tensors.size(); ++b) {
      if (!tensors[b].view->present()) continue;
      const ByteRange rb = byte_range(*tensors[b].view);
      if (ra.begin < rb.end && rb.begin < ra.end) {
        return invalid(std::string(tensors[a].name) + ": overlaps the memory of " +
                       tensors[b].name + "; an output must not share memory with any other tensor");
      }
    }
  }
  return {};
}

Status check_weights(const std::string& name, const TensorView& view) {
  const auto* x = static_cast<const float*>(view.data);
  std::int64_t count = 1;
  for (int i = 0; i < view.rank; ++i) count *= view.shape[i];
  for (std::int64_t i = 0; i < count; ++i) {
    if (!(x[i] >= 0.0f) || !formats::is_finite(x[i]) || x[i] > most_importance) {
      return invalid(name + ": element " + std::to_string(i) + " is " + std::to_string(x[i]) +
                     ", should be from 0 to 1e15");
    }
  }
  return {};
}

Status check_sequences(const detail::KvCacheData& cache, std::int64_t layer,
                       std::span<const std::int64_t> sequences) {
  if (sequences.empty()) return invalid("sequences: is empty");
  std::vector<std::int64_t> sorted(sequences.begin(), sequences.end());
  std::sort(sorted.begin(), sorted.end());
  for (std::size_t i = 0; i < sorted.size(); ++i) {
    if (Status s = check_place(cache, sorted[i], layer); !s.ok()) return s;
    if (i > 0 && sorted[i] == sorted[i - 1]) {
      return invalid("sequences: " + text(sorted[i]) + " is there twice");
    }
  }
  return {};
}

Status check_append(const detail::KvCacheData& cache, std::int64_t layer,
                    std::span<const std::int64_t> sequences, const KvAppendTensors& t,
                    Layout layout, std::vector<Rows>& rows) {
  if (Status s = check_sequences(cache, layer, sequences); !s.ok()) return s;
  if (layout != Layout::bshd && layout != Layout::bhsd) {
    return invalid("layout: " + text(static_cast<int>(layout)) + " is neither bshd nor bhsd");
  }
  const bool packed = t.cu_seqlens.present();
  const auto batch = static_cast<std::int64_t>(sequences.size());
  const KvCacheOptions& o = cache.options;
  const Axes a = axes_of(layout, packed);
  const std::int64_t tokens = t.k.rank > a.token ? t.k.shape[a.token] : -1;
  for (const auto& [name, view, channels] :
       {std::tuple{"k", &t.k, o.d}, std::tuple{"v", &t.v, o.dv}}) {
    const std::int64_t s = view == &t.k ? -1 : tokens;
    const std::int64_t outer = layout == Layout::bshd ? s : o.heads_kv;
    const std::int64_t inner = layout == Layout::bshd ? o.heads_kv : s;
    Status status =
        packed ? check_tensor(name, *view, Format::none, {outer, inner, channels}, true)
               : check_tensor(name, *view, Format::none, {batch, outer, inner, channels}, true);
    if (status.ok()) continue;
    const bool heads_elsewhere = view->rank == (packed ? 3 : 4) &&
                                 view->shape[a.head] != o.heads_kv &&
                                 view->shape[a.token] == o.heads_kv;
    return heads_elsewhere ? Status(status.code(), status.message() + other_layout(layout))
                           : status;
  }
  if (t.k.format != t.v.format) {
    return invalid("v: format " + std::string(info(t.v.format).name) + " differs from k's " +
                   std::string(info(t.k.format).name));
  }
  if (packed) {
    if (Status s = check_cu_seqlens(t.cu_seqlens, batch, tokens); !s.ok()) return s;
  }
  const std::int64_t bytes = info(t.k.format).bits / 8;
  std::int64_t longest = 0;
  for (std::int64_t b = 0; b < batch; ++b) {
    std::int64_t begin = 0, end = tokens;
    if (packed) {
      begin = index_entry(t.cu_seqlens, b);
      end = index_entry(t.cu_seqlens, b + 1);
    }
    const auto base = [&](const TensorView& x) {
      const std::int64_t element = (packed ? 0 : b * x.stride[0]) + begin * x.stride[a.token];
      return static_cast<const std::byte*>(x.data) + element * bytes;
    };
    Rows r;
    r.count = end - begin;
    r.format = t.k.format;
    if (r.count > 0) {
      r.k = base(t.k);
      r.v = base(t.v);
    }
    r.k_token = t.k.stride[a.token] * bytes;
    r.k_head = t.k.stride[a.head] * bytes;
    r.v_token = t.v.stride[a.token] * bytes;
    r.v_head = t.v.stride[a.head] * bytes;
    rows.push_back(r);
    const Sequence& s = *cache.find(sequences[static_cast<std::size_t>(b)]);
    longest = std::max(longest, s.layers[static_cast<std::size_t>(layer)].length + r.count);
  }
  if (Status s = check_lengths(cache, layer, sequences, rows); !s.ok()) return s;
  if (!t.importance.present()) return {};
  const std::int64_t blocks = formats::kv_blocks(longest);
  Status s =
      check_tensor("importance", t.importance, Format::f32, {batch, o.heads_kv, blocks}, false);
  if (!s.ok()) return s;
  if (s = check_weights("importance", t.importance); !s.ok()) return s;
  for (std::int64_t b = 0; b < batch; ++b) {
    rows[static_cast<std::size_t>(b)].importance =
        static_cast<const float*>(t.importance.data) + b * o.heads_kv * blocks;
    rows[static_cast<std::size_t>(b)].blocks = blocks;
  }
  return {};
}

}  // namespace qattn::kv
