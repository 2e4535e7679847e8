// A tile of any operand from memory to registers: floats less their mean and rotated, or codes.
#pragma once

#include "formats/hadamard.hpp"
#include "kernels/quantize/gpu/encode/codes.cuh"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

struct GeneralRole {
  tile::Rows rows;
  Grouping grouping;
  ScaleSource source = ScaleSource::row;
  CodeKind kind = CodeKind::s8;
  Micro micro = Micro::none;           ///< instead of `kind`
  KeyOrder order = KeyOrder::natural;  ///< of K's and V's codes in a micro format
  InputKind input = InputKind::bf16;
  bool codes = false;    ///< the operand comes quantised
  bool aligned = false;  ///< rows can be read in pieces of eight channels
  bool rotate = false;
  const float* mean = nullptr;  ///< K, V: [batches][heads][padded], subtracted
  PreparedMeans block_mean;     ///< Q: instead
  const float* dot = nullptr;   ///< Q: K's mean, for dot_mean
  std::int32_t heads_per_mean = 1;
  const float* factors = nullptr;      ///< Q, K: BalanceParams::factors
  PreparedRows out;                    ///< Q, K
  std::uint64_t* saturated = nullptr;  ///< counts codes that a given scale clipped
  SeenKeys seen;                       ///< of K and V that come without codes
};

struct GeneralParams {
  GeneralRole role[3];
  PreparedTiles v_out;
  std::int64_t blocks[3] = {};
  bool maxima_pass = false;
};

/// The rows of a tile in registers. A thread holds four keys that lie side by side in V's
/// contraction order x 8 channels.
template <int Channels>
struct GeneralTile {
  static constexpr int chunks = Channels / chunk_channels;
  static constexpr int threads = 16 * chunks;
  static constexpr int min_blocks = 512 / threads;
  static constexpr int stride = partial_stride(chunks);
  // Shared memory: row maxima [64][stride], 1 / scale [64], group of the row [64], a word, row
  // offsets [64], V's image (or dot products [64][stride], or maxima of channels).
  static constexpr int factor_at = 4 * slot_tile * stride;
  static constexpr int group_at = factor_at + 4 * slot_tile;
  static constexpr int word_at = group_at + 4 * slot_tile;
  static constexpr int offsets_at = word_at + 16;
  static constexpr int image_at = offsets_at + 8 * slot_tile;
  static constexpr int shared_bytes = image_at + (chunks + 1) * image_stride;
  static constexpr int most_groups = 8;  ///< of channel scales in a tile; blocks are 8 or more

  /// What a block knows of its tile, and where a thread works in it.
  struct Work {
    const GeneralRole& role;
    const PreparedTiles& v_out;
    TilePlace place;
    SharedAddress shared;

    QATTN_DEVICE bool is_value() const { return role.grouping.role == Role::v; }
    QATTN_DEVICE int chunk() const { return isa::thread() % chunks; }
    QATTN_DEVICE int first_key() const {
      const int quad = isa::thread() / chunks;
      return quad / 4 * 16 + quad % 4 * 2;
    }
    QATTN_DEVICE std::uint8_t* record() const { return record_of(v_out, place, Channels); }
  };
  /// Rows of a thread: x as float, or codes as they came.
  struct Values {
    bool here[4];  ///< there is something to read
    float x[4][8];
    std::uint32_t code[4][2];
  };
  static constexpr int key_step(int i) { return 8 * (i / 2) + i % 2; }

  template <InputKind Kind, bool Aligned>
  static QATTN_DEVICE void load_floats(const Work& w, const std::int64_t (&at)[4], Values& v) {
    const int left = w.role.rows.channels - w.chunk() * chunk_channels;
    Octet<Kind> octet[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      octet[i].fill(false);
      if (v.here[i] && left > 0) {
        octet[i].template load<Aligned>(w.role.rows.data, at[i], left);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      octet[i].unpack(v.x[i]);
#pragma unroll
      for (int j = 0; j < 8; ++j) {  // Inf - Inf = NaN; -0 becomes +0
        v.x[i][j] = formats::add_rn(v.x[i][j], formats::add_rn(v.x[i][j], -v.x[i][j]));
      }
    }
  }

  static QATTN_DEVICE void load_codes(const Work& w, const std::int64_t (&at)[4], Values& v) {
    const int left = w.role.rows.channels - w.chunk() * chunk_channels;
    const auto* data = static_cast<const std::uint8_t*>(w.role.rows.data);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      v.code[i][0] = v.code[i][1] = 0;
      if (v.here[i] && left > 0) {
        if (w.role.aligned) {
          const Words2 c = isa::load_global(reinterpret_cast<const Words2*>(data + at[i]));
          v.code[i][0] = c.w[0];
          v.code[i][1] = c.w[1];
        } else {
#pragma unroll
          for (int j = 0; j < 8; ++j) {
            if (j < left) {
              const std::uint32_t code = isa::load_global(data + at[i] + j);
              v.code[i][j / 4] |= code << 8 * (j % 4);
            }
          }
        }
      }
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const auto code = static_cast<std::uint8_t>(v.code[i][j / 4] >> 8 * (j % 4));
        v.x[i][j] = decode_code(w.role.kind, code);
      }
    }
  }

  /// Where a thread's rows are, in elements, and which of them lie in pages that do not exist.
  static QATTN_DEVICE void locate(const Work& w, Values& v, std::int64_t (&at)[4],
                                  bool (&missing)[4]) {
    const tile::Rows& r = w.role.rows;
    const int count = w.place.count(), first = w.first_key();
    const int channel = w.chunk() * chunk_channels;
    const TileSight sight = sight_of(w.role.seen, w.place);
    if (r.page_table != nullptr) {
      store_row_offsets(r, w.place, w.shared + offsets_at);
    }
    const std::int64_t base =
        r.page_table != nullptr
            ? 0
            : tile::row_offset(r, w.place.span, w.place.b, w.place.head, w.place.first);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int key = first + key_step(i);
      const bool exists = key < count && !sight.hidden(key);
      std::int64_t row = base + key * r.token;
      missing[i] = false;
      if (r.page_table != nullptr) {
        row = isa::load_shared<std::int64_t>(w.shared + offsets_at + 8 * key);
        missing[i] = exists && row == -1;
      }
      v.here[i] = exists && !missing[i];
      at[i] = row + channel;
    }
  }

  static QATTN_DEVICE void load(const Work& w, Values& v) {
    std::int64_t at[4];
    bool missing[4];
    locate(w, v, at, missing);
    if (w.role.codes) {
      load_codes(w, at, v);
    } else {
      with_input(w.role.input, w.role.aligned, [&](auto kind, auto aligned) {
        load_floats<decltype(kind)::value, decltype(aligned)::value>(w, at, v);
      });
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (!missing[i]) continue;
#pragma unroll
      for (int j = 0; j < 8; ++j) v.x[i][j] = formats::quiet_nan();
    }
  }

  static QATTN_DEVICE void load_mean(const Work& w, const float* mean, std::int64_t index,
                                     float (&m)[8]) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      m[j] = isa::load_global(mean + index * Channels + w.chunk() * chunk_channels + j);
    }
  }

  /// Number of the mean of K or V that belongs to the tile's head.
  static QATTN_DEVICE std::int64_t head_mean(const Work& w) {
    const GeneralRole& role = w.role;
    return std::int64_t{w.place.b} * (role.rows.heads / role.heads_per_mean) +
           w.place.head / role.heads_per_mean;
  }

  static QATTN_DEVICE void subtract(const float (&mean)[8], float (&x)[8]) {
#pragma unroll
    for (int j = 0; j < 8; ++j) x[j] = formats::add_rn(x[j], -mean[j]);
  }

  static QATTN_DEVICE void subtract_mean(const Work& w, Values& v) {
    const PreparedMeans& of = w.role.block_mean;
    float mean[8];
    if (w.role.mean != nullptr) {
      load_mean(w, w.role.mean, head_mean(w), mean);
#pragma unroll
      for (int i = 0; i < 4; ++i) subtract(mean, v.x[i]);
    } else if (of.data != nullptr) {
      const TilePlace& p = w.place;
      const std::int64_t first =
          p.head * of.blocks + tile::first_block(w.role.rows, p.span, p.b, of.block);
#pragma unroll
      for (int half = 0; half < 2; ++half) {  // blocks are multiples of 8
        const int key = w.first_key() + 8 * half;
        if (key >= p.count()) continue;
        load_mean(w, of.data, first + (p.first + key) / of.block, mean);
        subtract(mean, v.x[2 * half]);
        subtract(mean, v.x[2 * half + 1]);
      }
    }
  }

  /// Powers of two that balance K's loud channels.
  static QATTN_DEVICE void balance(const Work& w, Values& v) {
    float factor[8];
    const int of_queries = w.role.grouping.role == Role::q ? 1 : 0;
    load_mean(w, w.role.factors, 2 * head_mean(w) + of_queries, factor);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 8; ++j) v.x[i][j] = formats::mul_rn(v.x[i][j], factor[j]);
    }
  }

  /// Hidden tokens are zeros, whatever the mean.
  static QATTN_DEVICE void clear_hidden(const Work& w, Values& v) {
    const TileSight sight = sight_of(w.role.seen, w.place);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (!sight.hidden(w.first_key() + key_step(i))) continue;
#pragma unroll
      for (int j = 0; j < 8; ++j) v.x[i][j] = 0.0f;
    }
  }

  /// formats::rotate() with a row's channels spread over lanes.
  static QATTN_DEVICE void rotate(int chunk, int channels, float (&x)[8]) {
    const int block = formats::rotation_block(channels), first = chunk * chunk_channels;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      x[j] = formats::mul_rn(x[j], formats::rotation_sign(first + j));
    }
#pragma unroll
    for (int distance = 1; distance < 8; distance *= 2) {
      if (distance >= block) break;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        if ((j & distance) != 0) continue;
        const float a = x[j], b = x[j + distance];
        x[j] = formats::add_rn(a, b);
        x[j + distance] = formats::add_rn(a, -b);
      }
    }
    for (int distance = 8; distance < block; distance *= 2) {
      const int mask = distance / 8;
      const bool high = (chunk & mask) != 0;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float other = isa::shuffle_xor(x[j], mask);
        x[j] = formats::add_rn(other, high ? -x[j] : x[j]);
      }
    }
    const float norm = formats::rotation_norm(block);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      x[j] = first + j < channels ? formats::mul_rn(x[j], norm) : 0.0f;
    }
  }

  /// A chunk's share of q . (K's mean), for every row of the thread, to shared memory.
  static QATTN_DEVICE void multiply_mean(const Work& w, const Values& v) {
    const SharedAddress mine = w.shared + 4 * (w.first_key() * stride + w.chunk());
    float mean[8];
    load_mean(w, w.role.dot, head_mean(w), mean);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float sum = 0.0f;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        sum = formats::add_rn(sum, formats::mul_rn(v.x[i][j], mean[j]));
      }
      isa::store_shared(mine + image_at + 4 * key_step(i) * stride, sum);
    }
  }

  /// Mean, balance, rotation, dot products; the maxima of a thread's rows go to shared memory.
  static QATTN_DEVICE void transform(const Work& w, Values& v) {
    const GeneralRole& role = w.role;
    const SharedAddress mine = w.shared + 4 * (w.first_key() * stride + w.chunk());
    if (role.dot != nullptr) multiply_mean(w, v);
    subtract_mean(w, v);
    if (role.factors != nullptr) balance(w, v);
    if (role.rotate) {
#pragma unroll
      for (int i = 0; i < 4; ++i) rotate(w.chunk(), role.rows.channels, v.x[i]);
    }
    if (role.seen.bits != nullptr) clear_hidden(w, v);  // a rotation makes some zeros -0
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      std::uint32_t top = 0;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const std::uint32_t m = formats::magnitude_bits(v.x[i][j]);
        top = top > m ? top : m;
      }
      isa::store_shared(mine + 4 * key_step(i) * stride, top);
    }
  }
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
