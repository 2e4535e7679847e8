#include "kernels/decode/call.hpp"

#include <algorithm>
#include <cmath>

#include "core/guarded.hpp"
#include "core/layout_hint.hpp"
#include "core/problem.hpp"
#include "kernels/decode/cpu/kernel.hpp"
#include "kvcache/tensors.hpp"

namespace qattn::kv {
namespace {

std::string text(std::int64_t value) { return std::to_string(value); }

/// Where dimensions are in q and out.
struct Axes {
  int query, head;
};
Axes axes_of(Layout layout) { return layout == Layout::bshd ? Axes{1, 2} : Axes{2, 1}; }

}  // namespace

Status check_queries(const KvCacheOptions& o, const KvDecodeTensors& t, Layout layout,
                     Device device, DecodeExtents& call) {
  const auto [query, head] = axes_of(layout);
  Status s = check_tensor("q", t.q, Format::none, {call.batch, -1, -1, o.d}, true, device);
  if (!s.ok()) return s;
  call.queries = t.q.shape[query];
  call.heads_q = t.q.shape[head];
  if (call.queries < 1 || call.queries > most_queries) {
    const bool heads_elsewhere =
        call.queries % o.heads_kv == 0 && call.heads_q <= most_queries && call.heads_q > 0;
    return invalid("q: " + text(call.queries) + " queries of a sequence, should be 1 to " +
                   text(most_queries) + (heads_elsewhere ? other_layout(layout) : ""));
  }
  if (call.heads_q % o.heads_kv != 0 || call.heads_q == 0) {
    const bool fits = call.queries % o.heads_kv == 0 && call.heads_q <= most_queries;
    return invalid("q: " + text(call.heads_q) + " heads should be a multiple of heads_kv " +
                   text(o.heads_kv) + (fits && call.heads_q > 0 ? other_layout(layout) : ""));
  }
  s = check_tensor("out", t.out, Format::none, {call.batch, t.q.shape[1], t.q.shape[2], o.dv}, true,
                   device);
  return s.ok() ? check_no_overlap("out", t.out) : s;
}

Status check_the_rest(const KvDecodeTensors& t, Device device, const DecodeExtents& call) {
  const struct {
    const char* name;
    const TensorView& view;
    Format format;
    std::initializer_list<std::int64_t> extent;
    bool strided;
  } optional[] = {
      {"lse", t.lse, Format::f32, {call.batch, call.heads_q, call.queries}, false},
      {"sinks", t.sinks, Format::f32, {call.heads_q}, false},
      {"tree_mask", t.tree_mask, Format::b8, {call.batch, call.queries, call.queries}, true},
      {"mass", t.mass, Format::f32, {call.batch, call.heads_q, call.blocks}, false}};
  for (const auto& x : optional) {
    if (!x.view.present()) continue;
    if (Status s = check_tensor(x.name, x.view, x.format, x.extent, x.strided, device); !s.ok()) {
      return s;
    }
  }
  const NamedTensor all[] = {{"out", &t.out}, {"lse", &t.lse},     {"mass", &t.mass},
                             {"q", &t.q},     {"sinks", &t.sinks}, {"tree_mask", &t.tree_mask}};
  return check_overlap(all, 3);
}

Status make_call(const detail::KvCacheData& cache, std::int64_t layer,
                 std::span<const std::int64_t> sequences, const KvDecodeTensors& tensors,
                 const KvDecodeOptions& options, DecodeCall& call) {
  if (Status s = check_sequences(cache, layer, sequences); !s.ok()) return s;
  if (Status s = check_decode_options(options); !s.ok()) return s;
  if (Status s = check_threads(options.threads); !s.ok()) return s;
  call.cache = &cache;
  call.tensors = tensors;
  call.batch = static_cast<std::int64_t>(sequences.size());
  if (Status s = check_queries(cache.options, tensors, options.layout, {}, call); !s.ok()) return s;
  std::int64_t longest = 0;
  for (const std::int64_t id : sequences) {
    call.layers.push_back(&cache.find(id)->layers[static_cast<std::size_t>(layer)]);
    const std::int64_t length = call.layers.back()->length;
    longest = std::max(longest, length);
    if (length < call.queries) {
      return invalid("q: " + text(call.queries) + " queries, but sequence " + text(id) + " has " +
                     text(length) + " tokens; append their K and V first");
    }
  }
  call.blocks = formats::kv_blocks(longest);
  if (Status s = check_the_rest(tensors, {}, call); !s.ok()) return s;
  call.group_size = call.heads_q / cache.options.heads_kv;
  const auto [query, head] = axes_of(options.layout);
  call.q = {tensors.q.stride[0], tensors.q.stride[query], tensors.q.stride[head]};
  call.out = {tensors.out.stride[0], tensors.out.stride[query], tensors.out.stride[head]};
  call.softmax_scale =
      options.softmax_scale.value_or(1.0f / std::sqrt(static_cast<float>(cache.options.d)));
  call.softcap = options.softcap;
  call.debias = options.debias;
  call.causal = options.causal;
  call.window_left = options.window_left;
  call.threads = options.threads > 0 ? options.threads : cache.threads();
  return {};
}

DecodeCall DecodeCall::of_heads(std::int64_t first, std::int64_t count) const {
  DecodeCall part = *this;
  part.group_size = count;
  const auto move = [](TensorView& view, std::int64_t elements) {
    if (!view.present()) return;
    view.data = static_cast<std::byte*>(view.data) + elements * (info(view.format).bits / 8);
  };
  move(part.tensors.q, first * q.head);
  move(part.tensors.out, first * out.head);
  move(part.tensors.lse, first * queries);
  move(part.tensors.sinks, first);
  move(part.tensors.mass, first * blocks);
  return part;
}

}  // namespace qattn::kv

qattn::Status qattn::decode(const KvCache& cache, std::int64_t layer,
                            std::span<const std::int64_t> sequences, const KvDecodeTensors& tensors,
                            const KvDecodeOptions& options) {
  return guarded<Status>([&]() -> Status {
    kv::DecodeCall call;
    Status s = kv::make_call(cache.data(), layer, sequences, tensors, options, call);
    return s.ok() ? cpu::decode(call) : s;
  });
}
