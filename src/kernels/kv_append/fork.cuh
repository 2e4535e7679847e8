// A slot that holds what another one does, in the same pages.
#pragma once

#include "kernels/kv_append/shares.cuh"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

struct ForkParams {
  kv::AppendState state;
  std::int32_t from = 0, to = 0;
};

/// Copies tables, lengths and means, and counts one holder more of every page. The slot `to` is
/// empty; of a slot in error it gets the error alone. Any grid.
struct ForkTables {
  using Params = ForkParams;
  static constexpr int threads = 128, min_blocks = 1, shared_bytes = 0;

  static QATTN_DEVICE void copy_table(const Params& p, std::int64_t from, std::int64_t to) {
    const kv::DeviceCache& cache = p.state.cache;
    const std::int32_t count = isa::load_global(cache.counts + from);
    for (std::int32_t i = isa::thread(); i < count; i += threads) {
      const kv::Entry e = load_struct(cache.entries + from * cache.most_pages + i);
      store_struct(cache.entries + to * cache.most_pages + i, e);
      isa::atomic_add_global(share_count(p.state, e.tier, e.page), 1u);
    }
    if (isa::thread() == 0) isa::store_global(cache.counts + to, count);
  }

  static QATTN_DEVICE void copy_sets(const Params& p, std::int64_t from, std::int64_t to) {
    const kv::DeviceCache& cache = p.state.cache;
    const std::int64_t rows = std::int64_t{cache.sets} * cache.heads_kv;
    const auto copy = [&](auto* all, std::int64_t count) {
      for (std::int64_t i = isa::thread(); i < count; i += threads) {
        isa::store_global(all + to * count + i, isa::load_global(all + from * count + i));
      }
    };
    copy(cache.k_means, rows * cache.d);
    if (cache.balance_k != 0) copy(cache.k_shifts, rows * cache.d);
    if (cache.smooth_v != 0) copy(cache.v_means, rows * cache.dv);
    if (isa::thread() == 0) {
      isa::store_global(cache.set_counts + to, isa::load_global(cache.set_counts + from));
    }
  }

  static QATTN_DEVICE void run(const Params& p) {
    const kv::DeviceCache& cache = p.state.cache;
    const std::uint32_t error = isa::load_global(cache.errors + p.from);
    const std::int64_t block = isa::block().x, blocks = isa::grid().x;
    if (error != 0) {
      if (block != 0 || isa::thread() != 0) return;
      isa::store_global(cache.errors + p.to, error);
      set_device_error(p.state);
      return;
    }
    const std::int64_t tables = std::int64_t{cache.layers} * cache.heads_kv;
    for (std::int64_t table = block; table < tables; table += blocks) {
      copy_table(p, p.from * tables + table, p.to * tables + table);
    }
    for (std::int64_t layer = block; layer < cache.layers; layer += blocks) {
      copy_sets(p, cache.layer_index(p.from, layer), cache.layer_index(p.to, layer));
    }
    for (std::int64_t layer = block * threads + isa::thread(); layer < cache.layers;
         layer += blocks * threads) {
      const std::int64_t from = cache.layer_index(p.from, layer);
      const std::int64_t to = cache.layer_index(p.to, layer);
      isa::store_global(cache.lengths + to, isa::load_global(cache.lengths + from));
    }
  }
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
