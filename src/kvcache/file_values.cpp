#include "kvcache/file_values.hpp"

#include "kvcache/tensors.hpp"

namespace qattn::kv {

bool is_weight(const Entry& e) {
  if (e.importance == -1.0f) return e.guess == 0;
  const bool in_range = e.importance >= 0 && e.importance <= most_importance;
  return in_range && (e.guess == 0 || (e.guess == 1 && e.tier > 0));
}

}  // namespace qattn::kv
