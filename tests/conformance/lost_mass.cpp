#include "conformance/lost_mass.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "support/numbers.hpp"

namespace qattn::test {
namespace {

struct Dominated {
  double share;   ///< of a row's mass that is the key's
  double spread;  ///< of the other scores
  bool mean;      ///< has V a mean?
};

/// Numbers that every input format has.
void round_to_bf16(std::vector<float>& x) {
  for (float& value : x) {
    value = static_cast<float>(round_real(static_cast<double>(value), Format::bf16));
  }
}

/// Channel 0 of Q and K has the dominating key's score, the others the rest.
void dominate(Call& call, const Dominated& x) {
  constexpr float loud = 4.0f;
  const std::int64_t dim = call.dim, dim_v = call.dim_v;
  for (Sequence& s : call.sequences) {
    const auto others = static_cast<double>(s.len_k - 1) * std::exp(x.spread * x.spread / 2);
    const double score = std::log(x.share / (1 - x.share) * others);
    for (std::size_t i = 0; i < s.q.size(); i += dim) s.q[i] = loud;
    for (std::int64_t t = 0; t < call.heads_k * s.len_k; ++t) {
      float* k = &s.k[t * dim];
      const bool dominates = t % s.len_k == s.len_k / 3;
      for (std::int64_t d = 0; d < dim; ++d)
        k[d] *= dominates ? 0.0f : static_cast<float>(x.spread);
      k[0] = dominates ? static_cast<float>(score * std::sqrt(static_cast<double>(dim))) / loud : 0;
      for (std::int64_t d = 0; d < dim_v && x.mean; ++d) s.v[t * dim_v + d] += d % 2 ? 2.0f : -2.0f;
    }
    for (std::vector<float>* operand : {&s.q, &s.k, &s.v}) round_to_bf16(*operand);
  }
}

}  // namespace

void expect_mass_kept(const Feature& feature, const RunCall& run) {
  for (const Dominated& x : {Dominated{0.6, 0.5, false}, Dominated{0.8, 1.5, false},
                             Dominated{0.9, 0.5, true}, Dominated{0.97, 1.5, true}}) {
    SCOPED_TRACE("share " + std::to_string(x.share) + ", spread " + std::to_string(x.spread) +
                 (x.mean ? ", V with a mean" : ""));
    Call call = make_call(feature, 3);
    dominate(call, x);
    Laid laid = lay_out(call, feature.how);
    const Outcome now = run(call, laid);
    ASSERT_TRUE(now.status.ok()) << now.status.message();
    // The same scores, but neither P nor V rounded.
    ModelOptions options = now.model_options();
    options.recipe.p = options.recipe.v = Format::f32;
    options.recipe.v_scale = {};
    const ModelOutput want = model_attention(call, options);
    const double error = distance(now.out, want.out, call.dim_v).nrmse;
    EXPECT_LE(error, 2e-2);
    if (!now.lse.empty()) {
      EXPECT_LE(lse_distance(now.lse, want.lse), 2e-3);
    }
  }
}

}  // namespace qattn::test
