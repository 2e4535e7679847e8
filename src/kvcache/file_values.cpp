#include "kvcache/file_values.hpp"

#include <charconv>
#include <cstring>

#include "formats/bits.hpp"
#include "formats/f16.hpp"
#include "kvcache/tensors.hpp"

namespace qattn::kv {
namespace {

std::string text(std::int64_t value) { return std::to_string(value); }

std::string text(float value) {
  char buffer[64];  // to_chars: to_string() would make zeros of small values
  return {buffer, std::to_chars(buffer, buffer + sizeof buffer, value).ptr};
}

Status check_means(const detail::KvCacheData& cache) {
  std::int64_t element = 0;
  for (const Sequence& s : cache.sequences) {
    for (const Layer& layer : s.layers) {
      for (const float x : layer.k_mean) {
        if (!formats::is_finite(x)) {
          return invalid("k_means: element " + text(element) + " is " + text(x) +
                         ", should be finite");
        }
        ++element;
      }
    }
  }
  return {};
}

/// A scale is NaN where a row of 16 bits held NaN or Inf, and a finite number everywhere else.
Status check_scales(const detail::KvCacheData& cache, int tier) {
  const formats::KvBlock block = cache.block(tier);
  const PagePool& pool = cache.pool(tier);
  const int tokens = static_cast<int>(cache.options.page_size);
  for (std::int32_t page = 0; page < pool.pages_used(); ++page) {
    for (int i = 0; i < 2 * tokens; ++i) {
      const bool value = i >= tokens;
      const int token = i % tokens, in_block = token % formats::kv_block_tokens;
      const int place = token / formats::kv_block_tokens * block.bytes() +
                        (value ? block.v_scales() : block.k_scales()) + 2 * in_block;
      std::uint16_t code;
      std::memcpy(&code, pool.page(page) + place, sizeof code);
      const float scale = formats::F16::decode(code);
      if (formats::is_nan(scale) || (scale >= 0 && formats::is_finite(scale))) continue;
      return invalid("pages." + text(std::int64_t{tier}) + ": the scale of " + (value ? "V" : "K") +
                     " of token " + text(std::int64_t{token}) + " of page " +
                     text(std::int64_t{page}) + " is " + text(scale) +
                     ", should be finite and not negative, or NaN for a row that holds NaN or Inf");
    }
  }
  return {};
}

}  // namespace

bool is_weight(const Entry& e) {
  if (e.importance == -1.0f) return e.guess == 0;
  const bool in_range = e.importance >= 0 && e.importance <= most_importance;
  return in_range && (e.guess == 0 || (e.guess == 1 && e.tier > 0));
}

Status check_values(const detail::KvCacheData& cache) {
  if (Status s = check_means(cache); !s.ok()) return s;
  for (int tier = 1; tier < static_cast<int>(cache.pools.size()); ++tier) {
    if (Status s = check_scales(cache, tier); !s.ok()) return s;
  }
  return {};
}

}  // namespace qattn::kv
