// A tile of an operand of 16 bits from memory to registers, for the encoding without detours.
#pragma once

#include "kernels/operand/row_codes.cuh"
#include "kernels/quantize/gpu/encode/common.cuh"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

/// A thread holds 8 rows x 8 channels: two groups of four keys that lie side by side in V's
/// contraction order, so that four codes of one channel make a word without any transposition.
template <isa::Element Input, int Channels>
struct PlainTile : RowCodes<Input> {
  using RowCodes<Input>::magnitude;
  static constexpr int chunks = Channels / chunk_channels;
  static constexpr int threads = 8 * chunks;
  static constexpr int min_blocks = 768 / threads;
  static constexpr int stride = partial_stride(chunks);
  // Shared memory: maxima [64][stride], then 1 / scale [64], a word, row offsets [64], V's image
  // (or Q's dot products [64][stride]; in the first pass K's rows, or maxima of V [8][Channels]).
  static constexpr int factor_at = 4 * slot_tile * stride;
  static constexpr int word_at = factor_at + 4 * slot_tile;
  static constexpr int offsets_at = word_at + 16;
  static constexpr int image_at = offsets_at + 8 * slot_tile;
  /// Of K's rows: four rows on, 64 bytes further in the banks.
  static constexpr int row_stride = 2 * Channels + 16;
  static constexpr int image_bytes = (chunks + 1) * image_stride, rows_bytes = 64 * row_stride;
  static constexpr int shared_bytes =
      image_at + (image_bytes > rows_bytes ? image_bytes : rows_bytes);

  /// Where a thread works: pair `p` of groups of four keys, chunk `c` of channels.
  static QATTN_DEVICE int pair() { return isa::thread() / (2 * chunks) * 2 + isa::thread() % 2; }
  static QATTN_DEVICE int chunk() { return isa::thread() / 2 % chunks; }
  static QATTN_DEVICE int first_key() { return pair() / 2 * 16 + pair() % 2 * 4; }
  static constexpr int key_step(int i) { return 8 * (i % 4 / 2) + 2 * (i / 4) + i % 2; }

  static QATTN_DEVICE void load(const tile::Rows& r, const TilePlace& p, SharedAddress shared,
                                Words4 (&raw)[8]) {
    const int c = chunk(), count = p.count(), first = first_key();
    const bool inside = c * chunk_channels < r.channels;
    const auto* data = static_cast<const std::uint16_t*>(r.data) + c * chunk_channels;
    if (r.page_table != nullptr) {
      store_row_offsets(r, p, shared + offsets_at);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const auto at =
            isa::load_shared<std::int64_t>(shared + offsets_at + 8 * (first + key_step(i)));
        // A page that does not exist makes its tokens bad ones: NaN in either format.
        const std::uint32_t fill = first + key_step(i) < count && at == -1 ? 0x7fff7fffu : 0u;
        raw[i] = Words4{{fill, fill, fill, fill}};
        if (inside && at != -1) raw[i] = isa::load_once(reinterpret_cast<const Words4*>(data + at));
      }
      return;
    }
    data += tile::row_offset(r, p.span, p.b, p.head, p.first + first);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      raw[i] = Words4{{0, 0, 0, 0}};
      if (inside && first + key_step(i) < count) {
        raw[i] = isa::load_once(reinterpret_cast<const Words4*>(data + key_step(i) * r.token));
      }
    }
  }

  static QATTN_DEVICE void load_mean(const float* mean, int b, int heads, int head, float (&m)[8]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float* at =
          mean + (std::int64_t{b} * heads + head) * Channels + chunk() * chunk_channels + 4 * i;
      const Words4 w = isa::load_global(reinterpret_cast<const Words4*>(at));
#pragma unroll
      for (int j = 0; j < 4; ++j) m[4 * i + j] = formats::float_of(w.w[j]);
    }
  }

  /// max |x| of row `row` over its chunks.
  static QATTN_DEVICE float row_amax(SharedAddress shared, int row) {
    std::uint32_t top = 0;
#pragma unroll
    for (int c = 0; c < chunks; c += 4) {
      const Words4 w = isa::load_shared<Words4>(shared + 4 * (row * stride + c));
#pragma unroll
      for (int i = 0; i < 4; ++i) top = top > w.w[i] ? top : w.w[i];
    }
    return formats::float_of(top);
  }

  /// Scales of the rows, by the first warp; 1 / scale goes to shared memory.
  static QATTN_DEVICE RowPair find_scales(SharedAddress shared, int count, SharedScales scales,
                                          float qmax) {
    RowPair r;
    float amax[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      r.exists[i] = isa::lane() + 32 * i < count;
      // Rows behind the end hold zeros, or what is left of them less the mean.
      amax[i] = r.exists[i] ? row_amax(shared, isa::lane() + 32 * i) : 0.0f;
    }
    find_pair_scales(r, amax, scales, qmax);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      isa::store_shared(shared + factor_at + 4 * (isa::lane() + 32 * i),
                        code_factor(r.exists[i], r.scale[i]));
    }
    return r;
  }

  static QATTN_DEVICE float factor_of(SharedAddress shared, int row) {
    return isa::load_shared<float>(shared + factor_at + 4 * row);
  }

  /// Scales that come from the rows themselves, under which every code fits. EncodeGiven has
  /// others.
  struct OwnScales {
    /// Of a tile's rows, by the first warp; factors go to shared memory.
    QATTN_DEVICE RowPair find(SharedAddress shared, const TilePlace& p, SharedScales scales,
                              float qmax) {
      return find_scales(shared, p.count(), scales, qmax);
    }
    /// Codes of a chunk of Q or K less its mean.
    template <bool E4m3>
    QATTN_DEVICE Words2 row(const Words4& raw, float factor, const float (&mean)[8]) {
      return RowCodes<Input>::template encoded<E4m3>(raw, factor, mean);
    }
    /// The code in s8 of a value of V, in the low byte.
    QATTN_DEVICE std::uint32_t value(float x, float factor) {
      return RowCodes<Input>::rounded(x, factor);
    }
    /// A value of V that becomes e4m3.
    QATTN_DEVICE float scaled(float x, float factor) { return formats::mul_rn(x, factor); }
  };

  /// V's rows. When it returns, the first warp has their scales, and their factors are in shared
  /// memory but for a barrier.
  template <class Scales>
  static QATTN_DEVICE RowPair load_values(const PlainParams& params, const TilePlace& p,
                                          SharedAddress shared, Words4 (&raw)[8], Scales& scales) {
    load(params.v, p, shared, raw);
    const SharedAddress mine = shared + 4 * (first_key() * stride + chunk());
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      isa::store_shared(mine + 4 * key_step(i) * stride, magnitude(raw[i]));
    }
    isa::sync_threads();
    RowPair r{};
    if (isa::warp() == 0) r = scales.find(shared, p, params.v_shared, formats::S8::max);
    return r;
  }

  /// The rows' factors; rows that have 0, which may hold NaN, become zeros.
  static QATTN_DEVICE void clean_values(SharedAddress shared, Words4 (&raw)[8],
                                        float (&factor)[8]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      factor[i] = factor_of(shared, first_key() + key_step(i));
      if (factor[i] == 0.0f) raw[i] = Words4{{0, 0, 0, 0}};
    }
  }
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
