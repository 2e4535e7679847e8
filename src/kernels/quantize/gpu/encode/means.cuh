// Means of K and V over their sequences, in the order of the CPU's sums: 64 rows one by one in
// float32, those sums one by one in float64. So the means, and all codes, equal the CPU's.
#pragma once

#include <type_traits>

#include "kernels/operand/input_kind.hpp"
#include "kernels/quantize/gpu/encode/common.cuh"
#include "kernels/quantize/gpu/seen_keys.cuh"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

/// Means of one operand; or, where `limit` is not 0, V's scales per channel, from maxima of tiles
/// instead of sums, for codes up to it.
struct MeanRole {
  tile::Rows rows;
  float limit = 0.0f;
  InputKind input = InputKind::bf16;
  bool aligned = false;          ///< 16-byte loads are possible
  float* sums = nullptr;         ///< [heads][slot tiles][padded]
  float* mean = nullptr;         ///< [batches][heads][padded]; or scales
  const float* given = nullptr;  ///< instead of sums: a mean to copy, with these strides
  std::int64_t given_stride[3] = {};
  std::int64_t tiles = 0;  ///< slot tiles a head
  std::int32_t padded = 0;
  SeenKeys seen;  ///< of K and V: whose tokens join
};

struct MeanParams {
  MeanRole role[2];  ///< K, V; unused ones have no blocks
  std::int64_t blocks[2] = {};
};

/// Eight channels of a row as they lie in memory.
template <InputKind Kind>
struct Octet {
  static constexpr int words = Kind == InputKind::f32 ? 2 : 1;
  Words4 w[words];

  /// A NaN in every channel, or zeros.
  QATTN_DEVICE void fill(bool nan) {
    const std::uint32_t word = nan ? 0x7fff7fffu : 0u;
#pragma unroll
    for (int n = 0; n < words; ++n) w[n] = Words4{{word, word, word, word}};
  }

  /// Channels from `left` on are not read (unaligned rows) and become zeros.
  template <bool Aligned>
  QATTN_DEVICE void load(const void* data, std::int64_t element, int left) {
    if constexpr (Aligned) {
      const auto* bytes = static_cast<const std::uint8_t*>(data) + element * (2 * words);
#pragma unroll
      for (int n = 0; n < words; ++n) {
        w[n] = isa::load_once(reinterpret_cast<const Words4*>(bytes) + n);
      }
    } else {
      fill(false);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (i >= left) continue;
        if constexpr (Kind == InputKind::f32) {
          w[i / 4].w[i % 4] =
              isa::load_global(static_cast<const std::uint32_t*>(data) + element + i);
        } else {
          const std::uint32_t half =
              isa::load_global(static_cast<const std::uint16_t*>(data) + element + i);
          w[0].w[i / 2] |= half << 16 * (i % 2);
        }
      }
    }
  }

  QATTN_DEVICE void unpack(float (&x)[8]) const {
    if constexpr (Kind == InputKind::f32) {
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i] = formats::float_of(w[i / 4].w[i % 4]);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const isa::Pair p =
            Kind == InputKind::bf16 ? isa::unpack_bf16(w[0].w[i]) : isa::unpack_f16(w[0].w[i]);
        x[2 * i] = p.lo;
        x[2 * i + 1] = p.hi;
      }
    }
  }
};

/// Calls body(kind, aligned) with constants.
template <class Body>
QATTN_DEVICE void with_input(InputKind kind, bool aligned, Body body) {
  using Yes = std::true_type;
  using No = std::false_type;
  using F32 = std::integral_constant<InputKind, InputKind::f32>;
  using F16 = std::integral_constant<InputKind, InputKind::f16>;
  using Bf16 = std::integral_constant<InputKind, InputKind::bf16>;
  if (kind == InputKind::bf16) {
    aligned ? body(Bf16{}, Yes{}) : body(Bf16{}, No{});
  } else if (kind == InputKind::f16) {
    aligned ? body(F16{}, Yes{}) : body(F16{}, No{});
  } else {
    aligned ? body(F32{}, Yes{}) : body(F32{}, No{});
  }
}

/// Sums of 64 rows. A thread adds up eight channels of one slot tile.
struct SumRows {
  using Params = MeanParams;
  static constexpr int threads = 128, min_blocks = 6, shared_bytes = 0;
  static constexpr bool dependent = true;

  /// Blocks that a role needs.
  static constexpr std::int64_t blocks(std::int64_t tiles, std::int64_t heads, int padded) {
    const std::int64_t per_block = threads / (padded / chunk_channels);
    return (tiles + per_block - 1) / per_block * heads;
  }

  template <InputKind Kind, bool Aligned>
  static QATTN_DEVICE void add_rows(const MeanRole& role, const TilePlace& p, int chunk,
                                    float (&sum)[8]) {
    const tile::Rows& r = role.rows;
    const int count = p.count(), left = r.channels - chunk * chunk_channels;
    if (left <= 0) return;
    const bool paged = r.page_table != nullptr;
    const std::int64_t base = paged ? 0 : tile::row_offset(r, p.span, p.b, p.head, p.first);
    const TileSight sight = sight_of(role.seen, p);
    constexpr int step = !Aligned ? 1 : Kind == InputKind::f32 ? 4 : 8;  // rows in flight
    for (int j0 = 0; j0 < count; j0 += step) {
      Octet<Kind> octet[step];
#pragma unroll
      for (int j = 0; j < step; ++j) {
        const bool exists = j0 + j < count && sight.shares(j0 + j);
        std::int64_t at = base + (j0 + j) * r.token;
        if (paged && exists) at = tile::row_offset(r, p.span, p.b, p.head, p.first + j0 + j);
        // Rows behind the end and hidden ones add nothing; one on a page that does not exist spoils
        // the mean.
        octet[j].fill(exists);
        if (exists && (!paged || at != -1)) {
          octet[j].template load<Aligned>(r.data, at + chunk * chunk_channels, left);
        }
      }
#pragma unroll
      for (int j = 0; j < step; ++j) {
        float x[8];
        octet[j].unpack(x);
#pragma unroll
        for (int i = 0; i < 8; ++i) sum[i] = formats::add_rn(sum[i], x[i]);
      }
    }
  }

  static QATTN_DEVICE void run(const Params& params) {
    isa::grid_dependency_launch();
    isa::grid_dependency_wait();
    std::int64_t block = isa::block().x;
    const bool second = block >= params.blocks[0];
    if (second) block -= params.blocks[0];
    const MeanRole& role = params.role[second ? 1 : 0];
    const tile::Rows& r = role.rows;
    const int chunks = role.padded / chunk_channels, chunk = isa::thread() % chunks;
    const int tiles = threads / chunks;
    TilePlace p;
    const int group = divide(block, r.heads);
    p.head = static_cast<int>(block) - group * r.heads;
    p.tile = std::int64_t{group} * tiles + isa::thread() / chunks;
    if (isa::thread() >= tiles * chunks || p.tile >= role.tiles) return;
    int b = 0;
    if (r.cu_seqlens == nullptr) {
      b = sequence_of_tile(r, p.tile);
    } else {
      while (b < r.batches && !owns_tile(r, b, p.tile)) ++b;
      if (b == r.batches) return;
    }
    place_in_sequence(r, b, p);
    if (!p.used) return;
    float sum[8] = {};
    with_input(role.input, role.aligned, [&](auto kind, auto aligned) {
      add_rows<decltype(kind)::value, decltype(aligned)::value>(role, p, chunk, sum);
    });
    float* to = role.sums + (p.head * role.tiles + p.tile) * role.padded + chunk * chunk_channels;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      Words4 w;
#pragma unroll
      for (int i = 0; i < 4; ++i) w.w[i] = formats::bits_of(sum[4 * n + i]);
      isa::store_global(reinterpret_cast<Words4*>(to + 4 * n), w);
    }
  }
};

/// Sums to means, or given means to their place. One block 32 channels of a (sequence, head), x;
/// role y. The additions are a chain of one a slot tile, so that everything else happens beside
/// them: sums come into shared memory a stage ahead.
struct FinishMeans {
  using Params = MeanParams;
  static constexpr int columns = 32, stage = 128;  ///< channels of a block, slot tiles of a stage
  static constexpr int threads = 256, min_blocks = 1;
  static constexpr int row_bytes = 4 * columns, stage_bytes = stage * row_bytes;
  static constexpr int shared_bytes = 2 * stage_bytes;
  static constexpr bool dependent = true;

  /// Blocks that a role needs.
  static constexpr std::int64_t blocks(std::int64_t units, int padded) {
    return units * (padded / columns);
  }

  /// Starts copying the sums of slot tiles [first, first + stage) of those before `tiles`.
  static QATTN_DEVICE void start(const float* from, int padded, std::int64_t first,
                                 std::int64_t tiles) {
    constexpr int chunks = row_bytes / 16;
    const SharedAddress to =
        isa::shared_base() + static_cast<SharedAddress>(first / stage % 2 * stage_bytes);
#pragma unroll
    for (int n = isa::thread(); n < stage * chunks; n += threads) {
      const std::int64_t t = first + n / chunks;
      if (t < tiles) isa::copy_async16(to + 16 * n, from + t * padded + n % chunks * 4, 16);
    }
    isa::copy_async_commit();
  }

  /// Sum, or with `largest` maximum, over all tiles of channel thread() of the block; of the first
  /// warp.
  static QATTN_DEVICE double add_up(const float* from, int padded, std::int64_t tiles,
                                    bool largest) {
    double total = 0.0;
    start(from, padded, 0, tiles);
    for (std::int64_t first = 0; first < tiles; first += stage) {
      start(from, padded, first + stage, tiles);
      isa::copy_async_wait<1>();
      isa::sync_threads();
      if (isa::warp() == 0) {
        const SharedAddress mine = isa::shared_base() + 4 * isa::lane() +
                                   static_cast<SharedAddress>(first / stage % 2 * stage_bytes);
        const int count = tiles - first < stage ? static_cast<int>(tiles - first) : stage;
        if (largest) {
          auto top = static_cast<float>(total);
#pragma unroll 16
          for (int t = 0; t < count; ++t) {
            const auto x = isa::load_shared<float>(mine + t * row_bytes);
            top = top > x ? top : x;
          }
          total = static_cast<double>(top);
        } else {
#pragma unroll 16
          for (int t = 0; t < count; ++t) {
            total += static_cast<double>(isa::load_shared<float>(mine + t * row_bytes));
          }
        }
      }
      isa::sync_threads();
    }
    isa::copy_async_wait<0>();
    return total;
  }

  static QATTN_DEVICE void run(const Params& params) {
    isa::grid_dependency_launch();
    isa::grid_dependency_wait();
    const MeanRole& role = params.role[isa::block().y];
    const tile::Rows& r = role.rows;
    const int groups = role.padded / columns;
    if (role.mean == nullptr || isa::block().x >= blocks(r.batches * r.heads, role.padded)) return;
    const int unit = isa::block().x / groups, b = unit / r.heads, head = unit % r.heads;
    const int c0 = isa::block().x % groups * columns, c = c0 + isa::lane();
    float mean = 0.0f;
    if (role.given != nullptr) {
      if (c < r.channels) {
        mean = isa::load_global(role.given + b * role.given_stride[0] +
                                head * role.given_stride[1] + c * role.given_stride[2]);
      }
    } else {
      const tile::Span span = tile::span_of(r, b);
      const std::int64_t first = tile::first_slot(r, span, b) / slot_tile;
      const std::int64_t tiles = span.bad ? 0 : (span.length + slot_tile - 1) / slot_tile;
      const float* from = role.sums + (head * role.tiles + first) * role.padded + c0;
      const double total = add_up(from, role.padded, tiles, role.limit > 0.0f);
      if (c >= r.channels) {
        mean = 0.0f;
      } else if (role.limit > 0.0f) {
        mean = tiles > 0 ? formats::amax_scale(static_cast<float>(total), role.limit) : 0.0f;
      } else {
        std::int64_t tokens = span.length;
        if (role.seen.bits != nullptr) tokens = sharing_keys(role.seen, b, head);
        mean = static_cast<float>(total / static_cast<double>(tokens > 0 ? tokens : 1));
        if (!formats::is_finite(mean)) mean = formats::quiet_nan();
      }
    }
    if (isa::warp() == 0) isa::store_global(role.mean + std::int64_t{unit} * role.padded + c, mean);
  }
};

struct BlockMeanParams {
  MeanRole role;  ///< Q: rows and how to read them
  PreparedMeans out;
};

/// Means of Q's blocks, in the order of the CPU's sums: pieces of 64 rows from the block's first
/// on. One block a mean; a thread adds up eight channels of a piece, then all pieces of a channel.
struct BlockMeans {
  using Params = BlockMeanParams;
  /// A thread reads 64 rows one by one: few a block, for means of 64, and many blocks.
  static constexpr int threads = 64, min_blocks = 8;
  static constexpr int most_channels = 256 / threads;                ///< of a thread, in the end
  static constexpr int shared_bytes = 4 * chunk_channels * threads;  ///< sums: [piece][channel]
  static constexpr bool dependent = true;

  /// Finds the sequence that block number `index` is of, and the block's first token. False: none.
  static QATTN_DEVICE bool find(const tile::Rows& r, int size, int index, TilePlace& p) {
    p.b = r.cu_seqlens != nullptr ? sequence_of_block(r, index, size)
                                  : divide(index, (r.max_length + size - 1) / size);
    p.span = tile::span_of(r, p.b);
    p.first = (index - tile::first_block(r, p.span, p.b, size)) * size;
    return p.first >= 0 && p.first < p.span.length && !p.span.bad;
  }

  static QATTN_DEVICE void add_up(const MeanRole& role, TilePlace p, std::int64_t end,
                                  double (&total)[most_channels]) {
    const int chunks = role.padded / chunk_channels, pieces = threads / chunks;
    const int chunk = isa::thread() % chunks, piece = isa::thread() / chunks;
    const SharedAddress shared = isa::shared_base();
    for (std::int64_t first = p.first; first < end; first += slot_tile * pieces) {
      p.first = first + slot_tile * piece;
      if (piece < pieces && p.first < end) {
        float sum[8] = {};
        with_input(role.input, role.aligned, [&](auto kind, auto aligned) {
          SumRows::add_rows<decltype(kind)::value, decltype(aligned)::value>(role, p, chunk, sum);
        });
        const SharedAddress to = shared + 4 * (piece * role.padded + chunk * chunk_channels);
#pragma unroll
        for (int i = 0; i < 8; ++i) isa::store_shared(to + 4 * i, sum[i]);
      }
      isa::sync_threads();
      for (int n = 0; n < pieces && first + slot_tile * n < end; ++n) {
#pragma unroll
        for (int i = 0; i < most_channels; ++i) {
          const int c = isa::thread() + i * threads;
          if (c >= role.padded) break;
          const auto sum = isa::load_shared<float>(shared + 4 * (n * role.padded + c));
          total[i] += static_cast<double>(sum);
        }
      }
      isa::sync_threads();
    }
  }

  static QATTN_DEVICE void run(const Params& params) {
    isa::grid_dependency_launch();
    isa::grid_dependency_wait();
    const MeanRole& role = params.role;
    const tile::Rows& r = role.rows;
    const int index = isa::block().x / r.heads, size = params.out.block;
    TilePlace p;
    p.head = isa::block().x % r.heads;
    if (!find(r, size, index, p)) return;
    const std::int64_t left = p.span.length - p.first, count = left < size ? left : size;
    p.span.length = p.first + count;
    double total[most_channels] = {};
    add_up(role, p, p.span.length, total);
    float* to = params.out.data + (p.head * params.out.blocks + index) * std::int64_t{role.padded};
#pragma unroll
    for (int i = 0; i < most_channels; ++i) {
      const int c = isa::thread() + i * threads;
      if (c >= role.padded) break;
      float mean = static_cast<float>(total[i] / static_cast<double>(count));
      if (!formats::is_finite(mean)) mean = formats::quiet_nan();
      isa::store_global(to + c, c < r.channels ? mean : 0.0f);
    }
  }
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
