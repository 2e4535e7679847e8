// Before kernels that attend to packed sequences: which sequence each block of query rows belongs
// to, so that a grid has the blocks that exist and not those of the longest sequence for each; and
// whether cu_seqlens cuts the tokens into sequences at all, which only a look at all of it can
// tell.
#pragma once

#include "kernels/attn_prefill/params.hpp"
#include "tile/finish.hpp"

namespace qattn::kernels {

struct PackedParams {
  tile::Rows q, k;
  OutputView out;
  std::int32_t rows = 0;      ///< of a block
  std::int32_t q_blocks = 0;  ///< PrefillParams::q_blocks, if queries are packed
  std::int32_t* sequence_of = nullptr;
  std::uint32_t* disorder = nullptr;
  std::uint32_t* error = nullptr;
};

inline namespace QATTN_TARGET {

/// Entries that are no list of lengths, or that leave tokens out, set the error word. Then all of
/// the output becomes NaN, and what the attention kernel finds of sequences overwrites it: nothing
/// if they are in disorder.
struct PackedBlocks {
  using Params = PackedParams;
  static constexpr int threads = 256, min_blocks = 1;
  static constexpr bool dependent = true;
  static constexpr int verdict_at = 4 * threads, shared_bytes = verdict_at + 4;
  enum Verdict : std::uint32_t { in_order, incomplete, in_disorder };

  /// Where the last of the sequences [first, last) ends that has tokens where it says, but not
  /// before `end`. Raises the verdict where one begins before that.
  static QATTN_DEVICE std::uint32_t walk(const tile::Rows& r, int first, int last,
                                         std::uint32_t end, std::uint32_t& verdict) {
    for (int b = first; b < last; ++b) {
      const tile::Span s = tile::span_of(r, b);
      if (s.bad) verdict = verdict > incomplete ? verdict : incomplete;
      if (s.bad || s.rows == 0) continue;
      if (s.begin < end) verdict = in_disorder;
      const auto past = static_cast<std::uint32_t>(s.begin + s.rows);
      end = past > end ? past : end;
    }
    return end;
  }

  /// Every block of the grid looks at all entries, each thread at as many: first where its share
  /// ends, then, knowing where those before it end, at the order.
  static QATTN_DEVICE void check(tile::Rows r, std::uint32_t& verdict) {
    if (r.cu_seqlens == nullptr) return;
    r.used = nullptr;  // the attention kernel heeds it
    const isa::SharedAddress ends = isa::shared_base();
    const int share = (r.batches + threads - 1) / threads;
    const int first = isa::thread() * share < r.batches ? isa::thread() * share : r.batches;
    const int last = first + share < r.batches ? first + share : r.batches;
    std::uint32_t ignored = in_order, before = 0;
    isa::store_shared(ends + 4 * isa::thread(), walk(r, first, last, 0, ignored));
    isa::sync_threads();
    for (int t = 0; t < isa::thread(); ++t) {
      const auto end = isa::load_shared<std::uint32_t>(ends + 4 * t);
      before = end > before ? end : before;
    }
    walk(r, first, last, before, verdict);
    if (isa::thread() == 0 && (isa::load_global(r.cu_seqlens) != 0 ||
                               isa::load_global(r.cu_seqlens + r.batches) != r.total)) {
      verdict = verdict > incomplete ? verdict : incomplete;
    }
    isa::sync_threads();  // the ends have been read
  }

  static QATTN_DEVICE void fill(const Params& p, std::int64_t first, std::int64_t step) {
    const std::int64_t rows = p.q.total * p.q.heads;
    for (std::int64_t i = first; i < rows * p.out.channels; i += step) {
      const std::int64_t row = i / p.out.channels, token = row / p.q.heads;
      const std::int64_t channel = i - row * p.out.channels, head = row - token * p.q.heads;
      tile::store_number(p.out.data, p.out.format,
                         token * p.out.token + head * p.out.head + channel, tile::quiet_nan());
      if (channel == 0 && p.out.lse != nullptr) {
        isa::store_global(p.out.lse + token * p.out.lse_token + head * p.out.lse_head,
                          tile::quiet_nan());
      }
    }
  }

  static QATTN_DEVICE void run(const Params& p) {
    isa::grid_dependency_wait();
    const isa::SharedAddress shared = isa::shared_base() + verdict_at;
    if (isa::thread() == 0) isa::store_shared(shared, std::uint32_t{in_order});
    std::uint32_t verdict = in_order;
    check(p.q, verdict);
    check(p.k, verdict);
    isa::atomic_max_shared(shared, verdict);
    isa::sync_threads();
    verdict = isa::load_shared<std::uint32_t>(shared);
    const std::int64_t first = isa::block().x * std::int64_t{threads} + isa::thread();
    const std::int64_t step = isa::grid().x * std::int64_t{threads};
    if (first == 0) {
      isa::store_global(p.disorder, std::uint32_t{verdict == in_disorder});
      if (verdict != in_order) isa::atomic_or_global(p.error, std::uint32_t{tile::error_sequence});
    }
    if (p.q.cu_seqlens == nullptr) return;
    for (std::int64_t n = first; n < p.q_blocks; n += step) {
      isa::store_global(p.sequence_of + n, tile::sequence_of_block(p.q, n, p.rows));
    }
    if (verdict != in_order) fill(p, first, step);
  }
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
