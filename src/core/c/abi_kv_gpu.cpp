// The C interface of the KV cache in a GPU's memory: translation only.
#include "core/c/translate_kv.hpp"

struct qattn_kv_gpu_cache {
  qattn::GpuKvCache cache;
};

using namespace qattn;
using namespace qattn::c;

namespace {

Status read_capacity(const qattn_kv_gpu_capacity* given, KvGpuCapacity& capacity) {
  qattn_kv_gpu_capacity c;
  qattn_kv_gpu_capacity_init(&c);
  if (Status s = read_struct("capacity", given, c); !s.ok()) return s;
  if (c.pool_count < 0 || c.pool_count > QATTN_KV_MAX_TIERS + 1) {
    return invalid("pool_count: " + std::to_string(c.pool_count) + " is not from 0 to 8");
  }
  if (c.reserved != 0) return invalid("reserved: " + std::to_string(c.reserved) + " is not 0");
  for (int i = c.pool_count; i < QATTN_KV_MAX_TIERS + 1; ++i) {
    if (c.pages[i] != 0) {
      return invalid("pages: entry " + std::to_string(i) + " is " + std::to_string(c.pages[i]) +
                     ", but pool_count is " + std::to_string(c.pool_count));
    }
  }
  capacity = {c.sequences, c.tokens, {c.pages, c.pages + c.pool_count}};
  return {};
}

Device device(int32_t type, int32_t index) { return {static_cast<DeviceType>(type), index}; }

/// A cache to its owner.
Status give(Result<GpuKvCache> made, qattn_kv_gpu_cache** cache) {
  if (!made.ok()) return made.status();
  *cache = new qattn_kv_gpu_cache{std::move(*made)};
  return {};
}

}  // namespace

void qattn_kv_gpu_capacity_defaults(qattn_kv_gpu_capacity* given, size_t size) {
  qattn_kv_gpu_capacity c = {};
  c.sequences = 1;
  fill(given, size, c);
}
void qattn_kv_gpu_append_tensors_defaults(qattn_kv_gpu_append_tensors* t, size_t size) {
  fill(t, size);
}

qattn_status qattn_kv_gpu_create(const qattn_kv_options* options,
                                 const qattn_kv_gpu_capacity* capacity, int32_t device_type,
                                 int32_t device_index, void* stream, qattn_kv_gpu_cache** cache) {
  return guarded([&]() -> Status {
    if (Status s = check_pointer("cache", cache); !s.ok()) return s;
    KvCacheOptions o;
    KvGpuCapacity c;
    if (Status s = read_options(options, o); !s.ok()) return s;
    if (Status s = read_capacity(capacity, c); !s.ok()) return s;
    return give(GpuKvCache::create(o, c, device(device_type, device_index), stream), cache);
  });
}

void qattn_kv_gpu_destroy(qattn_kv_gpu_cache* cache) { delete cache; }

qattn_status qattn_kv_gpu_add_sequence(qattn_kv_gpu_cache* cache, void* stream, int64_t* slot) {
  return with(cache, [&](GpuKvCache& c) -> Status {
    if (Status s = check_pointer("slot", slot); !s.ok()) return s;
    return store("slot", c.add_sequence(stream), slot);
  });
}

qattn_status qattn_kv_gpu_fork(qattn_kv_gpu_cache* cache, int64_t slot, void* stream,
                               int64_t* copy) {
  return with(cache, [&](GpuKvCache& c) -> Status {
    if (Status s = check_pointer("copy", copy); !s.ok()) return s;
    return store("copy", c.fork(slot, stream), copy);
  });
}

qattn_status qattn_kv_gpu_release(qattn_kv_gpu_cache* cache, int64_t slot, void* stream) {
  return with(cache, [&](GpuKvCache& c) { return c.release(slot, stream); });
}

qattn_status qattn_kv_gpu_append(qattn_kv_gpu_cache* cache, int64_t layer,
                                 const qattn_kv_gpu_append_tensors* tensors, int32_t layout,
                                 void* stream) {
  return with(cache, [&](GpuKvCache& c) -> Status {
    qattn_kv_gpu_append_tensors t;
    qattn_kv_gpu_append_tensors_init(&t);
    if (Status s = read_struct("tensors", tensors, t); !s.ok()) return s;
    const KvGpuAppendTensors views{view(t.slots), view(t.k), view(t.v), view(t.counts),
                                   view(t.importance)};
    return c.append(layer, views, static_cast<Layout>(layout), stream);
  });
}

qattn_status qattn_kv_gpu_truncate(qattn_kv_gpu_cache* cache, int64_t slot, int64_t length,
                                   void* stream) {
  return with(cache, [&](GpuKvCache& c) { return c.truncate(slot, length, stream); });
}

qattn_status qattn_kv_gpu_evict(qattn_kv_gpu_cache* cache, int64_t slot, int64_t layer,
                                int64_t head, int64_t begin, int64_t end, void* stream) {
  return with(cache, [&](GpuKvCache& c) { return c.evict(slot, layer, head, begin, end, stream); });
}

qattn_status qattn_kv_gpu_observe(qattn_kv_gpu_cache* cache, int64_t layer,
                                  const qattn_tensor* slots, const qattn_tensor* mass,
                                  void* stream) {
  return with(cache, [&](GpuKvCache& c) {
    return c.observe(layer, optional_view(slots), optional_view(mass), stream);
  });
}

qattn_status qattn_kv_gpu_set_importance(qattn_kv_gpu_cache* cache, int64_t slot, int64_t layer,
                                         const qattn_tensor* importance, void* stream) {
  return with(cache, [&](GpuKvCache& c) {
    return c.set_importance(slot, layer, optional_view(importance), stream);
  });
}

qattn_status qattn_kv_gpu_decode_workspace(const qattn_kv_gpu_cache* cache, int64_t layer,
                                           const qattn_tensor* slots,
                                           const qattn_kv_decode_tensors* tensors,
                                           const qattn_kv_decode_options* options, size_t* bytes) {
  return with(cache, [&](const GpuKvCache& c) -> Status {
    KvDecodeTensors t;
    KvDecodeOptions o;
    if (Status s = read_decode(tensors, options, t, o); !s.ok()) return s;
    return store("bytes", decode_workspace(c, layer, optional_view(slots), t, o), bytes);
  });
}

qattn_status qattn_kv_gpu_decode(const qattn_kv_gpu_cache* cache, int64_t layer,
                                 const qattn_tensor* slots, const qattn_kv_decode_tensors* tensors,
                                 const qattn_kv_decode_options* options, void* workspace,
                                 size_t workspace_bytes, void* stream) {
  return with(cache, [&](const GpuKvCache& c) -> Status {
    KvDecodeTensors t;
    KvDecodeOptions o;
    if (Status s = read_decode(tensors, options, t, o); !s.ok()) return s;
    return decode(c, layer, optional_view(slots), t, o, workspace, workspace_bytes, stream);
  });
}

qattn_status qattn_kv_gpu_slot_status(const qattn_kv_gpu_cache* cache, int64_t slot, void* stream) {
  return with(cache, [&](const GpuKvCache& c) { return c.status(slot, stream); });
}

qattn_status qattn_kv_gpu_length(const qattn_kv_gpu_cache* cache, int64_t slot, int64_t layer,
                                 void* stream, int64_t* length) {
  return with(cache, [&](const GpuKvCache& c) {
    return store("length", c.length(slot, layer, stream), length);
  });
}

qattn_status qattn_kv_gpu_get_usage(const qattn_kv_gpu_cache* cache, int64_t slot, int64_t layer,
                                    void* stream, qattn_kv_usage* usage) {
  return with(cache, [&](const GpuKvCache& c) -> Status {
    const Result<KvUsage> u = c.usage(slot, layer, stream);
    return u.ok() ? store_usage(*u, usage) : u.status();
  });
}

qattn_status qattn_kv_gpu_save(const qattn_kv_gpu_cache* cache, const char* path, void* stream) {
  return with(cache, [&](const GpuKvCache& c) -> Status {
    if (Status s = check_pointer("path", path); !s.ok()) return s;
    return c.save(path, stream);
  });
}

qattn_status qattn_kv_gpu_load(const char* path, const qattn_kv_gpu_capacity* capacity,
                               int32_t device_type, int32_t device_index, void* stream,
                               qattn_kv_gpu_cache** cache) {
  return guarded([&]() -> Status {
    if (Status s = check_pointer("path", path); !s.ok()) return s;
    if (Status s = check_pointer("cache", cache); !s.ok()) return s;
    KvGpuCapacity c;
    if (Status s = read_capacity(capacity, c); !s.ok()) return s;
    return give(GpuKvCache::load(path, c, device(device_type, device_index), stream), cache);
  });
}

qattn_status qattn_kv_gpu_read(const qattn_kv_gpu_cache* cache, int64_t slot, int64_t layer,
                               const qattn_tensor* k, const qattn_tensor* v,
                               const qattn_tensor* tiers, void* stream) {
  return with(cache, [&](const GpuKvCache& c) {
    return c.read(slot, layer, optional_view(k), optional_view(v), optional_view(tiers), stream);
  });
}

qattn_status qattn_kv_gpu_get_bytes(const qattn_kv_gpu_cache* cache, qattn_kv_bytes* bytes) {
  return with(cache, [&](const GpuKvCache& c) { return store_bytes(c.bytes(), bytes); });
}

qattn_status qattn_kv_gpu_holds(const qattn_kv_gpu_cache* cache, int64_t slot, int32_t* holds) {
  return with(cache, [&](const GpuKvCache& c) -> Status {
    if (Status s = check_pointer("holds", holds); !s.ok()) return s;
    *holds = c.holds(slot) ? 1 : 0;
    return {};
  });
}
