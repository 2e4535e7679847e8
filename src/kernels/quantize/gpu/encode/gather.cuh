// Operands that come quantised in formats with built-in scales: their codes and scales go, as they
// are, from where the caller has them to where attention kernels read them. What EncodeMicro makes
// of the numbers lies there bit for bit, if quantize() made these codes of them.
//
// A scale that is none (NaN, or a negative one) makes the tokens bad that have a code under it, a
// code of NaN its token, and so does a product of the two beyond float32, as on CPUs. A second
// level that is none makes all of its tokens bad. Bad tokens have codes of zero.
#pragma once

#include "kernels/quantize/gpu/encode/micro.cuh"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

/// `grouping`: of the second level of nvfp4, which is `given` there.
struct GatherRole : GeneralRole {
  ScaleGroups groups;                    ///< of the built-in scales
  const std::uint8_t* scales = nullptr;  ///< with these strides
  std::int64_t stride[4] = {};
  std::int64_t entries = 0;  ///< along the third dimension; packed sequences may want more
};

struct GatherParams {
  GatherRole role[3];
  PreparedTiles v_out;
  std::int64_t blocks[3] = {};
};

template <int Channels>
struct GatherMicro {
  using Params = GatherParams;
  using MicroEncoder = EncodeMicro<Channels>;
  using General = EncodeGeneral<Channels>;
  using Values = typename General::Values;
  using Work = typename General::Work;
  static constexpr int threads = MicroEncoder::threads, min_blocks = MicroEncoder::min_blocks;
  static constexpr int shared_bytes = MicroEncoder::shared_bytes;
  static constexpr bool dependent = true;
  static constexpr int chunks = General::chunks, factor_at = General::factor_at;
  static constexpr int stride = General::stride;

  /// Scales that belong to a thread's codes: of its four rows, or of its eight channels of V.
  struct Scales {
    std::uint8_t code[8] = {};
    bool bad[8] = {};
  };

  /// Does the row's chunk have channels?
  static QATTN_DEVICE bool has_channels(const Work& w) {
    return w.chunk() * chunk_channels < w.role.rows.channels;
  }

  /// Eight codes of each row; zeros where there are none, as behind the row's end.
  template <class Format>
  static QATTN_DEVICE void load_codes(const Work& w, const std::int64_t (&at)[4], Values& v) {
    const auto* data = static_cast<const std::uint8_t*>(w.role.rows.data);
    const int left = w.role.rows.channels - w.chunk() * chunk_channels;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      v.code[i][0] = v.code[i][1] = 0;
      if (!v.here[i] || !has_channels(w)) continue;
      const std::uint8_t* from = data + at[i] * Format::bits / 8;
      if (!w.role.aligned) {
#pragma unroll
        for (int n = 0; n < Format::bits; ++n) {
          if (8 * n >= left * Format::bits) continue;
          const std::uint32_t byte = isa::load_global(from + n);
          v.code[i][n / 4] |= byte << 8 * (n % 4);
        }
      } else if constexpr (Format::bits == 8) {
        const Words2 c = isa::load_global(reinterpret_cast<const Words2*>(from));
        v.code[i][0] = c.w[0], v.code[i][1] = c.w[1];
      } else {
        v.code[i][0] = isa::load_global(reinterpret_cast<const std::uint32_t*>(from));
      }
    }
  }

  /// The scale of a token's channel, as products take it, which know no sign; 0 where it is none.
  template <class Format>
  static QATTN_DEVICE std::uint8_t load_scale(const GatherRole& role, const TilePlace& p,
                                              std::int64_t s, int channel, bool& bad) {
    std::int64_t outer, token;
    bad = !find_scales(role.rows, p.b, s, outer, token);
    const bool values = role.groups.role == Role::v;
    const bool paged = role.rows.page_table != nullptr;
    // The host cannot see how long packed sequences are.
    bad |= (values ? token / Format::group : token) >= role.entries;
    if (bad) return 0;
    const std::uint8_t code = isa::load_global(
        role.scales + role.groups.offset(role.stride, paged, outer, p.head, token, channel));
    if constexpr (Format::scale_one == 0x7f) {  // powers of two
      bad = code == formats::Ue8m0::nan;
    } else {
      bad = code > 0x80 || code == formats::E4m3::nan;
      if (code == 0x80) return 0;
    }
    return bad ? 0 : code;
  }

  template <class Format>
  static QATTN_DEVICE void load_row_scales(const GatherRole& role, const Work& w, const Values& v,
                                           Scales& s) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (!v.here[i] || !has_channels(w)) continue;
      s.code[i] =
          load_scale<Format>(role, w.place, w.place.first + w.first_key() + General::key_step(i),
                             w.chunk() * chunk_channels, s.bad[i]);
    }
  }

  /// V: a thread's keys are of one group.
  template <class Format>
  static QATTN_DEVICE void load_value_scales(const GatherRole& role, const Work& w, Scales& s) {
    const int first = w.first_key() / Format::group * Format::group;
    if (first >= w.place.count() || !has_channels(w)) return;
#pragma unroll
    for (int j = 0; j < chunk_channels; ++j) {
      if (w.chunk() * chunk_channels + j >= w.role.rows.channels) continue;
      s.code[j] = load_scale<Format>(role, w.place, w.place.first + first,
                                     w.chunk() * chunk_channels + j, s.bad[j]);
    }
  }

  template <class Format>
  static QATTN_DEVICE std::uint8_t code_of(const Values& v, int i, int j) {
    constexpr int bits = Format::bits, each = 32 / bits;
    const std::uint32_t word = v.code[i][j / each] >> bits * (j % each);
    return static_cast<std::uint8_t>(word & ((1u << bits) - 1));
  }
  template <class Format>
  static QATTN_DEVICE float decode(std::uint8_t code, std::uint8_t scale) {
    if constexpr (Format::bits == 8) return formats::decode_mxfp8(code, scale);
    if constexpr (Format::group == formats::kMxGroup) return formats::decode_mxfp4(code, scale);
    return formats::decode_nvfp4(code, scale, 1.0f);
  }

  /// Is a code of a row NaN, or a number beyond float32?
  template <class Format>
  static QATTN_DEVICE bool has_bad_code(const Values& v, int i, const std::uint8_t (&scale)[8]) {
    if constexpr (Format::scale_one != 0x7f) return false;
    bool bad = false, large = false;
    if constexpr (Format::bits == 8) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        bad |= (((v.code[i][n] & 0x7f7f7f7f) + 0x01010101) & 0x80808080) != 0;
      }
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) large |= scale[j] >= 247;  // 2^120 times up to 448
    if (!large) return bad;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      bad |= !formats::is_finite(decode<Format>(code_of<Format>(v, i, j), scale[j]));
    }
    return bad;
  }

  /// By all threads: which of their rows are bad, to shared memory, where find_rows() looks; K's
  /// mean times the rows of Q.
  template <class Format>
  static QATTN_DEVICE void judge(const Work& w, Values& v, const Scales& s,
                                 const bool (&missing)[4]) {
    const SharedAddress mine = w.shared + 4 * (w.first_key() * stride + w.chunk());
    bool spoiled = false;
#pragma unroll
    for (int j = 0; j < 8; ++j) spoiled |= w.is_value() && s.bad[j];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      std::uint8_t scale[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) scale[j] = w.is_value() ? s.code[j] : s.code[i];
      const bool none = w.is_value() ? spoiled : s.bad[i];
      const bool bad = missing[i] || none || has_bad_code<Format>(v, i, scale);
      isa::store_shared(mine + 4 * General::key_step(i) * stride, bad ? formats::kInfBits : 0u);
      if (w.role.dot == nullptr) continue;
#pragma unroll
      for (int j = 0; j < 8; ++j) v.x[i][j] = decode<Format>(code_of<Format>(v, i, j), scale[j]);
    }
    if (w.role.dot != nullptr) General::multiply_mean(w, v);
  }

  template <class Format>
  static QATTN_DEVICE void store_rows(const Work& w, const Values& v, const Scales& s) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int key = w.first_key() + General::key_step(i);
      const bool coded = MicroEncoder::has_codes(w, key);
      std::uint32_t code[Format::bits / 4];
#pragma unroll
      for (int n = 0; n < Format::bits / 4; ++n) code[n] = coded ? v.code[i][n] : 0;
      MicroEncoder::template store_codes<Format>(w, key, code, coded ? s.code[i] : std::uint8_t{0});
    }
  }

  template <class Format>
  static QATTN_DEVICE void store_values(const Work& w, Values& v, const Scales& s) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (!MicroEncoder::has_codes(w, w.first_key() + General::key_step(i)))
        v.code[i][0] = v.code[i][1] = 0;
    }
    const auto place = MicroEncoder::template value_place<Format>(w);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      std::uint32_t pair[2];
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        pair[n] = std::uint32_t{code_of<Format>(v, 2 * n, j)} |
                  std::uint32_t{code_of<Format>(v, 2 * n + 1, j)} << Format::bits;
      }
      MicroEncoder::template store_channel<Format>(place, j, pair[0], pair[1], s.code[j]);
    }
    isa::sync_threads();
    MicroEncoder::template store_image<Format>(w);
  }

  template <class Format>
  static QATTN_DEVICE void run_tile(const GatherRole& role, const Work& w) {
    Values v;
    std::int64_t at[4];
    bool missing[4];
    General::locate(w, v, at, missing);
    load_codes<Format>(w, at, v);
    Scales s;
    if (w.is_value()) {
      load_value_scales<Format>(role, w, s);
    } else {
      load_row_scales<Format>(role, w, v, s);
    }
    judge<Format>(w, v, s, missing);
    isa::sync_threads();
    if (isa::warp() == 0) {
      MicroEncoder::template store_facts<Format>(
          w, MicroEncoder::find_rows(w, [&](int row) {
            const bool given = role.grouping.given != nullptr && row < w.place.count();
            return given ? role.grouping.given_scale(role.rows, w.place.b, w.place.head,
                                                     w.place.first + row, 0)
                         : 1.0f;
          }));
    }
    if (w.role.dot != nullptr) General::store_dots(w);
    isa::sync_threads();
    w.is_value() ? store_values<Format>(w, v, s) : store_rows<Format>(w, v, s);
  }

  static QATTN_DEVICE void run(const Params& params) {
    isa::grid_dependency_launch();
    isa::grid_dependency_wait();
    const SharedAddress shared = isa::shared_base();
    const auto [i, p, last] = General::find_block(params, shared);
    MicroEncoder::store_nothing(params, i, p, last);
    if (!p.used) return;
    const GatherRole& role = params.role[i];
    const Work w{role, params.v_out, p, shared};
    with_micro(role.micro, [&](auto format) { run_tile<decltype(format)>(role, w); });
  }
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
