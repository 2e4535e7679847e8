// Encoding without detours: 16-bit rows in 16-byte pieces to s8 or e4m3 with a scale per token or
// per tile of 64, V in s8 per token and in e4m3 per channel, K less its mean; Q, K and V in one
// launch. The same kernel makes the pass before it for K's mean and V's scales. A block serves many
// tiles and loads the next one while it encodes one.
#pragma once

#include "kernels/quantize/encode_first.cuh"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

template <isa::Element Input, int Channels>
struct EncodePlain : FirstPass<Input, Channels> {
  using Params = PlainParams;
  using Tile = PlainTile<Input, Channels>;
  using First = FirstPass<Input, Channels>;
  using Tile::chunk, Tile::chunks, Tile::clean_values, Tile::factor_of, Tile::find_scales;
  using Tile::find_value_scales, Tile::first_key, Tile::image_at, Tile::key_step, Tile::load_mean;
  using Tile::magnitude, Tile::pair, Tile::start, Tile::stride, Tile::take, Tile::threads;
  using Tile::unpack, Tile::word_at;
  static constexpr bool dependent = true;

  static QATTN_DEVICE void store_dots(const PlainRows& q, const PlainPlace& p,
                                      SharedAddress shared) {
    for (int row = isa::thread(); row < slot_tile; row += threads) {
      float sum = 0.0f;
#pragma unroll
      for (int c = 0; c < chunks; c += 4) {
        const Words4 w = isa::load_shared<Words4>(shared + image_at + 4 * (row * stride + c));
#pragma unroll
        for (int i = 0; i < 4; ++i) sum = formats::add_rn(sum, formats::float_of(w.w[i]));
      }
      isa::store_global(q.out.dot_mean + slot_of(q.out, p.head, p.tile) + row, sum);
    }
  }

  /// Rounded value as the low byte of a word. |x * factor| is at most 127 and some ulps, so nothing
  /// needs clamping.
  static QATTN_DEVICE std::uint32_t rounded(float x, float factor) {
    return formats::bits_of(formats::add_rn(formats::mul_rn(x, factor), 12582912.0f));
  }

  template <bool E4m3>
  static QATTN_DEVICE void encode_rows(const PlainRows& row, const PlainPlace& p,
                                       SharedAddress shared, const Words4 (&raw)[8],
                                       const float (&mean)[8]) {
    const std::int64_t slot = slot_of(row.out, p.head, p.tile) + first_key();
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

  static QATTN_DEVICE void run_rows(const PlainRows& row, const PlainPlace& p, bool e4m3, bool dots,
                                    SharedAddress shared, const Words4 (&raw)[8]) {
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
          find_scales(shared, p.count, row.shared, e4m3 ? formats::E4m3::max : formats::S8::max);
      store_row_scales(row.out, slot_of(row.out, p.head, p.tile), r);
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
  static QATTN_DEVICE void run_values(const PlainParams& params, const PlainPlace& p,
                                      SharedAddress shared, Words4 (&raw)[8]) {
    const TileOffsets at = tile_offsets(Channels);
    const std::int64_t index = p.head * (params.v_out.slots / slot_tile) + p.tile;
    std::uint8_t* record = params.v_out.tiles + index * at.bytes;
    const RowPair r = find_value_scales(params, p, shared, raw);
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

  /// Operand of a tile among those of the launch, whose number becomes the one within its operand.
  /// What the first pass read comes from its end, which that pass left in the L2, behind so many
  /// tiles of Q as take the time in which that pass ends.
  static QATTN_DEVICE int role_of_tile(const Params& params, int& number) {
    const int keys = params.count[1];
    const int values = params.v_shared == SharedScales::channel ? params.count[2] : 0;
    const int behind = number - params.lead, again = keys + values;
    if (behind >= 0 && behind < again) {
      const bool key = params.first_pass ? behind < keys : behind >= values;
      const int before = key == params.first_pass ? 0 : params.first_pass ? keys : values;
      const int at = behind - before;
      number = params.first_pass ? at : (key ? keys : values) - 1 - at;
      return key ? 1 : 2;
    }
    if (behind >= 0) number -= again;
    if (number < params.count[0]) return 0;
    number -= params.count[0];
    return 2;
  }

  /// Finds a tile and starts loading its rows. Called by all threads.
  static QATTN_DEVICE PlainPlace start_tile(const Params& params, int number,
                                            SharedAddress shared) {
    PlainPlace to;
    to.role = role_of_tile(params, number);
    const tile::Rows& rows = params.rows(to.role);
    to.tile = divide(number, rows.heads);
    to.head = number - to.tile * rows.heads;
    const TilePlace p = find_tile(rows, to.tile, to.head, threads, shared + word_at);
    to.b = p.b;
    if (p.used) {
      to.count = p.count();
      start(rows, p, shared);
    }
    isa::copy_async_commit();
    return to;
  }

  static QATTN_DEVICE void run_tile(const Params& params, const PlainPlace& p, SharedAddress shared,
                                    Words4 (&raw)[8]) {
    if (params.first_pass) {
      First::run(params, p, shared, raw);
      return;
    }
    const bool channels = params.v_shared == SharedScales::channel;
    const bool reads = p.role < 2 ? params.row[p.role].mean != nullptr : channels;
    // Only who reads a mean or V's scales needs the kernels before. The others read and write what
    // those do not touch.
    if (reads) isa::grid_dependency_wait();
    if (p.role < 2) {
      const bool dots = p.role == 0 && params.row[0].out.dot_mean != nullptr;
      run_rows(params.row[p.role], p, params.e4m3, dots, shared, raw);
    } else if (channels) {
      run_values<true>(params, p, shared, raw);
    } else {
      run_values<false>(params, p, shared, raw);
    }
  }

  static QATTN_DEVICE void run(const Params& params) {
    isa::grid_dependency_launch();
    const SharedAddress shared = isa::shared_base();
    int number = isa::block().x;  // there are no more blocks than tiles
    PlainPlace next = start_tile(params, number, shared);
    while (number < params.tiles) {
      const PlainPlace p = next;
      Words4 raw[8];
      if (p.count > 0) take(shared, raw);
      isa::sync_threads();  // the tile before and what was found out for this one share memory
      // Behind the last there may be less than a grid to 2^31.
      const bool more = params.tiles - number > isa::grid().x;
      number = more ? number + isa::grid().x : params.tiles;
      if (more) next = start_tile(params, number, shared);
      if (p.count > 0) run_tile(params, p, shared, raw);
    }
    isa::grid_dependency_wait();  // so that this kernel's end is that of the chain
  }
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
