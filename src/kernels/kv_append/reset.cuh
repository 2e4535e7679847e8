// A cache without sequences, and a slot without tokens.
#pragma once

#include "kernels/kv_append/params.hpp"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

struct ResetParams {
  kv::AppendState state;
  std::int32_t slot = 0;
  std::uint32_t error = 0;  ///< the slot's error word afterwards
};

/// Empties every slot and fills the rings. Any grid.
struct InitCache {
  using Params = ResetParams;
  static constexpr int threads = 256, min_blocks = 1, shared_bytes = 0;

  template <class T>
  static QATTN_DEVICE void fill(T* to, std::int64_t count, T value) {
    const std::int64_t step = std::int64_t{isa::grid().x} * threads;
    for (std::int64_t i = std::int64_t{isa::block().x} * threads + isa::thread(); i < count;
         i += step) {
      isa::store_global(to + i, value);
    }
  }

  static QATTN_DEVICE void run(const Params& p) {
    const kv::DeviceCache& cache = p.state.cache;
    const std::int64_t layers = std::int64_t{cache.slots} * cache.layers;
    const std::int64_t heads = layers * cache.heads_kv;
    fill(cache.counts, heads, 0);
    fill(cache.lengths, layers, 0);
    fill(cache.has_mean, layers, 0);
    fill(cache.k_means, heads * cache.d, 0.0f);
    fill(cache.errors, cache.slots, std::uint32_t{kv::slot_unused});
    const std::int64_t step = std::int64_t{isa::grid().x} * threads;
    const std::int64_t mine = std::int64_t{isa::block().x} * threads + isa::thread();
    for (int t = 0; t < cache.pools; ++t) {
      for (std::int64_t i = mine; i < cache.pool[t].capacity; i += step) {
        isa::store_global(p.state.free_pages[t] + i, static_cast<std::int32_t>(i));
      }
      if (mine == 0) store_struct(p.state.rings + t, kv::Ring{0, cache.pool[t].capacity});
    }
  }
};

/// Gives a slot's pages back, one warp a pool, in the order of its tables. One block.
struct ResetSlot {
  using Params = ResetParams;
  static constexpr int threads = 32 * kv::most_tiers, min_blocks = 1, shared_bytes = 0;

  static QATTN_DEVICE void give_back(const Params& p, int tier) {
    const kv::DeviceCache& cache = p.state.cache;
    kv::Ring ring = load_struct(p.state.rings + tier);
    const std::int64_t tables = std::int64_t{cache.layers} * cache.heads_kv;
    for (std::int64_t n = 0; n < tables; ++n) {
      const std::int64_t table = p.slot * tables + n;
      const std::int32_t count = isa::load_global(cache.counts + table);
      for (std::int32_t first = 0; first < count; first += 32) {
        const std::int32_t i = first + isa::lane();
        const kv::Entry* e = cache.entries + table * cache.most_pages + i;
        const bool mine = i < count && isa::load_global(&e->tier) == tier;
        const std::uint32_t all = isa::ballot(mine);
        if (mine) {
          const int rank = __builtin_popcount(all & ((1u << isa::lane()) - 1));
          const std::int64_t place =
              p.state.ring_place(tier, std::int64_t{ring.head} + ring.count + rank);
          isa::store_global(p.state.free_pages[tier] + place, isa::load_global(&e->page));
        }
        ring.count += __builtin_popcount(all);
      }
    }
    if (isa::lane() == 0) store_struct(p.state.rings + tier, ring);
  }

  static QATTN_DEVICE void run(const Params& p) {
    const kv::DeviceCache& cache = p.state.cache;
    if (isa::warp() < cache.pools) give_back(p, isa::warp());
    isa::sync_threads();
    const std::int64_t tables = std::int64_t{cache.layers} * cache.heads_kv;
    for (std::int64_t i = isa::thread(); i < tables; i += threads) {
      isa::store_global(cache.counts + p.slot * tables + i, 0);
    }
    for (std::int64_t i = isa::thread(); i < cache.layers; i += threads) {
      isa::store_global(cache.lengths + cache.layer_index(p.slot, i), 0);
      isa::store_global(cache.has_mean + cache.layer_index(p.slot, i), 0);
    }
    for (std::int64_t i = isa::thread(); i < tables * cache.d; i += threads) {
      isa::store_global(cache.k_means + p.slot * tables * cache.d + i, 0.0f);
    }
    if (isa::thread() == 0) isa::store_global(cache.errors + p.slot, p.error);
  }
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
