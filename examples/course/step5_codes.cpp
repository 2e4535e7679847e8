// Step 5 of the course: what the portable kernel does (src/kernels/attention/mma/kernel.cuh), for
// one head and without its features. Q and K are codes of 8 bits with a scale a token, as
// quantize() makes them. P is u8, 255 times the weight relative to the largest of its row in this
// tile, with the scale of V's token in it; V is s8, one row a channel. Both products are exact sums
// of integers of 32 bits, and half as many instructions as in f16. Copies run under products: V of
// a tile arrives under Q K, K of the next tile under the softmax and P V.
//
// What to see: half of the instructions on tensor cores, fewer bytes, and an error of 1e-2. The
// order of keys along the second product is free if P and V have the same: the one in which
// accumulators lie costs nothing, so V is stored in it.
#include "course.hpp"

namespace course {

struct Codes {
  struct Params {
    const std::int8_t *q, *k;  ///< rows
    const std::int8_t* v;      ///< (tile, channel, key of the tile in the order of value_place())
    const float* q_scale;
    const float* of_keys;  ///< (tile, 3, key): K's scale; of V's scale log2 and 1 / it
    float* out;
  };
  static constexpr int threads = 128, min_blocks = 1, tile = 64, rows = 64;
  static constexpr int pitch = 64 + 16, v_at = tile * pitch, scales_at = 2 * v_at;
  static constexpr int shared_bytes = scales_at + 3 * tile * 4;
  using Sums = std::int32_t[1][8][4];

  /// 64 rows of 64 bytes.
  static QATTN_DEVICE void copy_tile(SharedAddress to, const std::int8_t* from) {
    for (int n = isa::thread(); n < 64 * 4; n += threads) {
      isa::copy_async16(to + static_cast<SharedAddress>(n / 4 * pitch + n % 4 * 16), from + 16 * n,
                        16);
    }
  }
  /// K's codes, and what there is of each key.
  static QATTN_DEVICE void copy_keys(const Params& p, int first) {
    copy_tile(isa::shared_base(), p.k + first * dim);
    if (const int n = isa::thread(); n < 3 * tile / 4) {
      isa::copy_async16(isa::shared_base() + static_cast<SharedAddress>(scales_at + 16 * n),
                        p.of_keys + 3 * first + 4 * n, 16);
    }
    isa::copy_async_commit();
  }
  /// Two numbers of keys 8 n + 2 t and 8 n + 2 t + 1.
  static QATTN_DEVICE void load_pairs(int which, float (&x)[8][2]) {
    for (int n = 0; n < 8; ++n) {
      const int at = scales_at + 4 * (which * tile + 8 * n + isa::lane() % 4 * 2);
      const auto pair =
          isa::load_shared<isa::Words2>(isa::shared_base() + static_cast<SharedAddress>(at));
      for (int e = 0; e < 2; ++e) x[n][e] = std::bit_cast<float>(pair.w[e]);
    }
  }

  /// 16 rows in fragments times 64 rows in shared memory, both 64 codes long.
  template <Element A>
  static QATTN_DEVICE void multiply(const std::uint32_t (&a)[2][4], SharedAddress b, Sums& sums) {
    std::uint32_t words[8][4];
    SharedAddress row[8];
    for (int n = 0; n < 8; ++n) {
      row[n] =
          b + static_cast<SharedAddress>((8 * n + isa::lane() % 8) * pitch + isa::lane() / 8 * 16);
    }
    isa::load_matrix<8>(words, row);
    for (int step = 0; step < 2; ++step) {  // 32 codes
      std::uint32_t left[1][4], right[8][2];
      for (int r = 0; r < 4; ++r) left[0][r] = a[step][r];
      for (int n = 0; n < 8; ++n) {
        right[n][0] = words[n][2 * step], right[n][1] = words[n][2 * step + 1];
      }
      isa::mma<A, Element::s8>(sums, left, right);
    }
  }

  /// What a row has gathered, relative to 2^top.
  struct Row {
    float top = -INFINITY, sum = 0, rescale = 0, join = 0;
  };

  /// P in place of scores, which are in units of log2 and have log2 of V's scale in them.
  static QATTN_DEVICE void softmax(float (&s)[8][4], const float (&inverse)[8][2], int h,
                                   Row& row) {
    float most = -INFINITY;  // in this tile
    for (auto& x : s) most = fmaxf(most, fmaxf(x[2 * h], x[2 * h + 1]));
    most = fmaxf(most, isa::shuffle_xor(most, 1));
    most = fmaxf(most, isa::shuffle_xor(most, 2));
    const float top = fmaxf(row.top, most);
    row.rescale = isa::exp2(row.top - top);
    row.join = isa::exp2(most - top) / 255;
    row.top = top;
    float sum = 0;
    for (int n = 0; n < 8; ++n) {
      for (int e = 0; e < 2; ++e) {
        float& x = s[n][2 * h + e];
        x = isa::exp2(x - most) * 255;  // pack_u8 rounds it
        sum = fmaf(x, inverse[n][e], sum);
      }
    }
    row.sum = fmaf(sum, row.join, row.sum * row.rescale);
  }

  static QATTN_DEVICE void run(const Params& p) {
    const int g = isa::lane() / 4, t = isa::lane() % 4;
    const int first_row = isa::block().x * rows + isa::warp() * 16 + g;
    const SharedAddress k = isa::shared_base(), v = k + v_at;
    std::uint32_t q[2][4];
    float q_scale[2], o[8][4] = {};
    for (int i = 0; i < 8; ++i) {
      const std::int8_t* from = p.q + (first_row + i % 2 * 8) * dim + i / 4 * 32 + 4 * t;
      q[i / 4][i % 4] =
          isa::load_global(reinterpret_cast<const std::uint32_t*>(from + i % 4 / 2 * 16));
    }
    for (int h = 0; h < 2; ++h) {
      q_scale[h] = isa::load_global(p.q_scale + first_row + 8 * h) * score_scale;
    }
    Row row[2];
    copy_keys(p, 0);
    for (int first = 0; first < keys; first += tile) {
      copy_tile(v, p.v + first * dim);
      isa::copy_async_commit();
      isa::copy_async_wait<1>();  // K is there; V may still be on its way
      isa::sync_threads();
      Sums sums = {};
      multiply<Element::s8>(q, k, sums);
      float s[8][4], k_scale[8][2], v_log[8][2], inverse[8][2];
      load_pairs(0, k_scale);
      load_pairs(1, v_log);
      load_pairs(2, inverse);
      isa::sync_threads();  // nobody reads K any more
      if (first + tile < keys) copy_keys(p, first + tile);
      for (int n = 0; n < 8; ++n) {
        for (int i = 0; i < 4; ++i) {
          const float score = isa::to_float(sums[0][n][i]) * q_scale[i / 2];
          s[n][i] = fmaf(score, k_scale[n][i % 2], v_log[n][i % 2]);
        }
      }
      for (int h = 0; h < 2; ++h) softmax(s, inverse, h, row[h]);
      std::uint32_t codes[2][4];
      for (int i = 0; i < 8; ++i) {  // register i % 4 of step i / 4: 16 keys are two columns of 8
        const int n = i / 4 * 4 + i % 4 / 2 * 2, h = i % 2 * 2;
        codes[i / 4][i % 4] = isa::pack_u8(s[n][h], s[n][h + 1], s[n + 1][h], s[n + 1][h + 1]);
      }
      if (first + tile < keys) {
        isa::copy_async_wait<1>();  // V is there; the next K may still be on its way
      } else {
        isa::copy_async_wait<0>();
      }
      isa::sync_threads();
      Sums values = {};
      multiply<Element::u8>(codes, v, values);
      for (int n = 0; n < 8; ++n) {
        for (int i = 0; i < 4; ++i) {
          o[n][i] =
              fmaf(isa::to_float(values[0][n][i]), row[i / 2].join, o[n][i] * row[i / 2].rescale);
        }
      }
      isa::sync_threads();  // nobody reads V any more
    }
    for (int h = 0; h < 2; ++h) {
      row[h].sum += isa::shuffle_xor(row[h].sum, 1);
      row[h].sum += isa::shuffle_xor(row[h].sum, 2);
      for (int n = 0; n < 8; ++n) {
        float* to = p.out + (first_row + 8 * h) * dim + 8 * n + 2 * t;
        for (int i = 0; i < 2; ++i) isa::store_global(to + i, o[n][2 * h + i] / row[h].sum);
      }
    }
  }
};

/// Where a key of a tile stands along the second product.
constexpr int value_place(int key) {
  return key / 16 * 16 + key % 8 / 2 * 4 + key / 8 % 2 * 2 + key % 2;
}

struct Coded {
  std::vector<std::int8_t> codes;
  std::vector<float> scale;

  explicit Coded(const std::vector<float>& x) : codes(x.size()), scale(x.size() / dim) {
    for (std::size_t r = 0; r < scale.size(); ++r) {
      const float* row = x.data() + r * dim;
      float largest = 0;
      for (int c = 0; c < dim; ++c) largest = std::fmax(largest, std::fabs(row[c]));
      scale[r] = largest / 127;
      for (int c = 0; c < dim; ++c) {
        codes[r * dim + static_cast<std::size_t>(c)] =
            static_cast<std::int8_t>(std::nearbyint(row[c] / scale[r]));
      }
    }
  }
};

}  // namespace course

int main() {
  using namespace course;
  const Problem x;
  const Coded q(x.q), k(x.k), v(x.v);
  std::vector<std::int8_t> turned(v.codes.size());
  for (int j = 0; j < keys; ++j) {
    for (int c = 0; c < dim; ++c) {
      const int to = j / Codes::tile * Codes::tile * dim + c * Codes::tile + value_place(j % 64);
      turned[static_cast<std::size_t>(to)] = v.codes[static_cast<std::size_t>(j * dim + c)];
    }
  }
  std::vector<float> of_keys(std::size_t{3} * keys), out(x.q.size());
  for (int j = 0; j < keys; ++j) {
    const auto from = static_cast<std::size_t>(j);
    float* to = of_keys.data() + j / Codes::tile * Codes::tile * 3 + j % Codes::tile;
    to[0] = k.scale[from];
    to[Codes::tile] = std::log2(v.scale[from]);
    to[2 * Codes::tile] = 1 / v.scale[from];
  }
  const Codes::Params p{q.codes.data(), k.codes.data(), turned.data(),
                        q.scale.data(), of_keys.data(), out.data()};
  return run<Codes>("5 codes of 8 bits", p, queries / Codes::rows, out, x, 2e-2);
}
