// After the plain 16-bit kernel: turns the rows that see a key with NaN or Inf into NaN. Blocks of
// that kernel note such keys in passing (check.cuh); this one reads the notes, 3 us on an
// H200.
#pragma once

#include "kernels/attention/common/check.cuh"
#include "kernels/attention/common/finish.hpp"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

struct SpoilRows {
  using Params = AttentionParams;
  static constexpr int threads = 128, min_blocks = 1, shared_bytes = 16;

  /// One block a (query head, sequence).
  static QATTN_DEVICE void run(const Params& p) {
    const int head = isa::block().x % p.q.heads, b = isa::block().x / p.q.heads;
    tile::Span q = tile::span_of(p.q, b), k = tile::span_of(p.k, b);
    heed_verdict(p, q, k);
    if (q.bad || k.bad || q.length == 0) return;
    const int shift = static_cast<int>(k.length - q.length);
    const int length = static_cast<int>(k.length);
    // The last row sees every key (plain: bottom-right causal, right >= 0), so every tile has
    // notes.
    const std::int64_t slot = tile::first_slot(p.k, k, b);
    const std::int32_t* notes =
        p.bad_keys + (head / p.group * tile::slot_count(p.k) + slot) / note_keys * note_warps;
    std::int32_t first = no_key;
    for (int n = isa::thread(); n < (length + note_keys - 1) / note_keys * note_warps;
         n += threads) {
      const std::int32_t key = isa::load_global(notes + n);
      first = key < first ? key : first;
    }
    // The smallest of all, as the largest of its complement.
    if (isa::thread() == 0) isa::store_shared(isa::shared_base(), 0u);
    isa::sync_threads();
    isa::atomic_max_shared(isa::shared_base(), ~static_cast<std::uint32_t>(first));
    isa::sync_threads();
    first = static_cast<std::int32_t>(~isa::load_shared<std::uint32_t>(isa::shared_base()));
    if (first == no_key) return;
    for (int i = 0; i < q.length; ++i) {
      if (first < visible_end(p.window_right, i + shift, length)) spoil(p, b, head, q.begin + i);
    }
  }

  static QATTN_DEVICE void spoil(const Params& p, int b, int head, std::int64_t token) {
    const std::int64_t at = b * p.out.batch + token * p.out.token + head * p.out.head;
    for (int c = isa::thread(); c < p.out.channels; c += threads) {
      tile::store_number(p.out.data, p.out.format, at + c, tile::quiet_nan());
    }
    if (isa::thread() == 0 && p.out.lse != nullptr) {
      isa::store_global(
          p.out.lse + b * p.out.lse_batch + token * p.out.lse_token + head * p.out.lse_head,
          tile::quiet_nan());
    }
  }
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
