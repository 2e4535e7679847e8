// How Q and tiles of the mma.sync prefill kernel come to shared memory: by cp.async of all threads,
// or K and V by TMA (ring.cuh).
#pragma once

#include "kernels/attention/common/work_tile.cuh"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

/// Callers commit and wait. `S`: MmaShape.
template <class S>
struct TileCopies {
  const AttentionParams& p;
  const WorkTile& work;
  SharedAddress base;
  tile::RowSource k_source = {}, v_source = {};
  int k_buffer = 0;  ///< that start_keys() fills, in bytes behind the first

  /// Elements of Q and K in place, in bytes.
  static constexpr int width = S::qk_16bit ? 2 : 1;

  QATTN_DEVICE static tile::RowSource prepared_source(const PreparedRows& x, int head,
                                                      std::int64_t slot, std::int64_t length) {
    tile::RowSource s;
    s.base =
        reinterpret_cast<const std::byte*>(x.codes) + prepared_row(x, head, slot) * x.row_bytes;
    s.stride = s.row_bytes = x.row_bytes;
    s.length = static_cast<std::int32_t>(length);
    return s;
  }

  QATTN_DEVICE void set_sources() {
    // Of keys that were dealt out, those behind the end lie among the others, as zeros.
    constexpr std::int64_t step = S::key_order == KeyOrder::natural ? 1 : slot_tile;
    k_source = p.k.data == nullptr
                   ? prepared_source(p.k8, work.kv_head, work.k_slot,
                                     (work.k.length + step - 1) / step * step)
                   : tile::row_source(p.k, work.k, work.b, work.kv_head, width, p.k_vectors);
    if constexpr (S::pv_16bit) {
      v_source = tile::row_source(p.v, work.k, work.b, work.kv_head, 2, p.v_vectors);
    }
  }

  QATTN_DEVICE void start_queries() const {
    const tile::RowSource source =
        p.q.data == nullptr ? prepared_source(p.q8, work.head, work.q_slot, work.q.length)
                            : tile::row_source(p.q, work.q, work.b, work.head, width, p.q_vectors);
    const typename S::Queries::At to{base + S::q_at};
    if constexpr (S::qk_groups) copy_query_groups();
    if (p.pack_gqa > 1) {
      const std::int64_t head_stride =
          p.q.data == nullptr ? p.q8.slots * p.q8.row_bytes : p.q.head * width;
      tile::bring_gqa_rows<S::qk_bytes, S::rows, S::threads>(source, p.pack_gqa, head_stride,
                                                             isa::thread(), to, tile::CopyAsync{});
      return;
    }
    tile::bring_rows<S::qk_bytes, S::rows, S::threads, S::general>(
        source, work.first_row, isa::thread(), p.error, to, tile::CopyAsync{});
  }

  QATTN_DEVICE void start_keys(int tile) const {
    tile::copy_rows<S::qk_bytes, S::keys, S::threads, S::general>(base + S::k_at + k_buffer,
                                                                  k_source, tile, p.error);
    if constexpr (S::qk_groups) {
      const std::int64_t first = prepared_row(p.k8, work.kv_head, work.k_slot + tile);
      const std::uint8_t* from = p.k8.group_scale + first * p.k8.group_bytes;
      if (!S::general || p.k8.group_bytes == S::qk_group_bytes) {
        tile::copy_linear<S::threads>(base + S::k_groups_at,
                                      reinterpret_cast<const std::byte*>(from),
                                      S::keys * S::qk_group_bytes);
      } else {
        copy_groups<S::keys>(S::k_groups_at, p.k8.group_bytes,
                             [&](int row) { return from + row * p.k8.group_bytes; });
      }
    }
  }

  /// Scales of groups of `Rows` rows, each where `row_at` says; of `bytes` that exist, zeros behind
  /// them.
  template <int Rows, class RowAt>
  QATTN_DEVICE void copy_groups(int to, int bytes, RowAt row_at) const {
    constexpr int words = S::qk_group_bytes / 4;
    for (int n = isa::thread(); n < Rows * words; n += S::threads) {
      const std::uint8_t* from = row_at(n / words);
      const bool here = from != nullptr && n % words * 4 < bytes;
      isa::store_shared(
          base + to + 4 * n,
          here ? isa::load_global(reinterpret_cast<const std::uint32_t*>(from) + n % words) : 0u);
    }
  }
  QATTN_DEVICE void copy_query_groups() const {
    copy_groups<S::rows>(S::q_groups_at, p.q8.group_bytes, [&](int row) {
      const int n = work.first_row + row, token = n / p.pack_gqa;
      const std::int64_t at =
          prepared_row(p.q8, work.head + n - token * p.pack_gqa, work.q_slot + token);
      return token < work.q.length ? p.q8.group_scale + at * p.q8.group_bytes : nullptr;
    });
  }

  /// K's scales of a tile come with its V: softmax reads them when the next tile's K is on its way.
  QATTN_DEVICE void start_key_scales(int tile) const {
    if constexpr (S::general && !S::qk_16bit) {
      const float* scales = p.k8.scale + prepared_row(p.k8, work.kv_head, work.k_slot + tile);
      tile::copy_linear<S::threads>(base + S::k_scale_at,
                                    reinterpret_cast<const std::byte*>(scales), 4 * S::keys);
    }
  }

  QATTN_DEVICE void start_values(int tile) const {
    if constexpr (S::pv_16bit) {
      tile::copy_rows<S::v_bytes, S::keys, S::threads, S::general>(base + S::v_at, v_source, tile,
                                                                   p.error);
    } else {
      const TileOffsets at = tile_offsets(p.v8.channels, S::v_bits, S::pv_group);
      const std::int64_t index = (work.kv_head * p.v8.slots + work.k_slot + tile) / S::keys;
      const auto* record = reinterpret_cast<const std::byte*>(p.v8.tiles) + index * at.bytes;
      if (!S::general || p.v8.channels == S::d) {
        tile::copy_packed<S::v_bytes, S::v_rows, S::threads>(base + S::v_at, record);
        if constexpr (S::pv_groups) {
          tile::copy_linear<S::threads>(base + S::v_groups_at, record + at.scales,
                                        S::v_rows * S::v_group_bytes);
        }
      } else {  // the weights go behind the padded channels
        tile::copy_packed<S::v_bytes, S::threads>(base + S::v_at, record, p.v8.channels);
        if constexpr (!S::u8) {
          tile::copy_packed<S::v_bytes, S::threads>(base + S::v_at + S::d * S::Values::stride,
                                                    record + at.extra, 8);
        }
        if constexpr (S::pv_groups) {
          constexpr int group = S::v_group_bytes;
          tile::copy_linear<S::threads>(base + S::v_groups_at, record + at.scales,
                                        p.v8.channels * group);
          tile::copy_linear<S::threads>(base + S::v_groups_at + S::d * group,
                                        record + at.scales + p.v8.channels * group, 8 * group);
        }
      }
      static_assert(S::tail_bytes <= 16 * S::threads);
      if (isa::thread() < S::tail_bytes / 16) {
        isa::copy_async16(base + S::tail_at + 16 * isa::thread(),
                          record + at.log + 16 * isa::thread(), 16);
      }
    }
  }

  /// V's padded channels, which no copy writes.
  QATTN_DEVICE void clear_missing_channels() const {
    if constexpr (!S::pv_16bit && S::general) {
      constexpr int chunks = S::v_bytes / 16;
      for (int n = p.v8.channels * chunks + isa::thread(); n < S::d * chunks; n += S::threads) {
        isa::store_shared(S::Values::place(base + S::v_at, n / chunks, n % chunks * 16),
                          isa::Words4{});
      }
      if constexpr (S::pv_groups) {
        for (int n = p.v8.channels + isa::thread(); n < S::d; n += S::threads) {
          for (int g = 0; g < S::v_group_bytes; ++g) {
            isa::store_shared(base + S::v_groups_at + n * S::v_group_bytes + g, std::uint8_t{0});
          }
        }
      }
    }
  }
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
