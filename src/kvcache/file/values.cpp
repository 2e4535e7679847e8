#include "kvcache/file/values.hpp"

#include <bit>
#include <charconv>
#include <cstring>

#include "formats/bits.hpp"
#include "formats/f16.hpp"
#include "formats/kv/quantize.hpp"
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
      if (!freezes(cache.options) && layer.sets.count > 0) {
        return invalid("mean_flags: a layer of sequence " + text(s.id) +
                       " has a mean, and there are none without smooth_k");
      }
      for (const float x : layer.sets.k_mean) {
        const bool none = !cache.options.smooth_k && x != 0;
        if (!formats::is_finite(x) || none) {
          return invalid("k_means: element " + text(element) + " is " + text(x) +
                         (none ? ", should be 0 without smooth_k" : ", should be finite"));
        }
        ++element;
      }
      for (const float x : layer.sets.v_mean) {
        if (formats::is_finite(x)) continue;
        return invalid("v_means: an element of sequence " + text(s.id) + " is " + text(x) +
                       ", should be finite");
      }
      for (const std::uint8_t shift : layer.sets.k_shift) {
        if (shift > most_key_shift) {
          return invalid("k_shifts: an element of sequence " + text(s.id) + " is " +
                         text(std::int64_t{shift}) + ", should be at most 15");
        }
      }
    }
  }
  return {};
}

/// Scales of K's channels and the flags of bad tokens must be what recode_page() writes: nothing
/// else in a page could make a token NaN that the page does not flag.
Status check_channels(const detail::KvCacheData& cache, int tier) {
  const formats::KvPage layout = cache.layout(tier);
  const PagePool& pool = cache.pool(tier);
  for (std::int32_t i = 0; layout.k_by_channel && i < pool.pages_used(); ++i) {
    const std::byte* page = pool.page(i);
    const auto wrong = [&](const std::string& what) {
      return invalid("pages." + text(std::int64_t{tier}) + ": page " + text(std::int64_t{i}) +
                     what);
    };
    for (int c = 0; c < layout.block.d; ++c) {
      std::uint16_t scale;
      std::memcpy(&scale, page + layout.channel_scales() + c * 2, sizeof scale);
      if (scale >= formats::kv_infinite_scale) {
        return wrong(": the scale of K's channel " + text(std::int64_t{c}) +
                     " is not from 0 to 65504");
      }
    }
    std::uint64_t tail[2];
    std::memcpy(tail, page + layout.bad_tokens(), sizeof tail);
    if (static_cast<std::int64_t>(std::bit_width(tail[0])) > cache.options.page_size ||
        tail[1] != 0) {
      return wrong(": flags tokens that it does not have");
    }
  }
  return {};
}

/// A scale is NaN where a row of 16 bits held NaN, Inf or what f16 has no scale for, and a finite
/// number everywhere else.
Status check_scales(const detail::KvCacheData& cache, int tier) {
  const formats::KvPage layout = cache.layout(tier);
  const PagePool& pool = cache.pool(tier);
  const int tokens = static_cast<int>(cache.options.page_size);
  for (std::int32_t page = 0; page < pool.pages_used(); ++page) {
    for (int i = layout.k_by_channel ? tokens : 0; i < 2 * tokens; ++i) {
      const bool value = i >= tokens;
      const int token = i % tokens, in_block = token % formats::kv_block_tokens;
      const int place = token / formats::kv_block_tokens * layout.block_bytes() +
                        (value ? layout.v_scales() : layout.block.k_scales()) + 2 * in_block;
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
    if (Status s = check_channels(cache, tier); !s.ok()) return s;
    if (Status s = check_scales(cache, tier); !s.ok()) return s;
  }
  return {};
}

}  // namespace qattn::kv
