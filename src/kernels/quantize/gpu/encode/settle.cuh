// Which keys seen slightly have weight in some row, as cpu/seen.cpp finds it: they are seen. The
// others are so faintly, which is what FindSeen leaves.
#pragma once

#include "kernels/quantize/gpu/encode/means.cuh"
#include "kernels/quantize/gpu/encode/seen.cuh"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

/// Rows whose norms are asked for.
struct NormRows {
  tile::Rows rows;
  InputKind input = InputKind::bf16;
  bool aligned = false;  ///< 16-byte loads are possible
};

struct SettleParams : MaskParams {
  NormRows q, k;
  SeenKeys seen;
  SlightKeys slight;
  float scale = 1.0f, softcap = 0.0f;
  std::int32_t group = 1;       ///< query heads of a KV head
  std::int32_t mask_heads = 1;  ///< of these masks tell apart so many
  std::int32_t padded = 0;      ///< channels of K, with their padding
};

/// One block a (sequence, KV head), which has nothing to do where no key is seen slightly.
struct SettleSeen {
  using Params = SettleParams;
  static constexpr int threads = 256, min_blocks = 1, warps = threads / 32;
  static constexpr int loads = 4;  ///< of a thread in flight: octets of a row, biases
  // Shared memory: sums of tiles, the mean, each warp's largest norm.
  static constexpr int mean_at = 4 * chunk_channels * threads, most_at = mean_at + 4 * threads;
  static constexpr int shared_bytes = most_at + 8 * warps;
  static constexpr bool dependent = true;

  struct Unit {
    int b = 0, head = 0;
    tile::Span q, k;
    std::int64_t first_tile = 0, tiles = 0;
    float advantage = 0.0f;
  };

  static QATTN_DEVICE Words2 slight_of(const Params& p, const Unit& u, std::int64_t tile) {
    const auto* bits = reinterpret_cast<const Words2*>(p.slight.bits);
    return isa::load_global(bits + seen_tile(p.seen, u.head, u.first_tile + tile));
  }
  /// The two words of keys that are seen plainly.
  static QATTN_DEVICE std::uint32_t* plainly_of(const Params& p, const Unit& u, std::int64_t tile) {
    return p.seen.bits + 4 * seen_tile(p.seen, u.head, u.first_tile + tile) + 2;
  }

  /// The mean of the keys that are seen, a channel a thread, to shared memory.
  static QATTN_DEVICE void find_mean(const Params& p, const Unit& u) {
    const SharedAddress shared = isa::shared_base();
    const int chunks = p.padded / chunk_channels, at_once = threads / chunks;
    const int chunk = isa::thread() % chunks, piece = isa::thread() / chunks;
    MeanRole role;
    role.rows = p.k.rows, role.seen = p.seen;
    TilePlace place;
    place.b = u.b, place.head = u.head, place.span = u.k;
    double total = 0.0;
    for (std::int64_t first = 0; first < u.tiles; first += at_once) {
      place.first = (first + piece) * slot_tile, place.tile = u.first_tile + first + piece;
      if (piece < at_once && first + piece < u.tiles) {
        float sum[8] = {};
        with_input(p.k.input, p.k.aligned, [&](auto kind, auto aligned) {
          SumRows::add_rows<decltype(kind)::value, decltype(aligned)::value>(role, place, chunk,
                                                                             sum);
        });
        const SharedAddress to = shared + 4 * (piece * p.padded + chunk * chunk_channels);
#pragma unroll
        for (int i = 0; i < 8; ++i) isa::store_shared(to + 4 * i, sum[i]);
      }
      isa::sync_threads();
      for (int n = 0; n < at_once && first + n < u.tiles && isa::thread() < p.padded; ++n) {
        const SharedAddress from = shared + 4 * (n * p.padded + isa::thread());
        total = formats::add_rn(total, static_cast<double>(isa::load_shared<float>(from)));
      }
      isa::sync_threads();
    }
    const auto keys = static_cast<double>(sharing_keys(p.seen, u.b, u.head));
    const bool exists = isa::thread() < p.k.rows.channels;
    isa::store_shared(shared + mean_at + 4 * isa::thread(),
                      exists ? static_cast<float>(total / keys) : 0.0f);
    isa::sync_threads();
  }

  /// The square of a row's norm, in the order of the CPU's sum; `centered`: of the row less the
  /// mean.
  template <InputKind Kind, bool Aligned>
  static QATTN_DEVICE double square_of(const tile::Rows& r, std::int64_t at, bool centered) {
    double sum = 0.0;
    for (int c = 0; c < r.channels; c += loads * chunk_channels) {
      Octet<Kind> octet[loads];
#pragma unroll
      for (int n = 0; n < loads; ++n) {
        const int first = c + n * chunk_channels, left = r.channels - first;
        octet[n].fill(false);
        if (left > 0) octet[n].template load<Aligned>(r.data, at + first, left);
      }
#pragma unroll
      for (int n = 0; n < loads; ++n) {
        float x[8];
        octet[n].unpack(x);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const SharedAddress mean = mean_at + 4 * (c + n * chunk_channels + i);
          if (centered) {
            x[i] = formats::add_rn(x[i], -isa::load_shared<float>(isa::shared_base() + mean));
          }
          const auto y = static_cast<double>(x[i]);
          sum = formats::add_rn(sum, formats::mul_rn(y, y));
        }
      }
    }
    return sum;
  }
  /// Its pattern; not negative, and NaN on top, as of a row on a page that does not exist.
  static QATTN_DEVICE std::uint64_t square_bits(const NormRows& x, const tile::Span& span, int b,
                                                int head, std::int64_t i, bool centered) {
    constexpr std::uint64_t magnitude = ~std::uint64_t{0} >> 1;
    const std::int64_t at = tile::row_offset(x.rows, span, b, head, i);
    if (at == -1) return magnitude;
    double square = 0.0;
    with_input(x.input, x.aligned, [&](auto kind, auto aligned) {
      square = square_of<decltype(kind)::value, decltype(aligned)::value>(x.rows, at, centered);
    });
    return __builtin_bit_cast(std::uint64_t, square) & magnitude;
  }

  /// The norm whose square is the largest of all threads'. By all of them.
  static QATTN_DEVICE float largest_norm(std::uint64_t top) {
    top = warp_max(top);
    const SharedAddress words = isa::shared_base() + most_at;
    const SharedAddress mine = words + 8 * static_cast<SharedAddress>(isa::warp());
    if (isa::lane() == 0) isa::store_shared(mine, __builtin_bit_cast(Words2, top));
    isa::sync_threads();
#pragma unroll
    for (int n = 0; n < warps; ++n) {
      const auto other = __builtin_bit_cast(std::uint64_t, isa::load_shared<Words2>(words + 8 * n));
      top = other > top ? other : top;
    }
    isa::sync_threads();
    return norm_of(__builtin_bit_cast(double, top));
  }

  /// largest_advantage() of the unit's rows.
  static QATTN_DEVICE float advantage_of(const Params& p, const Unit& u) {
    find_mean(p, u);
    std::uint64_t plain = 0, slight = 0, query = 0;
    for (std::int64_t j = isa::thread(); j < u.k.length; j += threads) {
      const std::int64_t tile = j / slot_tile;
      const auto key = static_cast<int>(j % slot_tile);
      const bool shares = sight_of(p.seen, u.b, u.head, u.first_tile + tile).shares(key);
      if (!shares && !TileSight::bit(slight_of(p, u, tile).w, key)) continue;
      const std::uint64_t square = square_bits(p.k, u.k, u.b, u.head, j, true);
      plain = shares && square > plain ? square : plain;
      slight = !shares && square > slight ? square : slight;
    }
    for (int h = u.head * p.group; h < (u.head + 1) * p.group; ++h) {
      for (std::int64_t i = isa::thread(); i < u.q.length; i += threads) {
        const std::uint64_t square = square_bits(p.q, u.q, u.b, h, i, false);
        query = square > query ? square : query;
      }
    }
    const float q = largest_norm(query), k = largest_norm(plain), others = largest_norm(slight);
    return largest_advantage(p.scale, p.softcap, q, k, others);
  }

  /// The bias under which a row sees a key; -infinity: it does not.
  static QATTN_DEVICE float bias_of(const Params& p, const Unit& u, int head, std::int64_t i,
                                    std::int64_t j) {
    const BroadcastView& m = p.mask;
    const std::int64_t at =
        u.b * m.stride[0] + head * m.stride[1] + i * m.stride[2] + j * m.stride[3];
    const float bias = tile::load_number(m.data, m.format, at);
    if (p.block_mask_q == 0) return bias;
    const std::int64_t block = tile::block_of(i, p.block_mask_q);
    return FindSeen::block_visible(p, u.b, head, block, j) ? bias : -tile::infinity();
  }

  /// The slight keys that have weight in a row are seen. By a warp.
  static QATTN_DEVICE void settle_row(const Params& p, const Unit& u, int head, std::int64_t i) {
    const std::int64_t diagonal = i + u.k.length - u.q.length;
    const std::int64_t first = visible_begin(std::int64_t{p.window_left}, diagonal);
    const std::int64_t begin = first > 0 ? first : 0;
    const std::int64_t end = visible_end(std::int64_t{p.window_right}, diagonal, u.k.length);
    float best = -tile::infinity();
    for (std::int64_t j = begin + isa::lane(); j < end; j += 32 * loads) {
      float bias[loads];
#pragma unroll
      for (int n = 0; n < loads; ++n) {
        const std::int64_t key = j + 32 * n;
        bias[n] = key < end ? bias_of(p, u, head, i, key) : -tile::infinity();
      }
#pragma unroll
      for (int n = 0; n < loads; ++n) best = bias[n] > best ? bias[n] : best;
    }
    for (int mask = 1; mask < 32; mask *= 2) {
      const float other = isa::shuffle_xor(best, mask);
      best = other > best ? other : best;
    }
    for (std::int64_t tile = begin / slot_tile; tile * slot_tile < end; ++tile) {
      const Words2 slight = slight_of(p, u, tile);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (slight.w[half] == 0) continue;
        const std::int64_t j = tile * slot_tile + 32 * half + isa::lane();
        float bias = -tile::infinity();
        if ((slight.w[half] >> isa::lane() & 1) != 0 && j >= begin && j < end) {
          bias = bias_of(p, u, head, i, j);
        }
        const bool sees = bias > -tile::infinity();
        const auto found = isa::ballot(sees && !lacks_weight(bias, best, u.advantage));
        if (found != 0 && isa::lane() == 0) {
          isa::atomic_or_global(plainly_of(p, u, tile) + half, found);
        }
      }
    }
  }

  static QATTN_DEVICE void settle_rows(const Params& p, const Unit& u) {
    const bool alike =
        p.mask.stride[2] == 0 && p.window_left < 0 && p.window_right < 0 && p.block_mask_q == 0;
    const std::int64_t rows = alike && u.q.length > 1 ? 1 : u.q.length;
    for (int h = 0; h < p.mask_heads; ++h) {
      for (std::int64_t i = isa::warp(); i < rows; i += warps) {
        settle_row(p, u, u.head * p.group + h, i);
      }
    }
  }

  /// Adds the slight keys that are seen to those that share: all of them, or those that are marked.
  static QATTN_DEVICE void count(const Params& p, const Unit& u, bool all) {
    isa::sync_threads();
    std::uint32_t more = 0;
    for (std::int64_t tile = isa::thread(); tile < u.tiles; tile += threads) {
      const Words2 slight = slight_of(p, u, tile);
      std::uint32_t* plainly = plainly_of(p, u, tile);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (slight.w[half] == 0) continue;
        const std::uint32_t now = isa::load_global(plainly + half) | (all ? slight.w[half] : 0u);
        if (all) isa::store_global(plainly + half, now);
        more += static_cast<std::uint32_t>(formats::popcount(now & slight.w[half]));
      }
    }
    if (more != 0) {
      isa::atomic_add_global(p.seen.counts + 2 * seen_unit(p.seen, u.b, u.head) + 1, more);
    }
  }

  static QATTN_DEVICE void run(const Params& p) {
    isa::grid_dependency_launch();
    isa::grid_dependency_wait();
    Unit u;
    u.b = isa::block().x / p.k.rows.heads, u.head = isa::block().x - u.b * p.k.rows.heads;
    if (isa::load_global(p.slight.counts + seen_unit(p.seen, u.b, u.head)) == 0) return;
    u.q = tile::span_of(p.q.rows, u.b), u.k = tile::span_of(p.k.rows, u.b);
    u.first_tile = tile::first_slot(p.k.rows, u.k, u.b) / slot_tile;
    u.tiles = (u.k.length + slot_tile - 1) / slot_tile;
    // Where no key is seen plainly, slight ones are the best there are.
    u.advantage = tile::quiet_nan();
    if (any_plainly(p.seen, u.b, u.head)) u.advantage = advantage_of(p, u);
    const bool bounded = bounds_weight(u.advantage);
    if (bounded) settle_rows(p, u);
    count(p, u, !bounded);
  }
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
