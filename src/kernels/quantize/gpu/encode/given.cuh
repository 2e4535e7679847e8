// EncodePlain under scales that the caller gives: no maximum of a group is found, codes that do not
// fit are clipped, and counted if asked.
#pragma once

#include "kernels/quantize/gpu/encode/codes.cuh"
#include "kernels/quantize/gpu/encode/plain.cuh"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

struct GivenParams : PlainParams {
  Grouping grouping[3];              ///< of Q, K, V; those without given scales have own ones
  std::uint64_t* saturated[3] = {};  ///< counters of clipped codes, or null
};

template <isa::Element Input, int Channels>
struct EncodeGiven {
  using Params = GivenParams;
  using Plain = EncodePlain<Input, Channels>;
  using Tile = PlainTile<Input, Channels>;
  static constexpr int threads = Plain::threads, min_blocks = Plain::min_blocks;
  static constexpr int shared_bytes = Plain::shared_bytes;
  static constexpr bool dependent = true;

  /// As PlainTile::OwnScales.
  struct GivenScales {
    const Grouping& grouping;
    const tile::Rows& rows;
    bool counts;
    std::uint32_t clipped = 0;

    QATTN_DEVICE RowPair find(SharedAddress shared, const TilePlace& p, SharedScales scales,
                              float qmax) {
      // Scales of V's channels are in a table; here rows are told usable from bad ones.
      if (scales == SharedScales::channel) {
        return Tile::find_scales(shared, p.count(), scales, qmax);
      }
      RowPair r;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = isa::lane() + 32 * i;
        r.exists[i] = row < p.count();
        r.bad[i] = r.exists[i] && !formats::is_finite(Tile::row_amax(shared, row));
      }
      // Of pages' scales kernels read each; else one key's stands for all that share it.
      if (grouping.role == Role::k && rows.page_table == nullptr) spread_bad(p, r.bad);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = isa::lane() + 32 * i;
        r.scale[i] = 0.0f;
        if (r.exists[i]) {
          r.scale[i] = r.bad[i] ? formats::quiet_nan()
                                : grouping.given_scale(rows, p.b, p.head, p.first + row, 0);
          r.bad[i] |= !formats::is_finite(r.scale[i]);
        }
        isa::store_shared(shared + Tile::factor_at + 4 * row,
                          code_factor(r.exists[i] && !r.bad[i], r.scale[i]));
      }
      return r;
    }

    template <bool E4m3>
    QATTN_DEVICE Words2 row(const Words4& raw, float factor, const float (&mean)[8]) {
      float y[8];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const isa::Pair x = Tile::unpack(raw.w[i]);
        y[2 * i] = less<E4m3>(x.lo, factor, mean[2 * i]);
        y[2 * i + 1] = less<E4m3>(x.hi, factor, mean[2 * i + 1]);
      }
      Words2 code;
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const float* z = y + 4 * n;
        if constexpr (E4m3) {
          code.w[n] = isa::pack_e4m3(z[0], z[1]) |
                      static_cast<std::uint32_t>(isa::pack_e4m3(z[2], z[3])) << 16;
        } else {
          code.w[n] = isa::pack_s8(z[0], z[1], z[2], z[3]);
        }
      }
      if (E4m3 && factor == 0.0f) code = Words2{{0, 0}};  // 0 times a bad value is NaN
      return code;
    }

    QATTN_DEVICE std::uint32_t value(float x, float factor) {
      const float y = clip(formats::mul_rn(x, factor));
      return formats::bits_of(formats::add_rn(y > 127.0f ? 127.0f : y, formats::whole_numbers));
    }

    QATTN_DEVICE float scaled(float x, float factor) {
      const float y = formats::mul_rn(x, factor);
      count(y > e4m3_limit || y < -e4m3_limit);
      return y;
    }

   private:
    /// Half a step beyond the largest code: up to there it is rounding, not clipping.
    static constexpr float e4m3_limit = 464.0f;

    QATTN_DEVICE void count(bool beyond) {
      if (counts) clipped += beyond ? 1 : 0;
    }
    /// Of what becomes s8: no code is -128. NaN stays, whose code is 0.
    QATTN_DEVICE float clip(float y) {
      count(y >= 127.5f || y <= -127.5f);
      return y < -127.0f ? -127.0f : y;
    }
    template <bool E4m3>
    QATTN_DEVICE float less(float x, float factor, float mean) {
      if constexpr (E4m3) return scaled(formats::add_rn(formats::add_rn(x, 0.0f), -mean), factor);
      return clip(formats::mul_rn(formats::add_rn(x, -mean), factor));
    }

    /// A bad key makes all of its group that are in the tile bad, as it does where the scale comes
    /// from the keys.
    QATTN_DEVICE void spread_bad(const TilePlace& p, bool (&bad)[2]) {
      const std::uint32_t low = isa::ballot(bad[0]), high = isa::ballot(bad[1]);
      std::uint64_t left = std::uint64_t{high} << 32 | low;
      for (; left != 0; left &= left - 1) {
        const std::uint64_t below = (left & (~left + 1)) - 1;
        const int key = formats::popcount(static_cast<std::uint32_t>(below)) +
                        formats::popcount(static_cast<std::uint32_t>(below >> 32));
        const std::int64_t group = grouping.index(p.first + key);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          bad[i] |= grouping.index(p.first + isa::lane() + 32 * i) == group;
        }
      }
    }
  };

  static QATTN_DEVICE void run(const Params& params) {
    isa::grid_dependency_launch();
    const SharedAddress shared = isa::shared_base();
    int block = isa::block().x;
    const int role = Plain::role_of_block(params, block);
    isa::grid_dependency_wait();  // for cleared counters, V's table, K's mean
    const TilePlace p = Plain::begin_tile(params, role, block, shared);
    if (!p.used) return;
    if (params.grouping[role].given == nullptr) {
      typename Tile::OwnScales scales;
      Plain::encode(params, role, p, shared, scales);
      return;
    }
    std::uint64_t* saturated = params.saturated[role];
    GivenScales scales{params.grouping[role], params.rows(role), saturated != nullptr};
    Plain::encode(params, role, p, shared, scales);
    if (saturated != nullptr) add_clipped(saturated, scales.clipped);
  }
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
