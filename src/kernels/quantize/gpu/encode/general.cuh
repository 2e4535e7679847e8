// Encoding of everything that EncodePlain and EncodeGiven leave out: any granularity, rotation,
// given codes, float32 and unaligned rows, all 8-bit formats. One block a tile; Q, K and V in one
// launch. The same kernel makes the pass for the maxima of groups that are larger than a tile.
#pragma once

#include "kernels/quantize/gpu/encode/general_tile.cuh"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

template <int Channels>
struct EncodeGeneral : GeneralTile<Channels> {
  using Params = GeneralParams;
  using Tile = GeneralTile<Channels>;
  using Tile::chunks, Tile::threads, Tile::stride, Tile::most_groups;
  using Tile::factor_at, Tile::group_at, Tile::word_at, Tile::image_at;
  using Tile::key_step, Tile::load, Tile::transform;
  using typename Tile::Values;
  using typename Tile::Work;
  static constexpr bool dependent = true;

  static QATTN_DEVICE float row_amax(SharedAddress shared, int row) {
    std::uint32_t top = 0;
#pragma unroll
    for (int c = 0; c < chunks; ++c) {
      const auto m = isa::load_shared<std::uint32_t>(shared + 4 * (row * stride + c));
      top = top > m ? top : m;
    }
    return top < formats::kInfBits ? formats::float_of(top) : formats::quiet_nan();
  }

  static QATTN_DEVICE void store_dots(const Work& w) {
    const PreparedRows& out = w.role.out;
    for (int row = isa::thread(); row < slot_tile; row += threads) {
      float sum = 0.0f;
      for (int c = 0; c < chunks; ++c) {
        sum = formats::add_rn(
            sum, isa::load_shared<float>(w.shared + image_at + 4 * (row * stride + c)));
      }
      const TilePlace& p = w.place;
      if (w.role.codes && w.role.grouping.given != nullptr && row < p.count()) {
        sum *= w.role.grouping.given_scale(w.role.rows, p.b, p.head, p.first + row, 0);
      }
      isa::store_global(out.dot_mean + p.head * out.slots + p.tile * slot_tile + row, sum);
    }
  }

  /// The maximum of every row's group inside the tile, and whether the row is the group's first.
  /// By one warp.
  static QATTN_DEVICE void tile_groups(const Work& w, float (&amax)[2], bool (&first)[2]) {
    const int count = w.place.count();
    std::uint32_t group[2], top[2] = {};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = isa::lane() + 32 * i;
      group[i] = isa::load_shared<std::uint32_t>(w.shared + group_at + 4 * row);
      isa::store_shared(w.shared + factor_at + 4 * row, amax[i]);
      first[i] = row < count;
    }
    isa::sync_warp();
    for (int k = 0; k < count; ++k) {
      const auto other = isa::load_shared<std::uint32_t>(w.shared + group_at + 4 * k);
      const auto m = isa::load_shared<std::uint32_t>(w.shared + factor_at + 4 * k);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (other != group[i]) continue;
        top[i] = top[i] > m ? top[i] : m;
        if (k < isa::lane() + 32 * i) first[i] = false;
      }
    }
    isa::sync_warp();
#pragma unroll
    for (int i = 0; i < 2; ++i) amax[i] = formats::float_of(top[i]);
  }

  /// Of a scale that keys of the tile share kernels read one key's: a bad key makes all of them
  /// bad, as it does where the scale comes from the keys. By one warp.
  static QATTN_DEVICE void spread_bad(const Work& w, bool (&bad)[2]) {
    float worst[2];
    bool first[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) worst[i] = bad[i] ? formats::float_of(formats::kInfBits) : 0.0f;
    tile_groups(w, worst, first);
#pragma unroll
    for (int i = 0; i < 2; ++i) bad[i] |= worst[i] != 0.0f;
  }

  /// A token of V that no row sees has codes of 0, and a scale that makes its tile no special one:
  /// that of its neighbours. Where all tokens are hidden it does not exist. By one warp.
  static QATTN_DEVICE void hide_values(const TileSight& sight, RowPair& r) {
    std::uint32_t own[2];
    bool hidden[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      hidden[i] = sight.hidden(isa::lane() + 32 * i);
      own[i] = r.exists[i] && !r.bad[i] && !hidden[i] ? formats::bits_of(r.scale[i]) : 0;
    }
    const std::uint32_t most = own[0] > own[1] ? own[0] : own[1];
    const std::uint32_t near = thread_max(most), top = warp_max(most);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (!hidden[i]) continue;
      r.scale[i] = formats::float_of(near != 0 ? near : top);
      r.exists[i] = r.exists[i] && top != 0;
    }
  }

  /// Which of a lane's rows join what rows share: those that are seen plainly; in a group without
  /// any (`grouped`), those that are seen.
  static QATTN_DEVICE void find_sharing(const Work& w, const TileSight& sight, bool grouped,
                                        bool (&shares)[2]) {
    const Grouping& grouping = w.role.grouping;
    // Groups of whole sequences are settled (any_plainly).
    const bool whole =
        grouping.one_per_sequence() || grouping.granularity == Granularity::per_tensor;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = isa::lane() + 32 * i;
      shares[i] = sight.shares(row);
      if (shares[i] || !grouped || whole || sight.hidden(row)) continue;
      const std::int64_t begin = (w.place.first + row) / grouping.block * grouping.block;
      // Of K's scales per thread a group has a fourth of the block's keys.
      const bool thread = grouping.granularity == Granularity::per_thread;
      const std::uint64_t among =
          thread ? std::uint64_t{0x0303030303030303} << row % 8 / 2 * 2 : ~std::uint64_t{0};
      shares[i] = !some_share(w.role.seen, w.place, begin, begin + grouping.block, among);
    }
  }

  /// By the first warp: exists, bad and scale of the rows; 1 / scale goes to shared memory. In the
  /// pass for maxima these leave instead, or 1 for rows that count where channels have their own.
  static QATTN_DEVICE RowPair row_stage(const Work& w, bool maxima_pass) {
    const GeneralRole& role = w.role;
    const Grouping& grouping = role.grouping;
    const TilePlace& p = w.place;
    const bool by_channel = w.is_value() && grouping.by_channel();
    const TileSight sight = sight_of(role.seen, p);
    RowPair r;
    float amax[2];
    bool shares[2];
    const bool groups = role.source == ScaleSource::tile || role.source == ScaleSource::maxima;
    find_sharing(w, sight, groups || by_channel, shares);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = isa::lane() + 32 * i;
      r.exists[i] = row < p.count();
      amax[i] = r.exists[i] ? row_amax(w.shared, row) : 0.0f;
      r.bad[i] = !formats::is_finite(amax[i]);
      if (w.is_value() && r.bad[i]) amax[i] = 0.0f;  // flagged, and left out of shared scales
      r.scale[i] = 1.0f;
    }
    if (role.source == ScaleSource::tile || (maxima_pass && !by_channel)) {
      bool first[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) amax[i] = shares[i] ? amax[i] : 0.0f;
      tile_groups(w, amax, first);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (!maxima_pass || !first[i]) continue;
        const std::int64_t at = grouping.base(role.rows, p.span, p.b, p.head) +
                                grouping.index(p.first + isa::lane() + 32 * i);
        isa::atomic_max_global(grouping.maxima + at, formats::bits_of(amax[i]));
      }
    }
    if (role.source == ScaleSource::row && grouping.joins()) {
      const bool apart[2] = {r.bad[0] || !shares[0], r.bad[1] || !shares[1]};
      join_maxima(amax, apart);
    }
    const bool shared = role.source == ScaleSource::given && grouping.role == Role::k &&
                        role.rows.page_table == nullptr;  // scales of pages are read one by one
    // A bad key that has no part in its group's scale shows there all the same.
    const bool apart =
        groups && !w.is_value() && isa::any((r.bad[0] && !shares[0]) || (r.bad[1] && !shares[1]));
    if ((shared || apart) && !maxima_pass) spread_bad(w, r.bad);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = isa::lane() + 32 * i;
      if (!maxima_pass && r.exists[i]) find_scale(w, row, amax[i], r.bad[i], r.scale[i]);
      const bool as_is = maxima_pass || role.codes || role.source == ScaleSource::channel;
      const float factor = as_is ? 1.0f : code_factor(true, r.scale[i]);
      const bool counts = r.exists[i] && !r.bad[i] && (!maxima_pass || shares[i]);
      isa::store_shared(w.shared + factor_at + 4 * row, counts ? factor : 0.0f);
    }
    if (!maxima_pass && w.is_value() && role.seen.bits != nullptr) hide_values(sight, r);
    return r;
  }

  static QATTN_DEVICE void find_scale(const Work& w, int row, float amax, bool& bad, float& scale) {
    const GeneralRole& role = w.role;
    const TilePlace& p = w.place;
    const float qmax = code_limit(role.kind);
    switch (role.source) {
      case ScaleSource::channel:
        return;
      case ScaleSource::given:
        scale = bad ? formats::quiet_nan()
                    : role.grouping.given_scale(role.rows, p.b, p.head, p.first + row, 0);
        bad |= !formats::is_finite(scale);
        return;
      case ScaleSource::maxima: {
        const std::int64_t at =
            role.grouping.base(role.rows, p.span, p.b, p.head) + role.grouping.index(p.first + row);
        amax = formats::float_of(isa::load_global(role.grouping.maxima + at));
        break;
      }
      default:
        break;
    }
    scale = formats::amax_scale(amax, qmax);
    bad |= !formats::is_finite(scale);
    if (bad && !w.is_value()) scale = formats::quiet_nan();
  }

  /// Maxima of channels over the tile's groups, into the table of maxima. By all threads.
  static QATTN_DEVICE void channel_maxima(const Work& w, const Values& v) {
    const Grouping& grouping = w.role.grouping;
    const SharedAddress table = w.shared + image_at;  // [group][j][chunk], zeros
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int key = w.first_key() + 8 * half;  // blocks of channel scales are multiples of 8
      const auto group = isa::load_shared<std::uint32_t>(w.shared + group_at + 4 * key);
      const bool usable[2] = {isa::load_shared<float>(w.shared + factor_at + 4 * key) != 0.0f,
                              isa::load_shared<float>(w.shared + factor_at + 4 * key + 4) != 0.0f};
      if (!usable[0] && !usable[1]) continue;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const std::uint32_t a = usable[0] ? formats::magnitude_bits(v.x[2 * half][j]) : 0;
        const std::uint32_t b = usable[1] ? formats::magnitude_bits(v.x[2 * half + 1][j]) : 0;
        const SharedAddress at = table + 4 * (static_cast<int>(group) * Channels + j * chunks);
        isa::atomic_max_shared(at + 4 * w.chunk(), a > b ? a : b);
      }
    }
    isa::sync_threads();
    const TilePlace& p = w.place;
    const std::int64_t first =
        grouping.base(w.role.rows, p.span, p.b, p.head) + grouping.index(p.first);
    for (int i = isa::thread(); i < most_groups * Channels; i += threads) {
      const auto top = isa::load_shared<std::uint32_t>(table + 4 * i);
      if (top == 0) continue;
      const int channel = i % chunks * chunk_channels + i % Channels / chunks;
      isa::atomic_max_global(grouping.maxima + (first + i / Channels) * Channels + channel, top);
    }
  }

  /// x to codes, in place; rows whose factor is 0 get zeros.
  template <class Codes>
  static QATTN_DEVICE std::uint32_t encode_values(const Work& w, Values& v) {
    std::uint32_t clipped = 0;
    float channel_factor[8];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int key = w.first_key() + key_step(i);
      const auto factor = isa::load_shared<float>(w.shared + factor_at + 4 * key);
      if (w.role.source == ScaleSource::channel && i % 2 == 0) {
        const std::int64_t group = channel_group(w.v_out, w.role.rows, w.place.span, w.place.b,
                                                 w.place.head, w.place.first + key);
        const bool exists = key < w.place.count();
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const float scale = exists ? isa::load_global(w.v_out.channel_scale + group * Channels +
                                                        w.chunk() * chunk_channels + j)
                                     : 0.0f;
          channel_factor[j] = scale > 0.0f ? formats::reciprocal(scale) : 0.0f;
        }
      }
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        float y[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float by =
              w.role.source == ScaleSource::channel ? channel_factor[4 * n + j] : factor;
          y[j] = factor == 0.0f ? 0.0f : formats::mul_rn(v.x[i][4 * n + j], by);
        }
        v.code[i][n] = Codes::word(y, clipped);
      }
    }
    return clipped;
  }

  static QATTN_DEVICE void store_rows(const Work& w, const Values& v) {
    const PreparedRows& out = w.role.out;
    const std::int64_t slot = w.place.head * out.slots + w.place.tile * slot_tile + w.first_key();
    std::uint8_t* to = out.codes + slot * Channels + w.chunk() * chunk_channels;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      isa::store_global(reinterpret_cast<Words2*>(to + key_step(i) * Channels),
                        Words2{{v.code[i][0], v.code[i][1]}});
    }
  }

  static QATTN_DEVICE void store_image(const Work& w, const Values& v) {
    const int quad = isa::thread() / chunks;
    const SharedAddress to = w.shared + image_at + w.chunk() * image_stride + 4 * quad;
#pragma unroll
    for (int n = 0; n < 2; ++n) {  // a transposition of 4 x 4 bytes
      const std::uint32_t a = v.code[0][n], b = v.code[1][n], c = v.code[2][n], d = v.code[3][n];
      const std::uint32_t ab = isa::byte_permute(a, b, 0x5140);
      const std::uint32_t cd = isa::byte_permute(c, d, 0x5140);
      const std::uint32_t ab2 = isa::byte_permute(a, b, 0x7362);
      const std::uint32_t cd2 = isa::byte_permute(c, d, 0x7362);
      const SharedAddress at = to + 4 * n * slot_tile;
      isa::store_shared(at, isa::byte_permute(ab, cd, 0x5410));
      isa::store_shared(at + slot_tile, isa::byte_permute(ab, cd, 0x7632));
      isa::store_shared(at + 2 * slot_tile, isa::byte_permute(ab2, cd2, 0x5410));
      isa::store_shared(at + 3 * slot_tile, isa::byte_permute(ab2, cd2, 0x7632));
    }
    isa::sync_threads();
    store_value_image<Channels, threads>(w.record(), w.shared + image_at,
                                         w.role.kind == CodeKind::s8);
  }

  static QATTN_DEVICE void store_tables(const Work& w, const RowPair& r) {
    if (!w.is_value()) {
      store_row_scales(w.role.out, w.place, r);
      return;
    }
    const bool token = w.role.grouping.by_token();
    const bool integer = w.role.kind == CodeKind::s8;
    const ValueScales kind =
        integer ? (token ? ValueScales::integer_token : ValueScales::integer_channel)
                : (token ? ValueScales::floating_token : ValueScales::floating);
    const std::uint32_t one = w.role.kind == CodeKind::e4m3   ? 0x38
                              : w.role.kind == CodeKind::e5m2 ? 0x3c
                                                              : 0x40;
    store_value_tables(w.record(), Channels, w.shared + image_at + chunks * image_stride, r, kind,
                       one);
  }

  static QATTN_DEVICE void run_tile(const Work& w, bool maxima_pass) {
    Values v;
    load(w, v);
    transform(w, v);
    const Grouping& grouping = w.role.grouping;
    const TilePlace& p = w.place;
    for (int row = isa::thread(); row < slot_tile; row += threads) {
      const std::int64_t group = grouping.index(p.first + row) - grouping.index(p.first);
      isa::store_shared(w.shared + group_at + 4 * row, static_cast<std::uint32_t>(group));
    }
    const bool by_channel = w.is_value() && grouping.by_channel();
    if (maxima_pass && by_channel) {
      for (int i = isa::thread(); i < most_groups * Channels; i += threads) {
        isa::store_shared(w.shared + image_at + 4 * i, 0u);
      }
    }
    isa::sync_threads();
    if (isa::warp() == 0) {
      const RowPair r = row_stage(w, maxima_pass);
      if (!maxima_pass) store_tables(w, r);
    }
    if (maxima_pass && !by_channel) return;
    if (!maxima_pass && w.role.dot != nullptr) store_dots(w);
    isa::sync_threads();
    if (maxima_pass) {
      channel_maxima(w, v);
      return;
    }
    if (w.role.codes) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int key = w.first_key() + key_step(i);
        if (isa::load_shared<float>(w.shared + factor_at + 4 * key) == 0.0f) {
          v.code[i][0] = v.code[i][1] = 0;
        }
      }
    } else {
      const bool given = w.role.grouping.given != nullptr;
      with_codes(w.role.kind, given, [&](auto codes) {
        const std::uint32_t clipped = encode_values<decltype(codes)>(w, v);
        if (given && w.role.saturated != nullptr) add_clipped(w.role.saturated, clipped);
      });
    }
    if (w.is_value()) {
      store_image(w, v);
    } else {
      store_rows(w, v);
    }
  }

  /// What a block of the grid is for, and whether it is its role's last.
  struct Block {
    int role;
    TilePlace place;
    bool last;
  };
  /// Blocks are numbered over roles, then tiles, then heads: neighbours read neighbouring memory of
  /// a (B, S, H, D) tensor.
  template <class AnyParams>
  static QATTN_DEVICE Block find_block(const AnyParams& params, SharedAddress shared) {
    std::int64_t block = isa::block().x;
    int i = 0;
    for (; i < 2 && block >= params.blocks[i]; ++i) block -= params.blocks[i];
    const tile::Rows& rows = params.role[i].rows;
    const int tile = divide(block, rows.heads);
    const int head = static_cast<int>(block) - tile * rows.heads;
    return {i, find_tile(rows, tile, head, threads, shared + word_at),
            block == params.blocks[i] - 1};
  }

  static QATTN_DEVICE void run(const Params& params) {
    isa::grid_dependency_launch();
    isa::grid_dependency_wait();
    const SharedAddress shared = isa::shared_base();
    const auto [i, p, last] = find_block(params, shared);
    const GeneralRole& role = params.role[i];
    if (!params.maxima_pass) {
      i < 2 ? store_no_rows(role.out, p, last) : store_no_values<Channels>(params.v_out, p, last);
    }
    if (!p.used) return;
    run_tile(Work{role, params.v_out, p, shared}, params.maxima_pass);
  }
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
