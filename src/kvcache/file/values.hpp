// Values in a cache's file that no call would have left there.
#pragma once

#include "kvcache/data.hpp"

namespace qattn::kv {

/// Importance of an entry: what was told, measured or, of a page that was quantised, guessed.
bool is_weight(const Entry& e);

/// Means and scales of a cache that was read from a file and not changed since, so that they lie
/// in the file's order. Errors: invalid_argument names the tensor, the position and the value.
Status check_values(const detail::KvCacheData& cache);

}  // namespace qattn::kv
