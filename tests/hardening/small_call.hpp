// A call of a few thousand numbers with its expected result, for tests of processes and threads.
#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "qattn/qattn.hpp"

namespace qattn::test {

struct SmallCall {
  std::int64_t queries, keys;
  std::vector<float> q, k, v;
  static constexpr std::int64_t heads = 2, dim = 32;

  explicit SmallCall(std::int64_t sq = 70, std::int64_t sk = 300) : queries(sq), keys(sk) {
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    q.resize(static_cast<std::size_t>(sq * heads * dim));
    k.resize(static_cast<std::size_t>(sk * heads * dim));
    v.resize(k.size());
    for (std::vector<float>* x : {&q, &k, &v}) {
      for (float& value : *x) value = normal(random);
    }
  }

  std::vector<float> output() const { return std::vector<float>(q.size()); }
  AttentionTensors tensors(std::vector<float>& out) const {
    AttentionTensors t;
    t.q = TensorView::dense(q.data(), Format::f32, {1, queries, heads, dim});
    t.k = TensorView::dense(k.data(), Format::f32, {1, keys, heads, dim});
    t.v = TensorView::dense(v.data(), Format::f32, {1, keys, heads, dim});
    t.out =
        TensorView::dense(static_cast<void*>(out.data()), Format::f32, {1, queries, heads, dim});
    return t;
  }
};

inline AttentionOptions options_of(const std::string& recipe, int threads) {
  AttentionOptions options;
  options.recipe = *recipe_named(recipe);
  options.causal = true;
  options.threads = threads;
  return options;
}

}  // namespace qattn::test
