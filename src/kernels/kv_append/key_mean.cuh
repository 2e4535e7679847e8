// K's mean of every channel and what it is divided by (kvcache/keys/balance.hpp), when pages of a
// (slot, layer) are quantised: of the keys behind the sinks that are in 16 bits or new, those that
// kvcache/keys/size.hpp lets count. V's mean likewise. They are the layer's first set, or one more
// where what is quantised has drifted (kvcache/keys/drift.hpp). Before WritePages: what is
// quantised then lies in 16 bits now.
#pragma once

#include "kernels/kv_append/params.hpp"
#include "kernels/kv_append/row.cuh"
#include "kvcache/keys/drift.hpp"
#include "kvcache/keys/size.hpp"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

struct FreezeMean {
  using Params = AppendParams;
  static constexpr int lanes = kv::mean_lanes, most_channels = 256, per_lane = most_channels / 32;
  static constexpr int threads = 32 * lanes, min_blocks = 1;
  static constexpr int counts_at = 8 * lanes * most_channels;
  static constexpr int sizes_at = counts_at + 8 * lanes;
  /// Which sets are named, and the last.
  static constexpr int named_at = sizes_at + 4 * kv::key_sizes;
  static constexpr int last_at = named_at + 4 * kv::most_sets;
  static constexpr int shared_bytes = last_at + 4;
  static constexpr bool dependent = true;

  /// What a warp adds up: channels lane, lane + 32, ...
  struct Sums {
    kv::KeySums channel[per_lane];
    double count = 0;
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
  static QATTN_DEVICE isa::SharedAddress count_at(int lane) {
    return isa::shared_base() + static_cast<isa::SharedAddress>(counts_at + 8 * lane);
  }

  /// Rows [begin, end) of K or V of a head.
  struct Rows {
    std::int64_t b, h, begin, end;
    bool value;
  };

  /// f(key) for those of the calling warp, in order.
  template <class F>
  static QATTN_DEVICE void for_keys(const Params& p, const Rows& of, F f) {
    const kv::DeviceCache& cache = p.state.cache;
    const std::int64_t b = of.b, h = of.h;
    const bool value = of.value;
    const NewRows& rows = value ? p.v : p.k;
    const int channels = value ? cache.dv : cache.d;
    const int first = value ? cache.pool[0].layout.block.v_codes() / 2 : 0;
    const kv::SlotPlan* plan = p.state.plans + b;
    const std::int64_t slot = isa::load_global(&plan->slot);
    const std::int64_t old_length = isa::load_global(&plan->old_length);
    const std::int32_t entries =
        isa::load_global(&p.state.heads[p.state.plan_head(b, h)].old_count);
    const kv::DevicePool& pool = cache.pool[0];
    const bool bf16 = cache.bf16 != 0;
    const std::int64_t begin = of.begin > cache.sinks ? of.begin : cache.sinks;
    for (std::int32_t i = 0; i < entries; ++i) {
      const kv::Entry e = load_struct(cache.table(slot, p.layer, h) + i);
      if (e.tier != 0 || e.first < begin || e.first >= of.end) continue;
      for (int token = 0; token < cache.page_size; ++token) {
        const int block = token / formats::kv_block_tokens;
        if ((e.first / formats::kv_block_tokens + block) % lanes != isa::warp()) continue;
        if ((e.live >> token & 1) == 0) continue;
        const auto* row = reinterpret_cast<const std::uint16_t*>(pool.block(e.page, block)) +
                          first + token % formats::kv_block_tokens * channels;
        f(Key(channels, bf16, [&](int c) { return isa::load_global(row + c); }));
      }
    }
    std::int64_t position = old_length > begin ? old_length : begin;
    while (position < of.end) {
      const std::int64_t block = position / formats::kv_block_tokens;
      const std::int64_t next = (block + 1) * formats::kv_block_tokens;
      if (block % lanes != isa::warp()) {
        position = next;
        continue;
      }
      for (; position < next && position < of.end; ++position) {
        const std::int64_t row = rows.row(b, h, position - old_length);
        f(Key(channels, bf16,
              [&](int c) { return window_bits(rows.data, rows.kind, row + c, bf16); }));
      }
    }
  }

  static QATTN_DEVICE isa::SharedAddress keys_of(int size) {
    return isa::shared_base() + static_cast<isa::SharedAddress>(sizes_at + 4 * size);
  }

  /// The size up to which keys count. Collective.
  static QATTN_DEVICE int largest(const Params& p, const Rows& rows) {
    for (int i = isa::thread(); i < kv::key_sizes; i += threads) isa::store_shared(keys_of(i), 0u);
    isa::sync_threads();
    for_keys(p, rows, [](const Key& key) {
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

  static QATTN_DEVICE Sums add_lane(const Params& p, const Rows& rows, int largest) {
    Sums s;
    for_keys(p, rows, [&](const Key& key) {
      if (key.size > largest) return;
      s.count += 1;
#pragma unroll
      for (int j = 0; j < per_lane; ++j) {
        s.channel[j].add(static_cast<double>(clean(key.x[j])));
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
  static QATTN_DEVICE double add_counts(double own) {
    const int warp = isa::warp();
    if (isa::lane() == 0) isa::store_shared(count_at(warp), own);
    isa::sync_threads();
    return add_lanes([](int n) { return isa::load_shared<double>(count_at(n)); });
  }

  /// Sums over rows, of this thread's channel.
  struct Moments {
    double count = 0;
    kv::KeySums sums;
  };
  static QATTN_DEVICE Moments moments(const Params& p, const Rows& rows) {
    const Sums s = add_lane(p, rows, largest(p, rows));
    Moments m;
    m.count = add_counts(s.count);
    m.sums.x = add_warps([&](int j) { return s.channel[j].x; });
    m.sums.xx = add_warps([&](int j) { return s.channel[j].xx; });
    return m;
  }

  /// What this thread's channel of a set is moved by.
  struct Moved {
    float k_mean = 0, v_mean = 0;
    int k_shift = 0;
  };

  /// What this thread's channel is divided by. `mine`: its energy. Collective.
  static QATTN_DEVICE int balance(const Params& p, double mine) {
    const int pairs = p.state.cache.d / 2, j = isa::thread();
    isa::sync_threads();  // what was there before is read
    if (j < 2 * pairs) isa::store_shared(at(0, j), mine);
    isa::sync_threads();
    const auto of_pair = [&](int i) {
      return isa::load_shared<double>(at(0, i)) + isa::load_shared<double>(at(0, i + pairs));
    };
    if (j < pairs && kv::is_median(j, pairs, of_pair)) isa::store_shared(at(1, 0), of_pair(j));
    isa::sync_threads();
    return kv::key_shift(of_pair(j % pairs), isa::load_shared<double>(at(1, 0)));
  }

  /// `from`: the mean of this thread's channel from which keys have moved; null: they have not.
  static QATTN_DEVICE void freeze_k(const Params& p, const Moments& m, const float* from,
                                    Moved& moved) {
    const kv::DeviceCache& cache = p.state.cache;
    const bool smooth = cache.smooth_k != 0, has_keys = m.count > 0;
    if (smooth && has_keys) moved.k_mean = static_cast<float>(m.sums.x / m.count);
    if (cache.balance_k == 0) return;
    double own = kv::KeyEnergy(m.sums, m.count, smooth).own;
    if (from != nullptr && has_keys) {
      const double gone = kv::moved_energy(m.sums, m.count, *from, 0);
      own = gone > own ? gone : own;
    }
    const int shift = balance(p, own);
    if (has_keys) moved.k_shift = shift;
  }

  /// V's mean, where it is far from 0. Collective.
  static QATTN_DEVICE void freeze_v(const Params& p, const Moments& m, Moved& moved) {
    const int c = isa::thread(), channels = p.state.cache.dv;
    const kv::KeyEnergy mine(m.sums, m.count, true);
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
    const bool far = m.count > 0 && kv::is_far(of_means, own);
    if (far) moved.v_mean = static_cast<float>(m.sums.x / m.count);
  }

  /// The sum over channels, in halves, of a number a thread's channel. Collective.
  static QATTN_DEVICE double add_channels(double mine) {
    isa::sync_threads();  // what was there before is read
    if (isa::thread() < most_channels) isa::store_shared(at(0, isa::thread()), mine);
    isa::sync_threads();
    double sum[per_lane];
#pragma unroll
    for (int j = 0; j < per_lane; ++j) {
      sum[j] = isa::load_shared<double>(at(0, isa::lane() + 32 * j));
    }
    kv::add_in_halves<per_lane>(sum, 1);
#pragma unroll
    for (int half = 16; half > 0; half /= 2) {
      sum[0] = formats::add_rn(sum[0], isa::shuffle_xor(sum[0], half));
    }
    return sum[0];
  }

  /// Of rows under what channels are moved by; of so few that they say nothing: 0. Collective.
  static QATTN_DEVICE double energy(const Moments& m, int channels, float mean, int shift) {
    const bool counts = isa::thread() % most_channels < channels && m.count >= kv::least_keys;
    return add_channels(counts ? kv::moved_energy(m.sums, m.count, mean, shift) : 0.0);
  }

  static QATTN_DEVICE Moved load_set(const Params& p, std::int64_t slot, std::int64_t h, int set) {
    const kv::DeviceCache& cache = p.state.cache;
    const int c = isa::thread() % most_channels;
    Moved m;
    if (c < cache.d) m.k_mean = isa::load_global(cache.k_mean(slot, p.layer, h, set) + c);
    if (c < cache.d && cache.balance_k != 0) {
      m.k_shift = isa::load_global(cache.k_shift(slot, p.layer, h, set) + c);
    }
    if (c < cache.dv && cache.smooth_v != 0) {
      m.v_mean = isa::load_global(cache.v_mean(slot, p.layer, h, set) + c);
    }
    return m;
  }
  static QATTN_DEVICE void store_set(const Params& p, std::int64_t slot, std::int64_t h, int set,
                                     const Moved& m) {
    const kv::DeviceCache& cache = p.state.cache;
    const int c = isa::thread();
    if (c < cache.d) isa::store_global(cache.k_mean(slot, p.layer, h, set) + c, m.k_mean);
    if (c < cache.d && cache.balance_k != 0) {
      isa::store_global(cache.k_shift(slot, p.layer, h, set) + c,
                        static_cast<std::uint8_t>(m.k_shift));
    }
    if (c < cache.dv && cache.smooth_v != 0) {
      isa::store_global(cache.v_mean(slot, p.layer, h, set) + c, m.v_mean);
    }
    if (isa::thread() != 0) return;
    auto* count =
        reinterpret_cast<std::uint32_t*>(cache.set_counts) + cache.layer_index(slot, p.layer);
    isa::atomic_max_global(count, static_cast<std::uint32_t>(set + 1));
  }

  /// The sets that pages of codes name, as bits, and that of the last. Collective.
  static QATTN_DEVICE std::uint32_t named_sets(const Params& p, std::int64_t slot, std::int64_t h,
                                               std::int32_t entries, int& last) {
    const auto word = [](int place, int i) {
      return isa::shared_base() + static_cast<isa::SharedAddress>(place + 4 * i);
    };
    if (isa::thread() <= kv::most_sets) isa::store_shared(word(named_at, isa::thread()), 0u);
    isa::sync_threads();
    const kv::Entry* table = p.state.cache.table(slot, p.layer, h);
    for (std::int32_t i = isa::thread(); i < entries; i += threads) {
      const kv::Entry e = load_struct(table + i);
      if (e.tier == 0) continue;
      const auto set = static_cast<std::uint32_t>(e.set) % kv::most_sets;
      isa::atomic_max_shared(word(named_at, static_cast<int>(set)), 1u);
      isa::atomic_max_shared(word(last_at, 0), static_cast<std::uint32_t>(i) * kv::most_sets + set);
    }
    isa::sync_threads();
    std::uint32_t named = 0;
    for (int set = 0; set < kv::most_sets; ++set) {
      named |= isa::load_shared<std::uint32_t>(word(named_at, set)) << set;
    }
    last = static_cast<int>(isa::load_shared<std::uint32_t>(word(last_at, 0)) % kv::most_sets);
    return named == 0 ? 1u : named;
  }

  /// Of rows of K and V, as the cache asks. Collective, as all of these.
  struct Both {
    Moments k, v;

    QATTN_DEVICE Both(const Params& p, std::int64_t b, std::int64_t h, std::int64_t begin,
                      std::int64_t end) {
      const kv::DeviceCache& cache = p.state.cache;
      const bool has_k = cache.smooth_k != 0 || cache.balance_k != 0;
      if (has_k) k = moments(p, {b, h, begin, end, false});
      if (cache.smooth_v != 0) v = moments(p, {b, h, begin, end, true});
    }
    QATTN_DEVICE Moved freeze(const Params& p, const float* from = nullptr) const {
      Moved m;
      freeze_k(p, k, from, m);
      freeze_v(p, v, m);
      return m;
    }
    struct Energy {
      double k, v;
    };
    QATTN_DEVICE Energy energy(const Params& p, const Moved& m) const {
      const kv::DeviceCache& cache = p.state.cache;
      return {FreezeMean::energy(k, cache.d, m.k_mean, m.k_shift),
              FreezeMean::energy(v, cache.dv, m.v_mean, 0)};
    }
  };

  /// The pages of a head that leave the window: what their parts take. `sets`: that there were.
  static QATTN_DEVICE std::uint32_t choose(const Params& p, std::int64_t slot, std::int64_t b,
                                           std::int64_t h, std::int32_t sets) {
    const kv::AppendState& state = p.state;
    const kv::DeviceCache& cache = state.cache;
    const kv::SlotPlan* plan = state.plans + b;
    const std::int64_t old_length = isa::load_global(&plan->old_length);
    const std::int64_t length = isa::load_global(&plan->new_length);
    const kv::DriftParts parts(state.window_begin(old_length), state.window_begin(length),
                               cache.sinks, cache.page_size);
    const int most = state.has_budget != 0 ? kv::reserved_sets(sets, true, cache.sets) : cache.sets;
    int last = 0;
    std::uint32_t chosen = 0;
    std::uint32_t named = named_sets(
        p, slot, h, isa::load_global(&state.heads[state.plan_head(b, h)].old_count), last);
#pragma unroll 1
    for (int part = 0; part < parts.count(); ++part) {
      const Both rows(p, b, h, parts.begin(part), parts.end(part));
      Moved fresh;
      kv::Choice choice{};
#pragma unroll 1
      for (int turn = 0; turn < 2; ++turn) {
        const std::int64_t behind = parts.end(part) + cache.window_tokens + cache.page_size;
        const std::int64_t end = behind < length ? behind : length;
        const float from = load_set(p, slot, h, last).k_mean;
        fresh = turn == 0 ? rows.freeze(p) : Both(p, b, h, parts.begin(part), end).freeze(p, &from);
        const typename Both::Energy of = rows.energy(p, fresh);
        choice = kv::best_set(named, last, [&](int set) {
          const typename Both::Energy over = rows.energy(p, load_set(p, slot, h, set));
          const double k = kv::excess(over.k, of.k), v = kv::excess(over.v, of.v);
          return k > v ? k : v;
        });
        if (!(choice.excess > kv::drift)) break;
      }
      const int spare = kv::spare_set(named, most);
      if (choice.excess > kv::drift && spare < most) {
        store_set(p, slot, h, spare, fresh);
        named |= 1u << spare;
        choice.set = spare;
      }
      last = choice.set;
      chosen |= static_cast<std::uint32_t>(last) << 4 * part;
    }
    return chosen;
  }

  static QATTN_DEVICE void run(const Params& p) {
    isa::grid_dependency_launch();
    isa::grid_dependency_wait();
    const std::int64_t b = isa::block().y, h = isa::block().x;
    const kv::SlotPlan* plan = p.state.plans + b;
    if (isa::load_global(&plan->granted) == 0 || isa::load_global(&plan->quantises) == 0) return;
    const std::int64_t slot = isa::load_global(&plan->slot);
    const std::int32_t sets = isa::load_global(&plan->sets);
    if (sets == 0) {
      const Both all(p, b, h, 0, isa::load_global(&plan->new_length));
      return store_set(p, slot, h, 0, all.freeze(p));
    }
    const std::uint32_t chosen = choose(p, slot, b, h, sets);
    if (isa::thread() == 0) {
      isa::store_global(&p.state.heads[p.state.plan_head(b, h)].sets, chosen);
    }
  }
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
