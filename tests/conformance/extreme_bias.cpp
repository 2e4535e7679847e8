#include "conformance/extreme_bias.hpp"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <random>

namespace qattn::test {
namespace {

constexpr float most = std::numeric_limits<float>::max();
constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr double double_infinity = std::numeric_limits<double>::infinity();
/// Beside a bias of this size scores lose all their bits: what ties, ties exactly.
constexpr double huge = 1e8;

constexpr float sizes[] = {-most, -3e38f, -1e38f, -1e30f, -1e15f, -1e8f, -1e4f, -2900, -2800, 0,
                           2800,  2900,   1e4f,   1e8f,   1e15f,  1e30f, 1e38f, 3e38f, most};
constexpr auto constant_rows = static_cast<std::int64_t>(std::size(sizes));
constexpr std::int64_t shapes = constant_rows + 11;

/// The bias of key `j` of `keys` in shape number `n`.
float bias_of(std::int64_t n, std::int64_t j, std::int64_t keys, std::mt19937_64& engine) {
  if (n < constant_rows) return sizes[n];
  const double place = static_cast<double>(2 * j + 1) / static_cast<double>(keys) - 1;  // -1 to 1
  const bool chosen = j == keys / 3, odd_block = j / 64 % 2 != 0;
  switch (n - constant_rows) {
    case 0:
      return sizes[engine() % std::size(sizes)];
    case 1:
      return chosen ? 0 : -most;
    case 2:
      return chosen ? -most : -1e38f;
    case 3:
      return j == keys - 1 ? most : 0;
    case 4:
      return static_cast<float>(place * most);
    case 5:
      return static_cast<float>(-place * most);
    case 6:
      return static_cast<float>(std::copysign(std::pow(10.0, 38 * std::abs(place)), place));
    case 7:
      return j % 2 != 0 ? -1e8f : -most;
    case 8:
      return odd_block ? -1e8f : -most;
    case 9:
      return odd_block ? -1e8f - 1024 : -1e8f;
    default:
      return j % 3 == 0 ? -infinity : -most;
  }
}

/// Added as float32 adds, but that two numbers never make an infinity.
float sum_of(float a, float b) {
  const float sum = a + b;
  return std::isinf(sum) && std::isfinite(b) ? std::copysign(most, sum) : sum;
}

/// Scores in float32 and the rest in float64; the range of what the row sees of V.
struct Expected {
  std::vector<double> out, low, high;
  double top = -double_infinity, lse = -double_infinity;
};
Expected expected_row(const Call& call, std::int64_t b, std::int64_t h, std::int64_t i) {
  const Sequence& s = call.sequences[b];
  const std::int64_t kv = h / (call.heads_q / call.heads_k), diagonal = i + s.len_k - s.len_q;
  const auto width = static_cast<std::size_t>(call.dim_v);
  Expected e{std::vector<double>(width), std::vector<double>(width, double_infinity),
             std::vector<double>(width, -double_infinity)};
  std::vector<double> score(static_cast<std::size_t>(s.len_k), -double_infinity);
  for (std::int64_t j = 0; j < s.len_k; ++j) {
    const AttentionOptions& o = call.options;
    if (o.causal && j > diagonal) continue;
    if (o.window_left >= 0 && diagonal - j > o.window_left) continue;
    if (o.window_right >= 0 && j - diagonal > o.window_right) continue;
    double dot = 0;
    for (std::int64_t d = 0; d < call.dim; ++d) {
      dot += static_cast<double>(s.q[(h * s.len_q + i) * call.dim + d]) *
             static_cast<double>(s.k[(kv * s.len_k + j) * call.dim + d]);
    }
    auto x = static_cast<float>(dot * static_cast<double>(*o.softmax_scale));
    if (!call.alibi.empty()) {
      const float slope = call.alibi[b * call.heads_q + h];
      const float far = -slope * static_cast<float>(std::abs(j - diagonal));
      x = sum_of(x, std::clamp(far, -most, most));
    }
    if (!call.mask.shape.empty()) x = sum_of(x, call.mask.at(b, h, i, j));
    score[j] = static_cast<double>(x);
    e.top = std::max(e.top, score[j]);
  }
  double total = 0;
  for (std::int64_t j = 0; j < s.len_k; ++j) {
    if (score[j] == -double_infinity) continue;
    const double p = std::exp(score[j] - e.top);
    total += p;
    for (std::size_t d = 0; d < width; ++d) {
      const double v = static_cast<double>(s.v[(kv * s.len_k + j) * call.dim_v + d]);
      e.out[d] += p * v;
      e.low[d] = std::min(e.low[d], v), e.high[d] = std::max(e.high[d], v);
    }
  }
  for (double& x : e.out) x = total > 0 ? x / total : 0;
  if (total > 0) e.lse = e.top + std::log(total);
  return e;
}

/// Every second token's V is a hundred times the others': a lost scale shows.
void fill_values(Call& call) {
  for (Sequence& s : call.sequences) {
    for (std::size_t n = 0; n < s.v.size(); ++n) {
      const auto token = static_cast<std::int64_t>(n) / call.dim_v % s.len_k;
      s.v[n] = (token % 2 == 0 ? 100.0f : 1.0f) * (1 + std::abs(std::sin(s.v[n])));
    }
  }
}

void expect_row(const Expected& e, const float* out, float lse, const Recipe& r, Format format) {
  constexpr double largest = 200;
  if (e.lse == -double_infinity) {
    for (std::size_t d = 0; d < e.out.size(); ++d) ASSERT_EQ(out[d], 0.0f);
    ASSERT_EQ(lse, -infinity);
    return;
  }
  Recipe exact_scores = r, values_alone = r;
  exact_scores.qk = values_alone.qk = values_alone.p = Format::f32;
  const bool ties = std::abs(e.top) >= huge;
  const double error =
      largest * (ties ? loose_bound(exact_scores, format) : 3 * loose_bound(r, format));
  // Scales of groups that are powers of two, or fp8, clip what is up to 1/8 too large.
  const double clipped = info(r.v).group > 0 ? 3 : 1;
  const double rounding = clipped * largest * loose_bound(values_alone, format);
  for (std::size_t d = 0; d < e.out.size(); ++d) {
    ASSERT_NEAR(out[d], e.out[d], error) << "channel " << d;
    ASSERT_GE(out[d], e.low[d] - rounding) << "channel " << d;
    ASSERT_LE(out[d], e.high[d] + rounding) << "channel " << d;
  }
  ASSERT_NEAR(lse, e.lse, 0.3 + 1e-6 * std::abs(e.lse)) << "LSE";
}

void expect_rows(const Call& call, const Outcome& now, Format format) {
  ASSERT_TRUE(now.status.ok()) << now.status.message();
  for (std::int64_t b = 0; b < static_cast<std::int64_t>(call.sequences.size()); ++b) {
    for (std::int64_t h = 0; h < call.heads_q; ++h) {
      for (std::int64_t i = 0; i < call.sequences[b].len_q; ++i) {
        SCOPED_TRACE(testing::Message() << "sequence " << b << ", head " << h << ", query " << i);
        const std::int64_t row = call.row(b, h, i);
        expect_row(expected_row(call, b, h, i), &now.out[row * call.dim_v], now.lse[row],
                   now.resolved, format);
        if (testing::Test::HasFatalFailure()) return;
      }
    }
  }
}

/// Small scores: beside huge biases none of them moves the last bit.
Call small_scores(Feature& feature) {
  feature.options.softmax_scale = 0.05f;
  Call call = make_call(feature, 7);
  fill_values(call);
  return call;
}

}  // namespace

void expect_extreme_biases(Feature feature, const Recipe& recipe, const RunCall& run) {
  const std::int64_t rows = *std::max_element(feature.sq.begin(), feature.sq.end());
  const std::int64_t keys = *std::max_element(feature.sk.begin(), feature.sk.end());
  for (std::int64_t first = 0; first < shapes; first += rows) {
    Call call = small_scores(feature);
    std::mt19937_64 engine(11);
    call.mask.boolean = false, call.mask.shape = {rows, keys};
    for (std::int64_t i = 0; i < rows; ++i) {
      for (std::int64_t j = 0; j < keys; ++j) {
        call.mask.values.push_back(bias_of((first + i) % shapes, j, keys, engine));
      }
    }
    Laid laid = lay_out(call, feature.how);
    SCOPED_TRACE(testing::Message()
                 << recipe.name << ", " << keys << " keys, from shape " << first);
    expect_rows(call, run(call, laid), feature.how.output);
    if (testing::Test::HasFailure()) return;
  }
}

void expect_extreme_slopes(Feature feature, const Recipe& recipe, const RunCall& run) {
  constexpr float slopes[] = {-most, -1e36f, -1e8f, -30, 30, 1e8f, 1e36f, most};
  feature.heads_q = 8, feature.heads_k = 2;
  Call call = small_scores(feature);
  for (std::size_t n = 0; n < call.sequences.size(); ++n) {
    call.alibi.insert(call.alibi.end(), std::begin(slopes), std::end(slopes));
  }
  Laid laid = lay_out(call, feature.how);
  SCOPED_TRACE(recipe.name);
  expect_rows(call, run(call, laid), feature.how.output);
}

}  // namespace qattn::test
