// Quantise once, run often: keys and values become codes once, a plan is made once, and then every
// call of the loop reads the codes as they lie and allocates nothing. Build it with the
// CMakeLists.txt beside it.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <qattn/qattn.hpp>
#include <random>
#include <vector>

using qattn::Format, qattn::TensorView;
constexpr std::int64_t queries = 4, keys = 4096, heads = 8, dim = 64;
std::vector<float> normal(std::int64_t count) {
  static std::mt19937 engine(1);
  std::vector<float> x(static_cast<std::size_t>(count));
  for (float& e : x) e = std::normal_distribution<float>()(engine);
  return x;
}
void check(const qattn::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.message().c_str());
  std::exit(1);
}

/// Codes of one operand and a scale a token.
struct Coded {
  std::vector<std::int8_t> codes;
  std::vector<float> scale;
  qattn::QuantizeTensors t;

  Coded(const std::vector<float>& x, qattn::Role role) : codes(x.size()), scale(heads * keys) {
    t.x = TensorView::dense(x.data(), Format::f32, {1, keys, heads, dim});
    t.codes = TensorView::dense(codes.data(), Format::s8, {1, keys, heads, dim});
    t.scale = TensorView::dense(scale.data(), Format::f32, {1, heads, keys});
    qattn::QuantizeOptions options;
    options.role = role;
    check(qattn::quantize(t, options).status());  // quantize_shapes() tells what it needs
  }
};

int main() {
  const auto k = normal(keys * heads * dim), v = normal(keys * heads * dim);
  const auto q = normal(queries * heads * dim);
  std::vector<float> out(q.size()), direct(q.size());
  const Coded k_codes(k, qattn::Role::k), v_codes(v, qattn::Role::v);

  qattn::AttentionTensors plain;
  plain.q = TensorView::dense(q.data(), Format::f32, {1, queries, heads, dim});
  plain.k = k_codes.t.x, plain.v = v_codes.t.x;
  plain.out = TensorView::dense(direct.data(), Format::f32, {1, queries, heads, dim});
  qattn::AttentionTensors coded = plain;
  coded.k = k_codes.t.codes, coded.k_scale = k_codes.t.scale;
  coded.v = v_codes.t.codes, coded.v_scale = v_codes.t.scale;
  coded.out.data = out.data();

  qattn::AttentionOptions options;
  options.recipe = *qattn::recipe_named("int8_full");
  options.recipe.smooth_k = options.recipe.balance_k = qattn::Toggle::off;  // as quantize() above
  const auto plan = qattn::plan(coded, options);
  check(plan.status());
  const std::size_t bytes = plan->workspace_bytes();
  void* const memory = std::aligned_alloc(64, bytes / 64 * 64 + 64);  // for as long as we run
  const auto run = [&] { return qattn::run(*plan, coded, options, memory, bytes); };
  const auto ms_of = [](auto call) {  // the fastest of 20
    double best = 1e9;
    for (int i = 0; i < 20; ++i) {
      const auto begin = std::chrono::steady_clock::now();
      check(call());
      const std::chrono::duration<double, std::milli> it = std::chrono::steady_clock::now() - begin;
      best = std::min(best, it.count());
    }
    return best;
  };
  const double once = ms_of(run), anew = ms_of([&] { return qattn::attention(plain, options); });
  std::printf("codes made once: %.3f ms a call; made in every call: %.3f ms; %s\n", once, anew,
              out == direct ? "the same bits" : "other bits");
  return out == direct ? 0 : 1;
}
