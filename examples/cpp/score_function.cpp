// Your own score function and mask: any callable, inlined into a loop over keys in your program.
// Here each head has a bias that falls with distance, bent by tanh, and queries see their own
// document alone. CPUs only. Build it with the CMakeLists.txt beside it.
#include <cmath>
#include <cstdio>
#include <qattn/qattn.hpp>
#include <random>
#include <vector>

constexpr std::int64_t tokens = 300, heads = 4, dim = 32;

/// A functor marked so could be inlined into a kernel, too.
struct BentBias {
  float slope, bend;
  QATTN_HOST_DEVICE float operator()(float score, std::int64_t /*batch*/, std::int64_t head,
                                     std::int64_t query, std::int64_t key) const {
    const auto distance = static_cast<float>(query < key ? key - query : query - key);
    return bend * std::tanh(score / bend) - slope * static_cast<float>(1 + head) * distance;
  }
};

int main() {
  std::mt19937 engine(1);
  std::normal_distribution<float> normal;
  std::vector<float> q(tokens * heads * dim), k = q, v = q, out = q;
  for (auto* x : {&q, &k, &v}) {
    for (float& e : *x) e = normal(engine);
  }
  std::vector<int> document(tokens);
  for (std::size_t i = 0; i < document.size(); ++i) document[i] = static_cast<int>(i / 70);

  qattn::AttentionTensors tensors;
  const auto view = [](std::vector<float>& x) {
    return qattn::TensorView::dense(x.data(), qattn::Format::f32, {1, tokens, heads, dim});
  };
  tensors.q = view(q), tensors.k = view(k), tensors.v = view(v), tensors.out = view(out);

  // Both are kept by address, so that they must live as long as the call.
  const BentBias bias{0.02f, 5.0f};
  const auto same_document = [&](std::int64_t, std::int64_t, std::int64_t query, std::int64_t key) {
    return document[static_cast<std::size_t>(query)] == document[static_cast<std::size_t>(key)];
  };
  qattn::AttentionOptions options;
  options.recipe = *qattn::recipe_named("int8_full");
  options.score_function = qattn::score_function(bias);
  options.mask_function = qattn::mask_function(same_document);
  if (const auto status = qattn::attention(tensors, options); !status.ok()) {
    std::fprintf(stderr, "%s\n", status.message().c_str());
    return 1;
  }

  // The same by hand, for a query of the third document.
  const std::int64_t i = 150, head = 2;
  const auto at = [&](const std::vector<float>& x, std::int64_t row, std::int64_t c) {
    return double{x[static_cast<std::size_t>((row * heads + head) * dim + c)]};
  };
  double sum = 0, error = 0, norm = 0, want[dim] = {};
  for (std::int64_t j = 0; j < tokens; ++j) {
    double s = 0;
    for (std::int64_t c = 0; c < dim; ++c) s += at(q, i, c) * at(k, j, c);
    const auto score = static_cast<float>(s / std::sqrt(double{dim}));
    const double p =
        same_document(0, head, i, j) ? std::exp(double{bias(score, 0, head, i, j)}) : 0;
    sum += p;
    for (std::int64_t c = 0; c < dim; ++c) want[c] += p * at(v, j, c);
  }
  for (std::int64_t c = 0; c < dim; ++c) {
    const double truth = want[c] / sum, off = at(out, i, c) - truth;
    error += off * off, norm += truth * truth;
  }
  std::printf("query %d, head %d: error %.1e\n", int{i}, int{head}, std::sqrt(error / norm));
  return std::sqrt(error / norm) < 0.05 ? 0 : 1;
}
