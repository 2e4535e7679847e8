// What calls of a GpuKvCache have in common.
#pragma once

#include <string>

#include "kvcache/gpu/data.hpp"

namespace qattn::kv {

inline Status launched(const char* what, const std::string& error) {
  return error.empty() ? Status() : Status(Code::internal, std::string(what) + ": " + error);
}

Status check_layer(const KvCacheOptions& options, std::int64_t layer);

/// A dense (B) s32 tensor of slots in the cache's memory.
Status check_slots(const GpuKvCache::Data& data, const TensorView& slots);

}  // namespace qattn::kv
