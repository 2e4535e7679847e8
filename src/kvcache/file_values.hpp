// Values in a cache's file that no call would have left there.
#pragma once

#include "kvcache/entry.hpp"

namespace qattn::kv {

/// Importance of an entry: what was told, measured or, of a page that was quantised, guessed.
bool is_weight(const Entry& e);

}  // namespace qattn::kv
