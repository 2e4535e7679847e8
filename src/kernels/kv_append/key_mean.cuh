// K's mean of every channel and what it is divided by (kvcache/key_balance.hpp), frozen when a
// first page of a (slot, layer) is quantised: of the keys behind the sinks that are in 16 bits or
// new, those that kvcache/key_size.hpp lets count. V's mean likewise. Before WritePages: what is
// quantised then lies in 16 bits now.
#pragma once

#include "kernels/kv_append/params.hpp"
#include "kernels/kv_append/row.cuh"
#include "kvcache/key_balance.hpp"
#include "kvcache/key_size.hpp"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

struct FreezeMean {
  using Params = AppendParams;
  static constexpr int lanes = kv::mean_lanes, most_channels = 256, per_lane = most_channels / 32;
  static constexpr int threads = 32 * lanes, min_blocks = 1;
  static constexpr int times_at = 8 * lanes * most_channels;
  static constexpr int sizes_at = times_at + 3 * 8 * lanes;
  static constexpr int shared_bytes = sizes_at + 4 * kv::key_sizes;
  static constexpr bool dependent = true;

  /// Blocks of the grid with z = 1 are V's.
  static QATTN_DEVICE bool is_value() { return isa::block().z != 0; }

  /// What a warp adds up: channels lane, lane + 32, ...
  struct Sums {
    kv::KeySums channel[per_lane];
    kv::KeyTimes times;
  };

  /// A key's channels of this lane, and its size.
  struct Key {
    float x[per_lane];
    int size;

    template <class Bits>
    QATTN_DEVICE Key(int channels, bool bf16, Bits bits) {
      float top = 0.0f;
#pragma unroll
      for (int j = 0; j < per_lane; ++j) {
        const int c = isa::lane() + 32 * j;
        x[j] = c < channels ? widen(bits(c), bf16) : 0.0f;
        top = formats::fold_amax(top, x[j]);
      }
#pragma unroll
      for (int mask = 16; mask > 0; mask /= 2) {
        top = formats::fold_amax(top, isa::shuffle_xor(top, mask));
      }
      size = kv::key_size(top);
    }
  };

  static QATTN_DEVICE isa::SharedAddress at(int lane, int channel) {
    return isa::shared_base() +
           static_cast<isa::SharedAddress>(8 * (lane * most_channels + channel));
  }
  static QATTN_DEVICE isa::SharedAddress time_at(int which, int lane) {
    return isa::shared_base() +
           static_cast<isa::SharedAddress>(times_at + 8 * (which * lanes + lane));
  }

  /// f(key, its block of 16 tokens) for those of the calling warp, in order.
  template <class F>
  static QATTN_DEVICE void for_keys(const Params& p, std::int64_t b, std::int64_t h, F f) {
    const kv::DeviceCache& cache = p.state.cache;
    const bool value = is_value();
    const NewRows& rows = value ? p.v : p.k;
    const int channels = value ? cache.dv : cache.d;
    const int first = value ? cache.pool[0].layout.block.v_codes() / 2 : 0;
    const kv::SlotPlan* plan = p.state.plans + b;
    const std::int64_t slot = isa::load_global(&plan->slot);
    const std::int64_t old_length = isa::load_global(&plan->old_length);
    const std::int64_t new_length = isa::load_global(&plan->new_length);
    const std::int32_t entries =
        isa::load_global(&p.state.heads[p.state.plan_head(b, h)].old_count);
    const kv::DevicePool& pool = cache.pool[0];
    const bool bf16 = cache.bf16 != 0;
    for (std::int32_t i = 0; i < entries; ++i) {
      const kv::Entry e = load_struct(cache.table(slot, p.layer, h) + i);
      if (e.tier != 0 || e.first < cache.sinks) continue;
      for (int token = 0; token < cache.page_size; ++token) {
        const int block = token / formats::kv_block_tokens;
        if ((e.first / formats::kv_block_tokens + block) % lanes != isa::warp()) continue;
        if ((e.live >> token & 1) == 0) continue;
        const auto* row = reinterpret_cast<const std::uint16_t*>(pool.block(e.page, block)) +
                          first + token % formats::kv_block_tokens * channels;
        f(Key(channels, bf16, [&](int c) { return isa::load_global(row + c); }),
          e.first / formats::kv_block_tokens + block);
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
        const std::int64_t row = rows.row(b, h, position - old_length);
        f(Key(channels, bf16,
              [&](int c) { return window_bits(rows.data, rows.kind, row + c, bf16); }),
          block);
      }
    }
  }

  static QATTN_DEVICE isa::SharedAddress keys_of(int size) {
    return isa::shared_base() + static_cast<isa::SharedAddress>(sizes_at + 4 * size);
  }

  /// The size up to which keys count. Collective.
  static QATTN_DEVICE int largest(const Params& p, std::int64_t b, std::int64_t h) {
    for (int i = isa::thread(); i < kv::key_sizes; i += threads) isa::store_shared(keys_of(i), 0u);
    isa::sync_threads();
    for_keys(p, b, h, [](const Key& key, std::int64_t) {
      if (isa::lane() == 0) isa::atomic_add_shared(keys_of(key.size), 1u);
    });
    isa::sync_threads();
    if (isa::thread() == 0) {
      std::uint32_t keys = 0;
      for (int i = 1; i <= kv::most_key_size; ++i) {
        keys += isa::load_shared<std::uint32_t>(keys_of(i));
        isa::store_shared(keys_of(i), keys);
      }
    }
    isa::sync_threads();
    return kv::largest_key_size([](int n) {
      return static_cast<std::int64_t>(isa::load_shared<std::uint32_t>(keys_of(n)));
    });
  }

  static QATTN_DEVICE Sums add_lane(const Params& p, std::int64_t b, std::int64_t h, int largest) {
    Sums s;
    for_keys(p, b, h, [&](const Key& key, std::int64_t block) {
      if (key.size > largest) return;
      const auto time = static_cast<double>(block);
      s.times.add(time);
#pragma unroll
      for (int j = 0; j < per_lane; ++j) {
        s.channel[j].add(static_cast<double>(clean(key.x[j])), time);
      }
    });
    return s;
  }

  /// The sum over all lanes, in halves; load(lane).
  template <class Load>
  static QATTN_DEVICE double add_lanes(Load load) {
    double sum[lanes];
#pragma unroll
    for (int n = 0; n < lanes; ++n) sum[n] = load(n);
#pragma unroll
    for (int half = lanes / 2; half > 0; half /= 2) {
#pragma unroll
      for (int n = 0; n < lanes / 2; ++n) {
        if (n < half) sum[n] = formats::add_rn(sum[n], sum[n + half]);
      }
    }
    return sum[0];
  }
  /// Sums of this thread's channel over all warps, of value(j) of each of their lanes' channels.
  template <class Value>
  static QATTN_DEVICE double add_warps(Value value) {
    const int warp = isa::warp();
    isa::sync_threads();  // what was there before is read
#pragma unroll
    for (int j = 0; j < per_lane; ++j) {
      isa::store_shared(at(warp, isa::lane() + 32 * j), value(j));
    }
    isa::sync_threads();
    const int c = isa::thread() % most_channels;
    return add_lanes([&](int n) { return isa::load_shared<double>(at(n, c)); });
  }
  static QATTN_DEVICE kv::KeyTimes add_times(const kv::KeyTimes& own) {
    const int warp = isa::warp();
    if (isa::lane() == 0) {
      isa::store_shared(time_at(0, warp), own.count);
      isa::store_shared(time_at(1, warp), own.t);
      isa::store_shared(time_at(2, warp), own.tt);
    }
    isa::sync_threads();
    const auto sum = [](int which) {
      return add_lanes([&](int n) { return isa::load_shared<double>(time_at(which, n)); });
    };
    kv::KeyTimes all;
    all.count = sum(0), all.t = sum(1), all.tt = sum(2);
    return all;
  }

  /// What the channels are divided by; `mine`: of this thread's channel. Collective.
  static QATTN_DEVICE void balance(const Params& p, std::int64_t slot, std::int64_t h,
                                   const kv::KeyEnergy& mine, const kv::KeyTimes& times) {
    const int pairs = p.state.cache.d / 2, j = isa::thread();
    isa::sync_threads();  // what was there before is read
    if (j < 2 * pairs) {
      isa::store_shared(at(0, j), mine.whole);
      isa::store_shared(at(1, j), mine.own);
      isa::store_shared(at(2, j), mine.line);
    }
    isa::sync_threads();
    const auto of_channel = [](int c) {
      kv::KeyEnergy e;
      e.whole = isa::load_shared<double>(at(0, c));
      e.own = isa::load_shared<double>(at(1, c));
      e.line = isa::load_shared<double>(at(2, c));
      return e;
    };
    const auto of_pair = [&](int i) { return of_channel(i) + of_channel(i + pairs); };
    const auto own = [&](int i) { return of_pair(i).own; };
    if (j < pairs && kv::is_median(j, pairs, own)) isa::store_shared(at(3, 0), own(j));
    isa::sync_threads();
    if (j >= pairs) return;
    const auto median = isa::load_shared<double>(at(3, 0));
    const int shift = kv::key_shift(of_pair(j).later(times, median), median);
    std::uint8_t* to = p.state.cache.k_shift(slot, p.layer, h) + j;
    isa::store_global(to, static_cast<std::uint8_t>(shift));
    isa::store_global(to + pairs, static_cast<std::uint8_t>(shift));
  }

  /// V's mean, where it is far from 0. Collective.
  static QATTN_DEVICE void freeze_v(float* to, int channels, const kv::KeySums& sums,
                                    const kv::KeyTimes& times) {
    const int c = isa::thread();
    const kv::KeyEnergy mine(sums, times, true);
    isa::sync_threads();  // what was there before is read
    if (c < channels) {
      isa::store_shared(at(0, c), formats::add_rn(mine.whole, -mine.own));
      isa::store_shared(at(1, c), mine.own);
    }
    isa::sync_threads();
    double of_means = 0, own = 0;
    for (int i = 0; i < channels; ++i) {
      of_means = formats::add_rn(of_means, isa::load_shared<double>(at(0, i)));
      own = formats::add_rn(own, isa::load_shared<double>(at(1, i)));
    }
    if (c >= channels) return;
    const bool far = times.count > 0 && kv::is_far(of_means, own);
    isa::store_global(to + c, far ? static_cast<float>(sums.x / times.count) : 0.0f);
  }

  static QATTN_DEVICE void run(const Params& p) {
    isa::grid_dependency_launch();
    isa::grid_dependency_wait();
    const kv::DeviceCache& cache = p.state.cache;
    const std::int64_t b = isa::block().y, h = isa::block().x;
    const kv::SlotPlan* plan = p.state.plans + b;
    if (isa::load_global(&plan->granted) == 0 || isa::load_global(&plan->freezes) == 0) return;
    const Sums s = add_lane(p, b, h, largest(p, b, h));
    const kv::KeyTimes times = add_times(s.times);
    kv::KeySums sums;
    sums.x = add_warps([&](int j) { return s.channel[j].x; });
    sums.xx = add_warps([&](int j) { return s.channel[j].xx; });
    sums.tx = add_warps([&](int j) { return s.channel[j].tx; });
    const std::int64_t slot = isa::load_global(&plan->slot);
    const int c = isa::thread();
    const bool smooth = cache.smooth_k != 0;
    if (is_value()) return freeze_v(cache.v_mean(slot, p.layer, h), cache.dv, sums, times);
    if (c < cache.d) {
      const double mean = times.count > 0 && smooth ? sums.x / times.count : 0.0;
      isa::store_global(cache.k_mean(slot, p.layer, h) + c, static_cast<float>(mean));
    }
    if (cache.balance_k == 0) return;
    balance(p, slot, h, kv::KeyEnergy(sums, times, smooth), times);
  }
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
