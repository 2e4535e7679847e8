// Importance of pages from their keys: the inverse of the mean square of those that
// kvcache/keys/size.hpp lets count.
#pragma once

#include "kernels/kv_append/params.hpp"
#include "kernels/kv_append/row.cuh"
#include "kernels/kv_append/weights.cuh"
#include "kvcache/keys/size.hpp"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

/// Sizes of up to 64 keys in half a warp: lane i has those of keys i, i + 16, ... 0 where there is
/// none.
struct PageSizes {
  static constexpr int per_lane = 64 / row_lanes;
  int size[per_lane] = {};

  QATTN_DEVICE void set(int key, int value) {
#pragma unroll
    for (int j = 0; j < per_lane; ++j) {
      if (key == row_lane() + row_lanes * j) size[j] = value;
    }
  }
  /// Collective.
  QATTN_DEVICE int largest() const {
    return kv::largest_key_size([&](int n) {
      int keys = 0;
#pragma unroll
      for (int j = 0; j < per_lane; ++j) keys += size[j] >= 1 && size[j] <= n ? 1 : 0;
#pragma unroll
      for (int mask = row_lanes / 2; mask > 0; mask /= 2) keys += isa::shuffle_xor(keys, mask);
      return std::int64_t{keys};
    });
  }
};

/// The inverse mean square of a page's keys, those that it holds in 16 bits and those at positions
/// [begin, end) that the call brings, in the host's order: sixteen lanes of every sixteenth
/// channel, token by token, added in halves. Half a warp a page; collective.
QATTN_DEVICE float key_weight(const AppendParams& p, std::int64_t b, std::int32_t h,
                              std::int64_t old_length, const kv::Entry& e, std::int64_t begin,
                              std::int64_t end) {
  const kv::DeviceCache& cache = p.state.cache;
  const kv::DevicePool& pool = cache.pool[0];
  const bool bf16 = cache.bf16 != 0;
  // f(token, is it there?, element) for every token of a page, by all lanes.
  const auto for_keys = [&](auto f) {
    for (int token = 0; token < cache.page_size; ++token) {
      const bool old = (e.live >> token & 1) != 0;
      const std::int64_t at = e.first + token;
      const bool is_new = !old && at >= begin && at < end;
      const std::uint8_t* block = pool.block(old ? e.page : 0, token / formats::kv_block_tokens);
      const auto* row = reinterpret_cast<const std::uint16_t*>(block) +
                        token % formats::kv_block_tokens * cache.d;
      const std::int64_t place = is_new ? p.k.row(b, h, at - old_length) : 0;
      f(token, old || is_new, [&](int c) {
        const std::uint16_t bits =
            old ? isa::load_global(row + c) : window_bits(p.k.data, p.k.kind, place + c, bf16);
        return clean(widen(bits, bf16));
      });
    }
  };
  PageSizes sizes;
  for_keys([&](int token, bool there, auto element) {
    float top = 0.0f;
    for (int c = row_lane(); there && c < cache.d; c += row_lanes) {
      top = formats::fold_amax(top, element(c));
    }
#pragma unroll
    for (int mask = row_lanes / 2; mask > 0; mask /= 2) {
      top = formats::fold_amax(top, isa::shuffle_xor(top, mask));
    }
    sizes.set(token, kv::key_size(top));
  });
  const int largest = sizes.largest();
  double sum = 0;
  std::int64_t count = 0;
  for_keys([&](int token, bool there, auto element) {
    int size = 0;
#pragma unroll
    for (int j = 0; j < PageSizes::per_lane; ++j) {
      if (token / row_lanes == j) size = sizes.size[j];
    }
    size = isa::shuffle(size, row_of_warp() * row_lanes + token % row_lanes);
    if (!there || size > largest) return;
    for (int c = row_lane(); c < cache.d; c += row_lanes) {
      const auto x = static_cast<double>(element(c));
      sum = formats::add_rn(sum, formats::mul_rn(x, x));
    }
    ++count;
  });
  for (int step = row_lanes / 2; step > 0; step /= 2) {
    sum = formats::add_rn(sum, isa::shuffle_xor(sum, step));
  }
  if (count == 0) return 0.0f;  // NaN and Inf have nothing to lose
  const double norm = sum / (static_cast<double>(count) * cache.d);
  // Zeros: as important as can be told.
  return norm > 1e-15 ? static_cast<float>(1.0 / norm) : most_importance;
}

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
