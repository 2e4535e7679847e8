// The first of two passes over K, for its mean, and V, for the maxima of its channels: sums and
// maxima of tiles, from which FinishMeans makes the mean and the scales.
#pragma once

#include "kernels/quantize/gpu/encode/plain_tile.cuh"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

template <isa::Element Input, int Channels>
struct FirstPass {
  using Tile = PlainTile<Input, Channels>;
  static_assert(Tile::threads == Channels);

  /// Sums of K's channels over a tile, row by row. A thread adds up two channels.
  static QATTN_DEVICE void sum_rows(const tile::Rows& r, const TilePlace& p, float* sums,
                                    SharedAddress shared) {
    Words4 raw[8];
    Tile::load(r, p, shared, raw);  // rows behind the end are zeros, which change no sum
    const SharedAddress rows = shared + Tile::image_at;
    const SharedAddress mine = rows + Tile::first_key() * Tile::row_stride + Tile::chunk() * 16;
#pragma unroll
    for (int i = 0; i < 8; ++i)
      isa::store_shared(mine + Tile::key_step(i) * Tile::row_stride, raw[i]);
    isa::sync_threads();
    if (isa::thread() >= Channels / 2) return;
    float lo = 0.0f, hi = 0.0f;
#pragma unroll 16
    for (int row = 0; row < slot_tile; ++row) {
      const isa::Pair x = Tile::unpack(
          isa::load_shared<std::uint32_t>(rows + row * Tile::row_stride + 4 * isa::thread()));
      lo = formats::add_rn(lo, x.lo);
      hi = formats::add_rn(hi, x.hi);
    }
    isa::store_global(reinterpret_cast<Words2*>(sums) + isa::thread(),
                      Words2{{formats::bits_of(lo), formats::bits_of(hi)}});
  }

  /// Maxima of V's channels over a tile, bad tokens left out.
  static QATTN_DEVICE void find_maxima(const PlainParams& params, const TilePlace& p, float* maxima,
                                       SharedAddress shared) {
    Words4 raw[8];
    typename Tile::OwnScales scales;
    Tile::load_values(params, p, shared, raw, scales);
    isa::sync_threads();
    float factor[8];
    Tile::clean_values(shared, raw, factor);
    const SharedAddress table = shared + Tile::image_at;  // [pair][Channels]
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      Words4 top;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        std::uint32_t high = 0, low = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const std::uint32_t both = raw[i].w[2 * n + j] & 0x7fff7fffu;
          high = high > both ? high : both;
          low = low > both << 16 ? low : both << 16;
        }
        top.w[2 * j] = formats::bits_of(Tile::unpack(low).hi);
        top.w[2 * j + 1] = formats::bits_of(Tile::unpack(high & 0xffff0000u).hi);
      }
      isa::store_shared(
          table + 4 * (Tile::pair() * Channels + Tile::chunk() * chunk_channels + 4 * n), top);
    }
    isa::sync_threads();
    std::uint32_t top = 0;  // there are as many threads as channels
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const auto m = isa::load_shared<std::uint32_t>(table + 4 * (i * Channels + isa::thread()));
      top = top > m ? top : m;
    }
    isa::store_global(maxima + isa::thread(), formats::float_of(top));
  }

  static QATTN_DEVICE void run(const PlainParams& params, int role, const TilePlace& p,
                               SharedAddress shared) {
    const tile::Rows& r = params.rows(role);
    const std::int64_t tiles = params.blocks[role] / r.heads;
    float* sums = params.sums[role] + (p.head * tiles + p.tile) * Channels;
    if (role == 1) {
      sum_rows(r, p, sums, shared);
    } else {
      find_maxima(params, p, sums, shared);
    }
  }
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
