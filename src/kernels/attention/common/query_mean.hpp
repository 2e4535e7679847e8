// smooth_q's correction: the mean of a block of Q times K, unquantised, for the keys of a tile.
#pragma once

#include "kernels/attention/common/copy.hpp"
#include "kernels/attention/common/params.hpp"
#include "kernels/attention/common/score.hpp"

namespace qattn::tile {
inline namespace QATTN_TARGET {

/// softmax_scale * (mean number `index` of Q) . (k - mean of K) of keys [tile, tile + Keys) of a
/// sequence to shared memory, for all lanes; 0 behind its end. By one warp: four lanes share a key.
template <int Keys>
QATTN_DEVICE void store_mean_scores(const kernels::AttentionParams& p, const Span& k, int b,
                                    int kv_head, std::int64_t index, int tile,
                                    isa::SharedAddress to) {
  constexpr int chunk = 8;  // channels of 16 bytes
  const Rows& rows = p.k_input;
  const float* q_mean = p.q_mean.data + index * p.q_mean.channels;
  const float* k_mean =
      p.k_mean == nullptr ? nullptr
                          : p.k_mean + (std::int64_t{b} * rows.heads + kv_head) * p.q_mean.channels;
#pragma unroll 1
  for (int j = isa::lane() / 4; j < Keys; j += 8) {
    const bool exists = tile + j < k.length;
    // A page that does not exist has made the key's scale NaN already.
    const std::int64_t at = exists ? row_offset(rows, k, b, kv_head, tile + j) : -1;
    float sum = 0.0f;
#pragma unroll 1
    for (int c = isa::lane() % 4 * chunk; at != -1 && c < rows.channels; c += 4 * chunk) {
      const bool whole = p.k_vectors && c + chunk <= rows.channels;
      const int left = rows.channels - c < chunk ? rows.channels - c : chunk;
      isa::Words4 w{};
      const float* numbers = nullptr;
      if (p.k_format == Format::f32) {
        numbers = static_cast<const float*>(rows.data) + at + c;
      } else {
        const auto* from = static_cast<const std::uint16_t*>(rows.data) + at + c;
        w = whole ? isa::load_global(reinterpret_cast<const isa::Words4*>(from))
                  : gather16(reinterpret_cast<const std::byte*>(from), 2 * left);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        isa::Pair x =
            p.k_format == Format::f16 ? isa::unpack_f16(w.w[i]) : isa::unpack_bf16(w.w[i]);
        if (numbers != nullptr) {
          x.lo = 2 * i < left ? isa::load_global(numbers + 2 * i) : 0.0f;
          x.hi = 2 * i + 1 < left ? isa::load_global(numbers + 2 * i + 1) : 0.0f;
        }
        const float lo = k_mean == nullptr ? 0.0f : isa::load_global(k_mean + c + 2 * i);
        const float hi = k_mean == nullptr ? 0.0f : isa::load_global(k_mean + c + 2 * i + 1);
        sum = fmaf(isa::load_global(q_mean + c + 2 * i), x.lo - lo, sum);
        sum = fmaf(isa::load_global(q_mean + c + 2 * i + 1), x.hi - hi, sum);
      }
    }
    sum += isa::shuffle_xor(sum, 1);
    sum += isa::shuffle_xor(sum, 2);
    sum *= p.scale;
    if (isa::lane() % 4 == 0) isa::store_shared(to + 4 * j, is_finite(sum) ? sum : quiet_nan());
  }
  isa::sync_warp();
}

}  // namespace QATTN_TARGET
}  // namespace qattn::tile
