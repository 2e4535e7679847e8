// What decode asks of its options, on every backend.
#pragma once

#include <cmath>
#include <cstdint>
#include <string>

#include "qattn/kv_cache.hpp"

namespace qattn::kv {

inline constexpr std::int64_t most_queries = 8;  ///< of a sequence in one call
inline constexpr std::int64_t most_group = 16;   ///< heads of a KV head that are read together

/// All but the threads, which are the CPU's.
inline Status check_decode_options(const KvDecodeOptions& o) {
  const auto refuse = [](std::string message) {
    return Status(Code::invalid_argument, std::move(message));
  };
  if (o.layout != Layout::bshd && o.layout != Layout::bhsd) {
    return refuse("layout: " + std::to_string(static_cast<int>(o.layout)) +
                  " is neither bshd nor bhsd");
  }
  if (o.softmax_scale && !std::isfinite(*o.softmax_scale)) {
    return refuse("softmax_scale: " + std::to_string(*o.softmax_scale) + " is not finite");
  }
  if (o.window_left < -1) {
    return refuse("window_left: " + std::to_string(o.window_left) + " is below -1");
  }
  if (!(o.softcap >= 0) || !std::isfinite(o.softcap)) {
    return refuse("softcap: " + std::to_string(o.softcap) + " should be finite and at least 0");
  }
  if (o.debias && o.softcap > 0) {
    return refuse("debias: should be off with a softcap, here " + std::to_string(o.softcap) +
                  "; it corrects the mean of exp(score), not of a capped score's");
  }
  return {};
}

}  // namespace qattn::kv
