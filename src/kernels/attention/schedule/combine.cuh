// After kernels that leave parts (PartsView): adds up the splits of a row and ends it, as
// Epilogue::end() ends rows that are nobody's part.
#pragma once

#include "kernels/attention/common/finish.hpp"
#include "kernels/attention/common/score.hpp"
#include "kernels/attention/common/work_tile.cuh"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

/// A block of the grid is a query row of a head; its warps take the row's splits in turn.
struct CombineSplits {
  using Params = AttentionParams;
  static constexpr int threads = 128, min_blocks = 1, warps = threads / 32;
  static constexpr bool dependent = true;
  static constexpr int most_channels = 256, pieces = most_channels / 128;
  static constexpr int row_bytes = 4 * most_channels;
  static constexpr int shared_bytes = warps * row_bytes;
  static constexpr int lane_splits = most_splits / 32;
  /// Of a split without anything for the row, which wrote no sums.
  static constexpr float nothing = -1.0f;

  struct Row {
    int b, head, query, parts;  ///< parts: p.splits, 0 for a row that does not exist
    tile::Span q, k;
    std::int64_t at;  ///< among the rows of all parts, of split 0
  };

  /// The lanes' shares of the splits: split 32 i + lane is weight[i].
  struct Weights {
    float weight[lane_splits], top, total;
  };

  /// `one_by_one`: the sequence of packed queries is not found by bisection.
  static QATTN_DEVICE Row locate(const Params& p, bool one_by_one = false) {
    Row row;
    const auto queries = static_cast<int>(p.q.max_length);
    const int index = isa::block().x;
    if (p.whole > 0) {  // the blocks of rows behind those
      const int size = p.parts.tile_rows, block = p.whole + index / size, head = block / p.q_blocks;
      row.query = (block - head * p.q_blocks) * size + index % size;
      row.b = head / p.q.heads, row.head = head - row.b * p.q.heads;
    } else {
      row.query = index % queries, row.head = index / queries % p.q.heads;
      row.b = index / queries / p.q.heads;
    }
    if (p.q.cu_seqlens != nullptr) {  // a head's `queries` are those of all sequences
      const std::int64_t token = row.query;
      if (one_by_one) {
        row.b = tile::first_sequence(p.q, [&](const tile::Span& span, int) {
          return token >= span.begin && token < span.begin + span.rows;
        });
      } else {
        row.b = tile::last_sequence(p.q, token, [](std::int64_t begin, int) { return begin; });
      }
      locate_sequence(p, row.b, row.q, row.k);
      row.query -= static_cast<int>(row.q.begin);
    } else {
      locate_sequence(p, row.b, row.q, row.k);
    }
    row.parts = row.query < row.q.length ? p.splits : 0;
    const int in_tile = p.pack_gqa > 1 ? row.query * p.pack_gqa + row.head % p.pack_gqa : row.query;
    row.at = part_row(p, row.q, row.b, row.head, in_tile);
    return row;
  }

  static QATTN_DEVICE Weights weigh(const Params& p, const Row& row) {
    Weights w;
    float sum[lane_splits];
    w.top = -tile::infinity(), w.total = 0.0f;
#pragma unroll
    for (int i = 0; i < lane_splits; ++i) {
      const int split = 32 * i + isa::lane();
      w.weight[i] = -tile::infinity(), sum[i] = 0.0f;
      if (split >= row.parts) continue;
      const auto words = isa::load_global(reinterpret_cast<const isa::Words2*>(
          p.parts.state + 2 * (row.at + split * std::int64_t{p.parts.rows})));
      w.weight[i] = __builtin_bit_cast(float, words.w[0]);
      sum[i] = __builtin_bit_cast(float, words.w[1]);
      w.top = fmaxf(w.top, w.weight[i]);
    }
#pragma unroll
    for (int step = 1; step < 32; step *= 2) w.top = fmaxf(w.top, isa::shuffle_xor(w.top, step));
#pragma unroll
    for (int i = 0; i < lane_splits; ++i) {
      const bool blind = w.weight[i] == -tile::infinity();
      const bool skip = blind && !tile::is_nan(sum[i]);
      w.weight[i] = skip ? nothing : blind ? 1.0f : isa::exp2(w.weight[i] - w.top);
      if (!skip) w.total = fmaf(w.weight[i], sum[i], w.total);
    }
#pragma unroll
    for (int step = 1; step < 32; step *= 2) w.total += isa::shuffle_xor(w.total, step);
    return w;
  }

  /// Lane l has channels 128 n + 4 l and the three behind it.
  using Sums = float[pieces][4];

  /// This warp's splits.
  static QATTN_DEVICE void add_splits(const Params& p, const Row& row, const Weights& w, Sums& x) {
    const std::int64_t step = std::int64_t{p.parts.rows} * p.parts.channels;
    const float* from = p.parts.out + row.at * p.parts.channels;
#pragma unroll
    for (int i = 0; i < lane_splits; ++i) {
#pragma unroll 4
      for (int lane = isa::warp(); lane < 32; lane += warps) {
        if (32 * i + lane >= row.parts) break;
        const float weight = isa::shuffle(w.weight[i], lane);
        if (weight == nothing) continue;
#pragma unroll
        for (int n = 0; n < pieces; ++n) {
          const int c = 128 * n + 4 * isa::lane();
          if (c >= p.parts.channels) continue;
          const auto v = isa::load_global(
              reinterpret_cast<const isa::Words4*>(from + (32 * i + lane) * step + c));
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            x[n][e] = fmaf(weight, __builtin_bit_cast(float, v.w[e]), x[n][e]);
          }
        }
      }
    }
  }

  static QATTN_DEVICE isa::SharedAddress place(int warp, int piece) {
    return isa::shared_base() +
           static_cast<isa::SharedAddress>(warp * row_bytes + piece * 512 + isa::lane() * 16);
  }

  /// All warps' sums to warp 0.
  static QATTN_DEVICE void gather(Sums& x, int parts) {
    if (isa::warp() > 0) {
#pragma unroll
      for (int n = 0; n < pieces; ++n) {
        isa::Words4 v;
#pragma unroll
        for (int e = 0; e < 4; ++e) v.w[e] = __builtin_bit_cast(std::uint32_t, x[n][e]);
        isa::store_shared(place(isa::warp(), n), v);
      }
    }
    isa::sync_threads();
    if (isa::warp() > 0) return;
    for (int warp = 1; warp < warps && warp < parts; ++warp) {
#pragma unroll
      for (int n = 0; n < pieces; ++n) {
        const auto v = isa::load_shared<isa::Words4>(place(warp, n));
#pragma unroll
        for (int e = 0; e < 4; ++e) x[n][e] += __builtin_bit_cast(float, v.w[e]);
      }
    }
  }

  /// NaN if a channel is not finite and V has 16 bits, else 0.
  static QATTN_DEVICE float poison_of(const Params& p, const Row& row, const Sums& x) {
    if (row.q.bad || row.k.bad) return tile::quiet_nan();
    if (p.coded_values) return 0.0f;
    float poison = 0.0f;
#pragma unroll
    for (int n = 0; n < pieces; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const bool exists = 128 * n + 4 * isa::lane() + e < p.out.channels;
        poison = fmaf(exists ? x[n][e] : 0.0f, 0.0f, poison);
      }
    }
#pragma unroll
    for (int step = 1; step < 32; step *= 2) poison += isa::shuffle_xor(poison, step);
    return poison;
  }

  /// softmax_scale q . mu, as ScoreRules::take_offsets().
  static QATTN_DEVICE float offset_of(const Params& p, const Row& row) {
    if (p.q8.dot_mean == nullptr || p.softcap > 0 || row.parts == 0) return 0.0f;
    const std::int64_t slot = tile::first_slot(p.q, row.q, row.b) + row.query;
    return p.scale * isa::load_global(p.q8.dot_mean + row.head * p.q8.slots + slot) * tile::log2_e;
  }

  static QATTN_DEVICE void end(const Params& p, const Row& row, const Weights& w, Sums& x) {
    const float poison = poison_of(p, row, x);
    const auto keys = static_cast<int>(row.k.length);
    const int shift = keys - static_cast<int>(row.q.length);
    const bool below = w.top == -tile::infinity() && row.parts > 0 &&
                       tile::sees_key(p, row.b, row.head, row.query, shift, keys);
    const tile::RowEnd end =
        tile::finish_row(p, row.b, row.head, row.parts > 0, false, w.top,
                         below ? tile::quiet_nan() : w.total, offset_of(p, row));
    const std::int64_t token = row.q.begin + row.query;
    const float* mean = nullptr;
    if (p.v_mean != nullptr && end.mean_weight != 0.0f) {
      mean = p.v_mean + (row.b * p.k.heads + row.head / p.group) * std::int64_t{p.v_mean_channels};
    }
    const std::int64_t to = row.b * p.out.batch + token * p.out.token + row.head * p.out.head;
#pragma unroll
    for (int n = 0; n < pieces; ++n) {
      const int first = 128 * n + 4 * isa::lane();
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (first + e >= p.out.channels) continue;
        float y = (end.factor == 0.0f ? 0.0f : x[n][e] * end.factor) + poison;
        if (mean != nullptr) y += end.mean_weight * isa::load_global(mean + first + e);
        x[n][e] = y;
        if (!p.out.vectors) tile::store_number(p.out.data, p.out.format, to + first + e, y);
      }
      if (!p.out.vectors || first >= p.out.channels) continue;
      isa::store_global(
          reinterpret_cast<isa::Words2*>(static_cast<std::uint16_t*>(p.out.data) + to + first),
          isa::Words2{{tile::pack_output(p.out.format, x[n][0], x[n][1]),
                       tile::pack_output(p.out.format, x[n][2], x[n][3])}});
    }
    if (isa::lane() == 0 && p.out.lse != nullptr) {
      isa::store_global(
          p.out.lse + row.b * p.out.lse_batch + token * p.out.lse_token + row.head * p.out.lse_head,
          end.lse + poison);
    }
  }

  static QATTN_DEVICE void run(const Params& p) {
    Row row = locate(p);  // inputs alone, while the kernel before may still run
    isa::grid_dependency_wait();
    if (verdict_of(p) == varlen_incomplete) row = locate(p, true);
    heed_verdict(p, row.q, row.k);
    if (row.query < 0 || row.query >= row.q.rows) return;
    Sums x = {};
    const Weights w = weigh(p, row);
    add_splits(p, row, w, x);
    gather(x, row.parts);
    if (isa::warp() == 0) end(p, row, w, x);
  }
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
