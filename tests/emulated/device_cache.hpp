// A host's KvCache as a DeviceCache: pools and tables copied to where a device would have them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <vector>

#include "kvcache/data.hpp"
#include "kvcache/device_view.hpp"
#include "qattn/kv_cache.hpp"

namespace qattn::test {

/// Slot i is the i-th of `sequences`; tables have room for `spare` more entries than they need.
/// Pools are exactly as large as the pages in use: a read behind them is one behind the heap.
class MirroredCache {
 public:
  MirroredCache(const KvCache& cache, const std::vector<std::int64_t>& sequences,
                std::int64_t spare = 3)
      : data_(cache.data()), sequences_(sequences) {
    const KvCacheOptions& o = cache.options();
    view_.d = static_cast<std::int32_t>(o.d);
    view_.dv = static_cast<std::int32_t>(o.dv);
    view_.page_size = static_cast<std::int32_t>(o.page_size);
    view_.window_tokens = static_cast<std::int32_t>(o.window);
    view_.sinks = static_cast<std::int32_t>(o.sinks);
    view_.layers = static_cast<std::int32_t>(o.layers);
    view_.heads_kv = static_cast<std::int32_t>(o.heads_kv);
    view_.slots = static_cast<std::int32_t>(sequences.size());
    view_.pools = static_cast<std::int32_t>(data_.pools.size());
    view_.bf16 = o.window_format == Format::bf16 ? 1 : 0;
    view_.rotate = o.rotate ? 1 : 0;
    view_.smooth_k = o.smooth_k ? 1 : 0;
    view_.balance_k = data_.balances_k() ? 1 : 0;
    view_.smooth_v = o.smooth_v ? 1 : 0;
    view_.sets = data_.most_sets;
    view_.k_by_channel = data_.k_by_channel() ? 1 : 0;
    std::size_t most = 1;
    each_table([&](std::size_t, std::size_t, std::size_t, const kv::Table& table) {
      most = std::max(most, table.size());
    });
    view_.most_pages = static_cast<std::int32_t>(most) + static_cast<std::int32_t>(spare);
    copy_tables();
    copy_lengths_and_means();
    finish_pools();
  }
  MirroredCache(const MirroredCache&) = delete;
  MirroredCache& operator=(const MirroredCache&) = delete;

  const kv::DeviceCache& view() const { return view_; }
  std::vector<kv::Entry>& entries() { return entries_; }
  std::vector<std::int32_t>& lengths() { return lengths_; }

  /// Numbers pages as if `bytes` bytes of others, which are not there, lay before them in each
  /// pool.
  void put_behind(std::uint64_t bytes) {
    std::vector<std::int32_t> first(pages_.size());
    for (std::size_t i = 0; i < pages_.size(); ++i) {
      const auto size = static_cast<std::uint64_t>(data_.page_bytes(static_cast<int>(i)));
      first[i] = static_cast<std::int32_t>(bytes / size + 1);
      kv::DevicePool& pool = view_.pool[i];
      if (pool.pages == nullptr) continue;
      const auto begin = reinterpret_cast<std::uintptr_t>(pool.pages);
      pool.pages =
          reinterpret_cast<std::uint8_t*>(begin - static_cast<std::uint64_t>(first[i]) * size);
      pool.capacity += first[i];
    }
    for (kv::Entry& e : entries_) {
      if (e.page != no_page) e.page += first[e.tier];
    }
  }

 private:
  template <class F>
  void each_table(F f) const {
    for (std::size_t s = 0; s < sequences_.size(); ++s) {
      const kv::Sequence& sequence = *data_.find(sequences_[s]);
      for (std::size_t l = 0; l < sequence.layers.size(); ++l) {
        for (std::size_t h = 0; h < sequence.layers[l].tables.size(); ++h) {
          f(s, l, h, sequence.layers[l].tables[h]);
        }
      }
    }
  }

  void copy_tables() {
    const auto heads = static_cast<std::size_t>(view_.layers * view_.heads_kv);
    kv::Entry nonsense;
    nonsense.page = no_page;
    nonsense.live = ~std::uint64_t{0};
    entries_.assign(sequences_.size() * heads * static_cast<std::size_t>(view_.most_pages),
                    nonsense);
    counts_.assign(sequences_.size() * heads, 0);
    pages_.resize(data_.pools.size());
    each_table([&](std::size_t s, std::size_t l, std::size_t h, const kv::Table& table) {
      const auto index = static_cast<std::size_t>(view_.head_index(static_cast<std::int64_t>(s),
                                                                   static_cast<std::int64_t>(l),
                                                                   static_cast<std::int64_t>(h)));
      counts_[index] = static_cast<std::int32_t>(table.size());
      for (std::size_t i = 0; i < table.size(); ++i) {
        kv::Entry e = table[i];
        e.page = copy_page(e);
        entries_[index * static_cast<std::size_t>(view_.most_pages) + i] = e;
      }
    });
    view_.entries = entries_.data();
    view_.counts = counts_.data();
  }

  /// Pages that sequences share are copied once.
  std::int32_t copy_page(const kv::Entry& e) {
    std::vector<std::uint8_t>& pool = pages_[e.tier];
    const auto size = static_cast<std::size_t>(data_.page_bytes(e.tier));
    const auto [it, is_new] =
        copied_.try_emplace({e.tier, e.page}, static_cast<std::int32_t>(pool.size() / size));
    if (is_new) {
      const auto* from = reinterpret_cast<const std::uint8_t*>(data_.page(e));
      pool.insert(pool.end(), from, from + size);
    }
    return it->second;
  }

  void copy_lengths_and_means() {
    for (const std::int64_t id : sequences_) {
      for (const kv::Layer& layer : data_.find(id)->layers) {
        lengths_.push_back(static_cast<std::int32_t>(layer.length));
        set_counts_.push_back(static_cast<std::int32_t>(layer.sets.count));
        const auto rows = static_cast<std::size_t>(view_.sets * view_.heads_kv);
        std::vector<float> mean = layer.sets.k_mean;
        mean.resize(rows * static_cast<std::size_t>(view_.d), 0.0f);
        means_.insert(means_.end(), mean.begin(), mean.end());
        std::vector<std::uint8_t> shift = layer.sets.k_shift;
        shift.resize(mean.size());
        shifts_.insert(shifts_.end(), shift.begin(), shift.end());
        std::vector<float> value = layer.sets.v_mean;
        value.resize(rows * static_cast<std::size_t>(view_.dv), 0.0f);
        v_means_.insert(v_means_.end(), value.begin(), value.end());
      }
    }
    view_.lengths = lengths_.data();
    view_.set_counts = set_counts_.data();
    view_.k_means = means_.data();
    view_.k_shifts = shifts_.data();
    view_.v_means = v_means_.data();
  }

  void finish_pools() {
    for (std::size_t i = 0; i < pages_.size(); ++i) {
      kv::DevicePool& pool = view_.pool[i];
      pool.layout = data_.layout(static_cast<int>(i));
      pool.capacity = static_cast<std::int32_t>(static_cast<std::int64_t>(pages_[i].size()) /
                                                data_.page_bytes(static_cast<int>(i)));
      // 16 bytes are what copies want.
      words_.emplace_back(pages_[i].size() / 16);
      if (pages_[i].empty()) continue;
      std::memcpy(words_.back().data(), pages_[i].data(), pages_[i].size());
      pool.pages = reinterpret_cast<std::uint8_t*>(words_.back().data());
    }
  }

  static constexpr std::int32_t no_page = 0x7fffffff;

  struct alignas(16) Words {
    std::uint64_t w[2];
  };

  const detail::KvCacheData& data_;
  std::vector<std::int64_t> sequences_;
  kv::DeviceCache view_;
  std::vector<kv::Entry> entries_;
  std::vector<std::int32_t> counts_, lengths_, set_counts_;
  std::vector<float> means_, v_means_;
  std::vector<std::uint8_t> shifts_;
  std::vector<std::vector<std::uint8_t>> pages_;
  std::vector<std::vector<Words>> words_;
  std::map<std::pair<int, std::int32_t>, std::int32_t> copied_;
};

}  // namespace qattn::test
