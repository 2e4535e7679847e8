// Step 3 of the course: the queries of a block share tiles of 64 keys in shared memory. All threads
// copy a tile together, 16 bytes at a time and past their registers, wait for it and for each
// other, and then read it there, where a row that all lanes of a warp read at once costs one read.
//
// What to see: global memory is read once a block, not once a query. Now the arithmetic is what
// takes the time: one multiply-add a lane and instruction.
#include "course.hpp"

namespace course {

struct Shared {
  struct Params {
    const float *q, *k, *v;
    float* out;
  };
  static constexpr int threads = 64, min_blocks = 1, tile = 64;
  static constexpr int row_bytes = dim * 4, v_at = tile * row_bytes, shared_bytes = 2 * v_at;

  /// Rows [first, first + tile) of K or V; a thread copies every 64th piece of 16 bytes.
  static QATTN_DEVICE void copy_tile(SharedAddress to, const float* from, int first) {
    const char* bytes = reinterpret_cast<const char*>(from + first * dim);
    for (int at = 16 * isa::thread(); at < tile * row_bytes; at += 16 * threads) {
      isa::copy_async16(to + static_cast<SharedAddress>(at), bytes + at, 16);
    }
  }
  static QATTN_DEVICE Words4 piece(SharedAddress tile_at, int row, int c) {
    return isa::load_shared<Words4>(tile_at + static_cast<SharedAddress>(row * row_bytes + 4 * c));
  }
  static QATTN_DEVICE float number(std::uint32_t word) { return std::bit_cast<float>(word); }

  static QATTN_DEVICE void run(const Params& p) {
    const int i = isa::block().x * threads + isa::thread();
    const SharedAddress k = isa::shared_base(), v = k + v_at;
    float q[dim], o[dim] = {}, top = -INFINITY, sum = 0;
    for (int c = 0; c < dim; ++c) q[c] = isa::load_global(p.q + i * dim + c) * score_scale;
    for (int first = 0; first < keys; first += tile) {
      copy_tile(k, p.k, first);
      copy_tile(v, p.v, first);
      isa::copy_async_commit();
      isa::copy_async_wait<0>();  // what this thread copied is there
      isa::sync_threads();        // and what the others did
      for (int j = 0; j < tile; ++j) {
        float s = 0;
        for (int c = 0; c < dim; c += 4) {
          const Words4 w = piece(k, j, c);
          for (int e = 0; e < 4; ++e) s = fmaf(q[c + e], number(w.w[e]), s);
        }
        const float before = top;
        top = fmaxf(top, s);
        const float rescale = isa::exp2(before - top), weight = isa::exp2(s - top);
        sum = fmaf(sum, rescale, weight);
        for (int c = 0; c < dim; c += 4) {
          const Words4 w = piece(v, j, c);
          for (int e = 0; e < 4; ++e) o[c + e] = fmaf(weight, number(w.w[e]), o[c + e] * rescale);
        }
      }
      isa::sync_threads();  // nobody reads the tile any more
    }
    for (int c = 0; c < dim; ++c) isa::store_global(p.out + i * dim + c, o[c] / sum);
  }
};

}  // namespace course

int main() {
  const course::Problem x;
  std::vector<float> out(x.q.size());
  const course::Shared::Params p{x.q.data(), x.k.data(), x.v.data(), out.data()};
  return course::run<course::Shared>("3 tiles in shared memory", p,
                                     course::queries / course::Shared::threads, out, x, 1e-6);
}
