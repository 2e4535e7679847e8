// Importance of pages from their keys: the inverse of the mean square.
#pragma once

#include "kernels/kv_append/params.hpp"
#include "kernels/kv_append/row.cuh"
#include "kernels/kv_append/weights.cuh"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

/// The inverse mean square of a page's keys, those that it holds in 16 bits and those at positions
/// [begin, end) that the call brings, in the host's order: sixteen lanes of every sixteenth
/// channel, token by token, added in halves. Half a warp a page; collective.
QATTN_DEVICE float key_weight(const AppendParams& p, std::int64_t b, std::int32_t h,
                              std::int64_t old_length, const kv::Entry& e, std::int64_t begin,
                              std::int64_t end) {
  const kv::DeviceCache& cache = p.state.cache;
  const kv::DevicePool& pool = cache.pool[0];
  const bool bf16 = cache.bf16 != 0;
  double sum = 0;
  std::int64_t count = 0;
  const auto add = [&](auto element) {
    for (int c = row_lane(); c < cache.d; c += row_lanes) {
      const auto x = static_cast<double>(clean(widen(element(c), bf16)));
      sum = formats::add_rn(sum, formats::mul_rn(x, x));
    }
    ++count;
  };
  for (int token = 0; token < cache.page_size; ++token) {
    if ((e.live >> token & 1) == 0) continue;
    const std::uint8_t* block = pool.block(e.page, token / formats::kv_block_tokens);
    const auto* row =
        reinterpret_cast<const std::uint16_t*>(block) + token % formats::kv_block_tokens * cache.d;
    add([&](int c) { return isa::load_global(row + c); });
  }
  for (std::int64_t at = begin; at < end; ++at) {
    const std::int64_t row = p.k.row(b, h, at - old_length);
    add([&](int c) { return window_bits(p.k.data, p.k.kind, row + c, bf16); });
  }
  for (int step = row_lanes / 2; step > 0; step /= 2) {
    sum = formats::add_rn(sum, isa::shuffle_xor(sum, step));
  }
  const double norm = sum / (static_cast<double>(count) * cache.d);
  // NaN, Inf and zeros: as important as can be told.
  return norm > 1e-15 && norm < 1e300 ? static_cast<float>(1.0 / norm) : most_importance;
}

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
