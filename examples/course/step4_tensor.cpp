// Step 4 of the course: products on tensor cores, in f16. A warp has 16 queries; one instruction
// multiplies 16 x 16 by 16 x 8 numbers. The price is where numbers lie: a lane holds rows g and
// g + 8 (g = lane / 4) and columns 2t, 2t + 1 of every 8 (t = lane % 4), and load_matrix brings K
// and V into the order that the product wants. A row's maximum is found by four lanes together.
// Scores never leave registers: as the accumulators of one product lie, the operand of the next
// one does.
//
// What to see: 64 times fewer instructions for the products. Rows in shared memory are 16 bytes
// longer than they need, so that eight rows lie in different banks.
#include "course.hpp"
#include "formats/f16.hpp"

namespace course {

struct Tensor {
  struct Params {
    const std::uint16_t *q, *k, *v;  ///< f16
    float* out;
  };
  static constexpr int threads = 128, min_blocks = 1, tile = 64, rows = 64;  // 16 a warp
  static constexpr int pitch = dim * 2 + 16, v_at = tile * pitch, shared_bytes = 2 * v_at;
  static constexpr auto f16 = Element::f16;

  static QATTN_DEVICE void copy_tile(SharedAddress to, const std::uint16_t* from, int first) {
    for (int n = isa::thread(); n < tile * 8; n += threads) {  // 8 pieces of 16 bytes a row
      isa::copy_async16(to + static_cast<SharedAddress>(n / 8 * pitch + n % 8 * 16),
                        from + (first + n / 8) * dim + n % 8 * 8, 16);
    }
  }
  /// load_matrix takes from each lane where one row of 16 bytes lies.
  static QATTN_DEVICE SharedAddress matrix_row(SharedAddress at, int row, int byte) {
    return at + static_cast<SharedAddress>(row * pitch + byte);
  }

  static QATTN_DEVICE void scores_of(SharedAddress k, const std::uint32_t (&q)[4][4],
                                     float (&s)[1][8][4]) {
    const int lane = isa::lane();
    for (int half = 0; half < 2; ++half) {  // 32 channels: two steps of 16
      std::uint32_t b[8][4];
      SharedAddress row[8];
      for (int n = 0; n < 8; ++n) {
        row[n] = matrix_row(k, 8 * n + lane % 8, 64 * half + lane / 8 * 16);
      }
      isa::load_matrix<8>(b, row);
      for (int step = 0; step < 2; ++step) {
        std::uint32_t a[1][4], part[8][2];
        for (int r = 0; r < 4; ++r) a[0][r] = q[2 * half + step][r];
        for (int n = 0; n < 8; ++n) part[n][0] = b[n][2 * step], part[n][1] = b[n][2 * step + 1];
        isa::mma<f16, f16>(s, a, part);
      }
    }
  }

  /// Weights in place of scores; what came before shrinks.
  static QATTN_DEVICE void softmax(float (&s)[1][8][4], float (&o)[1][8][4], float (&top)[2],
                                   float (&sum)[2]) {
    for (int h = 0; h < 2; ++h) {  // rows g and g + 8
      float most = top[h];
      for (auto& x : s[0]) most = fmaxf(most, fmaxf(x[2 * h], x[2 * h + 1]) * score_scale);
      most = fmaxf(most, isa::shuffle_xor(most, 1));
      most = fmaxf(most, isa::shuffle_xor(most, 2));
      const float rescale = isa::exp2(top[h] - most);
      top[h] = most;
      sum[h] *= rescale;
      for (auto& x : s[0]) {
        for (int i = 2 * h; i < 2 * h + 2; ++i) {
          x[i] = isa::exp2(fmaf(x[i], score_scale, -most));
          sum[h] += x[i];
        }
      }
      for (auto& x : o[0]) x[2 * h] *= rescale, x[2 * h + 1] *= rescale;
    }
  }

  static QATTN_DEVICE void add_values(SharedAddress v, const float (&p)[1][8][4],
                                      float (&o)[1][8][4]) {
    const int lane = isa::lane();
    for (int step = 0; step < 4; ++step) {  // 16 keys
      std::uint32_t a[1][4], pairs[4][4], b[8][2];
      for (int r = 0; r < 4; ++r) {
        const float* x = p[0][2 * step + r / 2] + r % 2 * 2;
        a[0][r] = isa::pack_f16(x[0], x[1]);
      }
      SharedAddress row[4];
      for (int n = 0; n < 4; ++n) {
        row[n] = matrix_row(v, 16 * step + lane % 16, 32 * n + lane / 16 * 16);
      }
      isa::load_matrix_transposed<4>(pairs, row);
      for (int n = 0; n < 8; ++n) {
        b[n][0] = pairs[n / 2][n % 2 * 2], b[n][1] = pairs[n / 2][n % 2 * 2 + 1];
      }
      isa::mma<f16, f16>(o, a, b);
    }
  }

  static QATTN_DEVICE void run(const Params& p) {
    const int g = isa::lane() / 4, t = isa::lane() % 4;
    const int row = isa::block().x * rows + isa::warp() * 16 + g;
    const SharedAddress k = isa::shared_base(), v = k + v_at;
    std::uint32_t q[4][4];
    for (int step = 0; step < 4; ++step) {
      for (int r = 0; r < 4; ++r) {
        const std::uint16_t* from = p.q + (row + r % 2 * 8) * dim + 16 * step + 2 * t + r / 2 * 8;
        q[step][r] = isa::load_global(reinterpret_cast<const std::uint32_t*>(from));
      }
    }
    float o[1][8][4] = {}, top[2] = {-INFINITY, -INFINITY}, sum[2] = {};
    for (int first = 0; first < keys; first += tile) {
      copy_tile(k, p.k, first);
      copy_tile(v, p.v, first);
      isa::copy_async_commit();
      isa::copy_async_wait<0>();
      isa::sync_threads();
      float s[1][8][4] = {};
      scores_of(k, q, s);
      softmax(s, o, top, sum);
      add_values(v, s, o);
      isa::sync_threads();
    }
    for (int h = 0; h < 2; ++h) {
      sum[h] += isa::shuffle_xor(sum[h], 1);
      sum[h] += isa::shuffle_xor(sum[h], 2);
      for (int n = 0; n < 8; ++n) {
        float* to = p.out + (row + 8 * h) * dim + 8 * n + 2 * t;
        for (int i = 0; i < 2; ++i) isa::store_global(to + i, o[0][n][2 * h + i] / sum[h]);
      }
    }
  }
};

}  // namespace course

int main() {
  const course::Problem x;
  const auto halves = [](const std::vector<float>& from) {
    std::vector<std::uint16_t> to;
    for (const float e : from) to.push_back(qattn::formats::F16::encode(e));
    return to;
  };
  const std::vector<std::uint16_t> q = halves(x.q), k = halves(x.k), v = halves(x.v);
  std::vector<float> out(x.q.size());
  const course::Tensor::Params p{q.data(), k.data(), v.data(), out.data()};
  return course::run<course::Tensor>("4 tensor cores, f16", p,
                                     course::queries / course::Tensor::rows, out, x, 1e-3);
}
