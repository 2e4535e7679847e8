// A cache without sequences, and slots with fewer tokens.
#pragma once

#include "kernels/kv_append/shares.cuh"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

struct ResetParams {
  kv::AppendState state;
  std::int32_t slot = 0;
  std::int32_t first_layer = 0, end_layer = 0, first_head = 0, end_head = 0;
  std::int64_t begin = 0, end = 0;  ///< tokens to be forgotten
  std::int32_t truncates = 0;       ///< `begin` becomes the length of layers that are longer
  std::int32_t resets = 0;          ///< the error word becomes `error`
  std::uint32_t error = 0;
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
    fill(cache.set_counts, layers, 0);
    // DecodePrepare loads entries before it knows how many a table has.
    fill(reinterpret_cast<std::uint64_t*>(cache.entries),
         heads * cache.most_pages * static_cast<std::int64_t>(sizeof(kv::Entry) / 8),
         std::uint64_t{0});
    const std::int64_t rows = heads * cache.sets;
    fill(cache.k_means, rows * cache.d, 0.0f);
    if (cache.balance_k != 0) fill(cache.k_shifts, rows * cache.d, std::uint8_t{0});
    if (cache.smooth_v != 0) fill(cache.v_means, rows * cache.dv, 0.0f);
    fill(cache.errors, cache.slots, std::uint32_t{kv::slot_unused});
    const std::int64_t step = std::int64_t{isa::grid().x} * threads;
    const std::int64_t mine = std::int64_t{isa::block().x} * threads + isa::thread();
    for (int t = 0; t < cache.pools; ++t) {
      for (std::int64_t i = mine; i < cache.pool[t].capacity; i += step) {
        isa::store_global(p.state.free_pages[t] + i, static_cast<std::int32_t>(i));
        isa::store_global(p.state.shares[t] + i, 0u);
      }
      if (mine == 0) store_struct(p.state.rings + t, kv::Ring{0, cache.pool[t].capacity});
    }
  }
};

/// Forgets tokens of a slot. Pages without tokens go back where no other slot holds them, one warp
/// a pool, in the order of the tables; then the tables close up, one warp a table. No page is
/// written. One block.
struct ForgetTokens {
  using Params = ResetParams;
  static constexpr int threads = 32 * kv::most_tiers, min_blocks = 1, shared_bytes = 0;

  /// What stays of a page; a layer that is short enough is left alone.
  static QATTN_DEVICE std::uint64_t kept(const Params& p, const kv::Entry& e) {
    return e.live & ~kv::live_bits(p.begin, p.end, e.first, p.state.cache.page_size);
  }
  template <class F>
  static QATTN_DEVICE void tables(const Params& p, F f) {
    const kv::DeviceCache& cache = p.state.cache;
    for (std::int32_t layer = p.first_layer; layer < p.end_layer; ++layer) {
      const std::int64_t length =
          isa::load_global(cache.lengths + cache.layer_index(p.slot, layer));
      if (p.truncates != 0 && length <= p.begin) continue;
      for (std::int32_t h = p.first_head; h < p.end_head; ++h) {
        f(cache.head_index(p.slot, layer, h));
      }
    }
  }

  static QATTN_DEVICE void give_back(const Params& p, int tier) {
    const kv::DeviceCache& cache = p.state.cache;
    kv::Ring ring = load_struct(p.state.rings + tier);
    tables(p, [&](std::int64_t table) {
      const std::int32_t count = isa::load_global(cache.counts + table);
      for (std::int32_t first = 0; first < count; first += 32) {
        const std::int32_t i = first + isa::lane();
        kv::Entry e;
        if (i < count) e = load_struct(cache.entries + table * cache.most_pages + i);
        bool free = i < count && e.tier == tier && kept(p, e) == 0;
        if (free) {
          std::uint32_t* count_of = share_count(p.state, tier, e.page);
          const std::uint32_t others = isa::load_global(count_of);
          if (others != 0) isa::store_global(count_of, others - 1);
          free = others == 0;
        }
        push_free(p.state, tier, ring, free, e.page);
      }
    });
    if (isa::lane() == 0) store_struct(p.state.rings + tier, ring);
  }

  static QATTN_DEVICE void close_up(const Params& p, std::int64_t table) {
    const kv::DeviceCache& cache = p.state.cache;
    const std::int32_t count = isa::load_global(cache.counts + table);
    kv::Entry* entries = cache.entries + table * cache.most_pages;
    std::int32_t out = 0;
    for (std::int32_t first = 0; first < count; first += 32) {
      const std::int32_t i = first + isa::lane();
      kv::Entry e;
      if (i < count) e = load_struct(entries + i);
      e.live = i < count ? kept(p, e) : 0;
      const std::uint32_t all = isa::ballot(e.live != 0);  // all have read: out <= first
      const int rank = __builtin_popcount(all & ((1u << isa::lane()) - 1));
      if (e.live != 0) store_struct(entries + out + rank, e);
      out += __builtin_popcount(all);
    }
    if (isa::lane() == 0) isa::store_global(cache.counts + table, out);
  }

  /// How many sets there must be for those that pages of the layer name. By one warp.
  static QATTN_DEVICE std::int32_t named_sets(const Params& p, std::int32_t layer) {
    const kv::DeviceCache& cache = p.state.cache;
    std::int32_t sets = 0;
    for (std::int32_t h = 0; h < cache.heads_kv; ++h) {
      const std::int64_t table = cache.head_index(p.slot, layer, h);
      const std::int32_t count = isa::load_global(cache.counts + table);
      for (std::int32_t i = isa::lane(); i < count; i += 32) {
        const kv::Entry e = load_struct(cache.entries + table * cache.most_pages + i);
        if (e.tier != 0 && e.set >= sets) sets = e.set + 1;
      }
    }
#pragma unroll
    for (int mask = 1; mask < 32; mask *= 2) {
      const std::int32_t other = isa::shuffle_xor(sets, mask);
      sets = other > sets ? other : sets;
    }
    return sets;
  }

  /// Sets that no page was quantised with any more go, but for those below one that stays. A warp a
  /// layer.
  static QATTN_DEVICE void forget_sets(const Params& p) {
    const kv::DeviceCache& cache = p.state.cache;
    for (std::int32_t layer = p.first_layer + isa::warp(); layer < p.end_layer;
         layer += kv::most_tiers) {
      const std::int64_t at = cache.layer_index(p.slot, layer);
      const bool shorter = p.truncates == 0 || isa::load_global(cache.lengths + at) > p.begin;
      if (!shorter && p.resets == 0) continue;
      const std::int32_t sets = isa::load_global(cache.set_counts + at);
      if (sets == 0) continue;
      const std::int32_t stay = named_sets(p, layer);
      if (stay >= sets) continue;
      isa::sync_warp();  // all have looked
      const auto clear = [&](auto* all, std::int64_t row, auto zero) {
        const std::int64_t each = std::int64_t{cache.heads_kv} * row;
        auto* to = all + at * cache.sets * each;
        for (std::int64_t i = stay * each + isa::lane(); i < sets * each; i += 32) {
          isa::store_global(to + i, zero);
        }
      };
      clear(cache.k_means, cache.d, 0.0f);
      if (cache.balance_k != 0) clear(cache.k_shifts, cache.d, std::uint8_t{0});
      if (cache.smooth_v != 0) clear(cache.v_means, cache.dv, 0.0f);
      if (isa::lane() == 0) isa::store_global(cache.set_counts + at, stay);
    }
  }

  static QATTN_DEVICE void run(const Params& p) {
    const kv::DeviceCache& cache = p.state.cache;
    if (isa::warp() < cache.pools) give_back(p, isa::warp());
    isa::sync_threads();
    int turn = 0;
    tables(p, [&](std::int64_t table) {
      if (turn++ % kv::most_tiers == isa::warp()) close_up(p, table);
    });
    isa::sync_threads();
    forget_sets(p);
    isa::sync_threads();  // lengths are read no more
    if (p.truncates != 0) {
      for (std::int64_t layer = isa::thread(); layer < cache.layers; layer += threads) {
        std::int32_t* length = cache.lengths + cache.layer_index(p.slot, layer);
        if (isa::load_global(length) > p.begin) {
          isa::store_global(length, static_cast<std::int32_t>(p.begin));
        }
      }
    }
    if (p.resets != 0 && isa::thread() == 0) isa::store_global(cache.errors + p.slot, p.error);
  }
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
