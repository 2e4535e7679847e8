// Does a cache on a device hold what one on the host holds? Without GoogleTest: programs that run
// on GPUs have none.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "qattn/kv_cache_gpu.hpp"

namespace qattn::test {

/// The first difference between tables (but for pages' numbers), pages, how many share them, means
/// and lengths of slot i and of the host's sequence ids[i] (negative: there is none), or a page
/// that is neither free nor held, or both, or whose count is not that of its holders; empty: there
/// is none.
std::string difference(const KvCache& host, const std::vector<std::int64_t>& ids,
                       const GpuKvCache& device);

}  // namespace qattn::test
