#include "kernels/attn_decode/call.hpp"

#include <algorithm>
#include <cmath>

#include "core/guarded.hpp"
#include "core/problem.hpp"
#include "kernels/attn_decode/cpu.hpp"
#include "kvcache/tensors.hpp"

namespace qattn::kv {
namespace {

std::string text(std::int64_t value) { return std::to_string(value); }

Status check_operands(const KvCacheOptions& o, const KvDecodeTensors& t, Layout layout,
                      DecodeCall& call) {
  const bool bshd = layout == Layout::bshd;
  const int query = bshd ? 1 : 2, head = bshd ? 2 : 1;
  Status s = check_tensor("q", t.q, Format::none, {call.batch, -1, -1, o.d}, true);
  if (!s.ok()) return s;
  call.queries = t.q.shape[query];
  call.heads_q = t.q.shape[head];
  if (call.queries < 1 || call.queries > most_queries) {
    return invalid("q: " + text(call.queries) + " queries of a sequence, should be 1 to " +
                   text(most_queries));
  }
  if (call.heads_q % o.heads_kv != 0 || call.heads_q == 0 ||
      call.heads_q / o.heads_kv > most_group) {
    return invalid("q: " + text(call.heads_q) + " heads should be 1 to " + text(most_group) +
                   " times heads_kv " + text(o.heads_kv));
  }
  const std::int64_t outer = bshd ? call.queries : call.heads_q;
  const std::int64_t inner = bshd ? call.heads_q : call.queries;
  s = check_tensor("out", t.out, Format::none, {call.batch, outer, inner, o.dv}, true);
  if (!s.ok()) return s;
  if (s = check_no_overlap("out", t.out); !s.ok()) return s;
  call.q = {t.q.stride[0], t.q.stride[query], t.q.stride[head]};
  call.out = {t.out.stride[0], t.out.stride[query], t.out.stride[head]};
  return {};
}

Status check_optional(const KvDecodeTensors& t, const DecodeCall& call) {
  if (t.lse.present()) {
    Status s =
        check_tensor("lse", t.lse, Format::f32, {call.batch, call.heads_q, call.queries}, false);
    if (!s.ok()) return s;
  }
  if (t.sinks.present()) {
    if (Status s = check_tensor("sinks", t.sinks, Format::f32, {call.heads_q}, false); !s.ok()) {
      return s;
    }
  }
  if (t.tree_mask.present()) {
    Status s = check_tensor("tree_mask", t.tree_mask, Format::b8,
                            {call.batch, call.queries, call.queries}, true);
    if (!s.ok()) return s;
  }
  if (t.mass.present()) {
    Status s =
        check_tensor("mass", t.mass, Format::f32, {call.batch, call.heads_q, call.blocks}, false);
    if (!s.ok()) return s;
  }
  return {};
}

Status check_outputs(const KvDecodeTensors& t) {
  const NamedTensor all[] = {{"out", &t.out}, {"lse", &t.lse},     {"mass", &t.mass},
                             {"q", &t.q},     {"sinks", &t.sinks}, {"tree_mask", &t.tree_mask}};
  return check_overlap(all, 3);
}

}  // namespace

Status make_call(const detail::KvCacheData& cache, std::int64_t layer,
                 std::span<const std::int64_t> sequences, const KvDecodeTensors& tensors,
                 const KvDecodeOptions& options, DecodeCall& call) {
  if (Status s = check_sequences(cache, layer, sequences); !s.ok()) return s;
  if (Status s = check_decode_options(options); !s.ok()) return s;
  if (Status s = check_threads(options.threads); !s.ok()) return s;
  call.cache = &cache;
  call.tensors = tensors;
  call.batch = static_cast<std::int64_t>(sequences.size());
  if (Status s = check_operands(cache.options, tensors, options.layout, call); !s.ok()) return s;
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
  if (Status s = check_optional(tensors, call); !s.ok()) return s;
  if (Status s = check_outputs(tensors); !s.ok()) return s;
  call.softmax_scale =
      options.softmax_scale.value_or(1.0f / std::sqrt(static_cast<float>(cache.options.d)));
  call.softcap = options.softcap;
  call.causal = options.causal;
  call.window_left = options.window_left;
  call.threads = options.threads > 0 ? options.threads : cache.threads();
  return {};
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
