// Encoding without detours: 16-bit rows in 16-byte pieces to s8 or e4m3 with a scale per token or
// per tile of 64, V in s8 per token and in e4m3 per channel, K less its mean. One block a tile; Q,
// K and V in one launch, which makes the pass before that for K's mean and V's scales, too.
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
  using Tile::first_key, Tile::image_at, Tile::key_step, Tile::load, Tile::load_mean;
  using Tile::load_values, Tile::magnitude, Tile::pair, Tile::stride, Tile::threads;
  using Tile::unpack, Tile::word_at;
  static constexpr bool dependent = true;

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

  /// Rounded value as the low byte of a word. |x * factor| is at most 127 and some ulps, so nothing
  /// needs clamping.
  static QATTN_DEVICE std::uint32_t rounded(float x, float factor) {
    return formats::bits_of(formats::add_rn(formats::mul_rn(x, factor), 12582912.0f));
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

  /// What a block does: which pass over which operand, in which turn, and its number there. The
  /// second pass of a turn comes after the first one of the next turn and after its own blocks of
  /// Q, so that nobody waits long, while the tokens are still in the L2. Blocks wait for those with
  /// lower numbers only. K and V come from their ends, which were read last.
  struct Work {
    bool first = false;
    int role = 0, turn = 0, block = 0;
  };
  static QATTN_DEVICE Work work_of_block(const Params& params, int block) {
    const int(&n)[3] = params.blocks;
    const int keys = params.twice[1] ? n[1] : 0, firsts = keys + (params.twice[2] ? n[2] : 0);
    Work w;
    w.first = block < firsts;
    if (!w.first) {
      block -= firsts;
      const int turn_blocks = firsts + n[0] + n[1] + n[2];
      w.turn = divide(block, turn_blocks);
      block -= w.turn * turn_blocks;
      if (w.turn + 1 < params.turns) {
        w.first = block < firsts;
        if (w.first) ++w.turn;
        if (!w.first) block -= firsts;
      }
    }
    if (w.first) {
      w.role = block < keys ? 1 : 2;
      w.block = w.role == 1 ? block : block - keys;
    } else if (block < n[0]) {
      w.block = block;
    } else if (block < n[0] + n[2]) {
      w.role = 2;
      w.block = n[0] + n[2] - 1 - block;
    } else {
      w.role = 1;
      w.block = n[0] + n[2] + n[1] - 1 - block;
    }
    return w;
  }

  static QATTN_DEVICE void encode(const Params& params, int role, const TilePlace& p,
                                  SharedAddress shared) {
    const bool dots = role == 0 && params.row[0].out.dot_mean != nullptr;
    const bool reads =
        role < 2 ? params.row[role].mean != nullptr : params.v_shared == SharedScales::channel;
    // Only who reads a mean or V's scales needs the kernels before. The others read and write what
    // those do not touch, and wait when they are done, so that this kernel's end is that of the
    // chain.
    if (reads) {
      isa::grid_dependency_wait();
      const int of = role == 2 ? 2 : 1;
      if (params.twice[of]) {
        First::await(params, of, p.b, role == 0 ? p.head / params.row[0].heads_per_mean : p.head);
      }
    }
    if (role < 2) {
      run_rows(params.row[role], p, params.e4m3, dots, shared);
    } else if (params.v_shared == SharedScales::channel) {
      run_values<true>(params, p, shared);
    } else {
      run_values<false>(params, p, shared);
    }
  }

  static QATTN_DEVICE void run(const Params& params) {
    isa::grid_dependency_launch();
    const SharedAddress shared = isa::shared_base();
    const Work w = work_of_block(params, isa::block().x);
    const tile::Rows& rows = w.role == 2 ? params.v : params.row[w.role].rows;
    const int heads = params.heads[w.role];
    const int tile = divide(w.block, heads), head = w.turn * heads + w.block - tile * heads;
    const TilePlace p = find_tile(rows, tile, head, threads, shared + word_at);
    if (p.used && w.first) First::run(params, w.role, p, shared);
    if (p.used && !w.first) encode(params, w.role, p, shared);
    isa::grid_dependency_wait();  // also behind the first: to remember it costs a register too many
  }
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
