// One call from C++: causal attention of 1024 tokens with integer products, and its error against
// float64. Build it with the CMakeLists.txt beside it.
#include <cstdio>
#include <qattn/qattn.hpp>
#include <random>
#include <string>
#include <vector>

constexpr std::int64_t batch = 1, tokens = 1024, heads = 8, heads_kv = 2, dim = 64;

std::vector<float> normal(std::int64_t count, unsigned seed) {
  std::mt19937 engine(seed);
  std::normal_distribution<float> distribution;
  std::vector<float> x(static_cast<std::size_t>(count));
  for (float& e : x) e = distribution(engine);
  return x;
}

int main() {
  const auto q = normal(batch * tokens * heads * dim, 1);
  const auto k = normal(batch * tokens * heads_kv * dim, 2);
  const auto v = normal(batch * tokens * heads_kv * dim, 3);
  std::vector<float> out(q.size());

  // Views of your memory, here (B, H, S, D). Any strides will do whose last one is 1.
  qattn::AttentionTensors tensors;
  const auto view = [](auto* data, std::int64_t of_heads) {
    return qattn::TensorView::dense(data, qattn::Format::f32, {batch, of_heads, tokens, dim});
  };
  tensors.q = view(q.data(), heads);
  tensors.k = view(k.data(), heads_kv);
  tensors.v = view(v.data(), heads_kv);
  tensors.out = view(out.data(), heads);

  qattn::AttentionOptions options;
  options.recipe = *qattn::recipe_named("int8_full");
  options.layout = qattn::Layout::bhsd;
  options.causal = true;

  // A refusal names the tensor, the value and the rule, and leaves `out` alone.
  std::vector<double> truth(out.size());
  qattn::Status status = qattn::attention(tensors, options);
  if (status.ok()) status = qattn::reference_attention(tensors, options, truth);
  if (!status.ok()) {
    std::fprintf(stderr, "%s\n", status.message().c_str());
    return 1;
  }
  const double nrmse = qattn::compare(out, truth, dim).nrmse;
  std::printf("qattn %s on %s: NRMSE %.1e\n", std::string(qattn::version()).c_str(),
              qattn::cpu_isa()->c_str(), nrmse);
  return nrmse < 0.03 ? 0 : 1;
}
