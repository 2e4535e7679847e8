// A KV cache on a GPU for decode_bench: pools and tables filled with random codes on the device.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <vector>

#include "formats/f16.hpp"
#include "kvcache/device_view.hpp"
#include "qattn/kv_cache.hpp"
#include "qattn/status.hpp"

namespace qattn::bench {

inline void check(cudaError_t e, const char* what) {
  if (e == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(e));
  std::exit(1);
}
inline void check(const Status& s) {
  if (s.ok()) return;
  std::fprintf(stderr, "%s\n", s.message().c_str());
  std::exit(1);
}

template <class T>
class DeviceArray {
 public:
  explicit DeviceArray(std::size_t count) : count_(count) {
    check(cudaMalloc(&data_, std::max<std::size_t>(count * sizeof(T), 256)), "cudaMalloc");
  }
  explicit DeviceArray(const std::vector<T>& host) : DeviceArray(host.size()) {
    check(cudaMemcpy(data_, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice), "copy");
  }
  DeviceArray(DeviceArray&& x) noexcept : data_(x.data_), count_(x.count_) { x.data_ = nullptr; }
  DeviceArray& operator=(DeviceArray&&) = delete;
  ~DeviceArray() { cudaFree(data_); }
  T* get() const { return static_cast<T*>(data_); }
  std::size_t size() const { return count_; }
  std::vector<T> fetch(std::size_t first, std::size_t count) const {
    std::vector<T> host(count);
    check(cudaMemcpy(host.data(), get() + first, count * sizeof(T), cudaMemcpyDeviceToHost),
          "fetch");
    return host;
  }

 private:
  void* data_ = nullptr;
  std::size_t count_;
};

// ---- Filling ------------------------------------------------------------------------------------

static __device__ std::uint32_t mix(std::uint64_t x) {
  x ^= x >> 33;
  x *= 0xff51afd7ed558ccdull;
  x ^= x >> 33;
  x *= 0xc4ceb9fe1a85ec53ull;
  return static_cast<std::uint32_t>(x >> 32);
}

/// Random codes; scales that make a code's value about N(0,1)'s size; rows uniform in [-1.7, 1.7].
static __global__ void fill_pool(std::uint8_t* pool, formats::KvPage layout, std::int64_t pages) {
  const formats::KvBlock& block = layout.block;
  const std::int64_t halves = pages * layout.bytes() / 2;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
       i < halves; i += step) {
    const std::uint32_t random = mix(static_cast<std::uint64_t>(i) + 0x1234567);
    const int in_page = static_cast<int>(i % (layout.bytes() / 2)) * 2;
    const bool of_channels = in_page >= layout.channel_scales();
    const int at = in_page % layout.block_bytes();
    auto code = static_cast<std::uint16_t>(random);
    if (layout.k_by_channel && in_page >= layout.bad_tokens()) {
      code = 0;
    } else if (block.window() || of_channels || at >= block.k_scales()) {
      const float u = static_cast<float>(random >> 8) * 0x1p-24f;
      const int bits = !of_channels && at >= layout.v_scales() ? block.v_bits : block.k_bits;
      const float x = block.window() ? 3.4f * (u - 0.5f)
                                     : 3.4f / static_cast<float>(1 << bits) * (0.75f + 0.5f * u);
      code = formats::F16::encode(x);
    }
    reinterpret_cast<std::uint16_t*>(pool)[i] = code;
  }
}

// ---- Cases --------------------------------------------------------------------------------------

struct Shape {
  std::int64_t batch, heads_q, heads_kv, d, tokens, page;
};

struct Case {
  const char* name;
  std::vector<std::pair<KvTier, int>> tiers;  ///< and how many pages of 100
  bool by_channel = false;                    ///< K's scales
};

inline const std::vector<Case>& all_cases() {
  static const std::vector<Case> cases = {
      {"kv8", {{{8, 8}, 100}}},
      {"kv4", {{{4, 4}, 100}}},
      {"kv3", {{{3, 3}, 100}}},
      {"kv2", {{{2, 2}, 100}}},
      {"mixed", {{{8, 8}, 5}, {{4, 4}, 25}, {{3, 3}, 40}, {{2, 2}, 30}}},
      {"mixed3", {{{8, 8}, 2}, {{4, 4}, 12}, {{3, 3}, 38}, {{2, 2}, 48}}},
      {"k4v2", {{{4, 2}, 100}}},
      {"kv4c", {{{4, 4}, 100}}, true},
      {"kv2c", {{{2, 2}, 100}}, true},
  };
  return cases;
}

class Cache {
 public:
  Cache(const Shape& s, const Case& c) {
    kv::DeviceCache& v = view;
    v.d = v.dv = static_cast<std::int32_t>(s.d);
    v.page_size = static_cast<std::int32_t>(s.page);
    v.window_tokens = 128;
    v.sinks = 16;
    v.layers = 1;
    v.heads_kv = static_cast<std::int32_t>(s.heads_kv);
    v.slots = static_cast<std::int32_t>(s.batch);
    v.most_pages = static_cast<std::int32_t>((s.tokens + s.page - 1) / s.page);
    v.pools = static_cast<std::int32_t>(1 + c.tiers.size());
    v.rotate = v.smooth_k = 1;
    v.k_by_channel = c.by_channel ? 1 : 0;
    const auto layout = [&](int k_bits, int v_bits) {
      const bool window = k_bits == formats::kv_window_bits;
      return formats::KvPage{
          {v.d, v.dv, k_bits, v_bits}, v.blocks_per_page(), c.by_channel && !window};
    };
    v.pool[0].layout = layout(formats::kv_window_bits, formats::kv_window_bits);
    for (std::size_t i = 0; i < c.tiers.size(); ++i) {
      v.pool[i + 1].layout = layout(c.tiers[i].first.k_bits, c.tiers[i].first.v_bits);
    }
    make_tables(s, c);
    for (int i = 0; i < v.pools; ++i) make_pool(v.pool[i]);
    const std::vector<std::int32_t> lengths(static_cast<std::size_t>(s.batch),
                                            static_cast<std::int32_t>(s.tokens));
    lengths_.emplace_back(lengths);
    std::vector<float> means(static_cast<std::size_t>(s.batch * s.heads_kv * s.d));
    for (std::size_t i = 0; i < means.size(); ++i) means[i] = static_cast<float>(i % 13) * 0.1f;
    means_.emplace_back(means);
    const std::vector<std::int32_t> ones(static_cast<std::size_t>(s.batch), 1);
    lengths_.emplace_back(ones);
    v.lengths = lengths_[0].get();
    v.set_counts = lengths_[1].get();
    v.k_means = means_[0].get();
  }

  kv::DeviceCache view;
  std::vector<kv::Entry> table;  ///< as on the device
  std::int64_t bytes = 0;        ///< of pages that a step reads

 private:
  void make_tables(const Shape& s, const Case& c) {
    std::mt19937 random(5);
    const std::int64_t pages = view.most_pages;
    for (std::int64_t head = 0; head < s.batch * s.heads_kv; ++head) {
      for (std::int64_t i = 0; i < pages; ++i) {
        kv::Entry e;
        const std::int64_t first = i * s.page, left = s.tokens - first;
        e.first = static_cast<std::int32_t>(first);
        e.live = left >= 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << left) - 1;
        if (s.page < 64) e.live &= (std::uint64_t{1} << s.page) - 1;
        const bool window = first < view.sinks || first + s.page > s.tokens - view.window_tokens;
        if (!window) {
          int share = static_cast<int>(random() % 100);
          e.tier = 1;
          for (const auto& [tier, percent] : c.tiers) {
            if (share < percent) break;
            share -= percent;
            ++e.tier;
          }
        }
        view.pool[e.tier].capacity++;
        table.push_back(e);
      }
    }
    // Pages of a pool lie in any order.
    std::vector<std::vector<std::int32_t>> numbers(static_cast<std::size_t>(view.pools));
    for (int t = 0; t < view.pools; ++t) {
      auto& n = numbers[static_cast<std::size_t>(t)];
      n.resize(static_cast<std::size_t>(view.pool[t].capacity));
      std::iota(n.begin(), n.end(), 0);
      std::shuffle(n.begin(), n.end(), random);
    }
    for (kv::Entry& e : table) {
      e.page = numbers[e.tier].back();
      numbers[e.tier].pop_back();
      const formats::KvPage& layout = view.pool[e.tier].layout;
      bytes += std::int64_t{layout.block_bytes()} * kv::live_blocks(e);
      bytes += layout.bytes() - layout.channel_scales();
    }
    entries_.emplace_back(table);
    counts_.emplace_back(
        std::vector<std::int32_t>(static_cast<std::size_t>(s.batch * s.heads_kv), view.most_pages));
    view.entries = entries_[0].get();
    view.counts = counts_[0].get();
  }

  void make_pool(kv::DevicePool& pool) {
    pages_.emplace_back(static_cast<std::size_t>(pool.capacity) *
                        static_cast<std::size_t>(pool.layout.bytes()));
    pool.pages = pages_.back().get();
    if (pool.capacity == 0) return;
    fill_pool<<<2048, 256>>>(pool.pages, pool.layout, pool.capacity);
    check(cudaDeviceSynchronize(), "fill_pool");
  }

  std::vector<DeviceArray<std::uint8_t>> pages_;
  std::vector<DeviceArray<kv::Entry>> entries_;
  std::vector<DeviceArray<std::int32_t>> counts_, lengths_;
  std::vector<DeviceArray<float>> means_;
};

}  // namespace qattn::bench
