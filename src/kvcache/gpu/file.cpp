// Files of a GpuKvCache: what the device holds becomes contents in host memory, which file.cpp of
// the host's cache writes, and the other way round. Numbers of pages mean nothing in either; all
// else that decides what calls do later lies in tables, lengths, means and counts of holders.
#include "kvcache/file/file.hpp"

#include <algorithm>
#include <string>
#include <vector>

#include "core/guarded.hpp"
#include "kvcache/gpu/checks.hpp"

namespace qattn {

using detail::KvCacheData;
using kv::Entry;
using kv::invalid;
using kv::Layer;
using kv::PagePool;
using kv::Sequence;
using kv::Table;

namespace {

using Data = GpuKvCache::Data;

std::string text(std::int64_t value) { return std::to_string(value); }

template <class T>
Status put(const Data& d, T* to, const T* from, std::int64_t count, Stream stream) {
  if (count == 0) return {};
  return d.backend->copy_to_device(to, from, static_cast<std::size_t>(count) * sizeof(T), stream);
}

/// f(entry) for all entries of all tables.
template <class F>
void each_entry(KvCacheData& host, F f) {
  for (Sequence& sequence : host.sequences) {
    for (Layer& layer : sequence.layers) {
      for (Table& table : layer.tables) {
        for (Entry& entry : table) f(entry);
      }
    }
  }
}

/// Tables, lengths and means of all slots; pages have the device's numbers.
Status fetch_sequences(const Data& d, Stream stream, KvCacheData& host) {
  for (std::size_t slot = 0; slot < d.used.size(); ++slot) {
    if (!d.used[slot]) continue;
    Sequence s;
    s.id = static_cast<std::int64_t>(slot);
    s.layers.resize(static_cast<std::size_t>(d.options().layers));
    for (std::size_t l = 0; l < s.layers.size(); ++l) {
      Status status = kv::fetch_layer(d, s.id, static_cast<std::int64_t>(l), stream, s.layers[l]);
      if (!status.ok()) return status;
    }
    host.next_id = s.id + 1;
    host.sequences.push_back(std::move(s));
  }
  return {};
}

/// Pages of a pool, given by the device's ascending numbers, to an empty pool of the host, which
/// numbers them from 0. Those that lie side by side in both come together.
Status fetch_pages(const Data& d, const kv::DevicePool& from,
                   const std::vector<std::int32_t>& pages, Stream stream, PagePool& to) {
  for (std::size_t i = 0; i < pages.size(); ++i) to.allocate();
  for (std::size_t i = 0; i < pages.size();) {
    std::size_t end = i + 1;
    while (end < pages.size() && end % PagePool::slab_pages != 0 &&
           pages[end] == pages[end - 1] + 1) {
      ++end;
    }
    const auto bytes = (end - i) * static_cast<std::size_t>(to.page_bytes());
    Status s = d.backend->copy_to_host(to.page(static_cast<std::int32_t>(i)), from.page(pages[i]),
                                       bytes, stream);
    if (!s.ok()) return s;
    i = end;
  }
  return {};
}

/// Everything that the device holds, in as many pages; how many tables hold each is not counted,
/// for write_file() sees it from the tables.
Status fetch_all(const Data& d, Stream stream, KvCacheData& host) {
  host.options = d.options();
  host.budget_from = d.host().budget_from;
  host.words = d.host().words;
  host.make_pools();
  if (Status s = fetch_sequences(d, stream, host); !s.ok()) return s;
  std::vector<std::vector<std::int32_t>> pages(host.pools.size());
  each_entry(host, [&](Entry& e) { pages[e.tier].push_back(e.page); });
  for (std::size_t t = 0; t < pages.size(); ++t) {
    std::vector<std::int32_t>& p = pages[t];
    std::sort(p.begin(), p.end());
    p.erase(std::unique(p.begin(), p.end()), p.end());
    Status s = fetch_pages(d, d.state.cache.pool[t], p, stream, host.pools[t]);
    if (!s.ok()) return s;
  }
  each_entry(host, [&](Entry& e) {
    const std::vector<std::int32_t>& p = pages[e.tier];
    e.page = static_cast<std::int32_t>(std::lower_bound(p.begin(), p.end(), e.page) - p.begin());
  });
  return {};
}

/// Does what the file held have room?
Status check_room(const KvCacheData& host, const Data& d) {
  const KvGpuCapacity& c = d.capacity;
  for (const Sequence& s : host.sequences) {
    if (s.id >= c.sequences) {
      return invalid("capacity.sequences: " + text(c.sequences) + " should be above " + text(s.id) +
                     ", the number of a sequence of the file");
    }
    for (const Layer& layer : s.layers) {
      if (layer.length > c.tokens) {
        return invalid("capacity.tokens: " + text(c.tokens) + " are fewer than the " +
                       text(layer.length) + " of sequence " + text(s.id) + " of the file");
      }
      for (const Table& table : layer.tables) {
        if (static_cast<std::int64_t>(table.size()) <= d.state.cache.most_pages) continue;
        return invalid("capacity.tokens: " + text(c.tokens) + " make page tables of " +
                       text(d.state.cache.most_pages) + " entries, and sequence " + text(s.id) +
                       " of the file has one of " + text(static_cast<std::int64_t>(table.size())));
      }
    }
  }
  for (std::size_t t = 0; t < host.pools.size(); ++t) {
    const std::int64_t used = host.pools[t].pages_used();
    if (used <= c.pages[t]) continue;
    return invalid("capacity.pages[" + text(static_cast<std::int64_t>(t)) +
                   "]: " + text(c.pages[t]) + " are fewer than the " + text(used) + " of the file");
  }
  return {};
}

/// Pages 0 to n of every pool, how many hold them, and the others as free ones.
Status put_pages(const KvCacheData& host, const Data& d, Stream stream) {
  const kv::AppendState& state = d.state;
  for (int t = 0; t < state.cache.pools; ++t) {
    const PagePool& pool = host.pool(t);
    const auto count = static_cast<std::int32_t>(pool.pages_used());
    std::vector<std::uint32_t> shares;
    for (std::int32_t i = 0; i < count; ++i) {
      shares.push_back(static_cast<std::uint32_t>(pool.references(i) - 1));
    }
    for (std::int32_t i = 0; i < count; i += PagePool::slab_pages) {
      auto* to = reinterpret_cast<std::byte*>(state.cache.pool[t].page(i));
      const std::int64_t pages = std::min(count - i, PagePool::slab_pages);
      Status s = put(d, to, pool.page(i), pages * pool.page_bytes(), stream);
      if (!s.ok()) return s;
    }
    if (Status s = put(d, state.shares[t], shares.data(), count, stream); !s.ok()) return s;
    // As init() numbers free pages, those behind the first `count` are the last in their ring.
    const kv::Ring ring{static_cast<std::int32_t>(state.ring_place(t, count)),
                        state.cache.pool[t].capacity - count};
    if (Status s = put(d, state.rings + t, &ring, 1, stream); !s.ok()) return s;
  }
  return {};
}

Status put_sequence(const Sequence& sequence, Data& d, Stream stream) {
  const kv::DeviceCache& c = d.state.cache;
  const std::int64_t slot = sequence.id;
  for (std::int64_t l = 0; l < c.layers; ++l) {
    const Layer& layer = sequence.layers[static_cast<std::size_t>(l)];
    const std::int64_t at = c.layer_index(slot, l), first = c.head_index(slot, l, 0);
    const auto length = static_cast<std::int32_t>(layer.length);
    const auto sets = static_cast<std::int32_t>(layer.sets.count);
    std::vector<std::int32_t> counts;
    for (std::int64_t h = 0; h < c.heads_kv; ++h) {
      const Table& table = layer.tables[static_cast<std::size_t>(h)];
      counts.push_back(static_cast<std::int32_t>(table.size()));
      Status s = put(d, c.table(slot, l, h), table.data(), counts.back(), stream);
      if (!s.ok()) return s;
    }
    if (Status s = put(d, c.counts + first, counts.data(), c.heads_kv, stream); !s.ok()) return s;
    if (Status s = put(d, c.lengths + at, &length, 1, stream); !s.ok()) return s;
    if (Status s = put(d, c.set_counts + at, &sets, 1, stream); !s.ok()) return s;
    if (sets == 0) continue;
    const std::int64_t index = c.set_index(slot, l, 0, 0), rows = std::int64_t{sets} * c.heads_kv;
    Status s = put(d, c.k_means + index * c.d, layer.sets.k_mean.data(), rows * c.d, stream);
    if (!s.ok()) return s;
    if (c.balance_k != 0) {
      s = put(d, c.k_shifts + index * c.d, layer.sets.k_shift.data(), rows * c.d, stream);
    }
    if (!s.ok()) return s;
    if (c.smooth_v != 0) {
      s = put(d, c.v_means + index * c.dv, layer.sets.v_mean.data(), rows * c.dv, stream);
    }
    if (!s.ok()) return s;
  }
  const std::uint32_t good = 0;
  d.used[static_cast<std::size_t>(slot)] = true;
  return put(d, c.errors + slot, &good, 1, stream);
}

}  // namespace

Status GpuKvCache::save(const std::string& path, Stream stream) const {
  return guarded<Status>([&]() -> Status {
    const Data& d = *data_;
    KvCacheData host;
    std::vector<std::uint32_t> words;
    std::int64_t bad = 0;
    {
      const detail::DeviceGuard guard(*d.backend, d.device);
      if (!guard.status().ok()) return guard.status();
      Status s = kv::fetch(d, d.state.cache.errors, d.capacity.sequences, stream, words);
      if (!s.ok()) return s;
      while (bad < d.capacity.sequences &&
             (!holds(bad) || words[static_cast<std::size_t>(bad)] == 0))
        ++bad;
      if (bad == d.capacity.sequences) s = fetch_all(d, stream, host);
      if (!s.ok()) return s;
    }
    if (bad == d.capacity.sequences) return kv::write_file(host, path);
    return invalid(status(bad, stream).message() + ", and a file cannot say so: release it first");
  });
}

Result<GpuKvCache> GpuKvCache::load(const std::string& path, const KvGpuCapacity& capacity,
                                    Device device, Stream stream) {
  return guarded<Result<GpuKvCache>>([&]() -> Result<GpuKvCache> {
    const Result<KvCache> file = KvCache::load(path);
    if (!file.ok()) return file.status();
    const KvCacheData& host = file->data();
    auto made = kv::plan_memory(host.options, capacity, device, stream);
    if (!made.ok()) return made.status();
    Data& d = **made;
    if (Status s = check_room(host, d); !s.ok()) return s;
    if (Status s = kv::take_memory(d); !s.ok()) return s;
    const detail::DeviceGuard guard(*d.backend, d.device);
    if (!guard.status().ok()) return guard.status();
    if (Status s = put_pages(host, d, stream); !s.ok()) return s;
    for (const Sequence& s : host.sequences) {
      if (Status status = put_sequence(s, d, stream); !status.ok()) return status;
    }
    return GpuKvCache(std::move(*made));
  });
}

}  // namespace qattn
