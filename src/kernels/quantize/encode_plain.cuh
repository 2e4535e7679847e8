// Encoding without detours: 16-bit rows in 16-byte pieces to s8 or e4m3 with a scale per token or
// per tile of 64, V in s8 per token and in e4m3 per channel, K less its mean. One block a tile; Q,
// K and V in one launch. The same kernel makes the pass for K's mean and the maxima of V's
// channels.
#pragma once

#include "kernels/quantize/encode_common.cuh"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

/// Which tokens of a tile share a scale.
enum class SharedScales : std::int32_t {
  none,
  tile,     ///< all of them
  thread,   ///< those of the same (key % 8) / 2: K's per_thread
  joint,    ///< the same but for tokens that are far smaller: V's per_thread
  channel,  ///< V in e4m3: PreparedTiles::channel_scale; the tokens have none
};

struct PlainRows {
  tile::Rows rows;
  PreparedRows out;
  const float* mean = nullptr;  ///< [batches][heads][padded]: K: subtracted; Q: for dot_mean
  std::int32_t heads_per_mean = 1;
  SharedScales shared = SharedScales::none;
};

struct PlainParams {
  PlainRows row[2];  ///< Q, K
  tile::Rows v;
  PreparedTiles v_out;
  SharedScales v_shared = SharedScales::none;
  HeadRange heads[3];           ///< of Q, K, V
  std::int32_t blocks[3] = {};  ///< likewise
  std::int32_t lead = 0;        ///< of the blocks of Q and V, how many come before K's
  bool e4m3 = false;            ///< codes of Q and K
  /// The first of two passes: no codes, but what FinishMeans reads.
  bool first_pass = false;
  float* sums[3] = {};  ///< of K's rows; of V maxima: [heads][slot tiles][Channels]
};

/// A thread holds 8 rows x 8 channels: two groups of four keys that lie side by side in V's
/// contraction order, so that four codes of one channel make a word without any transposition.
template <isa::Element Input, int Channels>
struct EncodePlain {
  using Params = PlainParams;
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
  static constexpr bool dependent = true;

  static QATTN_DEVICE isa::Pair unpack(std::uint32_t w) {
    if constexpr (Input == isa::Element::bf16) {
      return isa::unpack_bf16(w);
    } else {
      return isa::unpack_f16(w);
    }
  }

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

  /// Bits of max |x|: sixteen-bit magnitudes are ordered like their patterns, Inf and NaN on top.
  static QATTN_DEVICE std::uint32_t magnitude(const Words4& raw) {
    std::uint32_t high = 0, low = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const std::uint32_t both = raw.w[i] & 0x7fff7fffu;
      high = high > both ? high : both;
      low = low > both << 16 ? low : both << 16;
    }
    high = (high > low ? high : low) & 0xffff0000u;
    return formats::bits_of(unpack(high).hi);
  }
  static QATTN_DEVICE std::uint32_t magnitude(const Words4& raw, const float (&mean)[8]) {
    std::uint32_t top = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const isa::Pair x = unpack(raw.w[i]);
      const std::uint32_t lo = formats::magnitude_bits(formats::add_rn(x.lo, -mean[2 * i]));
      const std::uint32_t hi = formats::magnitude_bits(formats::add_rn(x.hi, -mean[2 * i + 1]));
      top = top > lo ? top : lo;
      top = top > hi ? top : hi;
    }
    return top;
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

  static QATTN_DEVICE void store_dots(const PlainRows& q, const TilePlace& p,
                                      SharedAddress shared) {
    for (int row = isa::thread(); row < slot_tile; row += threads) {
      float sum = 0.0f;
#pragma unroll
      for (int c = 0; c < chunks; c += 4) {
        const Words4 w = isa::load_shared<Words4>(shared + image_at + 4 * (row * stride + c));
#pragma unroll
        for (int i = 0; i < 4; ++i) sum = formats::add_rn(sum, formats::float_of(w.w[i]));
      }
      isa::store_global(q.out.dot_mean + p.head * q.out.slots + p.tile * slot_tile + row, sum);
    }
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
    const float both = formats::fold_amax(amax[0], amax[1]);
    if (scales == SharedScales::tile) {
      amax[0] = amax[1] = formats::float_of(warp_max(formats::bits_of(both)));
    } else if (scales == SharedScales::thread) {
      amax[0] = amax[1] = formats::float_of(thread_max(formats::bits_of(both)));
    } else if (scales == SharedScales::joint) {
      const bool bad[2] = {!formats::is_finite(amax[0]), !formats::is_finite(amax[1])};
      join_maxima(amax, bad);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      r.scale[i] = formats::amax_scale(amax[i], qmax);
      r.bad[i] = !formats::is_finite(r.scale[i]);
      if (scales == SharedScales::channel) r.scale[i] = r.bad[i] ? formats::quiet_nan() : 1.0f;
      isa::store_shared(shared + factor_at + 4 * (isa::lane() + 32 * i),
                        code_factor(r.exists[i], r.scale[i]));
    }
    return r;
  }

  /// Rounded value as the low byte of a word. |x * factor| is at most 127 and some ulps, so nothing
  /// needs clamping.
  static QATTN_DEVICE std::uint32_t rounded(float x, float factor) {
    return formats::bits_of(formats::add_rn(formats::mul_rn(x, factor), 12582912.0f));
  }

  static QATTN_DEVICE float factor_of(SharedAddress shared, int row) {
    return isa::load_shared<float>(shared + factor_at + 4 * row);
  }

  template <bool E4m3>
  static QATTN_DEVICE void encode_rows(const PlainRows& row, const TilePlace& p,
                                       SharedAddress shared, const Words4 (&raw)[8],
                                       const float (&mean)[8]) {
    const std::int64_t slot = p.head * row.out.slots + p.tile * slot_tile + first_key();
    std::uint8_t* out = row.out.codes + slot * Channels + chunk() * chunk_channels;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float factor = factor_of(shared, first_key() + key_step(i));
      Words2 code;
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const isa::Pair a = unpack(raw[i].w[2 * n]), b = unpack(raw[i].w[2 * n + 1]);
        float x[4] = {a.lo, a.hi, b.lo, b.hi};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if constexpr (E4m3) x[j] = formats::add_rn(x[j], 0.0f);  // -0 becomes +0, as on the CPU
          x[j] = formats::add_rn(x[j], -mean[4 * n + j]);
        }
        if constexpr (E4m3) {
          const std::uint32_t lo =
              isa::pack_e4m3(formats::mul_rn(x[0], factor), formats::mul_rn(x[1], factor));
          const std::uint32_t hi =
              isa::pack_e4m3(formats::mul_rn(x[2], factor), formats::mul_rn(x[3], factor));
          code.w[n] = lo | hi << 16;
        } else {
          code.w[n] = low_bytes(rounded(x[0], factor), rounded(x[1], factor), rounded(x[2], factor),
                                rounded(x[3], factor));
        }
      }
      if (factor == 0.0f) code = Words2{{0, 0}};  // 0 times a bad value is NaN
      isa::store_global(reinterpret_cast<Words2*>(out + key_step(i) * Channels), code);
    }
  }

  static QATTN_DEVICE void run_rows(const PlainRows& row, const TilePlace& p, bool e4m3, bool dots,
                                    SharedAddress shared) {
    Words4 raw[8];
    load(row.rows, p, shared, raw);
    float mean[8] = {};
    const bool has_mean = row.mean != nullptr;
    if (has_mean) {
      const int head = p.head / row.heads_per_mean;
      load_mean(row.mean, p.b, row.rows.heads / row.heads_per_mean, head, mean);
    }
    const SharedAddress mine = shared + 4 * (first_key() * stride + chunk());
    if (has_mean && !dots) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        isa::store_shared(mine + 4 * key_step(i) * stride, magnitude(raw[i], mean));
      }
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        isa::store_shared(mine + 4 * key_step(i) * stride, magnitude(raw[i]));
        if (dots) {
          float sum = 0.0f;
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const isa::Pair x = unpack(raw[i].w[j]);
            sum = formats::add_rn(sum, formats::mul_rn(x.lo, mean[2 * j]));
            sum = formats::add_rn(sum, formats::mul_rn(x.hi, mean[2 * j + 1]));
          }
          isa::store_shared(mine + image_at + 4 * key_step(i) * stride, sum);
        }
      }
    }
    isa::sync_threads();
    if (isa::warp() == 0) {
      const RowPair r =
          find_scales(shared, p.count(), row.shared, e4m3 ? formats::E4m3::max : formats::S8::max);
      store_row_scales(row.out, p, r);
    }
    if (dots) store_dots(row, p, shared);
    isa::sync_threads();
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (dots) mean[i] = 0.0f;  // Q's is not subtracted
    }
    if (e4m3) {
      encode_rows<true>(row, p, shared, raw, mean);
    } else {
      encode_rows<false>(row, p, shared, raw, mean);
    }
  }

  /// V's rows. When it returns, the first warp has their scales, and their factors are in shared
  /// memory but for a barrier.
  static QATTN_DEVICE RowPair load_values(const PlainParams& params, const TilePlace& p,
                                          SharedAddress shared, Words4 (&raw)[8]) {
    load(params.v, p, shared, raw);
    const SharedAddress mine = shared + 4 * (first_key() * stride + chunk());
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      isa::store_shared(mine + 4 * key_step(i) * stride, magnitude(raw[i]));
    }
    isa::sync_threads();
    RowPair r{};
    if (isa::warp() == 0) r = find_scales(shared, p.count(), params.v_shared, formats::S8::max);
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

  /// Codes of a thread's eight keys, in the low bytes or four to a word as they come.
  static QATTN_DEVICE Words2 token_codes(const float (&x)[8], const float (&factor)[8]) {
    std::uint32_t code[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) code[i] = rounded(x[i], factor[i]);
    return {{low_bytes(code[0], code[1], code[2], code[3]),
             low_bytes(code[4], code[5], code[6], code[7])}};
  }
  static QATTN_DEVICE Words2 channel_codes(const float (&x)[8], float factor) {
    std::uint32_t pair[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // -0 becomes +0, as on the CPU
      pair[i] = isa::pack_e4m3(formats::mul_rn(formats::add_rn(x[2 * i], 0.0f), factor),
                               formats::mul_rn(formats::add_rn(x[2 * i + 1], 0.0f), factor));
    }
    return {{pair[0] | pair[1] << 16, pair[2] | pair[3] << 16}};
  }

  template <bool E4m3>
  static QATTN_DEVICE void run_values(const PlainParams& params, const TilePlace& p,
                                      SharedAddress shared) {
    const TileOffsets at = tile_offsets(Channels);
    const std::int64_t index = p.head * (params.v_out.slots / slot_tile) + p.tile;
    std::uint8_t* record = params.v_out.tiles + index * at.bytes;
    Words4 raw[8];
    const RowPair r = load_values(params, p, shared, raw);
    const SharedAddress image = shared + image_at;
    if (isa::warp() == 0) {
      constexpr auto kind = E4m3 ? ValueScales::floating : ValueScales::integer_token;
      constexpr std::uint32_t one = 0x38;  // in e4m3
      store_value_tables(record, Channels, image + chunks * image_stride, r, kind, one);
    }
    isa::sync_threads();
    float factor[8], scale[8];
    clean_values(shared, raw, factor);
    if constexpr (E4m3) {
      load_mean(params.v_out.channel_scale, p.b, params.v.heads, p.head, scale);
    }
    const SharedAddress to = image + chunk() * image_stride + pair() / 2 * 16 + pair() % 2 * 8;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float even[8], odd[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const isa::Pair x = unpack(raw[i].w[j]);
        even[i] = x.lo;
        odd[i] = x.hi;
      }
      Words2 code[2];
      if constexpr (E4m3) {
        code[0] = channel_codes(even, code_factor(scale[2 * j] > 0.0f, scale[2 * j]));
        code[1] = channel_codes(odd, code_factor(scale[2 * j + 1] > 0.0f, scale[2 * j + 1]));
      } else {
        code[0] = token_codes(even, factor);
        code[1] = token_codes(odd, factor);
      }
      isa::store_shared(to + 2 * j * slot_tile, code[0]);
      isa::store_shared(to + (2 * j + 1) * slot_tile, code[1]);
    }
    isa::sync_threads();
    store_value_image<Channels, threads>(record, image);
  }

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

  /// Operand of a block, whose number becomes the one within its operand. K comes from its end,
  /// which the first pass left in the L2, behind so many blocks of Q and V as fill the GPU while
  /// that pass ends.
  static QATTN_DEVICE int role_of_block(const Params& params, int& block) {
    const int keys = params.blocks[1], behind = block - params.lead;
    if (behind >= 0 && behind < keys) {
      block = params.first_pass ? behind : keys - 1 - behind;
      return 1;
    }
    if (behind >= 0) block -= keys;
    if (block < params.blocks[0]) return 0;
    block -= params.blocks[0];
    return 2;
  }

  static QATTN_DEVICE void run_tile(const Params& params, int role, int block) {
    const SharedAddress shared = isa::shared_base();
    const tile::Rows& rows = role == 2 ? params.v : params.row[role].rows;
    const HeadRange heads = params.heads[role];
    const int tile = divide(block, heads.count), head = heads.first + block - tile * heads.count;
    const TilePlace p = find_tile(rows, tile, head, threads, shared + word_at);
    if (!p.used) return;
    if (params.first_pass) {
      const std::int64_t tiles = params.blocks[role] / heads.count;
      float* sums = params.sums[role] + (head * tiles + tile) * Channels;
      if (role == 1) {
        sum_rows(rows, p, sums, shared);
      } else {
        find_maxima(params, p, sums, shared);
      }
    } else if (role < 2) {
      const bool dots = role == 0 && params.row[0].out.dot_mean != nullptr;
      run_rows(params.row[role], p, params.e4m3, dots, shared);
    } else if (params.v_shared == SharedScales::channel) {
      run_values<true>(params, p, shared);
    } else {
      run_values<false>(params, p, shared);
    }
  }

  static QATTN_DEVICE void run(const Params& params) {
    isa::grid_dependency_launch();
    int block = isa::block().x;
    const int role = role_of_block(params, block);
    // Only who reads a mean or V's scales needs the kernels before. The others read and write what
    // those do not touch, and wait when they are done, so that this kernel's end is that of the
    // chain.
    const bool reads =
        role < 2 ? params.row[role].mean != nullptr : params.v_shared == SharedScales::channel;
    if (reads && !params.first_pass) isa::grid_dependency_wait();
    run_tile(params, role, block);
    isa::grid_dependency_wait();  // also behind the first: to remember it costs a register too many
  }
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
