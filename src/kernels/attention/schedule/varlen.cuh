// Before kernels that attend to packed sequences: which sequence a block of query rows belongs to,
// so that a grid has the blocks that exist, not those of all tokens for each sequence; and whether
// cu_seqlens cuts the tokens into sequences, which only a look at all of it can tell.
#pragma once

#include "kernels/attention/common/finish.hpp"
#include "kernels/attention/common/params.hpp"

namespace qattn::kernels {

struct VarlenParams {
  tile::Rows q, k;
  OutputView out;
  std::int32_t rows = 0;           ///< of a block
  std::int32_t q_blocks = 0;       ///< AttentionParams::q_blocks, if queries are packed
  std::int32_t* blocks = nullptr;  ///< AttentionParams::varlen_blocks
  std::uint32_t* verdict = nullptr;
  std::uint32_t* error = nullptr;
};

inline namespace QATTN_TARGET {

/// Where a list is not in order the error word is set, and all rows of packed queries become NaN:
/// the attention kernel then overwrites those of sequences that are well, if there is no disorder.
struct VarlenBlocks {
  using Params = VarlenParams;
  static constexpr int threads = 256, min_blocks = 1, shared_bytes = 4;
  static constexpr bool dependent = true;

  /// This thread's share of the entries.
  static QATTN_DEVICE bool rises(const tile::Rows& r) {
    if (r.cu_seqlens == nullptr) return true;
    bool good = true;
    for (int b = isa::thread(); b < r.batches; b += threads) {
      good &= isa::load_global(r.cu_seqlens + b) <= isa::load_global(r.cu_seqlens + b + 1);
    }
    if (isa::thread() == 0) {
      good &= isa::load_global(r.cu_seqlens) == 0 &&
              isa::load_global(r.cu_seqlens + r.batches) == r.total;
    }
    return good;
  }

  /// Of sequences whose own entries are right: does one begin before the one in front of it ends?
  static QATTN_DEVICE bool overlaps(const tile::Rows& r) {
    if (r.cu_seqlens == nullptr) return false;
    std::int64_t end = 0;
    for (int b = 0; b < r.batches; ++b) {
      const tile::Span s = tile::span_of(r, b);
      if (s.rows == 0) continue;  // a wrong one, too
      if (s.begin < end) return true;
      end = s.begin + s.rows;
    }
    return false;
  }

  /// The same in all threads. Every block of the grid finds it for itself: there is no barrier
  /// among them, and lists are short.
  static QATTN_DEVICE std::uint32_t judge(const Params& p) {
    const isa::SharedAddress shared = isa::shared_base();
    if (isa::thread() == 0) isa::store_shared(shared, std::uint32_t{varlen_in_order});
    isa::sync_threads();
    if (!rises(p.q) || !rises(p.k)) isa::atomic_max_shared(shared, varlen_incomplete);
    isa::sync_threads();
    if (isa::load_shared<std::uint32_t>(shared) == varlen_in_order) return varlen_in_order;
    isa::sync_threads();
    if (isa::thread() == 0 && (overlaps(p.q) || overlaps(p.k))) {
      isa::store_shared(shared, std::uint32_t{varlen_in_disorder});
    }
    isa::sync_threads();
    return isa::load_shared<std::uint32_t>(shared);
  }

  /// Which sequence a block of rows belongs to.
  static QATTN_DEVICE int sequence_of(const Params& p, std::int64_t block, bool rising) {
    if (rising) {
      return tile::last_sequence(
          p.q, block, [&](std::int64_t begin, int b) { return tile::block_of(begin, p.rows) + b; });
    }
    return tile::first_sequence(p.q, [&](const tile::Span& span, int b) {
      return tile::owns_block(p.q, span, b, block, p.rows);
    });
  }

  /// A block of nobody becomes one behind the rows of some sequence.
  static QATTN_DEVICE isa::Words2 place_of(const Params& p, std::int64_t block, bool rising) {
    const int b = sequence_of(p, block, rising);
    const tile::Span span = tile::span_of(p.q, b);
    const std::int64_t at = block - tile::first_block(p.q, span, b, p.rows);
    const bool exists = at >= 0 && at * p.rows < span.rows;
    return {{static_cast<std::uint32_t>(b),
             static_cast<std::uint32_t>(exists ? at * p.rows : p.q.total)}};
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
    const std::uint32_t verdict = judge(p);
    const std::int64_t first = isa::block().x * std::int64_t{threads} + isa::thread();
    const std::int64_t step = isa::grid().x * std::int64_t{threads};
    if (first == 0) {
      isa::store_global(p.verdict, verdict);
      if (verdict != varlen_in_order) {
        isa::atomic_or_global(p.error, std::uint32_t{tile::error_sequence});
      }
    }
    if (p.q.cu_seqlens == nullptr) return;
    for (std::int64_t n = first; n < p.q_blocks; n += step) {
      isa::store_global(reinterpret_cast<isa::Words2*>(p.blocks) + n,
                        place_of(p, n, verdict == varlen_in_order));
    }
    if (verdict != varlen_in_order) fill(p, first, step);
  }
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
