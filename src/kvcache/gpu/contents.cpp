// What a GpuKvCache holds: calls that copy from the device and wait.
#include "kvcache/contents.hpp"

#include <string>

#include "core/guarded.hpp"
#include "kvcache/gpu/checks.hpp"

namespace qattn {

using kv::check_layer;
using kv::check_slot;
using kv::fetch;

namespace {

std::string text(std::int64_t value) { return std::to_string(value); }

std::string slot_error_text(std::uint32_t word) {
  std::string what;
  for (const auto& [bit, why] :
       {std::pair{kv::slot_unused, "it held no sequence"},
        std::pair{kv::slot_budget, "even the last tier is too much for the budget"},
        std::pair{kv::slot_pool, "a pool had no page left"},
        std::pair{kv::slot_capacity, "more tokens than its capacity"},
        std::pair{kv::slot_count, "an entry of counts was below 0 or above S"},
        std::pair{kv::slot_weight,
                  "an importance was not from 0 to 1e15, or there were too few blocks of them"},
        std::pair{kv::slot_twice, "a call named it twice"}}) {
    if ((word & bit) != 0) what += (what.empty() ? "" : ", ") + std::string(why);
  }
  return what.empty() ? "error " + std::to_string(word) : what;
}

}  // namespace

Status kv::fetch_layer(const GpuKvCache::Data& d, std::int64_t slot, std::int64_t layer,
                       Stream stream, Layer& to) {
  const DeviceCache& c = d.state.cache;
  const std::int64_t heads = c.heads_kv, at = c.layer_index(slot, layer);
  const std::int64_t first = c.head_index(slot, layer, 0);
  std::vector<std::int32_t> length, counts, sets;
  if (Status s = fetch(d, c.lengths + at, 1, stream, length); !s.ok()) return s;
  if (Status s = fetch(d, c.set_counts + at, 1, stream, sets); !s.ok()) return s;
  if (Status s = fetch(d, c.counts + first, heads, stream, counts); !s.ok()) return s;
  to.length = length[0];
  to.sets.resize(sets[0], d.options());
  if (sets[0] > 0) {
    const std::int64_t index = c.set_index(slot, layer, 0, 0), rows = sets[0] * heads;
    Status s = fetch(d, c.k_means + index * c.d, rows * c.d, stream, to.sets.k_mean);
    if (!s.ok()) return s;
    if (c.balance_k != 0) {
      s = fetch(d, c.k_shifts + index * c.d, rows * c.d, stream, to.sets.k_shift);
      if (!s.ok()) return s;
    }
    if (c.smooth_v != 0) {
      s = fetch(d, c.v_means + index * c.dv, rows * c.dv, stream, to.sets.v_mean);
      if (!s.ok()) return s;
    }
  }
  to.tables.resize(static_cast<std::size_t>(heads));
  for (std::int64_t h = 0; h < heads; ++h) {
    const auto i = static_cast<std::size_t>(h);
    Status s = fetch(d, c.table(slot, layer, h), counts[i], stream, to.tables[i]);
    if (!s.ok()) return s;
  }
  return {};
}

Status GpuKvCache::status(std::int64_t slot, Stream stream) const {
  return guarded<Status>([&]() -> Status {
    const Data& d = *data_;
    if (Status s = check_slot(d, slot); !s.ok()) return s;
    const detail::DeviceGuard guard(*d.backend, d.device);
    if (!guard.status().ok()) return guard.status();
    std::vector<std::uint32_t> word;
    if (Status s = fetch(d, d.state.cache.errors + slot, 1, stream, word); !s.ok()) return s;
    if (word[0] == 0) return {};
    constexpr std::uint32_t room = kv::slot_budget | kv::slot_pool | kv::slot_capacity;
    return Status((word[0] & room) != 0 ? Code::out_of_memory : Code::invalid_argument,
                  "slot " + text(slot) + ": " + slot_error_text(word[0]) +
                      "; it is as it was before that append, and nothing is appended any more");
  });
}

Result<std::int64_t> GpuKvCache::length(std::int64_t slot, std::int64_t layer,
                                        Stream stream) const {
  return guarded<Result<std::int64_t>>([&]() -> Result<std::int64_t> {
    const Data& d = *data_;
    if (Status s = check_slot(d, slot); !s.ok()) return s;
    if (Status s = check_layer(d.options(), layer); !s.ok()) return s;
    const detail::DeviceGuard guard(*d.backend, d.device);
    if (!guard.status().ok()) return guard.status();
    std::vector<std::int32_t> value;
    const kv::DeviceCache& c = d.state.cache;
    Status s = fetch(d, c.lengths + c.layer_index(slot, layer), 1, stream, value);
    if (!s.ok()) return s;
    return std::int64_t{value[0]};
  });
}

Result<KvUsage> GpuKvCache::usage(std::int64_t slot, std::int64_t layer, Stream stream) const {
  return guarded<Result<KvUsage>>([&]() -> Result<KvUsage> {
    const Data& d = *data_;
    if (Status s = check_slot(d, slot); !s.ok()) return s;
    if (Status s = check_layer(d.options(), layer); !s.ok()) return s;
    const detail::DeviceGuard guard(*d.backend, d.device);
    if (!guard.status().ok()) return guard.status();
    kv::Layer held;
    if (Status s = kv::fetch_layer(d, slot, layer, stream, held); !s.ok()) return s;
    return kv::usage_of(d.host(), held);
  });
}

Status GpuKvCache::read(std::int64_t slot, std::int64_t layer, const TensorView& k,
                        const TensorView& v, const TensorView& tiers, Stream stream) const {
  return guarded<Status>([&]() -> Status {
    const Data& d = *data_;
    const kv::DeviceCache& c = d.state.cache;
    if (Status s = check_slot(d, slot); !s.ok()) return s;
    if (Status s = check_layer(d.options(), layer); !s.ok()) return s;
    const detail::DeviceGuard guard(*d.backend, d.device);
    if (!guard.status().ok()) return guard.status();
    kv::Layer held;
    if (Status s = kv::fetch_layer(d, slot, layer, stream, held); !s.ok()) return s;
    const kv::Contents out(d.host(), k, v, tiers, held.length);
    if (Status s = out.check(); !s.ok()) return s;
    out.clear();
    std::vector<std::byte> page;
    for (std::int64_t h = 0; h < c.heads_kv; ++h) {
      for (const kv::Entry& e : held.tables[static_cast<std::size_t>(h)]) {
        const auto* from = reinterpret_cast<const std::byte*>(c.pool[e.tier].page(e.page));
        Status s = fetch(d, from, d.host().page_bytes(e.tier), stream, page);
        if (!s.ok()) return s;
        out.page(h, e, page.data(), held.sets);
      }
    }
    return {};
  });
}

}  // namespace qattn
