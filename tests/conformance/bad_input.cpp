#include "conformance/bad_input.hpp"

#include <cmath>
#include <cstring>
#include <limits>
#include <span>

namespace qattn::test {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr double quiet_nan = std::numeric_limits<double>::quiet_NaN();

/// The first key of those whose scale or mean the bad key shares.
std::int64_t first_sharing_key(Format format, const Scaling& scaling, Role role, bool smooth) {
  if (smooth) return 0;
  if (!has_codes(format)) return bad_key;
  if (format == Format::nvfp4) return 0;  // the second level
  if (info(format).group > 0) {
    return role == Role::v ? bad_key / info(format).group * info(format).group : bad_key;
  }
  switch (scaling.granularity) {
    case Granularity::per_token:
      return bad_key;
    case Granularity::per_block:
    case Granularity::per_block_channel:
      return bad_key / scaling.block * scaling.block;
    default:
      return 0;
  }
}

bool same_row(const float* a, const float* b, std::int64_t n) {
  return std::memcmp(a, b, static_cast<std::size_t>(n) * sizeof(float)) == 0;
}

/// Each value NaN or right. Right is what it was, but for the recipe's own error: a bad element
/// that is left out of its group's maximum gives its neighbours a finer scale.
bool nan_or_right(const float* now, const float* clean, std::int64_t n, double recipe_error) {
  double square = 0;
  for (std::int64_t d = 0; d < n; ++d) square += static_cast<double>(clean[d]) * clean[d];
  const double bound = 1e-4 + 3 * recipe_error * std::sqrt(square / static_cast<double>(n));
  for (std::int64_t d = 0; d < n; ++d) {
    if (!std::isnan(now[d]) && std::abs(now[d] - clean[d]) > bound) return false;
  }
  return true;
}

/// The same but for the rounding of P in 16 bits.
bool rounded_row(const float* now, const float* clean, std::int64_t n) {
  double square = 0, error = 0;
  for (std::int64_t d = 0; d < n; ++d) {
    const double x = clean[d], e = static_cast<double>(now[d]) - x;
    square += x * x;
    error += e * e;
  }
  return error <= 1e-4 * square;  // false for NaN
}

void check_row(Fate expected, Operand operand, const float* now, const float* clean, float lse,
               float clean_lse, std::int64_t dim_v, double recipe_error) {
  if (expected == Fate::untouched) {
    EXPECT_TRUE(same_row(now, clean, dim_v)) << "a row that does not depend on it changed";
    EXPECT_EQ(lse, clean_lse);
    return;
  }
  EXPECT_TRUE(nan_or_right(now, clean, dim_v, recipe_error)) << "a plausible but wrong number";
  EXPECT_TRUE(nan_or_right(&lse, &clean_lse, 1, recipe_error)) << "LSE: plausible but wrong";
  if (expected == Fate::may_be_nan) return;
  // V has no part in the scores: the LSE stays.
  if (operand != Operand::v) {
    EXPECT_TRUE(std::isnan(lse)) << "LSE of a dependent row is " << lse;
  }
  for (std::int64_t d = 0; d < dim_v; ++d) {
    EXPECT_TRUE(std::isnan(now[d])) << "channel " << d << " of a dependent row is " << now[d];
    if (!std::isnan(now[d])) return;
  }
}

void check_all(const Call& call, Operand operand, const Outcome& now, const Outcome& clean,
               bool again) {
  ASSERT_TRUE(now.status.ok()) << now.status.message();
  for (std::int64_t b = 0; b < 2; ++b) {
    for (std::int64_t h = 0; h < call.heads_q; ++h) {
      for (std::int64_t i = 0; i < call.sequences[b].room_q; ++i) {
        const std::int64_t row = call.row(b, h, i);
        SCOPED_TRACE("sequence " + std::to_string(b) + " head " + std::to_string(h) + " row " +
                     std::to_string(i));
        const Fate expected = fate(clean.resolved, operand, b, h, i);
        const float *out = &now.out[row * call.dim_v], *was = &clean.out[row * call.dim_v];
        // A mean of V's codes leaves the token out: rows that took it have another.
        const bool mean = lost_mass_of(clean.plan) == LostMass::value_mean &&
                          clean.resolved.p == Format::u8 && b == bad_b && h / 2 == bad_h;
        if ((again || mean) && operand == Operand::v && expected == Fate::untouched) {
          EXPECT_TRUE(rounded_row(out, was, call.dim_v));
          EXPECT_NEAR(now.lse[row], clean.lse[row], 1e-3);
        } else {
          check_row(expected, operand, out, was, now.lse[row], clean.lse[row], call.dim_v,
                    loose_bound(clean.resolved, Format::f32));
        }
        if (testing::Test::HasFailure()) return;  // one row says it
      }
    }
  }
}

}  // namespace

Feature bad_input_feature() {
  Feature f;
  f.sq = {100, 100};
  f.sk = {200, 200};
  f.dim_v = 32;
  f.options.causal = true;
  return f;
}

Fate fate(const Recipe& r, Operand operand, std::int64_t b, std::int64_t h, std::int64_t i) {
  if (operand == Operand::q) {
    // Default Q scales are per token or group: nobody shares the row's, but for nvfp4's second
    // level, which a sequence and head has in common.
    if (b != bad_b || h != bad_h) return Fate::untouched;
    if (i == bad_query) return Fate::is_nan;
    const std::int64_t block = r.smooth_q == Toggle::on ? r.q_scale.block : 1;
    if (i / block == bad_query / block) return Fate::may_be_nan;  // a mean in common
    return r.qk == Format::nvfp4 ? Fate::may_be_nan : Fate::untouched;
  }
  if (b != bad_b || h / 2 != bad_h) return Fate::untouched;
  const std::int64_t last_key = i + 100;
  if (last_key >= bad_key) return Fate::is_nan;
  const bool k = operand == Operand::k;
  const std::int64_t shared =
      k ? first_sharing_key(r.qk, r.k_scale, Role::k, r.smooth_k == Toggle::on)
        : first_sharing_key(r.v, r.v_scale, Role::v, r.smooth_v == Toggle::on);
  return last_key >= shared ? Fate::may_be_nan : Fate::untouched;
}

void expect_bad_input_stays(const Feature& feature, const RunCall& run, bool again,
                            BadValues values) {
  const Call call = make_call(feature, 5);
  Laid laid = lay_out(call, feature.how);
  const Outcome clean = run(call, laid);
  ASSERT_TRUE(clean.status.ok()) << clean.status.message();
  for (const Operand operand : {Operand::q, Operand::k, Operand::v}) {
    const Sequence& sequence = call.sequences[bad_b];
    const bool q = operand == Operand::q;
    const std::int64_t dim = operand == Operand::v ? call.dim_v : call.dim;
    const std::int64_t token = q ? bad_query : bad_key;
    const auto& x = q ? sequence.q : operand == Operand::k ? sequence.k : sequence.v;
    const float good = x[(bad_h * (q ? 100 : 200) + token) * dim + bad_d];
    constexpr double every[] = {quiet_nan, infinity, -infinity};
    const auto one = std::span(every).subspan(static_cast<std::size_t>(operand) % 3, 1);
    for (const double bad : values == BadValues::all ? std::span<const double>(every) : one) {
      SCOPED_TRACE(std::string("operand ") + "qkv"[static_cast<int>(operand)] + ", value " +
                   std::to_string(bad));
      poke(laid, call, operand, bad_b, bad_h, token, bad_d, bad);
      check_all(call, operand, run(call, laid), clean, again);
      if (testing::Test::HasFailure()) return;
    }
    poke(laid, call, operand, bad_b, bad_h, token, bad_d, good);
  }
}

void expect_bad_pair_stays(const Feature& feature, const RunCall& run) {
  const Call call = make_call(feature, 5);
  Laid laid = lay_out(call, feature.how);
  const Outcome clean = run(call, laid);
  ASSERT_TRUE(clean.status.ok()) << clean.status.message();
  for (const Operand operand : {Operand::k, Operand::v}) {
    poke(laid, call, operand, bad_b, bad_h, bad_key, bad_d, quiet_nan);
  }
  check_all(call, Operand::k, run(call, laid), clean, false);
}

void expect_bad_bias_and_sink_stay(Feature feature, const RunCall& run) {
  feature.mask = MaskShape::rows_keys;
  feature.boolean_mask = false;
  feature.sinks = true;
  const Call call = make_call(feature, 6);
  Call without_sink = call;
  without_sink.sinks.clear();
  Laid laid_without_sink = lay_out(without_sink, feature.how);
  const Outcome clean_without_sink = run(without_sink, laid_without_sink);
  ASSERT_TRUE(clean_without_sink.status.ok()) << clean_without_sink.status.message();
  Laid laid = lay_out(call, feature.how);
  const Outcome clean = run(call, laid);
  ASSERT_TRUE(clean.status.ok()) << clean.status.message();
  laid.mask.set({20, 110}, quiet_nan);
  laid.sinks.set({3}, quiet_nan);
  const Outcome now = run(call, laid);
  ASSERT_TRUE(now.status.ok()) << now.status.message();
  for (std::int64_t row = 0; row < call.total_rows(); ++row) {
    SCOPED_TRACE("row " + std::to_string(row));
    const bool bad = row % 100 == 20 || row / 100 % 4 == 3;
    const bool blind = std::isinf(clean_without_sink.lse[row]);  // sees no key: O = 0
    const float* out = &now.out[row * call.dim_v];
    if (bad) {
      EXPECT_TRUE(std::isnan(now.lse[row]));
      EXPECT_TRUE(blind ? *out == 0 : std::isnan(*out));
    } else {
      EXPECT_TRUE(same_row(out, &clean.out[row * call.dim_v], call.dim_v));
    }
    if (testing::Test::HasFailure()) return;
  }
}

}  // namespace qattn::test
