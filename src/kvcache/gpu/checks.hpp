// What calls of a GpuKvCache have in common.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kvcache/gpu/data.hpp"

namespace qattn::kv {

inline Status launched(const char* what, const std::string& error) {
  return error.empty() ? Status() : Status(Code::internal, std::string(what) + ": " + error);
}

Status check_layer(const KvCacheOptions& options, std::int64_t layer);

/// A slot that is in use.
bool holds(const GpuKvCache::Data& data, std::int64_t slot) noexcept;
Status check_slot(const GpuKvCache::Data& data, std::int64_t slot);

/// A dense (B) s32 tensor of slots in the cache's memory.
Status check_slots(const GpuKvCache::Data& data, const TensorView& slots);

/// `count` elements of the cache's memory. Inside a guard of its device; waits for the stream.
template <class T>
Status fetch(const GpuKvCache::Data& data, const T* from, std::int64_t count, Stream stream,
             std::vector<T>& to) {
  to.resize(static_cast<std::size_t>(count));
  if (count == 0) return {};
  return data.backend->copy_to_host(to.data(), from, to.size() * sizeof(T), stream);
}

/// One (slot, layer) as the host has it, but for pages' numbers, which are the device's. Likewise.
Status fetch_layer(const GpuKvCache::Data& data, std::int64_t slot, std::int64_t layer,
                   Stream stream, Layer& to);

}  // namespace qattn::kv
