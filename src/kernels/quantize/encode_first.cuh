// The first of two passes over K, for its mean, and V, for the maxima of its channels. The block
// that is the last of a sequence's makes the mean or the scales; blocks of the second pass wait for
// it.
#pragma once

#include "kernels/quantize/encode_plain_tile.cuh"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

template <isa::Element Input, int Channels>
struct FirstPass : PlainTile<Input, Channels> {
  using Tile = PlainTile<Input, Channels>;
  using Tile::chunk, Tile::clean_values, Tile::first_key, Tile::image_at, Tile::key_step;
  using Tile::load, Tile::load_values, Tile::pair, Tile::row_stride, Tile::threads, Tile::unpack;
  using Tile::word_at;
  static constexpr std::uint32_t finished = 0x80000000;
  static_assert(threads == Channels);

  /// Sums of K's channels over a tile, row by row. A thread adds up two channels.
  static QATTN_DEVICE void sum_rows(const tile::Rows& r, const TilePlace& p, float* sums,
                                    SharedAddress shared) {
    Words4 raw[8];
    load(r, p, shared, raw);  // rows behind the end are zeros, which change no sum
    const SharedAddress rows = shared + image_at;
    const SharedAddress mine = rows + first_key() * row_stride + chunk() * 16;
#pragma unroll
    for (int i = 0; i < 8; ++i) isa::store_shared(mine + key_step(i) * row_stride, raw[i]);
    isa::sync_threads();
    if (isa::thread() >= Channels / 2) return;
    float lo = 0.0f, hi = 0.0f;
#pragma unroll 16
    for (int row = 0; row < slot_tile; ++row) {
      const isa::Pair x =
          unpack(isa::load_shared<std::uint32_t>(rows + row * row_stride + 4 * isa::thread()));
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
    load_values(params, p, shared, raw);
    isa::sync_threads();
    float factor[8];
    clean_values(shared, raw, factor);
    const SharedAddress table = shared + image_at;  // [pair][Channels]
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
        top.w[2 * j] = formats::bits_of(unpack(low).hi);
        top.w[2 * j + 1] = formats::bits_of(unpack(high & 0xffff0000u).hi);
      }
      isa::store_shared(table + 4 * (pair() * Channels + chunk() * chunk_channels + 4 * n), top);
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

  /// Mean, or scales, of the sequence and head of a tile, from those of its tiles: in the order of
  /// the CPU's sums. A thread has a channel.
  static QATTN_DEVICE void finish(const PlainParams& params, int role, const TilePlace& p,
                                  int tiles) {
    const tile::Rows& r = role == 2 ? params.v : params.row[1].rows;
    const std::int64_t first = p.head * std::int64_t{params.blocks[role] / params.heads[role]} +
                               p.tile - p.first / slot_tile;
    const float* from = params.sums[role] + first * Channels + isa::thread();
    constexpr int step = 32;  // loads in flight
    double total = 0.0;
    float top = 0.0f;
    for (int t0 = 0; t0 < tiles; t0 += step) {
      float x[step];
#pragma unroll
      for (int t = 0; t < step; ++t) {
        x[t] = t0 + t < tiles ? isa::load_global(from + std::int64_t{t0 + t} * Channels) : 0.0f;
      }
      if (role == 2) {
#pragma unroll
        for (int t = 0; t < step; ++t) top = top > x[t] ? top : x[t];
      } else {
#pragma unroll
        for (int t = 0; t < step; ++t) total += static_cast<double>(x[t]);
      }
    }
    float result = formats::amax_scale(top, formats::E4m3::max);
    if (role == 1) {
      result = static_cast<float>(total / static_cast<double>(p.span.length));
      if (!formats::is_finite(result)) result = formats::quiet_nan();
    }
    if (isa::thread() >= r.channels) result = 0.0f;
    const std::int64_t unit = std::int64_t{p.b} * r.heads + p.head;
    isa::store_global(params.result[role] + unit * Channels + isa::thread(), result);
  }

  static QATTN_DEVICE void run(const PlainParams& params, int role, const TilePlace& p,
                               SharedAddress shared) {
    const tile::Rows& r = role == 2 ? params.v : params.row[1].rows;
    const std::int64_t tiles_of_head = params.blocks[role] / params.heads[role];
    float* sums = params.sums[role] + (p.head * tiles_of_head + p.tile) * Channels;
    if (role == 1) {
      sum_rows(r, p, sums, shared);
    } else {
      find_maxima(params, p, sums, shared);
    }
    isa::grid_dependency_wait();  // for the zeros in `done`
    isa::sync_threads();
    const int tiles = static_cast<int>((p.span.length + slot_tile - 1) / slot_tile);
    std::uint32_t* done = params.done[role] + std::int64_t{p.b} * r.heads + p.head;
    if (isa::thread() == 0) isa::store_shared(shared + word_at, isa::signal_global(done, 1u));
    isa::sync_threads();
    const auto before = static_cast<int>(isa::load_shared<std::uint32_t>(shared + word_at));
    if (before + 1 < tiles) return;
    finish(params, role, p, tiles);
    isa::sync_threads();
    if (isa::thread() == 0) {
      isa::signal_global(done, finished - static_cast<std::uint32_t>(tiles));
    }
  }

  /// Until K's mean or V's scales of a sequence and a head of these are there. Of sequences without
  /// tokens they always are.
  static QATTN_DEVICE void await(const PlainParams& params, int role, int b, int head) {
    const tile::Rows& r = role == 2 ? params.v : params.row[1].rows;
    if (isa::thread() == 0) {
      const tile::Span span = tile::span_of(r, b);
      if (!span.bad && span.length > 0) {
        isa::await_global(params.done[role] + std::int64_t{b} * r.heads + head, finished);
      }
    }
    isa::sync_threads();
  }
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
