// Step 2 of the course: no scores in memory. A thread keeps its query, its output and two numbers,
// the largest score so far and the sum of the weights under it. A larger score makes everything
// before it smaller by one factor: the online softmax, with which attention needs one pass.
//
// What to see: half of the traffic is gone, and the S x S scores with it, which no memory would
// hold for long sequences. Each thread still reads all of K and V by itself.
#include "course.hpp"

namespace course {

struct Online {
  struct Params {
    const float *q, *k, *v;
    float* out;
  };
  static constexpr int threads = 64, min_blocks = 1, shared_bytes = 0;

  static QATTN_DEVICE void run(const Params& p) {
    const int i = isa::block().x * threads + isa::thread();
    float q[dim], o[dim] = {}, top = -INFINITY, sum = 0;
    for (int c = 0; c < dim; ++c) q[c] = isa::load_global(p.q + i * dim + c) * score_scale;
    for (int j = 0; j < keys; ++j) {
      float s = 0;
      for (int c = 0; c < dim; ++c) s = fmaf(q[c], isa::load_global(p.k + j * dim + c), s);
      const float before = top;
      top = fmaxf(top, s);
      const float rescale = isa::exp2(before - top), weight = isa::exp2(s - top);
      sum = fmaf(sum, rescale, weight);
      for (int c = 0; c < dim; ++c) {
        o[c] = fmaf(weight, isa::load_global(p.v + j * dim + c), o[c] * rescale);
      }
    }
    for (int c = 0; c < dim; ++c) isa::store_global(p.out + i * dim + c, o[c] / sum);
  }
};

}  // namespace course

int main() {
  const course::Problem x;
  std::vector<float> out(x.q.size());
  const course::Online::Params p{x.q.data(), x.k.data(), x.v.data(), out.data()};
  return course::run<course::Online>("2 online softmax", p,
                                     course::queries / course::Online::threads, out, x, 1e-6);
}
