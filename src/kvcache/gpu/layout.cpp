// How much room a cache on a device needs, and where everything lies in it.
#include <algorithm>
#include <string>

#include "kvcache/allocator.hpp"
#include "kvcache/gpu/data.hpp"

namespace qattn::kv {
namespace {

std::string text(std::int64_t value) { return std::to_string(value); }

std::int64_t pages_of(const KvCacheOptions& o, std::int64_t tokens) {
  return (tokens + o.page_size - 1) / o.page_size;
}

/// Entries of a page table: some share their first token in files of earlier versions.
std::int64_t most_entries(const KvCacheOptions& o, std::int64_t tokens) {
  return pages_of(o, tokens) + 16;
}

/// Places in one allocation, each 256-byte aligned.
class Room {
 public:
  explicit Room(std::byte* base) : base_(base) {}
  template <class T>
  void take(T*& to, std::int64_t count) {
    to = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + used_);
    used_ += (static_cast<std::size_t>(count) * sizeof(T) + 255) / 256 * 256;
  }
  std::size_t used() const { return used_; }

 private:
  std::byte* base_;
  std::size_t used_ = 0;
};

constexpr auto entry_bytes = static_cast<std::int64_t>(sizeof(Entry));

}  // namespace

std::vector<std::int64_t> default_pages(const detail::KvCacheData& host,
                                        const KvGpuCapacity& capacity) {
  const KvCacheOptions& o = host.options;
  const std::int64_t all = pages_of(o, capacity.tokens) * o.heads_kv;  // of a (slot, layer)
  const std::int64_t moving = o.window / o.page_size + 1;
  const std::int64_t window = (o.sinks / o.page_size + moving) * o.heads_kv;
  const std::int64_t layers = capacity.sequences * o.layers;
  // An append to a layer takes pages before it gives any back. A copy of an open page that forks
  // share counts like the page that would be there if they shared none.
  std::vector<std::int64_t> pages{layers * std::min(window, all) +
                                  capacity.sequences * std::min(moving * o.heads_kv, all)};
  for (std::size_t t = 1; t <= o.tiers.size(); ++t) {
    std::int64_t most = all;
    if (o.average_bits > 0) {
      const std::int64_t page = host.page_bytes(static_cast<int>(t)) + entry_bytes;
      most = std::min(most, host.allowed_bytes(capacity.tokens) / page + 1);
    }
    // A page is in the tier before the call or after it, or moves through it.
    pages.push_back(layers * most + capacity.sequences * std::min(all - most, most));
  }
  return pages;
}

Status check_capacity(const detail::KvCacheData& host, const KvGpuCapacity& c) {
  const KvCacheOptions& o = host.options;
  for (const auto& [name, value, most] : {std::tuple{"sequences", c.sequences, std::int64_t{65535}},
                                          std::tuple{"tokens", c.tokens, most_tokens}}) {
    if (value < 1 || value > most) {
      return invalid(std::string("capacity.") + name + ": " + text(value) + " is not from 1 to " +
                     text(most));
    }
  }
  if (o.heads_kv > 65535) {
    return invalid("heads_kv: " + text(o.heads_kv) + " is above 65535, the most on a GPU");
  }
  // Pages of a layer and the bytes that they can free are counted in 32 bits, in units of 8.
  const std::int64_t pages = most_entries(o, c.tokens) * o.heads_kv;
  if (pages > 0x7fffffff || pages > (std::int64_t{1} << 35) / (host.page_bytes(1) + entry_bytes)) {
    return invalid("capacity.tokens: " + text(c.tokens) + " tokens of " + text(o.heads_kv) +
                   " heads take over 32 GiB in the first tier, the most of a layer");
  }
  if (!c.pages.empty() && c.pages.size() != o.tiers.size() + 1) {
    return invalid("capacity.pages: there are " + text(static_cast<std::int64_t>(c.pages.size())) +
                   " numbers, should be none or " +
                   text(static_cast<std::int64_t>(o.tiers.size()) + 1) +
                   ": of the window and of every tier");
  }
  const std::vector<std::int64_t> most = c.pages.empty() ? default_pages(host, c) : c.pages;
  for (std::size_t t = 0; t < most.size(); ++t) {
    if (most[t] < 0 || most[t] > (std::int64_t{1} << 30)) {
      return invalid("capacity.pages[" + text(static_cast<std::int64_t>(t)) +
                     "]: " + text(most[t]) + " is not from 0 to 2^30");
    }
  }
  return {};
}

std::size_t lay_out(const detail::KvCacheData& host, const KvGpuCapacity& capacity, std::byte* base,
                    AppendState& s) {
  const KvCacheOptions& o = host.options;
  DeviceCache& c = s.cache;
  c.d = host.d();
  c.dv = host.dv();
  c.page_size = static_cast<std::int32_t>(o.page_size);
  c.window_tokens = static_cast<std::int32_t>(o.window);
  c.sinks = static_cast<std::int32_t>(o.sinks);
  c.layers = static_cast<std::int32_t>(o.layers);
  c.heads_kv = static_cast<std::int32_t>(o.heads_kv);
  c.slots = static_cast<std::int32_t>(capacity.sequences);
  c.most_pages = static_cast<std::int32_t>(most_entries(o, capacity.tokens));
  c.pools = static_cast<std::int32_t>(o.tiers.size() + 1);
  c.bf16 = o.window_format == Format::bf16 ? 1 : 0;
  c.rotate = o.rotate ? 1 : 0;
  c.smooth_k = o.smooth_k ? 1 : 0;
  c.k_by_channel = host.k_by_channel() ? 1 : 0;
  c.balance_k = host.balances_k() ? 1 : 0;
  c.smooth_v = o.smooth_v ? 1 : 0;
  c.sets = host.most_sets;
  const std::int64_t layers = capacity.sequences * o.layers, heads = layers * o.heads_kv;
  const std::int64_t plans = capacity.sequences * o.heads_kv;
  Room room(base);
  for (int t = 0; t < c.pools; ++t) {
    DevicePool& pool = c.pool[t];
    pool.layout = host.layout(t);
    pool.capacity = static_cast<std::int32_t>(capacity.pages[static_cast<std::size_t>(t)]);
    room.take(pool.pages, pool.capacity * host.page_bytes(t));
    room.take(s.free_pages[t], pool.capacity);
    room.take(s.shares[t], pool.capacity);
  }
  room.take(c.entries, heads * c.most_pages);
  room.take(c.counts, heads);
  room.take(c.lengths, layers);
  room.take(c.set_counts, layers);
  room.take(c.k_means, heads * c.sets * c.d);
  room.take(c.k_shifts, c.balance_k != 0 ? heads * c.sets * c.d : 0);
  room.take(c.v_means, c.smooth_v != 0 ? heads * c.sets * c.dv : 0);
  room.take(c.errors, capacity.sequences);
  room.take(s.rings, c.pools);
  room.take(s.plans, capacity.sequences);
  room.take(s.heads, plans);
  room.take(s.pages, plans * c.most_pages);
  room.take(s.steps, plans * c.most_pages);
  room.take(s.step_prices, plans * c.most_pages * (c.pools - 2));
  room.take(s.jobs, plans * c.most_pages);

  std::vector<std::int64_t> bytes;
  for (int t = 1; t < c.pools; ++t) bytes.push_back(host.page_bytes(t) + entry_bytes);
  s.prices = make_prices(o.tiers, bytes, o.hysteresis);
  s.has_budget = o.average_bits > 0 ? 1 : 0;
  s.key_norm = o.importance == KvImportance::key_norm ? 1 : 0;
  s.budget_from = host.budget_from;
  s.budget_per_token = budget_per_token(o);
  s.mean_bytes = mean_bytes(o);
  s.window_bytes = host.page_bytes(0) + entry_bytes;
  s.decay = o.importance_decay;
  s.most_tokens = capacity.tokens;
  return room.used();
}

}  // namespace qattn::kv
