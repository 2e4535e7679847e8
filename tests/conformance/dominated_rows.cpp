#include "conformance/dominated_rows.hpp"

#include <algorithm>
#include <cmath>

#include "support/numbers.hpp"

namespace qattn::test {
namespace {

/// Channel 0 of Q and K has the score of the key at `place`, which leaves the others `rest` of a
/// row's mass or less. Channel 0 of V is that key's share of a row.
void dominate(Call& call, double rest, std::int64_t place) {
  constexpr float loud = 4.0f, spread = 0.5f;
  const std::int64_t dim = call.dim, dim_v = call.dim_v;
  for (Sequence& s : call.sequences) {
    const auto others = static_cast<double>(std::max<std::int64_t>(s.len_k - 1, 1));
    const double score = std::log(others / rest) * std::sqrt(static_cast<double>(dim)) / loud;
    const std::int64_t dominating = std::min(place, s.len_k - 1);
    // Of any size above `loud`, so that P of the key has any fraction.
    for (std::size_t row = 0; row * dim < s.q.size(); ++row) {
      s.q[row * dim] = loud * (1 + static_cast<float>(row % 32) / 128);
    }
    for (std::int64_t t = 0; t < call.heads_k * s.len_k; ++t) {
      const bool dominates = t % s.len_k == dominating;
      float* k = &s.k[t * dim];
      for (std::int64_t d = 0; d < dim; ++d) k[d] *= dominates ? 0.0f : spread;
      k[0] = dominates ? static_cast<float>(score) : 0.0f;
      s.v[t * dim_v] = dominates ? 1.0f : 0.0f;
    }
    for (std::vector<float>* operand : {&s.q, &s.k, &s.v}) {  // numbers that every format has
      for (float& x : *operand) {
        x = static_cast<float>(round_real(static_cast<double>(x), Format::bf16));
      }
    }
  }
}

void expect_lse(const Call& call, const Outcome& now) {
  ASSERT_TRUE(now.status.ok()) << now.status.message();
  // The same scores, but neither P nor V rounded.
  ModelOptions options = now.model_options();
  options.recipe.p = options.recipe.v = Format::f32;
  options.recipe.v_scale = {};
  const ModelOutput want = model_attention(call, options);
  // P of so few bits that nothing is left of the others.
  const bool coarse = info(now.resolved.p).bits <= 8 && now.resolved.p != Format::u8;
  for (std::size_t row = 0; row < want.lse.size(); ++row) {
    const double rest = 1 - want.out[row * call.dim_v];
    const double lost = rest * (coarse ? 1 : 0x1p-8);
    const double bound = 1e-5 + 1e-6 * std::abs(want.lse[row]) + lost;
    ASSERT_NEAR(now.lse[row], want.lse[row], bound) << "row " << row << ", rest " << rest;
  }
}

}  // namespace

void expect_exact_lse(const Feature& feature, const RunCall& run) {
  const std::int64_t keys = *std::max_element(feature.sk.begin(), feature.sk.end());
  for (const double rest : {0x1p-20, 0x1p-10, 0x1p-7, 0x1p-4}) {
    for (const std::int64_t place : {std::int64_t{0}, keys / 2, keys - 1}) {
      SCOPED_TRACE("key " + std::to_string(place) + " of " + std::to_string(keys) + ", others " +
                   std::to_string(rest));
      Call call = make_call(feature, 3);
      dominate(call, rest, place);
      Laid laid = lay_out(call, feature.how);
      expect_lse(call, run(call, laid));
      if (testing::Test::HasFailure() || keys == 1) return;
    }
  }
}

}  // namespace qattn::test
