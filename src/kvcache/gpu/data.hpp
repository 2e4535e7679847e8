// What a GpuKvCache is made of: facts on the host, everything else in one allocation on the device.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "core/backend.hpp"
#include "kvcache/data.hpp"
#include "kvcache/gpu/device_ops.hpp"
#include "qattn/kv_cache_gpu.hpp"

namespace qattn {

struct GpuKvCache::Data {
  KvCache facts;  ///< without sequences: options, budget, sizes
  KvGpuCapacity capacity;
  const detail::Backend* backend = nullptr;
  Device device;
  Stream stream = nullptr;  ///< of create()
  void* memory = nullptr;
  std::size_t memory_bytes = 0;
  kv::AppendState state;
  std::vector<bool> used;  ///< slots

  explicit Data(KvCache host) : facts(std::move(host)) {}
  ~Data();
  Data(const Data&) = delete;
  Data& operator=(const Data&) = delete;

  const detail::KvCacheData& host() const { return facts.data(); }
  const KvCacheOptions& options() const { return facts.options(); }
};

}  // namespace qattn

namespace qattn::kv {

/// Everything of a cache but its memory, or what is wrong with create()'s arguments.
Result<std::unique_ptr<GpuKvCache::Data>> plan_memory(const KvCacheOptions& options,
                                                      const KvGpuCapacity& capacity, Device device,
                                                      Stream stream);

/// Takes the memory of a cache without sequences, on the stream of create().
Status take_memory(GpuKvCache::Data& data);

/// Pages of the pools where the caller names none.
std::vector<std::int64_t> default_pages(const detail::KvCacheData& host,
                                        const KvGpuCapacity& capacity);

/// Checks a capacity by itself.
Status check_capacity(const detail::KvCacheData& host, const KvGpuCapacity& capacity);

/// Everything in `state` but prices' inputs; places in memory from `base` on. Returns the bytes.
std::size_t lay_out(const detail::KvCacheData& host, const KvGpuCapacity& capacity, std::byte* base,
                    AppendState& state);

}  // namespace qattn::kv
