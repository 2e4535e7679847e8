// The C interface of the KV cache: translation only.
#include "core/c_translate.hpp"

struct qattn_kv_cache {
  qattn::KvCache cache;
};

using namespace qattn;
using namespace qattn::c;

namespace {

Status read_options(const qattn_kv_options* given, KvCacheOptions& options) {
  qattn_kv_options o;
  qattn_kv_options_init(&o);
  if (Status s = read_struct("options", given, o); !s.ok()) return s;
  if (Status s = read_flag("smooth_k", o.smooth_k); !s.ok()) return s;
  if (Status s = read_flag("rotate", o.rotate); !s.ok()) return s;
  if (o.tier_count < 0 || o.tier_count > QATTN_KV_MAX_TIERS) {
    return invalid("tier_count: " + std::to_string(o.tier_count) + " is not from 0 to 7");
  }
  options.layers = o.layers;
  options.heads_kv = o.heads_kv;
  options.d = o.d;
  options.dv = o.dv;
  options.page_size = o.page_size;
  options.window = o.window;
  options.sinks = o.sinks;
  options.window_format = static_cast<Format>(o.window_format);
  options.tiers.clear();
  for (int i = 0; i < o.tier_count; ++i) {
    options.tiers.push_back({o.tiers[i].k_bits, o.tiers[i].v_bits});
  }
  options.average_bits = o.average_bits;
  options.budget_from = o.budget_from;
  options.smooth_k = o.smooth_k != 0;
  options.rotate = o.rotate != 0;
  options.importance = static_cast<KvImportance>(o.importance);
  options.threads = o.threads;
  options.importance_decay = o.importance_decay;
  options.hysteresis = o.hysteresis;
  return {};
}

/// f(cache), where there is one.
template <class Cache, class Function>
qattn_status with(Cache* cache, Function f) noexcept {
  return guarded([&]() -> Status {
    if (cache == nullptr) return invalid("cache: is NULL");
    return f(cache->cache);
  });
}

/// Stores a Result through a pointer of the caller.
template <class T>
Status store(const char* name, const Result<T>& result, T* to) {
  if (!result.ok()) return result.status();
  if (to == nullptr) return invalid(std::string(name) + ": is NULL");
  *to = *result;
  return {};
}

Status check_pointer(const char* name, const void* pointer) {
  return pointer == nullptr ? invalid(std::string(name) + ": is NULL") : Status();
}

Status read_sequences(const int64_t* sequences, int64_t count, std::span<const int64_t>& span) {
  if (count < 0 || (count > 0 && sequences == nullptr)) {
    return invalid("sequences: " + std::to_string(count) + " at " +
                   (sequences == nullptr ? "NULL" : "a pointer"));
  }
  span = {sequences, static_cast<std::size_t>(count)};
  return {};
}

TensorView optional_view(const qattn_tensor* tensor) {
  return tensor == nullptr ? TensorView{} : view(*tensor);
}

}  // namespace

void qattn_kv_options_init(qattn_kv_options* o) {
  init(o);
  if (o == nullptr) return;
  const KvCacheOptions defaults;
  o->layers = defaults.layers;
  o->heads_kv = defaults.heads_kv;
  o->d = defaults.d;
  o->dv = defaults.dv;
  o->page_size = defaults.page_size;
  o->window = defaults.window;
  o->sinks = defaults.sinks;
  o->window_format = static_cast<int32_t>(defaults.window_format);
  o->tier_count = static_cast<int32_t>(defaults.tiers.size());
  for (int i = 0; i < o->tier_count; ++i) {
    const KvTier& tier = defaults.tiers[static_cast<std::size_t>(i)];
    o->tiers[i] = {tier.k_bits, tier.v_bits};
  }
  o->smooth_k = defaults.smooth_k;
  o->rotate = defaults.rotate;
  o->importance_decay = defaults.importance_decay;
  o->hysteresis = defaults.hysteresis;
}
void qattn_kv_append_tensors_init(qattn_kv_append_tensors* t) { init(t); }
void qattn_kv_decode_tensors_init(qattn_kv_decode_tensors* t) { init(t); }
void qattn_kv_decode_options_init(qattn_kv_decode_options* o) {
  init(o);
  if (o == nullptr) return;
  o->causal = 1;
  o->window_left = -1;
}
void qattn_kv_bytes_init(qattn_kv_bytes* b) { init(b); }
void qattn_kv_usage_init(qattn_kv_usage* u) { init(u); }

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
  return with(cache, [&](const KvCache& c) {
    const KvBytes b = c.bytes();
    qattn_kv_bytes full{0, b.codes, b.scales, b.window, b.tables, b.means, b.spare, b.total};
    return write_struct("bytes", full, bytes);
  });
}

qattn_status qattn_kv_get_usage(const qattn_kv_cache* cache, int64_t sequence, int64_t layer,
                                qattn_kv_usage* usage) {
  return with(cache, [&](const KvCache& c) -> Status {
    const Result<KvUsage> u = c.usage(sequence, layer);
    if (!u.ok()) return u.status();
    qattn_kv_usage full{0, u->length, u->bytes, u->allowed_bytes, u->average_bits, u->window_tokens,
                        {}};
    std::copy(u->tier_tokens.begin(), u->tier_tokens.end(), full.tier_tokens);
    return write_struct("usage", full, usage);
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
    qattn_kv_decode_tensors t;
    qattn_kv_decode_options o;
    qattn_kv_decode_tensors_init(&t);
    qattn_kv_decode_options_init(&o);
    if (Status s = read_struct("tensors", tensors, t); !s.ok()) return s;
    if (Status s = read_struct("options", options, o); !s.ok()) return s;
    if (Status s = read_flag("causal", o.causal); !s.ok()) return s;
    if (Status s = read_flag("has_softmax_scale", o.has_softmax_scale); !s.ok()) return s;
    KvDecodeOptions own;
    own.layout = static_cast<Layout>(o.layout);
    if (o.has_softmax_scale) own.softmax_scale = o.softmax_scale;
    own.causal = o.causal != 0;
    own.window_left = o.window_left;
    own.softcap = o.softcap;
    own.threads = o.threads;
    return decode(
        c, layer, ids,
        {view(t.q), view(t.out), view(t.lse), view(t.sinks), view(t.tree_mask), view(t.mass)}, own);
  });
}
