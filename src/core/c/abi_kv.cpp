// The C interface of the KV cache: translation only.
#include "core/c/translate_kv.hpp"

struct qattn_kv_cache {
  qattn::KvCache cache;
};

using namespace qattn;
using namespace qattn::c;

namespace {

Status read_sequences(const int64_t* sequences, int64_t count, std::span<const int64_t>& span) {
  if (count < 0 || (count > 0 && sequences == nullptr)) {
    return invalid("sequences: " + std::to_string(count) + " at " +
                   (sequences == nullptr ? "NULL" : "a pointer"));
  }
  span = {sequences, static_cast<std::size_t>(count)};
  return {};
}

}  // namespace

void qattn_kv_options_defaults(qattn_kv_options* given, size_t size) {
  qattn_kv_options o = {};
  const KvCacheOptions defaults;
  o.layers = defaults.layers;
  o.heads_kv = defaults.heads_kv;
  o.d = defaults.d;
  o.dv = defaults.dv;
  o.page_size = defaults.page_size;
  o.window = defaults.window;
  o.sinks = defaults.sinks;
  o.window_format = static_cast<int32_t>(defaults.window_format);
  o.tier_count = static_cast<int32_t>(defaults.tiers.size());
  for (int i = 0; i < o.tier_count; ++i) {
    const KvTier& tier = defaults.tiers[static_cast<std::size_t>(i)];
    o.tiers[i] = {tier.k_bits, tier.v_bits};
  }
  o.smooth_k = defaults.smooth_k;
  o.rotate = defaults.rotate;
  o.balance_k = defaults.balance_k;
  o.smooth_v = defaults.smooth_v;
  o.importance_decay = defaults.importance_decay;
  o.hysteresis = defaults.hysteresis;
  o.k_granularity = static_cast<int32_t>(defaults.k_granularity);
  fill(given, size, o);
}
void qattn_kv_append_tensors_defaults(qattn_kv_append_tensors* t, size_t size) { fill(t, size); }
void qattn_kv_decode_tensors_defaults(qattn_kv_decode_tensors* t, size_t size) { fill(t, size); }
void qattn_kv_decode_options_defaults(qattn_kv_decode_options* given, size_t size) {
  qattn_kv_decode_options o = {};
  o.causal = 1;
  o.window_left = -1;
  fill(given, size, o);
}
void qattn_kv_bytes_defaults(qattn_kv_bytes* b, size_t size) { fill(b, size); }
void qattn_kv_usage_defaults(qattn_kv_usage* u, size_t size) { fill(u, size); }

qattn_status qattn_kv_create(const qattn_kv_options* options, qattn_kv_cache** cache) {
  return guarded([&]() -> Status {
    if (Status s = check_pointer("cache", cache); !s.ok()) return s;
    KvCacheOptions o;
    if (Status s = read_options(options, o); !s.ok()) return s;
    Result<KvCache> made = KvCache::create(o);
    if (!made.ok()) return made.status();
    *cache = new qattn_kv_cache{std::move(*made)};
    return {};
  });
}

void qattn_kv_destroy(qattn_kv_cache* cache) { delete cache; }

qattn_status qattn_kv_shortest_length(const qattn_kv_options* options, int64_t* length) {
  return guarded([&]() -> Status {
    KvCacheOptions o;
    if (Status s = read_options(options, o); !s.ok()) return s;
    return store("length", KvCache::shortest_length(o), length);
  });
}

qattn_status qattn_kv_add_sequence(qattn_kv_cache* cache, int64_t* sequence) {
  return with(cache, [&](KvCache& c) -> Status {
    if (Status s = check_pointer("sequence", sequence); !s.ok()) return s;
    return store("sequence", c.add_sequence(), sequence);
  });
}

qattn_status qattn_kv_fork(qattn_kv_cache* cache, int64_t sequence, int64_t* copy) {
  return with(cache, [&](KvCache& c) -> Status {
    if (Status s = check_pointer("copy", copy); !s.ok()) return s;
    return store("copy", c.fork(sequence), copy);
  });
}

qattn_status qattn_kv_release(qattn_kv_cache* cache, int64_t sequence) {
  return with(cache, [&](KvCache& c) { return c.release(sequence); });
}

qattn_status qattn_kv_length(const qattn_kv_cache* cache, int64_t sequence, int64_t layer,
                             int64_t* length) {
  return with(cache,
              [&](const KvCache& c) { return store("length", c.length(sequence, layer), length); });
}

qattn_status qattn_kv_append(qattn_kv_cache* cache, int64_t layer, const int64_t* sequences,
                             int64_t count, const qattn_kv_append_tensors* tensors,
                             int32_t layout) {
  return with(cache, [&](KvCache& c) -> Status {
    std::span<const int64_t> ids;
    if (Status s = read_sequences(sequences, count, ids); !s.ok()) return s;
    qattn_kv_append_tensors t;
    qattn_kv_append_tensors_init(&t);
    if (Status s = read_struct("tensors", tensors, t); !s.ok()) return s;
    const KvAppendTensors views{view(t.k), view(t.v), view(t.cu_seqlens), view(t.importance)};
    return c.append(layer, ids, views, static_cast<Layout>(layout));
  });
}

qattn_status qattn_kv_truncate(qattn_kv_cache* cache, int64_t sequence, int64_t length) {
  return with(cache, [&](KvCache& c) { return c.truncate(sequence, length); });
}

qattn_status qattn_kv_evict(qattn_kv_cache* cache, int64_t sequence, int64_t layer, int64_t head,
                            int64_t begin, int64_t end) {
  return with(cache, [&](KvCache& c) { return c.evict(sequence, layer, head, begin, end); });
}

qattn_status qattn_kv_observe(qattn_kv_cache* cache, int64_t layer, const int64_t* sequences,
                              int64_t count, const qattn_tensor* mass) {
  return with(cache, [&](KvCache& c) -> Status {
    std::span<const int64_t> ids;
    if (Status s = read_sequences(sequences, count, ids); !s.ok()) return s;
    return c.observe(layer, ids, optional_view(mass));
  });
}

qattn_status qattn_kv_set_importance(qattn_kv_cache* cache, int64_t sequence, int64_t layer,
                                     const qattn_tensor* importance) {
  return with(cache, [&](KvCache& c) {
    return c.set_importance(sequence, layer, optional_view(importance));
  });
}

qattn_status qattn_kv_read(const qattn_kv_cache* cache, int64_t sequence, int64_t layer,
                           const qattn_tensor* k, const qattn_tensor* v,
                           const qattn_tensor* tiers) {
  return with(cache, [&](const KvCache& c) {
    return c.read(sequence, layer, optional_view(k), optional_view(v), optional_view(tiers));
  });
}

qattn_status qattn_kv_get_bytes(const qattn_kv_cache* cache, qattn_kv_bytes* bytes) {
  return with(cache, [&](const KvCache& c) { return store_bytes(c.bytes(), bytes); });
}

qattn_status qattn_kv_get_usage(const qattn_kv_cache* cache, int64_t sequence, int64_t layer,
                                qattn_kv_usage* usage) {
  return with(cache, [&](const KvCache& c) -> Status {
    const Result<KvUsage> u = c.usage(sequence, layer);
    return u.ok() ? store_usage(*u, usage) : u.status();
  });
}

qattn_status qattn_kv_save(const qattn_kv_cache* cache, const char* path) {
  return with(cache, [&](const KvCache& c) -> Status {
    if (Status s = check_pointer("path", path); !s.ok()) return s;
    return c.save(path);
  });
}

qattn_status qattn_kv_load(const char* path, int32_t threads, qattn_kv_cache** cache) {
  return guarded([&]() -> Status {
    if (Status s = check_pointer("path", path); !s.ok()) return s;
    if (Status s = check_pointer("cache", cache); !s.ok()) return s;
    Result<KvCache> loaded = KvCache::load(path, threads);
    if (!loaded.ok()) return loaded.status();
    *cache = new qattn_kv_cache{std::move(*loaded)};
    return {};
  });
}

qattn_status qattn_kv_decode(const qattn_kv_cache* cache, int64_t layer, const int64_t* sequences,
                             int64_t count, const qattn_kv_decode_tensors* tensors,
                             const qattn_kv_decode_options* options) {
  return with(cache, [&](const KvCache& c) -> Status {
    std::span<const int64_t> ids;
    if (Status s = read_sequences(sequences, count, ids); !s.ok()) return s;
    KvDecodeTensors t;
    KvDecodeOptions o;
    if (Status s = read_decode(tensors, options, t, o); !s.ok()) return s;
    return decode(c, layer, ids, t, o);
  });
}
