// Files of a cache's contents (file.cpp has their layout).
#pragma once

#include <string>

#include "kvcache/data.hpp"

namespace qattn::kv {

/// KvCache::save() of any contents in host memory.
Status write_file(const detail::KvCacheData& data, const std::string& path);

}  // namespace qattn::kv
