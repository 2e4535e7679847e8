// Keys that no query sees have no influence on the emulated GPU kernels, whatever they hold: not a
// bit of the results changes with them, but where Hopper's kernel leaves blocks to the portable
// one.
#include "conformance/hidden_keys.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "emulated/on_gpu.hpp"
#include "support/thorough.hpp"

namespace qattn::test {
namespace {

constexpr std::int64_t queries = 5, keys = 150;
constexpr float nan_value = std::numeric_limits<float>::quiet_NaN();

class EmulatedHiddenKeys : public OnGpuTest {
 protected:
  Feature small(std::int64_t rows = queries) const {
    Feature f = feature(rows, keys, 4, 2);
    f.sq = {rows}, f.sk = {keys}, f.options.causal = false;
    return f;
  }

  /// Blocks of Hopper's kernels for 16-bit V that meet numbers that are not finite are done again
  /// by the portable one, whose last bits differ.
  bool done_again(const Call& call) const {
    const auto& v = call.sequences[0].v;
    return GetParam().architecture == 90 && !has_codes(recipe().v) &&
           std::any_of(v.begin(), v.end(), [](float x) { return !(std::abs(x) < 65504); });
  }

  /// Runs with several contents of what is hidden; the results of zeros.
  Outcome expect_no_influence(const Feature& f, const Hiding& hiding, int pack, int splits) {
    Call call = make_call(f, 3);
    hiding.apply(call);
    Outcome want;
    for (const float value : {0.0f, nan_value, 1e30f, 1000.0f}) {
      fill_keys(call, hiding.hides, value);
      Laid laid = lay_out(call, f.how);
      const Outcome got = run(call, laid, pack, splits);
      if (HasFailure()) return got;
      if (value == 0.0f) {
        want = got;
        for (const float x : want.out) EXPECT_TRUE(std::isfinite(x));
      }
      if (done_again(call)) {
        EXPECT_LE(distance(got.out, widened(want.out), call.dim_v).nrmse, 1e-3) << value;
      } else {
        EXPECT_TRUE(same_bits(want, got)) << "filled with " << value;
      }
      if (value == 1000.0f) {
        const ModelOutput model = model_attention(call, got.model_options());
        expect_matches_model(got, call, f.how.output, model);
      }
    }
    const bool codes = has_codes(recipe().qk) || has_codes(recipe().v);
    const std::string line =
        std::string("\nhidden_keys: ") + (codes ? "are looked for" : "none") + "\n";
    EXPECT_NE(want.plan.find(line), std::string::npos) << want.plan;
    return want;
  }
};

TEST_P(EmulatedHiddenKeys, HaveNoInfluence) {
  for (const Hiding& hiding : every_hiding(queries, keys)) {
    if (hiding.name == "function") continue;
    SCOPED_TRACE(hiding.name);
    expect_no_influence(small(), hiding, 1, 1);
    if (HasFailure()) return;
  }
}

/// Tiles that are full of rows, several of them, and keys in parts.
TEST_P(EmulatedHiddenKeys, HaveNoInfluenceOnManyRows) {
  const auto mask = padding_mask({1, 1, 140, keys}, true, 1, 0);
  const Hiding rows{"rows", [&](Call& call) { call.mask = mask; }, is_padding};
  for (const int splits : {1, 2}) {
    expect_no_influence(small(140), rows, 1, splits);
    if (HasFailure()) return;
  }
  const auto one = padding_mask({1, 1, 1, keys}, true, 1, 0);
  expect_no_influence(small(140), {"padding", [&](Call& c) { c.mask = one; }, is_padding}, 1, 1);
}

/// Means of everything, rotation and a scale for all keys of a head.
TEST_P(EmulatedHiddenKeys, HaveNoInfluenceUnderOtherOptions) {
  if (recipe().qk != Format::s8) GTEST_SKIP() << "smooth_q is for s8";
  Recipe options = recipe();
  const bool floats = options.v == Format::e4m3;
  options.smooth_q = floats && GetParam().architecture == 90 ? Toggle::off : Toggle::on;
  options.smooth_v = has_codes(options.v) ? Toggle::on : Toggle::off;
  options.rotate = Toggle::on;
  options.k_scale.granularity = Granularity::per_head;
  for (const Hiding& hiding : every_hiding(queries, keys)) {
    if (hiding.name != "padding" && hiding.name != "window") continue;
    const Feature f = small();
    Call call = make_call(f, 5);
    hiding.apply(call);
    Outcome want;
    for (const float value : {0.0f, nan_value}) {
      fill_keys(call, hiding.hides, value);
      Laid laid = lay_out(call, f.how);
      const Outcome got = run_emulated(call, laid, options, every_timing().subspan(1, 1));
      if (HasFailure()) return;
      if (value == 0.0f) want = got;
      for (const float x : got.out) EXPECT_TRUE(std::isfinite(x));
      if (done_again(call)) continue;
      EXPECT_TRUE(same_bits(want, got)) << hiding.name;
    }
  }
}

/// The factors that balance K's channels, where keys share nothing else.
TEST_P(EmulatedHiddenKeys, HaveNoInfluenceOnBalance) {
  if (!free_scales(recipe().qk)) GTEST_SKIP() << "no scales per token";
  Recipe options = recipe();
  options.k_scale = {Granularity::per_token, 0, 0};
  options.smooth_k = Toggle::off, options.balance_k = Toggle::on;
  Feature f = small();
  f.family = Family::loud;
  Call call = make_call(f, 5);
  call.mask = padding_mask({1, 1, 1, keys}, true, 1, 0);
  Outcome want;
  for (const float value : {0.0f, 1000.0f}) {
    fill_keys(call, is_padding, value);
    Laid laid = lay_out(call, f.how);
    const Outcome got = run_emulated(call, laid, options, every_timing().subspan(1, 1));
    if (HasFailure()) return;
    if (value == 0.0f) want = got;
    EXPECT_TRUE(same_bits(want, got)) << value;
  }
}

constexpr std::int64_t plain_keys = 100;

/// Loud keys under a bias behind the plain ones, in `rows` rows that differ, or one for all.
Call with_slight_keys(const Feature& f, std::int64_t rows, float bias) {
  Call call = make_call(f, 7);
  call.mask = Mask{};
  call.mask.shape = {1, 1, rows, keys};
  for (std::int64_t n = 0; n < rows * keys; ++n) {
    const std::int64_t i = n / keys, j = n % keys;
    const bool missed = j >= plain_keys || (rows > 1 && i > 0 && (i + j) % 7 == 0);
    call.mask.values.push_back(missed ? bias : 0.0f);
  }
  Sequence& s = call.sequences[0];
  for (std::size_t n = 0; n < s.k.size(); ++n) {
    if (static_cast<std::int64_t>(n) / call.dim % s.len_k >= plain_keys) s.k[n] *= 5.0f;
  }
  for (std::size_t n = 0; n < s.v.size(); ++n) {
    if (static_cast<std::int64_t>(n) / call.dim_v % s.len_k >= plain_keys) s.v[n] += 20.0f;
  }
  return call;
}

/// The results of keys without weight are those of keys under a faint bias, to the bit.
TEST_P(EmulatedHiddenKeys, SlightOnesWithoutWeightLeaveTheOthersTheirCodes) {
  Feature f = small(12);
  f.family = Family::normal;
  for (const std::int64_t rows : {1, 12}) {
    for (const bool causal : {false, true}) {
      f.options.causal = causal;
      Outcome want;
      for (const float bias : {-1e4f, -300.0f}) {
        const Call call = with_slight_keys(f, rows, bias);
        Laid laid = lay_out(call, f.how);
        const Outcome got = run(call, laid, 1, 1);
        if (HasFailure()) return;
        if (bias == -1e4f) want = got;
        EXPECT_TRUE(same_bits(want, got)) << rows << " rows, causal " << causal;
      }
    }
  }
}

/// The other rows' results where one row sees the keys without a bias, so that they join scales.
TEST_P(EmulatedHiddenKeys, SlightOnesWithWeightKeepIt) {
  Feature f = small(12);
  f.family = Family::normal;
  for (const char* why : {"scores make up for it", "a row sees no others", "a row's best"}) {
    SCOPED_TRACE(why);
    Call call = with_slight_keys(f, 12, -100.0f);
    Sequence& s = call.sequences[0];
    const auto bias_of_others = [&](float bias) {
      std::fill_n(call.mask.values.begin() + 7 * keys, plain_keys, bias);
    };
    if (*why == 's') {  // what q and these keys have in common
      for (std::int64_t n = 0; n < static_cast<std::int64_t>(s.q.size()); n += call.dim) {
        s.q[static_cast<std::size_t>(n)] = 20.0f;
      }
      for (std::int64_t n = 0; n < static_cast<std::int64_t>(s.k.size()); n += call.dim) {
        s.k[static_cast<std::size_t>(n)] = n / call.dim % s.len_k < plain_keys ? 0.0f : 40.0f;
      }
    } else {
      bias_of_others(why[6] == 's' ? -std::numeric_limits<float>::infinity() : -300.0f);
    }
    Laid laid = lay_out(call, f.how);
    const Outcome got = run(call, laid, 1, 1);
    std::fill_n(call.mask.values.begin() + plain_keys, keys - plain_keys, 0.0f);
    Laid plain = lay_out(call, f.how);
    const Outcome want = run(call, plain, 1, 1);
    if (HasFailure()) return;
    std::int64_t wrong = 0;
    for (std::int64_t h = 0; h < call.heads_q; ++h) {
      for (std::int64_t i = 1; i < 12; ++i) {
        const auto row = call.row(0, h, i) * call.dim_v;
        wrong += !std::equal(got.out.begin() + row, got.out.begin() + row + call.dim_v,
                             want.out.begin() + row);
      }
    }
    EXPECT_EQ(wrong, 0) << "rows";
  }
}

/// Without masks, under causality, and where windows reach every key.
TEST_P(EmulatedHiddenKeys, AreNotLookedForWhereNoneCanBe) {
  Feature f = small(140);
  f.options.causal = true;
  EXPECT_NE(planned(f).find("\nhidden_keys: none\n"), std::string::npos);
  f.options.window_left = keys - 140;
  EXPECT_NE(planned(f).find("\nhidden_keys: none\n"), std::string::npos);
  if (!has_codes(recipe().qk) && !has_codes(recipe().v)) return;
  f.options.window_left = keys - 141;
  EXPECT_NE(planned(f).find("\nhidden_keys: are looked for\n"), std::string::npos);
}

INSTANTIATE_TEST_SUITE_P(Cover, EmulatedHiddenKeys, testing::ValuesIn(a_third(everywhere(), 2)),
                         recipe_name);

}  // namespace
}  // namespace qattn::test
