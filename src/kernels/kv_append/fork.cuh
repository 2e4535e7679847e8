// A slot that holds what another one does, in pages of its own.
#pragma once

#include "kernels/kv_append/params.hpp"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

struct ForkParams {
  kv::AppendState state;
  std::int32_t from = 0, to = 0;
};

/// Takes the pages, all of them or none, and writes tables, lengths and means. One block, a warp a
/// pool; the slot `to` is empty.
struct ForkTables {
  using Params = ForkParams;
  static constexpr int threads = 32 * kv::most_tiers, min_blocks = 1;
  static constexpr int shared_bytes = 4 * kv::most_tiers;

  static QATTN_DEVICE isa::SharedAddress flag(int pool) {
    return isa::shared_base() + static_cast<isa::SharedAddress>(4 * pool);
  }

  /// f(from's entry, to's place, rank among the pages of this tier, is there one?) by all lanes.
  template <class F>
  static QATTN_DEVICE std::int32_t pages(const Params& p, int tier, F f) {
    const kv::DeviceCache& cache = p.state.cache;
    const std::int64_t tables = std::int64_t{cache.layers} * cache.heads_kv;
    std::int32_t seen = 0;
    for (std::int64_t table = 0; table < tables; ++table) {
      const std::int64_t from = p.from * tables + table;
      const std::int32_t count = isa::load_global(cache.counts + from);
      for (std::int32_t first = 0; first < count; first += 32) {
        const std::int32_t i = first + isa::lane();
        kv::Entry e;
        if (i < count) e = load_struct(cache.entries + from * cache.most_pages + i);
        const bool mine = i < count && e.tier == tier;
        const std::uint32_t all = isa::ballot(mine);
        const int rank = __builtin_popcount(all & ((1u << isa::lane()) - 1));
        if (mine) f(e, cache.entries + (p.to * tables + table) * cache.most_pages + i, seen + rank);
        seen += __builtin_popcount(all);
      }
    }
    return seen;
  }

  static QATTN_DEVICE void take(const Params& p, int tier) {
    kv::Ring ring = load_struct(p.state.rings + tier);
    const std::int32_t taken = pages(p, tier, [&](kv::Entry e, kv::Entry* to, std::int32_t rank) {
      const std::int64_t place = p.state.ring_place(tier, std::int64_t{ring.head} + rank);
      e.page = isa::load_global(p.state.free_pages[tier] + place);
      store_struct(to, e);
    });
    ring.head = static_cast<std::int32_t>(
        p.state.ring_place(tier, std::int64_t{ring.head} + std::int64_t{taken}));
    ring.count -= taken;
    if (isa::lane() == 0) store_struct(p.state.rings + tier, ring);
  }

  /// Everything of a slot but its table's entries.
  static QATTN_DEVICE void copy_facts(const Params& p) {
    const kv::DeviceCache& cache = p.state.cache;
    const auto copy = [&](auto* all, std::int64_t each) {
      for (std::int64_t i = isa::thread(); i < each; i += threads) {
        isa::store_global(all + p.to * each + i, isa::load_global(all + p.from * each + i));
      }
    };
    const std::int64_t heads = std::int64_t{cache.layers} * cache.heads_kv;
    copy(cache.lengths, cache.layers);
    copy(cache.has_mean, cache.layers);
    copy(cache.counts, heads);
    copy(cache.k_means, heads * cache.d);
  }

  static QATTN_DEVICE void run(const Params& p) {
    const int warp = isa::warp(), pools = p.state.cache.pools;
    std::uint32_t error = isa::load_global(p.state.cache.errors + p.from);
    if (warp < pools) {
      const std::int32_t need = pages(p, warp, [](const kv::Entry&, kv::Entry*, std::int32_t) {});
      const bool enough = need <= load_struct(p.state.rings + warp).count;
      if (isa::lane() == 0) isa::store_shared(flag(warp), enough ? 1u : 0u);
    }
    isa::sync_threads();
    for (int t = 0; t < pools; ++t) {
      if (error == 0 && isa::load_shared<std::uint32_t>(flag(t)) == 0) error = kv::slot_pool;
    }
    if (error != 0) {
      if (isa::thread() != 0) return;
      isa::store_global(p.state.cache.errors + p.to, error);
      if (p.state.device_error != nullptr) {
        isa::atomic_or_global(p.state.device_error, std::uint32_t{kv::device_error_bit});
      }
      return;
    }
    if (warp < pools) take(p, warp);
    copy_facts(p);
  }
};

/// Copies the pages: blocks of the grid are (pages, KV head, layers). A slot that ForkTables
/// refused has none.
struct ForkPages {
  using Params = ForkParams;
  static constexpr int threads = 128, min_blocks = 1, shared_bytes = 0;

  static QATTN_DEVICE void copy(const Params& p, std::int64_t layer, std::int64_t head) {
    const kv::DeviceCache& cache = p.state.cache;
    const std::int32_t count = isa::load_global(cache.counts + cache.head_index(p.to, layer, head));
    for (std::int32_t i = isa::block().x; i < count; i += isa::grid().x) {
      const kv::Entry from = load_struct(cache.table(p.from, layer, head) + i);
      const kv::Entry to = load_struct(cache.table(p.to, layer, head) + i);
      const kv::DevicePool& pool = cache.pool[from.tier];
      const auto words = [&](std::int32_t page) {
        return reinterpret_cast<isa::Words4*>(pool.page(page, cache.blocks_per_page()));
      };
      const int count_words = cache.blocks_per_page() * static_cast<int>(pool.block.bytes()) / 16;
      for (int w = isa::thread(); w < count_words; w += threads) {
        isa::store_global(words(to.page) + w, isa::load_global(words(from.page) + w));
      }
    }
  }

  static QATTN_DEVICE void run(const Params& p) {
    for (std::int64_t layer = isa::block().z; layer < p.state.cache.layers;
         layer += isa::grid().z) {
      copy(p, layer, isa::block().y);
    }
  }
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
