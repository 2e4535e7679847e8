// Codes of formats with built-in scales (formats/micro.hpp): of Q and K in groups of channels, of V
// in groups of keys, with everything that EncodeGeneral does before it. That kernel's pass for
// maxima finds the second level of nvfp4.
#pragma once

#include "kernels/quantize/gpu/encode/general.cuh"
#include "kernels/quantize/gpu/encode/mean_scores.cuh"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

/// A format with built-in scales.
template <Micro Format>
struct MicroFormat {
  static constexpr int bits = Format == Micro::mxfp8 ? 8 : 4;
  static constexpr int group = Format == Micro::nvfp4 ? formats::kNvfp4Group : formats::kMxGroup;
  static constexpr std::uint32_t one = Format == Micro::mxfp8 ? 0x38 : 2;  ///< the code of 1
  static constexpr std::uint8_t scale_one = Format == Micro::nvfp4 ? 0x38 : 0x7f;
  /// Two codes, and those of a channel of a tile of V.
  using Pair = std::conditional_t<bits == 8, std::uint16_t, std::uint8_t>;
  static constexpr int row = slot_tile * bits / 8;

  static QATTN_DEVICE std::uint32_t pair(float low, float high) {
    if constexpr (bits == 8) return isa::pack_e4m3(low, high);
    return static_cast<std::uint32_t>(formats::E2m1::encode(low) | formats::E2m1::encode(high)
                                                                       << 4);
  }
  static QATTN_DEVICE formats::GroupScale scale(float amax, float global) {
    return group_scale(Format, amax, global);
  }
};

/// Calls body(format).
template <class Body>
QATTN_DEVICE void with_micro(Micro format, Body body) {
  if (format == Micro::nvfp4) {
    body(MicroFormat<Micro::nvfp4>{});
  } else if (format == Micro::mxfp8) {
    body(MicroFormat<Micro::mxfp8>{});
  } else {
    body(MicroFormat<Micro::mxfp4>{});
  }
}

template <int Channels>
struct EncodeMicro {
  using Params = GeneralParams;
  using General = EncodeGeneral<Channels>;
  using Values = typename General::Values;
  using Work = typename General::Work;
  static constexpr int threads = General::threads, min_blocks = General::min_blocks;
  static constexpr int chunks = General::chunks, factor_at = General::factor_at;
  static constexpr int image_at = General::image_at, word_at = General::word_at;
  static constexpr bool dependent = true;
  /// Behind the image of V's codes: what lies between them and the tables of a tile. Over the
  /// image, before it is made: maxima of four keys, [16][Channels].
  static constexpr int tail_at = image_at + chunks * image_stride;
  static constexpr int tail_bytes(int bits, int group) {
    const TileOffsets at = tile_offsets(Channels, bits, group);
    return at.log - at.extra;
  }
  static constexpr int shared_bytes =
      tail_at + (tail_bytes(8, 32) > tail_bytes(4, 16) ? tail_bytes(8, 32) : tail_bytes(4, 16));
  static_assert(16 * 4 * Channels <= chunks * image_stride);

  static QATTN_DEVICE TileOffsets offsets(const PreparedTiles& out) {
    return tile_offsets(Channels, out.bits, out.group);
  }
  static QATTN_DEVICE std::uint8_t* record_at(const PreparedTiles& out, const TilePlace& p) {
    return out.tiles + (p.head * (out.slots / slot_tile) + p.tile) * offsets(out).bytes;
  }

  /// The second level of the tile's head and sequence.
  static QATTN_DEVICE float global_scale(const Work& w) {
    if (w.role.micro != Micro::nvfp4) return 1.0f;
    const TilePlace& p = w.place;
    return row_global(w.role.grouping, w.role.rows, p.span, p.b, p.head);
  }

  /// By the first warp: exists, bad and scale of the rows, whose second level is global_of(row);
  /// shared memory says which have codes.
  template <class GlobalOf>
  static QATTN_DEVICE RowPair find_rows(const Work& w, GlobalOf global_of) {
    RowPair r;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = isa::lane() + 32 * i;
      const float global = global_of(row);
      r.exists[i] = row < w.place.count();
      r.bad[i] = r.exists[i] && !formats::is_finite(General::row_amax(w.shared, row));
      r.bad[i] |= !formats::is_finite(global);
      r.scale[i] = w.is_value() ? 1.0f : r.bad[i] ? formats::quiet_nan() : global;
      isa::store_shared(w.shared + factor_at + 4 * row, r.exists[i] && !r.bad[i] ? 1.0f : 0.0f);
    }
    return r;
  }

  static QATTN_DEVICE bool has_codes(const Work& w, int key) {
    return isa::load_shared<float>(w.shared + factor_at + 4 * key) != 0.0f;
  }

  /// Q and K: groups are channels of neighbouring lanes.
  template <class Format>
  static QATTN_DEVICE void encode_rows(const Work& w, const Values& v, float global) {
    constexpr int lanes = Format::group / chunk_channels;
    constexpr int words = Format::bits / 4, pair_bits = 2 * Format::bits;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int key = w.first_key() + General::key_step(i);
      std::uint32_t top = 0;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const std::uint32_t m = formats::magnitude_bits(v.x[i][j]);
        top = top > m ? top : m;
      }
#pragma unroll
      for (int mask = 1; mask < lanes; mask *= 2) {
        const std::uint32_t other = isa::shuffle_xor(top, mask);
        top = top > other ? top : other;
      }
      const formats::GroupScale scale = Format::scale(formats::float_of(top), global);
      const bool coded = has_codes(w, key), usable = coded && scale.inverse > 0.0f;
      std::uint32_t code[words] = {};
#pragma unroll
      for (int j = 0; j < 8; j += 2) {
        const float y0 = usable ? formats::mul_rn(v.x[i][j], scale.inverse) : 0.0f;
        const float y1 = usable ? formats::mul_rn(v.x[i][j + 1], scale.inverse) : 0.0f;
        code[j * words / 8] |= Format::pair(y0, y1) << j / 2 * pair_bits % 32;
      }
      store_codes<Format>(w, key, code, coded ? scale.code : std::uint8_t{0});
    }
  }

  /// Q and K: eight codes of a row and, by a group's first lane, its scale.
  template <class Format>
  static QATTN_DEVICE void store_codes(const Work& w, int key,
                                       const std::uint32_t (&code)[Format::bits / 4],
                                       std::uint8_t scale) {
    constexpr int lanes = Format::group / chunk_channels, groups = Channels / Format::group;
    const PreparedRows& out = w.role.out;
    const bool swapped = w.role.order == KeyOrder::fp4;
    const int place = swapped ? key / 32 * 32 + fp4_position(key % 32) : key;
    const std::int64_t slot = slot_of(out, w.place) + place;
    std::uint8_t* to = out.codes + slot * out.row_bytes + w.chunk() * Format::bits;
    if constexpr (Format::bits == 8) {
      isa::store_global(reinterpret_cast<Words2*>(to), Words2{{code[0], code[1]}});
    } else {
      isa::store_global(reinterpret_cast<std::uint32_t*>(to), code[0]);
    }
    if (w.chunk() % lanes != 0) return;
    std::uint8_t* scales = out.group_scale + slot * out.group_bytes + w.chunk() / lanes;
    isa::store_global(scales, scale);
    if (groups < 4) isa::store_global(scales + groups, std::uint8_t{0});  // two are a word's half
  }

  /// V: which of a thread's four keys their group's scale comes from: those that are seen plainly,
  /// or in a group without any all.
  template <class Format>
  static QATTN_DEVICE void find_sharing(const Work& w, bool (&joins)[4]) {
    const TileSight sight = sight_of(w.role.seen, w.place);
    std::uint32_t plainly = w.first_key() < 32 ? sight.plainly[0] : sight.plainly[1];
    if (Format::group == 16) plainly = plainly >> w.first_key() % 32 / 16 * 16 & 0xffffu;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      joins[i] = plainly == 0 || sight.shares(w.first_key() + General::key_step(i));
    }
  }

  /// V: the largest magnitudes of a thread's channels in its group of keys. By all threads.
  template <class Format>
  static QATTN_DEVICE void group_maxima(const Work& w, const Values& v, float (&amax)[8]) {
    constexpr int quads = Format::group / 4;
    const int quad = isa::thread() / chunks;
    const SharedAddress mine = w.shared + image_at + 32 * w.chunk();
    bool joins[4];
    find_sharing<Format>(w, joins);
    std::uint32_t top[8] = {};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const std::uint32_t m = joins[i] ? formats::magnitude_bits(v.x[i][j]) : 0;
        top[j] = top[j] > m ? top[j] : m;
      }
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      isa::store_shared(mine + 4 * Channels * quad + 16 * n,
                        Words4{{top[4 * n], top[4 * n + 1], top[4 * n + 2], top[4 * n + 3]}});
    }
    isa::sync_threads();
#pragma unroll
    for (int q = 0; q < quads; ++q) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const SharedAddress at = mine + 4 * Channels * (quad / quads * quads + q) + 16 * n;
        const auto other = isa::load_shared<Words4>(at);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          std::uint32_t& t = top[4 * n + j];
          t = t > other.w[j] ? t : other.w[j];
        }
      }
    }
    isa::sync_threads();
#pragma unroll
    for (int j = 0; j < 8; ++j) amax[j] = formats::float_of(top[j]);
  }

  /// V: codes to the image in shared memory, scales behind it. Keys without codes are zeros.
  template <class Format>
  static QATTN_DEVICE void encode_values(const Work& w, Values& v, float global) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (has_codes(w, w.first_key() + General::key_step(i))) continue;
#pragma unroll
      for (int j = 0; j < 8; ++j) v.x[i][j] = 0.0f;
    }
    float amax[8];
    group_maxima<Format>(w, v, amax);
    const ValuePlace place = value_place<Format>(w);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const formats::GroupScale scale = Format::scale(amax[j], global);
      float y[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        // Keys that have no part in the scale go no further than those that have one.
        float x = v.x[i][j];
        x = x < -amax[j] ? -amax[j] : amax[j] < x ? amax[j] : x;
        y[i] = scale.inverse > 0.0f ? formats::mul_rn(x, scale.inverse) : 0.0f;
      }
      store_channel<Format>(place, j, Format::pair(y[0], y[1]), Format::pair(y[2], y[3]),
                            scale.code);
    }
  }

  /// V: where in shared memory a thread's codes go, of its first two keys and of the others, and
  /// the scales of its group. Of the first channel.
  struct ValuePlace {
    SharedAddress low, high, scales;
    bool first;  ///< of its group's threads
  };
  template <class Format>
  static QATTN_DEVICE ValuePlace value_place(const Work& w) {
    constexpr int quads = Format::group / 4, groups = slot_tile / Format::group;
    const int quad = isa::thread() / chunks;
    const bool natural = w.role.order == KeyOrder::fp4;
    const int low = (natural ? w.first_key() : 4 * quad) * Format::bits / 8;
    const int high = low + (natural ? 8 : 2) * Format::bits / 8;
    const SharedAddress image = w.shared + image_at + w.chunk() * image_bytes<Format>();
    const SharedAddress scales =
        w.shared + tail_at + 8 * Format::row + w.chunk() * chunk_channels * groups + quad / quads;
    return {image + low, image + high, scales, quad % quads == 0};
  }
  /// Pairs of codes of channel `j` of a thread.
  template <class Format>
  static QATTN_DEVICE void store_channel(const ValuePlace& to, int j, std::uint32_t low,
                                         std::uint32_t high, std::uint8_t scale) {
    using Pair = typename Format::Pair;
    isa::store_shared(to.low + j * Format::row, static_cast<Pair>(low));
    isa::store_shared(to.high + j * Format::row, static_cast<Pair>(high));
    constexpr int groups = slot_tile / Format::group;
    if (to.first) isa::store_shared(to.scales + j * groups, scale);
  }

  /// Bytes between the channel octets of V's image, which start in different banks.
  template <class Format>
  static constexpr int image_bytes() {
    return chunk_channels * Format::row + 16;
  }

  /// V: what lies behind the codes, but for their scales: to shared memory the rows that weigh P,
  /// with scales of 1; tables. By the first warp.
  template <class Format>
  static QATTN_DEVICE void store_tables(const Work& w, RowPair& r) {
    constexpr TileOffsets at = tile_offsets(Channels, Format::bits, Format::group);
    constexpr int groups = slot_tile / Format::group, ones = 8 * groups;
    static_assert(at.scales + Channels * groups + ones == at.log);
    const int lane = isa::lane();
    const SharedAddress extra = w.shared + tail_at, scales = extra + 8 * Format::row;
    if (w.role.seen.bits != nullptr) General::hide_values(sight_of(w.role.seen, w.place), r);
    const std::uint32_t exists[2] = {isa::ballot(r.exists[0]), isa::ballot(r.exists[1])};
    const bool any_bad = isa::any((r.exists[0] && r.bad[0]) || (r.exists[1] && r.bad[1]));
    for (int n = lane; n < Format::row / 2; n += 32) {
      isa::store_shared(extra + 16 * n, Words4{{0, 0, 0, 0}});
    }
    for (int n = lane; n < ones; n += 32) {
      isa::store_shared(scales + Channels * groups + n, Format::scale_one);
    }
    isa::sync_warp();
    const int place = 2 * lane;  // two of them are neighbouring keys in every order
    const int key = w.role.order == KeyOrder::fp4 ? place : place / 16 * 16 + p_key(place % 16);
    const std::uint32_t here = (key < 32 ? exists[0] : exists[1]) >> key % 32;
    const std::uint32_t pair = (here & 1) * Format::one | (here >> 1 & 1) * Format::one
                                                              << Format::bits;
    isa::store_shared(extra + lane * 2 * Format::bits / 8,
                      static_cast<typename Format::Pair>(pair));
    std::uint8_t* record = record_at(w.v_out, w.place);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float inverse = !r.exists[i] ? 0.0f : r.bad[i] ? formats::quiet_nan() : 1.0f;
      const int n = lane + 32 * i;
      isa::store_global(reinterpret_cast<float*>(record + at.log) + n, 0.0f);
      isa::store_global(reinterpret_cast<float*>(record + at.inverse) + n, inverse);
    }
    if (lane == 0) {
      const std::uint32_t flags = any_bad ? std::uint32_t{tile_has_bad} : 0u;
      isa::store_global(reinterpret_cast<Words4*>(record + at.flags), Words4{{flags, 0, 0, 0}});
    }
  }

  /// V: image and what stands behind it to the record. By all threads.
  template <class Format>
  static QATTN_DEVICE void store_image(const Work& w) {
    constexpr int pieces = Channels * Format::row / 16, octet = chunk_channels * Format::row / 16;
    constexpr int tail = tail_bytes(Format::bits, Format::group) / 16;
    auto* to = reinterpret_cast<Words4*>(record_at(w.v_out, w.place));
    for (int n = isa::thread(); n < pieces + tail; n += threads) {
      const SharedAddress from = n < pieces
                                     ? image_at + n / octet * image_bytes<Format>() + n % octet * 16
                                     : tail_at + (n - pieces) * 16;
      isa::store_global(to + n, isa::load_shared<Words4>(w.shared + from));
    }
  }

  /// What belongs to the rows of a tile. By the first warp.
  template <class Format>
  static QATTN_DEVICE void store_facts(const Work& w, RowPair r) {
    if (w.is_value()) {
      store_tables<Format>(w, r);
    } else {
      store_row_scales(w.role.out, w.place, r);
    }
  }

  template <class Format>
  static QATTN_DEVICE void run_tile(const Work& w, Values& v) {
    const float global = global_scale(w);
    isa::sync_threads();
    if (isa::warp() == 0) {
      store_facts<Format>(w, find_rows(w, [&](int) { return global; }));
    }
    if (w.role.dot != nullptr) General::store_dots(w);
    isa::sync_threads();
    if (!w.is_value()) {
      encode_rows<Format>(w, v, global);
      return;
    }
    encode_values<Format>(w, v, global);
    isa::sync_threads();
    store_image<Format>(w);
  }

  /// For slots without tokens.
  template <class AnyParams>
  static QATTN_DEVICE void store_nothing(const AnyParams& params, int role, const TilePlace& p,
                                         bool last) {
    if (role < 2) {
      store_no_rows(params.role[role].out, p, last);
    } else {
      store_no_values(record_at(params.v_out, p), offsets(params.v_out), p, last);
    }
  }

  static QATTN_DEVICE void run(const Params& params) {
    isa::grid_dependency_launch();
    isa::grid_dependency_wait();
    const SharedAddress shared = isa::shared_base();
    const auto [i, p, last] = General::find_block(params, shared);
    store_nothing(params, i, p, last);
    if (!p.used) return;
    const Work w{params.role[i], params.v_out, p, shared};
    Values v;
    General::load(w, v);
    General::transform(w, v);
    with_micro(w.role.micro, [&](auto format) { run_tile<decltype(format)>(w, v); });
  }
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
