#include "same_cache.hpp"

#include <cstddef>
#include <cstring>

#include "kvcache/gpu/data.hpp"

namespace qattn::test {
namespace {

std::string text(std::int64_t value) { return std::to_string(value); }
std::uint32_t bits(float x) { return __builtin_bit_cast(std::uint32_t, x); }

bool same_16bit(std::uint16_t a, std::uint16_t b, bool bf16) {
  const auto nan = [bf16](std::uint16_t x) { return (x & 0x7fff) > (bf16 ? 0x7f80 : 0x7c00); };
  return a == b || (nan(a) && nan(b));
}

/// A copy of the device's memory with its pointers into the copy.
class Image {
 public:
  explicit Image(const GpuKvCache::Data& d) : bytes_(d.memory_bytes) {
    const detail::DeviceGuard guard(*d.backend, d.device);
    const Status s = d.backend->copy_to_host(bytes_.data(), d.memory, bytes_.size(), nullptr);
    error = s.ok() ? "" : s.message();
    kv::lay_out(d.host(), d.capacity, bytes_.data(), state);
  }
  kv::AppendState state;
  std::string error;

 private:
  std::vector<std::byte> bytes_;
};

std::string page_difference(const detail::KvCacheData& host, const kv::Entry& mine,
                            const kv::DeviceCache& c, const kv::Entry& other) {
  const auto* a = reinterpret_cast<const std::uint8_t*>(host.page(mine));
  const std::uint8_t* b = c.pool[other.tier].page(other.page);
  const std::int64_t bytes = host.page_bytes(mine.tier);
  for (std::int64_t i = 0; i < bytes; i += 2) {
    std::uint16_t x, y;
    std::memcpy(&x, a + i, 2);
    std::memcpy(&y, b + i, 2);
    if (mine.tier == 0 ? same_16bit(x, y, c.bf16 != 0) : x == y) continue;
    return "tier " + text(mine.tier) + ", byte " + text(i) + ": " + text(x) + " and " + text(y);
  }
  return "";
}

std::string entry_difference(const kv::Entry& a, const kv::Entry& b) {
  if (a.first != b.first) return "first token " + text(a.first) + " and " + text(b.first);
  if (a.live != b.live) return "tokens alive differ";
  if (a.tier != b.tier) return "tier " + text(a.tier) + " and " + text(b.tier);
  if (a.set != b.set) return "set " + text(a.set) + " and " + text(b.set);
  if (a.path != b.path) return "path " + text(a.path) + " and " + text(b.path);
  if (a.guess != b.guess) return "importance is a guess of one only";
  if (bits(a.importance) == bits(b.importance)) return "";
  return "importance " + std::to_string(a.importance) + " and " + std::to_string(b.importance);
}

/// Sets that are not in use are zeros on a device.
std::string set_difference(const kv::Layer& layer, const kv::DeviceCache& c, std::int64_t slot,
                           std::int64_t number, std::int64_t h, int set) {
  kv::Frames frames;
  if (set < layer.sets.count) frames = layer.sets.frames(h, set, c.d, c.dv);
  for (std::int64_t i = 0; i < c.d; ++i) {
    const float mean = frames.k.mean ? frames.k.mean[i] : 0.0f;
    if (bits(mean) != bits(c.k_mean(slot, number, h, set)[i])) {
      return "mean of channel " + text(i) + " differs";
    }
    const int shift = frames.k.shift ? frames.k.shift[i] : 0;
    if (c.balance_k != 0 && shift != c.k_shift(slot, number, h, set)[i]) {
      return "what channel " + text(i) + " is divided by differs";
    }
  }
  for (std::int64_t i = 0; c.smooth_v != 0 && i < c.dv; ++i) {
    const float mean = frames.v.mean ? frames.v.mean[i] : 0.0f;
    if (bits(mean) != bits(c.v_mean(slot, number, h, set)[i])) {
      return "V's mean of channel " + text(i) + " differs";
    }
  }
  return "";
}

std::string layer_difference(const detail::KvCacheData& host, const kv::Layer& layer,
                             const kv::AppendState& s, std::int64_t slot, std::int64_t number) {
  const kv::DeviceCache& c = s.cache;
  const std::int64_t at = c.layer_index(slot, number);
  if (layer.length != c.lengths[at]) {
    return "length " + text(layer.length) + " and " + text(c.lengths[at]);
  }
  if (layer.sets.count != c.set_counts[at]) {
    return text(layer.sets.count) + " and " + text(c.set_counts[at]) + " sets";
  }
  for (std::int64_t h = 0; h < c.heads_kv; ++h) {
    const std::string head = "head " + text(h) + ": ";
    for (int set = 0; set < c.sets; ++set) {
      std::string what = set_difference(layer, c, slot, number, h, set);
      if (!what.empty()) return head + "set " + text(set) + ": " + what;
    }
    const kv::Table& table = layer.tables[static_cast<std::size_t>(h)];
    const std::int32_t count = c.counts[c.head_index(slot, number, h)];
    if (static_cast<std::int64_t>(table.size()) != count) {
      return head + text(static_cast<std::int64_t>(table.size())) + " and " + text(count) +
             " entries";
    }
    for (std::size_t i = 0; i < table.size(); ++i) {
      const kv::Entry& other = c.table(slot, number, h)[i];
      std::string what = entry_difference(table[i], other);
      if (what.empty()) what = page_difference(host, table[i], c, other);
      const std::int64_t mine = host.pool(table[i].tier).references(table[i].page);
      const std::int64_t others = std::int64_t{s.shares[other.tier][other.page]} + 1;
      if (what.empty() && mine != others) what = text(mine) + " and " + text(others) + " holders";
      if (!what.empty()) return head + "entry " + text(static_cast<std::int64_t>(i)) + ": " + what;
    }
  }
  return "";
}

/// Every page is in the ring of free ones, once, or in as many tables as it counts.
std::string lost_pages(const kv::AppendState& s) {
  const kv::DeviceCache& c = s.cache;
  std::vector<std::vector<std::int64_t>> holders(static_cast<std::size_t>(c.pools));
  for (int t = 0; t < c.pools; ++t) {
    holders[static_cast<std::size_t>(t)].resize(static_cast<std::size_t>(c.pool[t].capacity));
  }
  for (std::int64_t n = 0; n < c.head_index(c.slots, 0, 0); ++n) {
    for (std::int32_t i = 0; i < c.counts[n]; ++i) {
      const kv::Entry& e = c.entries[n * c.most_pages + i];
      if (e.page < 0 || e.page >= c.pool[e.tier].capacity) return "no page " + text(e.page);
      ++holders[e.tier][static_cast<std::size_t>(e.page)];
    }
  }
  for (int t = 0; t < c.pools; ++t) {
    const kv::Ring ring = s.rings[t];
    std::vector<std::int64_t>& pages = holders[static_cast<std::size_t>(t)];
    for (std::size_t page = 0; page < pages.size(); ++page) {
      const std::int64_t shares = s.shares[t][page];
      if (shares == (pages[page] > 0 ? pages[page] - 1 : 0)) continue;
      return "pool " + text(t) + ": page " + text(static_cast<std::int64_t>(page)) + " is in " +
             text(pages[page]) + " tables and counts " + text(shares) + " beyond the first";
    }
    for (std::int32_t i = 0; i < ring.count; ++i) {
      const std::int32_t page = s.free_pages[t][s.ring_place(t, std::int64_t{ring.head} + i)];
      if (page < 0 || page >= c.pool[t].capacity || pages[static_cast<std::size_t>(page)]++ > 0) {
        return "pool " + text(t) + ": page " + text(page) +
               " is free, and free twice, in a table or no page";
      }
    }
    for (const std::int64_t n : pages) {
      if (n == 0) return "pool " + text(t) + ": a page is lost";
    }
  }
  return "";
}

}  // namespace

std::string difference(const KvCache& host, const std::vector<std::int64_t>& ids,
                       const GpuKvCache& device) {
  const Image image(device.data());
  if (!image.error.empty()) return image.error;
  for (std::size_t slot = 0; slot < ids.size(); ++slot) {
    if (ids[slot] < 0) continue;
    const kv::Sequence& sequence = *host.data().find(ids[slot]);
    for (std::size_t layer = 0; layer < sequence.layers.size(); ++layer) {
      const std::string what =
          layer_difference(host.data(), sequence.layers[layer], image.state,
                           static_cast<std::int64_t>(slot), static_cast<std::int64_t>(layer));
      if (what.empty()) continue;
      return "slot " + text(static_cast<std::int64_t>(slot)) + ", layer " +
             text(static_cast<std::int64_t>(layer)) + ", " + what;
    }
  }
  return lost_pages(image.state);
}

}  // namespace qattn::test
