// Step 1 of the course: attention as its formula says it. A thread has one query. It writes its
// scores to memory, reads them for the softmax, and reads them again for every channel of V.
//
// What to see: every number comes from global memory each time that it is used, 32 MiB for a
// problem of 160 KiB. A GPU has ten to a hundred times too few bytes a second for its arithmetic.
#include "course.hpp"

namespace course {

struct Naive {
  struct Params {
    const float *q, *k, *v;
    float *scores, *out;
  };
  static constexpr int threads = 64, min_blocks = 1, shared_bytes = 0;

  static QATTN_DEVICE void run(const Params& p) {
    const int i = isa::block().x * threads + isa::thread();
    float* scores = p.scores + i * keys;
    float top = -INFINITY;
    for (int j = 0; j < keys; ++j) {
      float s = 0;
      for (int c = 0; c < dim; ++c) {
        s = fmaf(isa::load_global(p.q + i * dim + c), isa::load_global(p.k + j * dim + c), s);
      }
      isa::store_global(scores + j, s * score_scale);
      top = fmaxf(top, s * score_scale);
    }
    float sum = 0;
    for (int j = 0; j < keys; ++j) {
      const float weight = isa::exp2(isa::load_global(scores + j) - top);
      isa::store_global(scores + j, weight);
      sum += weight;
    }
    for (int c = 0; c < dim; ++c) {
      float o = 0;
      for (int j = 0; j < keys; ++j) {
        o = fmaf(isa::load_global(scores + j), isa::load_global(p.v + j * dim + c), o);
      }
      isa::store_global(p.out + i * dim + c, o / sum);
    }
  }
};

}  // namespace course

int main() {
  const course::Problem x;
  std::vector<float> scores(course::queries * course::keys), out(x.q.size());
  const course::Naive::Params p{x.q.data(), x.k.data(), x.v.data(), scores.data(), out.data()};
  return course::run<course::Naive>("1 naive", p, course::queries / course::Naive::threads, out, x,
                                    1e-6);
}
