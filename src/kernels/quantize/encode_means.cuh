// Means of K and V over their sequences, in the order of the CPU's sums: 64 rows one by one in
// float32, those sums one by one in float64. So the means, and all codes, equal the CPU's.
#pragma once

#include <type_traits>

#include "kernels/quantize/encode_common.cuh"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

/// How the elements of a float tensor lie in memory.
enum class InputKind : std::int32_t { f32, f16, bf16 };

/// Means of one operand.
struct MeanRole {
  tile::Rows rows;
  InputKind input = InputKind::bf16;
  bool aligned = false;          ///< 16-byte loads are possible
  float* sums = nullptr;         ///< [heads][slot tiles][padded]
  float* mean = nullptr;         ///< [batches][heads][padded]
  const float* given = nullptr;  ///< instead of sums: a mean to copy, with these strides
  std::int64_t given_stride[3] = {};
  std::int64_t tiles = 0;  ///< slot tiles a head
  std::int32_t padded = 0;
};

struct MeanParams {
  MeanRole role[2];  ///< K, V; unused ones have no blocks
  std::int64_t blocks[2] = {};
};

/// Eight channels of a row as they lie in memory.
template <InputKind Kind>
struct Octet {
  static constexpr int words = Kind == InputKind::f32 ? 2 : 1;
  Words4 w[words];

  /// A NaN in every channel, or zeros.
  QATTN_DEVICE void fill(bool nan) {
    const std::uint32_t word = nan ? 0x7fff7fffu : 0u;
#pragma unroll
    for (int n = 0; n < words; ++n) w[n] = Words4{{word, word, word, word}};
  }

  /// Channels from `left` on are not read (unaligned rows) and become zeros.
  template <bool Aligned>
  QATTN_DEVICE void load(const void* data, std::int64_t element, int left) {
    if constexpr (Aligned) {
      const auto* bytes = static_cast<const std::uint8_t*>(data) + element * (2 * words);
#pragma unroll
      for (int n = 0; n < words; ++n) {
        w[n] = isa::load_once(reinterpret_cast<const Words4*>(bytes) + n);
      }
    } else {
      fill(false);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (i >= left) continue;
        if constexpr (Kind == InputKind::f32) {
          w[i / 4].w[i % 4] =
              isa::load_global(static_cast<const std::uint32_t*>(data) + element + i);
        } else {
          const std::uint32_t half =
              isa::load_global(static_cast<const std::uint16_t*>(data) + element + i);
          w[0].w[i / 2] |= half << 16 * (i % 2);
        }
      }
    }
  }

  QATTN_DEVICE void unpack(float (&x)[8]) const {
    if constexpr (Kind == InputKind::f32) {
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i] = formats::float_of(w[i / 4].w[i % 4]);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const isa::Pair p =
            Kind == InputKind::bf16 ? isa::unpack_bf16(w[0].w[i]) : isa::unpack_f16(w[0].w[i]);
        x[2 * i] = p.lo;
        x[2 * i + 1] = p.hi;
      }
    }
  }
};

/// Calls body(kind, aligned) with constants.
template <class Body>
QATTN_DEVICE void with_input(InputKind kind, bool aligned, Body body) {
  using Yes = std::true_type;
  using No = std::false_type;
  using F32 = std::integral_constant<InputKind, InputKind::f32>;
  using F16 = std::integral_constant<InputKind, InputKind::f16>;
  using Bf16 = std::integral_constant<InputKind, InputKind::bf16>;
  if (kind == InputKind::bf16) {
    aligned ? body(Bf16{}, Yes{}) : body(Bf16{}, No{});
  } else if (kind == InputKind::f16) {
    aligned ? body(F16{}, Yes{}) : body(F16{}, No{});
  } else {
    aligned ? body(F32{}, Yes{}) : body(F32{}, No{});
  }
}

/// Sums of 64 rows. A thread adds up eight channels of one slot tile.
struct SumRows {
  using Params = MeanParams;
  static constexpr int threads = 128, min_blocks = 6, shared_bytes = 0;

  /// Blocks that a role needs.
  static constexpr std::int64_t blocks(std::int64_t tiles, std::int64_t heads, int padded) {
    const std::int64_t per_block = threads / (padded / chunk_channels);
    return (tiles + per_block - 1) / per_block * heads;
  }

  template <InputKind Kind, bool Aligned>
  static QATTN_DEVICE void add_rows(const MeanRole& role, const TilePlace& p, int chunk,
                                    float (&sum)[8]) {
    const tile::Rows& r = role.rows;
    const int count = p.count(), left = r.channels - chunk * chunk_channels;
    if (left <= 0) return;
    const bool paged = r.page_table != nullptr;
    const std::int64_t base = paged ? 0 : tile::row_offset(r, p.span, p.b, p.head, p.first);
    constexpr int step = !Aligned ? 1 : Kind == InputKind::f32 ? 4 : 8;  // rows in flight
    for (int j0 = 0; j0 < count; j0 += step) {
      Octet<Kind> octet[step];
#pragma unroll
      for (int j = 0; j < step; ++j) {
        const bool exists = j0 + j < count;
        std::int64_t at = base + (j0 + j) * r.token;
        if (paged && exists) at = tile::row_offset(r, p.span, p.b, p.head, p.first + j0 + j);
        // Rows behind the end add nothing; one on a page that does not exist spoils the mean.
        octet[j].fill(exists);
        if (exists && (!paged || at != -1)) {
          octet[j].template load<Aligned>(r.data, at + chunk * chunk_channels, left);
        }
      }
#pragma unroll
      for (int j = 0; j < step; ++j) {
        float x[8];
        octet[j].unpack(x);
#pragma unroll
        for (int i = 0; i < 8; ++i) sum[i] = formats::add_rn(sum[i], x[i]);
      }
    }
  }

  static QATTN_DEVICE void run(const Params& params) {
    std::int64_t block = isa::block().x;
    const bool second = block >= params.blocks[0];
    if (second) block -= params.blocks[0];
    const MeanRole& role = params.role[second ? 1 : 0];
    const tile::Rows& r = role.rows;
    const int chunks = role.padded / chunk_channels, chunk = isa::thread() % chunks;
    const int tiles = threads / chunks;
    TilePlace p;
    const int group = divide(block, r.heads);
    p.head = static_cast<int>(block) - group * r.heads;
    p.tile = std::int64_t{group} * tiles + isa::thread() / chunks;
    if (isa::thread() >= tiles * chunks || p.tile >= role.tiles) return;
    int b = 0;
    if (r.cu_seqlens == nullptr) {
      b = sequence_of_tile(r, p.tile);
    } else {
      while (b < r.batches && !owns_tile(r, b, p.tile)) ++b;
      if (b == r.batches) return;
    }
    place_in_sequence(r, b, p);
    if (!p.used) return;
    float sum[8] = {};
    with_input(role.input, role.aligned, [&](auto kind, auto aligned) {
      add_rows<decltype(kind)::value, decltype(aligned)::value>(role, p, chunk, sum);
    });
    float* to = role.sums + (p.head * role.tiles + p.tile) * role.padded + chunk * chunk_channels;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      Words4 w;
#pragma unroll
      for (int i = 0; i < 4; ++i) w.w[i] = formats::bits_of(sum[4 * n + i]);
      isa::store_global(reinterpret_cast<Words4*>(to + 4 * n), w);
    }
  }
};

/// Sums to means, or given means to their place. One block a (sequence, head), x; role y.
struct FinishMeans {
  using Params = MeanParams;
  static constexpr int threads = 256, min_blocks = 1, shared_bytes = 0;

  static QATTN_DEVICE void run(const Params& params) {
    const MeanRole& role = params.role[isa::block().y];
    const tile::Rows& r = role.rows;
    const int c = isa::thread();
    if (role.mean == nullptr || isa::block().x >= r.batches * r.heads || c >= role.padded) return;
    const int b = isa::block().x / r.heads, head = isa::block().x % r.heads;
    float mean = 0.0f;
    if (role.given != nullptr) {
      if (c < r.channels) {
        mean = isa::load_global(role.given + b * role.given_stride[0] +
                                head * role.given_stride[1] + c * role.given_stride[2]);
      }
    } else if (c < r.channels) {
      const tile::Span span = tile::span_of(r, b);
      const std::int64_t first = tile::first_slot(r, span, b) / slot_tile;
      const std::int64_t tiles = span.bad ? 0 : (span.length + slot_tile - 1) / slot_tile;
      const float* from = role.sums + (head * role.tiles + first) * role.padded + c;
      double total = 0.0;
      constexpr int step = 32;  // loads in flight
      for (std::int64_t t = 0; t < tiles; t += step) {
        float x[step];
#pragma unroll
        for (int i = 0; i < step; ++i) {
          x[i] = t + i < tiles ? isa::load_global(from + (t + i) * role.padded) : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < step; ++i) total += static_cast<double>(x[i]);
      }
      mean = static_cast<float>(total / static_cast<double>(span.length > 0 ? span.length : 1));
      if (!formats::is_finite(mean)) mean = formats::quiet_nan();
    }
    isa::store_global(role.mean + isa::block().x * std::int64_t{role.padded} + c, mean);
  }
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
