// K's mean of every channel, frozen when a first page of a (slot, layer) is quantised: of the keys
// behind the sinks that are in 16 bits or new, rows with NaN or Inf left out. Before WritePages:
// what is quantised then lies in 16 bits now.
#pragma once

#include "kernels/kv_append/params.hpp"
#include "kernels/kv_append/row.cuh"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

struct FreezeMean {
  using Params = AppendParams;
  static constexpr int lanes = kv::mean_lanes, most_channels = 256, per_lane = most_channels / 32;
  static constexpr int threads = 32 * lanes, min_blocks = 1;
  static constexpr int counts_at = 8 * lanes * most_channels;
  static constexpr int shared_bytes = counts_at + 8 * lanes;
  static constexpr bool dependent = true;

  /// What a warp adds up: channels lane, lane + 32, ...
  struct Sums {
    double sum[per_lane] = {};
    std::int64_t count = 0;
  };

  template <class Bits>
  static QATTN_DEVICE void add(Sums& s, int channels, bool bf16, Bits bits) {
    float x[per_lane];
    bool finite = true;
#pragma unroll
    for (int j = 0; j < per_lane; ++j) {
      const int c = isa::lane() + 32 * j;
      x[j] = c < channels ? widen(bits(c), bf16) : 0.0f;
      finite = finite && formats::is_finite(x[j]);
    }
    if (!isa::all(finite)) return;
#pragma unroll
    for (int j = 0; j < per_lane; ++j) {
      s.sum[j] = formats::add_rn(s.sum[j], static_cast<double>(clean(x[j])));
    }
    ++s.count;
  }

  static QATTN_DEVICE isa::SharedAddress at(int lane, int channel) {
    return isa::shared_base() +
           static_cast<isa::SharedAddress>(8 * (lane * most_channels + channel));
  }

  static QATTN_DEVICE Sums add_lane(const Params& p, std::int64_t b, std::int64_t h) {
    const kv::DeviceCache& cache = p.state.cache;
    const kv::SlotPlan* plan = p.state.plans + b;
    const std::int64_t slot = isa::load_global(&plan->slot);
    const std::int64_t old_length = isa::load_global(&plan->old_length);
    const std::int64_t new_length = isa::load_global(&plan->new_length);
    const std::int32_t entries =
        isa::load_global(&p.state.heads[p.state.plan_head(b, h)].old_count);
    const kv::DevicePool& pool = cache.pool[0];
    const bool bf16 = cache.bf16 != 0;
    Sums s;
    for (std::int32_t i = 0; i < entries; ++i) {
      const kv::Entry e = load_struct(cache.table(slot, p.layer, h) + i);
      if (e.tier != 0 || e.first < cache.sinks) continue;
      for (int token = 0; token < cache.page_size; ++token) {
        const int block = token / formats::kv_block_tokens;
        if ((e.first / formats::kv_block_tokens + block) % lanes != isa::warp()) continue;
        if ((e.live >> token & 1) == 0) continue;
        const auto* row = reinterpret_cast<const std::uint16_t*>(pool.block(e.page, block)) +
                          token % formats::kv_block_tokens * cache.d;
        add(s, cache.d, bf16, [&](int c) { return isa::load_global(row + c); });
      }
    }
    std::int64_t position = old_length > cache.sinks ? old_length : cache.sinks;
    while (position < new_length) {
      const std::int64_t block = position / formats::kv_block_tokens;
      const std::int64_t next = (block + 1) * formats::kv_block_tokens;
      if (block % lanes != isa::warp()) {
        position = next;
        continue;
      }
      for (; position < next && position < new_length; ++position) {
        const std::int64_t row = p.k.row(b, h, position - old_length);
        add(s, cache.d, bf16,
            [&](int c) { return window_bits(p.k.data, p.k.kind, row + c, bf16); });
      }
    }
    return s;
  }

  static QATTN_DEVICE void run(const Params& p) {
    isa::grid_dependency_launch();
    isa::grid_dependency_wait();
    const kv::DeviceCache& cache = p.state.cache;
    const std::int64_t b = isa::block().y, h = isa::block().x;
    const kv::SlotPlan* plan = p.state.plans + b;
    if (isa::load_global(&plan->granted) == 0 || isa::load_global(&plan->freezes) == 0) return;
    const Sums s = add_lane(p, b, h);
    const int warp = isa::warp();
#pragma unroll
    for (int j = 0; j < per_lane; ++j) {
      isa::store_shared(at(warp, isa::lane() + 32 * j), s.sum[j]);
    }
    if (isa::lane() == 0) isa::store_shared(at(lanes, warp), s.count);
    isa::sync_threads();
    const int c = isa::thread();
    if (c >= cache.d) return;
    std::int64_t count = 0;
    double sum[lanes];
#pragma unroll
    for (int n = 0; n < lanes; ++n) {
      sum[n] = isa::load_shared<double>(at(n, c));
      count += isa::load_shared<std::int64_t>(at(lanes, n));
    }
#pragma unroll
    for (int half = lanes / 2; half > 0; half /= 2) {
#pragma unroll
      for (int n = 0; n < lanes / 2; ++n) {
        if (n < half) sum[n] = formats::add_rn(sum[n], sum[n + half]);
      }
    }
    const float mean = count > 0 ? static_cast<float>(sum[0] / static_cast<double>(count)) : 0.0f;
    isa::store_global(cache.k_mean(isa::load_global(&plan->slot), p.layer, h) + c, mean);
  }
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
