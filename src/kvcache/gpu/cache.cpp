// The interface of a KV cache on a device: checks on the host, launches, and what waits.
#include <algorithm>
#include <string>

#include "core/guarded.hpp"
#include "core/problem.hpp"
#include "kvcache/gpu/checks.hpp"
#include "kvcache/tensors.hpp"

namespace qattn {

using kv::check_layer;
using kv::check_slot;
using kv::check_slots;
using kv::invalid;
using kv::launched;

namespace {

std::string text(std::int64_t value) { return std::to_string(value); }

/// A dense (B, heads, N) f32 tensor of values a block.
Status check_blocks(const GpuKvCache::Data& d, const char* name, const TensorView& view,
                    std::int64_t batch, std::int64_t heads) {
  return kv::check_tensor(name, view, Format::f32, {batch, heads, -1}, false, d.device);
}

/// k or v: (B, S, heads, channels) in the layout's order.
Status take_rows(const GpuKvCache::Data& d, const char* name, const TensorView& view,
                 std::int64_t batch, std::int64_t tokens, std::int64_t channels, Layout layout,
                 kv::DeviceRows& rows) {
  const std::int64_t heads = d.options().heads_kv;
  const bool bshd = layout == Layout::bshd;
  Status s = kv::check_tensor(name, view, Format::none,
                              {batch, bshd ? tokens : heads, bshd ? heads : tokens, channels}, true,
                              d.device);
  if (!s.ok()) return s;
  rows.data = view.data;
  rows.format = view.format;
  rows.batch = view.stride[0];
  rows.token = view.stride[bshd ? 1 : 2];
  rows.head = view.stride[bshd ? 2 : 1];
  return {};
}

Status check_append(const GpuKvCache::Data& d, std::int64_t layer, const KvGpuAppendTensors& t,
                    Layout layout, kv::AppendCall& call) {
  const KvCacheOptions& o = d.options();
  if (Status s = check_layer(o, layer); !s.ok()) return s;
  if (layout != Layout::bshd && layout != Layout::bhsd) {
    return invalid("layout: " + text(static_cast<int>(layout)) + " is neither bshd nor bhsd");
  }
  if (Status s = check_slots(d, t.slots); !s.ok()) return s;
  const std::int64_t batch = t.slots.shape[0];
  Status s = take_rows(d, "k", t.k, batch, -1, o.d, layout, call.k);
  if (!s.ok()) return s;
  const std::int64_t tokens = t.k.shape[layout == Layout::bshd ? 1 : 2];
  if (s = take_rows(d, "v", t.v, batch, tokens, o.dv, layout, call.v); !s.ok()) return s;
  if (t.k.format != t.v.format) {
    return invalid("v: format " + std::string(info(t.v.format).name) + " differs from k's " +
                   std::string(info(t.k.format).name));
  }
  if (tokens > d.capacity.tokens) {
    return invalid("k: " + text(tokens) + " tokens are more than the capacity of " +
                   text(d.capacity.tokens));
  }
  if (t.counts.present()) {
    s = kv::check_tensor("counts", t.counts, Format::s32, {batch}, false, d.device);
    if (!s.ok()) return s;
    call.counts = static_cast<const std::int32_t*>(t.counts.data);
  }
  if (t.importance.present()) {
    s = check_blocks(d, "importance", t.importance, batch, o.heads_kv);
    if (!s.ok()) return s;
    call.importance = static_cast<const float*>(t.importance.data);
    call.blocks = t.importance.shape[2];
  }
  call.slots = static_cast<const std::int32_t*>(t.slots.data);
  call.batch = static_cast<std::int32_t>(batch);
  call.tokens = static_cast<std::int32_t>(tokens);
  call.layer = static_cast<std::int32_t>(layer);
  return {};
}

/// All tokens of a slot from `begin` on, in every layer.
kv::ForgetCall forget_from(const GpuKvCache::Data& d, std::int64_t slot, std::int64_t begin) {
  kv::ForgetCall call;
  call.slot = static_cast<std::int32_t>(slot);
  call.end_layer = d.state.cache.layers;
  call.end_head = d.state.cache.heads_kv;
  call.begin = begin;
  call.end = kv::most_tokens;
  call.truncates = true;
  return call;
}
kv::ForgetCall forget_all(const GpuKvCache::Data& d, std::int64_t slot, std::uint32_t error) {
  kv::ForgetCall call = forget_from(d, slot, 0);
  call.resets = true;
  call.error = error;
  return call;
}

Status forget(const char* what, const GpuKvCache::Data& d, const kv::ForgetCall& call,
              Stream stream) {
  const detail::DeviceGuard guard(*d.backend, d.device);
  if (!guard.status().ok()) return guard.status();
  return launched(what, d.backend->kv->forget(d.state, call, stream));
}

/// The lowest free slot, emptied on the device; not yet in use.
Result<std::int64_t> empty_slot(const char* what, const GpuKvCache::Data& d, Stream stream) {
  const auto at = std::find(d.used.begin(), d.used.end(), false);
  if (at == d.used.end()) {
    return Status(Code::out_of_memory,
                  "capacity.sequences: all " + text(d.capacity.sequences) + " slots are in use");
  }
  const std::int64_t slot = at - d.used.begin();
  const Status s = forget(what, d, forget_all(d, slot, 0), stream);
  return s.ok() ? Result<std::int64_t>(slot) : Result<std::int64_t>(s);
}

}  // namespace

Status kv::check_layer(const KvCacheOptions& o, std::int64_t layer) {
  if (layer >= 0 && layer < o.layers) return {};
  return invalid("layer: " + text(layer) + " is not from 0 to " + text(o.layers - 1));
}

bool kv::holds(const GpuKvCache::Data& d, std::int64_t slot) noexcept {
  return slot >= 0 && slot < static_cast<std::int64_t>(d.used.size()) &&
         d.used[static_cast<std::size_t>(slot)];
}

Status kv::check_slot(const GpuKvCache::Data& d, std::int64_t slot) {
  if (holds(d, slot)) return {};
  return invalid("slot: " + text(slot) + " holds no sequence of this cache");
}

Status kv::check_slots(const GpuKvCache::Data& d, const TensorView& slots) {
  if (Status s = check_tensor("slots", slots, Format::s32, {-1}, false, d.device); !s.ok()) {
    return s;
  }
  if (slots.shape[0] >= 1 && slots.shape[0] <= d.capacity.sequences) return {};
  return invalid("slots: there are " + text(slots.shape[0]) + ", should be 1 to the capacity of " +
                 text(d.capacity.sequences) + " sequences");
}

GpuKvCache::Data::~Data() {
  if (memory == nullptr) return;
  const detail::DeviceGuard guard(*backend, device);
  if (guard.status().ok()) backend->release(memory, stream);
}

GpuKvCache::GpuKvCache(std::unique_ptr<Data> data) : data_(std::move(data)) {}
GpuKvCache::GpuKvCache(GpuKvCache&&) noexcept = default;
GpuKvCache& GpuKvCache::operator=(GpuKvCache&&) noexcept = default;
GpuKvCache::~GpuKvCache() = default;

const KvCacheOptions& GpuKvCache::options() const { return data_->options(); }

namespace {

/// Pages on a GPU have no room for what a row lacks, and kernels none for longer ones.
Status check_device_channels(const KvCacheOptions& o) {
  for (const auto& [name, channels, rest] :
       {std::tuple{"d", o.d, " and give softmax_scale 1 / sqrt(" + text(o.d) + ")"},
        std::tuple{"dv", o.dv, std::string(" and cut out")}}) {
    const std::string value = std::string(name) + ": " + text(channels);
    if (channels > most_device_channels) {
      return invalid(value + " is above " + text(std::int64_t{most_device_channels}) +
                     ", the most in a cache on a GPU; one on CPUs (KvCache) takes it");
    }
    if (channels == kv::stored_channels(channels)) continue;
    return invalid(value + " is not a multiple of 32, as a cache on a GPU needs; pad rows with " +
                   "zeros to " + text(kv::stored_channels(channels)) + rest);
  }
  return {};
}

}  // namespace

Result<std::unique_ptr<GpuKvCache::Data>> kv::plan_memory(const KvCacheOptions& options,
                                                          const KvGpuCapacity& capacity,
                                                          Device device, Stream stream) {
  if (Status s = check_device("device", device, options.threads); !s.ok()) return s;
  Result<KvCache> facts = KvCache::create(options);
  if (!facts.ok()) return facts.status();
  if (Status s = check_device_channels(options); !s.ok()) return s;
  auto d = std::make_unique<GpuKvCache::Data>(std::move(*facts));
  if (Status s = check_capacity(d->host(), capacity); !s.ok()) return s;
  const Result<const detail::Backend*> backend = detail::backend_of(device);
  if (!backend.ok()) return backend.status();
  if ((*backend)->kv == nullptr) {
    return Status(Code::unsupported, std::string("device: the backend \"") + (*backend)->name +
                                         "\" has no kernels for a KV cache in its memory");
  }
  d->backend = *backend;
  d->device = device;
  d->stream = stream;
  d->capacity = capacity;
  if (capacity.pages.empty()) d->capacity.pages = default_pages(d->host(), capacity);
  d->used.resize(static_cast<std::size_t>(capacity.sequences));
  d->memory_bytes = lay_out(d->host(), d->capacity, nullptr, d->state);
  return d;
}

Status kv::take_memory(GpuKvCache::Data& d) {
  const detail::DeviceGuard guard(*d.backend, d.device);
  if (!guard.status().ok()) return guard.status();
  const Result<void*> memory = d.backend->allocate(d.memory_bytes, d.stream);
  if (!memory.ok()) {
    return Status(memory.status().code(), "capacity: " + memory.status().message());
  }
  d.memory = *memory;
  lay_out(d.host(), d.capacity, static_cast<std::byte*>(d.memory), d.state);
  d.state.device_error = d.backend->kv->error_word();
  return launched("create", d.backend->kv->init(d.state, d.stream));
}

Result<GpuKvCache> GpuKvCache::create(const KvCacheOptions& options, const KvGpuCapacity& capacity,
                                      Device device, Stream stream) {
  return guarded<Result<GpuKvCache>>([&]() -> Result<GpuKvCache> {
    auto d = kv::plan_memory(options, capacity, device, stream);
    if (!d.ok()) return d.status();
    if (Status s = kv::take_memory(**d); !s.ok()) return s;
    return GpuKvCache(std::move(*d));
  });
}

bool GpuKvCache::holds(std::int64_t slot) const noexcept { return kv::holds(*data_, slot); }

Result<std::int64_t> GpuKvCache::add_sequence(Stream stream) {
  return guarded<Result<std::int64_t>>([&]() -> Result<std::int64_t> {
    Result<std::int64_t> slot = empty_slot("add_sequence", *data_, stream);
    if (slot.ok()) data_->used[static_cast<std::size_t>(*slot)] = true;
    return slot;
  });
}

Result<std::int64_t> GpuKvCache::fork(std::int64_t slot, Stream stream) {
  return guarded<Result<std::int64_t>>([&]() -> Result<std::int64_t> {
    Data& d = *data_;
    if (Status s = check_slot(d, slot); !s.ok()) return s;
    Result<std::int64_t> copy = empty_slot("fork", d, stream);
    if (!copy.ok()) return copy;
    const detail::DeviceGuard guard(*d.backend, d.device);
    if (!guard.status().ok()) return guard.status();
    const kv::ForkCall call{static_cast<std::int32_t>(slot), static_cast<std::int32_t>(*copy)};
    if (Status s = launched("fork", d.backend->kv->fork(d.state, call, stream)); !s.ok()) return s;
    d.used[static_cast<std::size_t>(*copy)] = true;
    return copy;
  });
}

Status GpuKvCache::release(std::int64_t slot, Stream stream) {
  return guarded<Status>([&]() -> Status {
    Data& d = *data_;
    if (Status s = check_slot(d, slot); !s.ok()) return s;
    Status s = forget("release", d, forget_all(d, slot, kv::slot_unused), stream);
    if (s.ok()) d.used[static_cast<std::size_t>(slot)] = false;
    return s;
  });
}

Status GpuKvCache::truncate(std::int64_t slot, std::int64_t length, Stream stream) {
  return guarded<Status>([&]() -> Status {
    if (Status s = check_slot(*data_, slot); !s.ok()) return s;
    if (length < 0) return invalid("length: " + text(length) + " is below 0");
    if (length >= data_->capacity.tokens) return {};
    return forget("truncate", *data_, forget_from(*data_, slot, length), stream);
  });
}

Status GpuKvCache::evict(std::int64_t slot, std::int64_t layer, std::int64_t head,
                         std::int64_t begin, std::int64_t end, Stream stream) {
  return guarded<Status>([&]() -> Status {
    const KvCacheOptions& o = options();
    if (Status s = check_slot(*data_, slot); !s.ok()) return s;
    if (layer != -1) {
      if (Status s = check_layer(o, layer); !s.ok()) return s;
    }
    if (Status s = kv::check_eviction(o, head, begin, end); !s.ok()) return s;
    kv::ForgetCall call = forget_from(*data_, slot, begin);
    call.truncates = false;
    call.end = std::min(end, kv::most_tokens);
    call.begin = std::min(begin, call.end);
    if (layer != -1) {
      call.first_layer = static_cast<std::int32_t>(layer);
      call.end_layer = call.first_layer + 1;
    }
    if (head != -1) {
      call.first_head = static_cast<std::int32_t>(head);
      call.end_head = call.first_head + 1;
    }
    return forget("evict", *data_, call, stream);
  });
}

Status GpuKvCache::append(std::int64_t layer, const KvGpuAppendTensors& tensors, Layout layout,
                          Stream stream) {
  return guarded<Status>([&]() -> Status {
    const Data& d = *data_;
    kv::AppendCall call;
    if (Status s = check_append(d, layer, tensors, layout, call); !s.ok()) return s;
    if (call.tokens == 0) return {};
    const detail::DeviceGuard guard(*d.backend, d.device);
    if (!guard.status().ok()) return guard.status();
    return launched("append", d.backend->kv->append(d.state, call, stream));
  });
}

Status GpuKvCache::observe(std::int64_t layer, const TensorView& slots, const TensorView& mass,
                           Stream stream) {
  return guarded<Status>([&]() -> Status {
    const Data& d = *data_;
    const KvCacheOptions& o = d.options();
    if (Status s = check_layer(o, layer); !s.ok()) return s;
    if (Status s = check_slots(d, slots); !s.ok()) return s;
    Status s = check_blocks(d, "mass", mass, slots.shape[0], -1);
    if (!s.ok()) return s;
    const std::int64_t heads = mass.shape[1];
    if (heads == 0 || heads % o.heads_kv != 0 || heads > (std::int64_t{1} << 20)) {
      return invalid("mass: " + text(heads) + " query heads are no multiple of heads_kv " +
                     text(o.heads_kv) + " up to 2^20");
    }
    kv::ObserveCall call;
    call.mass = static_cast<const float*>(mass.data);
    call.slots = static_cast<const std::int32_t*>(slots.data);
    call.blocks = mass.shape[2];
    call.batch = static_cast<std::int32_t>(slots.shape[0]);
    call.heads_q = static_cast<std::int32_t>(heads);
    call.layer = static_cast<std::int32_t>(layer);
    const detail::DeviceGuard guard(*d.backend, d.device);
    if (!guard.status().ok()) return guard.status();
    return launched("observe", d.backend->kv->observe(d.state, call, stream));
  });
}

Status GpuKvCache::set_importance(std::int64_t slot, std::int64_t layer,
                                  const TensorView& importance, Stream stream) {
  return guarded<Status>([&]() -> Status {
    const Data& d = *data_;
    if (Status s = check_slot(d, slot); !s.ok()) return s;
    if (Status s = check_layer(d.options(), layer); !s.ok()) return s;
    Status s = kv::check_tensor("importance", importance, Format::f32, {d.options().heads_kv, -1},
                                false, d.device);
    if (!s.ok()) return s;
    kv::ImportanceCall call;
    call.values = static_cast<const float*>(importance.data);
    call.blocks = importance.shape[1];
    call.slot = static_cast<std::int32_t>(slot);
    call.layer = static_cast<std::int32_t>(layer);
    const detail::DeviceGuard guard(*d.backend, d.device);
    if (!guard.status().ok()) return guard.status();
    return launched("set_importance", d.backend->kv->set_importance(d.state, call, stream));
  });
}

KvBytes GpuKvCache::bytes() const {
  const Data& d = *data_;
  const kv::DeviceCache& c = d.state.cache;
  KvBytes b;
  for (int t = 0; t < c.pools; ++t) {
    const std::int64_t pages = c.pool[t].capacity;
    (t == 0 ? b.window : b.codes) += pages * c.pool[t].layout.code_bytes();
    b.scales += pages * c.pool[t].layout.scale_bytes();
  }
  const std::int64_t heads = c.head_index(c.slots, 0, 0);
  b.tables = heads * c.most_pages * static_cast<std::int64_t>(sizeof(kv::Entry));
  constexpr auto number = static_cast<std::int64_t>(sizeof(float));
  b.means = heads * (c.d * (number + c.balance_k) + c.dv * number * c.smooth_v);
  b.total = static_cast<std::int64_t>(d.memory_bytes);
  b.spare = b.total - b.codes - b.scales - b.window - b.tables - b.means;
  return b;
}

}  // namespace qattn
