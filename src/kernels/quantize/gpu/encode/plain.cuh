// Encoding without detours: 16-bit rows in 16-byte pieces to s8 or e4m3 with a scale per token or
// per tile of 64, V in s8 per token and in e4m3 per channel, K less its mean. One block a tile; Q,
// K and V in one launch. The same kernel makes the pass before it for K's mean and V's scales.
#pragma once

#include "kernels/quantize/gpu/encode/first.cuh"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

template <isa::Element Input, int Channels>
struct EncodePlain {
  using Params = PlainParams;
  using Tile = PlainTile<Input, Channels>;
  using First = FirstPass<Input, Channels>;
  static constexpr int threads = Tile::threads, min_blocks = Tile::min_blocks;
  static constexpr int shared_bytes = Tile::shared_bytes;
  static constexpr bool dependent = true;

  static QATTN_DEVICE void store_dots(const PlainRows& q, const TilePlace& p,
                                      SharedAddress shared) {
    for (int row = isa::thread(); row < slot_tile; row += threads) {
      float sum = 0.0f;
#pragma unroll
      for (int c = 0; c < Tile::chunks; c += 4) {
        const Words4 w =
            isa::load_shared<Words4>(shared + Tile::image_at + 4 * (row * Tile::stride + c));
#pragma unroll
        for (int i = 0; i < 4; ++i) sum = formats::add_rn(sum, formats::float_of(w.w[i]));
      }
      isa::store_global(q.out.dot_mean + slot_of(q.out, p) + row, sum);
    }
  }

  /// Codes of a thread's rows: code(raw, 1 / scale).
  template <class Code>
  static QATTN_DEVICE void encode_rows(const PlainRows& row, const TilePlace& p,
                                       SharedAddress shared, const Words4 (&raw)[8], Code code) {
    const std::int64_t slot = slot_of(row.out, p) + Tile::first_key();
    std::uint8_t* out = row.out.codes + slot * Channels + Tile::chunk() * chunk_channels;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float factor = Tile::factor_of(shared, Tile::first_key() + Tile::key_step(i));
      isa::store_global(reinterpret_cast<Words2*>(out + Tile::key_step(i) * Channels),
                        code(raw[i], factor));
    }
  }

  static QATTN_DEVICE bool is_loud(const PlainRows& row, const TilePlace& p) {
    const int heads = row.rows.heads / row.heads_per_mean, head = p.head / row.heads_per_mean;
    return row.factors != nullptr && isa::load_global(row.loud + p.b * heads + head) != 0;
  }
  /// What balances this thread's channels.
  static QATTN_DEVICE void load_times(const PlainRows& row, const TilePlace& p, float (&times)[8]) {
    const int heads = row.rows.heads / row.heads_per_mean, head = p.head / row.heads_per_mean;
    Tile::load_mean(row.factors, p.b, 2 * heads, 2 * head, times);
  }

  template <class Scales>
  static QATTN_DEVICE void run_rows(const PlainRows& row, const TilePlace& p, bool e4m3, bool dots,
                                    SharedAddress shared, Scales& scales) {
    const bool loud = is_loud(row, p);
    Words4 raw[8];
    Tile::load(row.rows, p, shared, raw);
    float mean[8] = {};
    const bool has_mean = row.mean != nullptr;
    if (has_mean) {
      const int head = p.head / row.heads_per_mean;
      Tile::load_mean(row.mean, p.b, row.rows.heads / row.heads_per_mean, head, mean);
    }
    const SharedAddress mine = shared + 4 * (Tile::first_key() * Tile::stride + Tile::chunk());
    if (dots) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const isa::Pair x = Tile::unpack(raw[i].w[j]);
          sum = formats::add_rn(sum, formats::mul_rn(x.lo, mean[2 * j]));
          sum = formats::add_rn(sum, formats::mul_rn(x.hi, mean[2 * j + 1]));
        }
        isa::store_shared(mine + Tile::image_at + 4 * Tile::key_step(i) * Tile::stride, sum);
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) mean[i] = 0.0f;  // Q's is not subtracted
    }
    if (loud) {
      float times[8];
      load_times(row, p, times);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        isa::store_shared(mine + 4 * Tile::key_step(i) * Tile::stride,
                          Tile::magnitude(raw[i], mean, times));
      }
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const bool less = has_mean && !dots;
        isa::store_shared(mine + 4 * Tile::key_step(i) * Tile::stride,
                          less ? Tile::magnitude(raw[i], mean) : Tile::magnitude(raw[i]));
      }
    }
    isa::sync_threads();
    if (isa::warp() == 0) {
      const RowPair r =
          scales.find(shared, p, row.shared, e4m3 ? formats::E4m3::max : formats::S8::max);
      store_row_scales(row.out, p, r);
    }
    if (dots) store_dots(row, p, shared);
    isa::sync_threads();
    if (loud) {
      float times[8];  // again, or they would be kept in registers that there are not
      load_times(row, p, times);
      encode_rows(row, p, shared, raw, [&](const Words4& x, float factor) {
        return Tile::encoded(x, factor, mean, times);
      });
    } else if (e4m3) {
      encode_rows(row, p, shared, raw, [&](const Words4& x, float factor) {
        return scales.template row<true>(x, factor, mean);
      });
    } else {
      encode_rows(row, p, shared, raw, [&](const Words4& x, float factor) {
        return scales.template row<false>(x, factor, mean);
      });
    }
  }

  /// Codes of a thread's eight keys, in the low bytes or four to a word as they come.
  template <class Scales>
  static QATTN_DEVICE Words2 token_codes(const float (&x)[8], const float (&factor)[8],
                                         Scales& scales) {
    std::uint32_t code[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) code[i] = scales.value(x[i], factor[i]);
    return {{low_bytes(code[0], code[1], code[2], code[3]),
             low_bytes(code[4], code[5], code[6], code[7])}};
  }
  template <class Scales>
  static QATTN_DEVICE Words2 channel_codes(const float (&x)[8], float factor, Scales& scales) {
    std::uint32_t pair[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // -0 becomes +0, as on the CPU
      pair[i] = isa::pack_e4m3(scales.scaled(formats::add_rn(x[2 * i], 0.0f), factor),
                               scales.scaled(formats::add_rn(x[2 * i + 1], 0.0f), factor));
    }
    return {{pair[0] | pair[1] << 16, pair[2] | pair[3] << 16}};
  }

  template <bool E4m3, class Scales>
  static QATTN_DEVICE void run_values(const PlainParams& params, const TilePlace& p,
                                      SharedAddress shared, Scales& scales) {
    std::uint8_t* record = record_of(params.v_out, p, Channels);
    Words4 raw[8];
    const RowPair r = Tile::load_values(params, p, shared, raw, scales);
    const SharedAddress image = shared + Tile::image_at;
    if (isa::warp() == 0) {
      constexpr auto kind = E4m3 ? ValueScales::floating : ValueScales::integer_token;
      constexpr std::uint32_t one = 0x38;  // in e4m3
      store_value_tables(record, Channels, image + Tile::chunks * image_stride, r, kind, one);
    }
    isa::sync_threads();
    float factor[8], scale[8];
    Tile::clean_values(shared, raw, factor);
    if constexpr (E4m3) {
      Tile::load_mean(params.v_out.channel_scale, p.b, params.v.heads, p.head, scale);
    }
    const SharedAddress to =
        image + Tile::chunk() * image_stride + Tile::pair() / 2 * 16 + Tile::pair() % 2 * 8;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float even[8], odd[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const isa::Pair x = Tile::unpack(raw[i].w[j]);
        even[i] = x.lo;
        odd[i] = x.hi;
      }
      Words2 code[2];
      if constexpr (E4m3) {
        code[0] = channel_codes(even, code_factor(scale[2 * j] > 0.0f, scale[2 * j]), scales);
        code[1] =
            channel_codes(odd, code_factor(scale[2 * j + 1] > 0.0f, scale[2 * j + 1]), scales);
      } else {
        code[0] = token_codes(even, factor, scales);
        code[1] = token_codes(odd, factor, scales);
      }
      isa::store_shared(to + 2 * j * slot_tile, code[0]);
      isa::store_shared(to + (2 * j + 1) * slot_tile, code[1]);
    }
    isa::sync_threads();
    store_value_image<Channels, threads>(record, image, !E4m3);
  }

  /// Operand of a block, whose number becomes the one within its operand. What the first pass read
  /// comes from its end, which that pass left in the L2, behind so many blocks of Q and V as fill
  /// the GPU while that pass ends.
  static QATTN_DEVICE int role_of_block(const PlainParams& params, int& block) {
    const int keys = params.blocks[1];
    const int values = params.v_shared == SharedScales::channel ? params.blocks[2] : 0;
    const int behind = block - params.lead, again = keys + values;
    if (behind >= 0 && behind < again) {
      if (params.first_pass) {
        const bool key = behind < keys;
        block = key ? behind : behind - keys;
        return key ? 1 : 2;
      }
      block = behind < values ? values - 1 - behind : again - 1 - behind;
      return behind < values ? 2 : 1;
    }
    if (behind >= 0) block -= again;
    const int first = params.values_lead ? 2 : 0;
    if (block < params.blocks[first]) return first;
    block -= params.blocks[first];
    return 2 - first;
  }

  template <class Scales>
  static QATTN_DEVICE void encode(const PlainParams& params, int role, const TilePlace& p,
                                  SharedAddress shared, Scales& scales) {
    if (role < 2) {
      const bool dots = role == 0 && params.row[0].out.dot_mean != nullptr;
      run_rows(params.row[role], p, params.e4m3, dots, shared, scales);
    } else if (params.v_shared == SharedScales::channel) {
      run_values<true>(params, p, shared, scales);
    } else {
      run_values<false>(params, p, shared, scales);
    }
  }

  /// The tile that block `block` of a role has; what belongs to tiles without tokens is stored.
  static QATTN_DEVICE TilePlace begin_tile(const PlainParams& params, int role, int block,
                                           SharedAddress shared) {
    const tile::Rows& rows = params.rows(role);
    const int tile = divide(block, rows.heads), head = block - tile * rows.heads;
    const TilePlace p = find_tile(rows, tile, head, threads, shared + Tile::word_at);
    if (!params.first_pass) {
      const bool last = block == params.blocks[role] - 1;
      role < 2 ? store_no_rows(params.row[role].out, p, last)
               : store_no_values<Channels>(params.v_out, p, last);
    }
    return p;
  }

  static QATTN_DEVICE void run(const Params& params) {
    isa::grid_dependency_launch();
    const SharedAddress shared = isa::shared_base();
    int block = isa::block().x;
    const int role = role_of_block(params, block);
    // Only who reads a mean, factors or V's scales needs the kernels before. The others read and
    // write what those do not touch, and wait when they are done, so that this kernel's end is that
    // of the chain.
    const bool reads = role < 2
                           ? params.row[role].mean != nullptr || params.row[role].factors != nullptr
                           : params.v_shared == SharedScales::channel;
    if (reads && !params.first_pass) isa::grid_dependency_wait();
    const TilePlace p = begin_tile(params, role, block, shared);
    typename Tile::OwnScales scales;
    if (p.used) {
      params.first_pass ? First::run(params, role, p, shared)
                        : encode(params, role, p, shared, scales);
    }
    isa::grid_dependency_wait();  // also behind the first: to remember it costs a register too many
  }
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
