#include "support/model.hpp"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <numbers>
#include <optional>
#include <utility>

namespace qattn::test {
namespace {

using Values = std::vector<double>;
constexpr double infinity = std::numeric_limits<double>::infinity();

double dot(const double* a, const double* b, std::int64_t n) {
  double sum = 0;
#pragma omp simd reduction(+ : sum)
  for (std::int64_t d = 0; d < n; ++d) sum += a[d] * b[d];
  return sum;
}

Values widen(std::span<const float> x) { return Values(x.begin(), x.end()); }

/// Rows of one head in a [head][token][dim] array.
std::span<const float> head(const std::vector<float>& x, std::int64_t h, std::int64_t count) {
  return std::span<const float>(x).subspan(static_cast<std::size_t>(h * count),
                                           static_cast<std::size_t>(count));
}

/// The operands of one query head: codes, and the unquantised values for the exact corrections.
struct Head {
  std::int64_t b, h, len_q, len_k;
  Coded q, k, v;
  Values q_exact, k_exact;
  std::int64_t q_block = 0;
};

/// q.k before softcap: product of the codes plus what smoothing took out.
double product(const Head& x, std::int64_t dim, std::int64_t i, std::int64_t j) {
  double s = dot(&x.q.value[i * dim], &x.k.value[j * dim], dim);
  if (!x.k.mean.empty()) s += dot(&x.q_exact[i * dim], x.k.mean.data(), dim);
  if (!x.q.mean.empty()) {
    const double* mean = &x.q.mean[i / x.q_block * dim];
    s += dot(mean, &x.k_exact[j * dim], dim);
    if (!x.k.mean.empty()) s -= dot(mean, x.k.mean.data(), dim);
  }
  return s;
}

/// A score through the caller's function, which is of float32.
double through_function(const AttentionOptions& o, const ScoreRun& one, double s) {
  if (!o.score_function) return s;
  auto changed = static_cast<float>(s);
  o.score_function.apply(o.score_function.context, one, &changed);
  return static_cast<double>(changed);
}

/// May query i of head h in sequence b see key j?
bool is_visible(const Call& call, Mutation mutation, std::int64_t b, std::int64_t h, std::int64_t i,
                std::int64_t j) {
  const AttentionOptions& o = call.options;
  const std::int64_t len_q = call.sequences[b].len_q, len_k = call.sequences[b].len_k;
  const std::int64_t bound = i + len_k - len_q + (mutation == Mutation::shift_mask_bound ? 1 : 0);
  if (o.causal && j > bound) return false;
  if (o.window_left >= 0 && j < bound - o.window_left) return false;
  if (o.window_right >= 0 && j > bound + o.window_right) return false;
  if (!call.block_mask.shape.empty() &&
      call.block_mask.at(b, h, i / o.block_mask_q, j / o.block_mask_k) == 0) {
    return false;
  }
  if (!call.mask.shape.empty()) {
    const double value = call.mask.at(b, h, i, j);
    if (call.mask.boolean ? value == 0 : value == -infinity) return false;
  }
  std::uint8_t visible = 1;
  const ScoreRun one{b, h, i, j, 1, len_q, len_k};
  if (o.mask_function) o.mask_function.apply(o.mask_function.context, one, &visible);
  return visible != 0;
}

/// Rows of `x` ([head][token][dim]) that no query sees become what leaves their neighbours alone:
/// the mean of the others where it is subtracted, else zeros.
void neutralise(std::vector<float>& x, const std::vector<bool>& seen, std::int64_t first,
                std::int64_t dim, bool smooth) {
  std::vector<float> neutral(static_cast<std::size_t>(dim));
  const auto tokens = static_cast<std::int64_t>(seen.size());
  const auto count = std::count(seen.begin(), seen.end(), true);
  for (std::int64_t d = 0; d < dim && smooth && count > 0; ++d) {
    double sum = 0;
    for (std::int64_t j = 0; j < tokens; ++j) sum += seen[j] ? x[(first + j) * dim + d] : 0.0f;
    neutral[d] = static_cast<float>(sum / static_cast<double>(count));
  }
  for (std::int64_t j = 0; j < tokens; ++j) {
    if (!seen[j]) std::copy(neutral.begin(), neutral.end(), x.begin() + (first + j) * dim);
  }
}

/// Which keys does some query of their KV head see?
std::vector<bool> seen_keys(const Call& call, const ModelOptions& model, std::size_t b,
                            std::int64_t hk) {
  const std::int64_t group = call.heads_q / call.heads_k;
  const Sequence& seq = call.sequences[b];
  const bool unasked = seq.len_q == 0 && !model.finds_hidden_keys;
  std::vector<bool> seen(static_cast<std::size_t>(seq.len_k), unasked);
  for (std::int64_t n = 0; n < group * seq.len_q; ++n) {
    for (std::int64_t j = 0; j < seq.len_k; ++j) {
      if (!seen[j]) {
        seen[j] = is_visible(call, Mutation::none, static_cast<std::int64_t>(b),
                             hk * group + n / seq.len_q, n % seq.len_q, j);
      }
    }
  }
  return seen;
}

/// Divides K's channels by their factors, and multiplies those of the queries that see it. Powers
/// of two: whatever is made of K and Q changes by them alone.
void balance_head(Call& call, std::size_t b, std::int64_t hk, const std::vector<float>& factors) {
  Sequence& seq = call.sequences[b];
  const std::int64_t group = call.heads_q / call.heads_k, rows = group * seq.len_q;
  const auto dim = static_cast<std::size_t>(call.dim);
  float* k = seq.k.data() + hk * seq.len_k * call.dim;
  float* q = seq.q.data() + hk * rows * call.dim;
  for (std::size_t n = 0; n < static_cast<std::size_t>(seq.len_k) * dim; ++n) {
    k[n] /= factors[n % dim];
  }
  for (std::size_t n = 0; n < static_cast<std::size_t>(rows) * dim; ++n) q[n] *= factors[n % dim];
}

/// The call without the influence of keys that no query of their KV head sees, and balanced.
Call as_quantised(Call call, const ModelOptions& model) {
  const Recipe& recipe = model.recipe;
  const bool smooth = recipe.smooth_k == Toggle::on;
  for (std::size_t b = 0; b < call.sequences.size(); ++b) {
    Sequence& seq = call.sequences[b];
    for (std::int64_t hk = 0; hk < call.heads_k; ++hk) {
      const std::vector<bool> seen = seen_keys(call, model, b, hk);
      std::vector<float> factors;
      if (recipe.balance_k == Toggle::on) {
        factors = balance(head(seq.k, hk, seq.len_k * call.dim), seen, call.dim, smooth);
      }
      // Beside static scales hidden keys do no harm; where nobody looks for them they may saturate.
      const auto stay = [&](const std::vector<float>& scales) {
        return model.given_codes || (!model.finds_hidden_keys && !scales.empty());
      };
      if (!stay(call.static_k)) neutralise(seq.k, seen, hk * seq.len_k, call.dim, smooth);
      if (!stay(call.static_v)) {
        neutralise(seq.v, seen, hk * seq.len_k, call.dim_v, recipe.smooth_v == Toggle::on);
      }
      if (!factors.empty()) balance_head(call, b, hk, factors);
    }
  }
  return call;
}

double softmax_scale(const Call& call) {
  const std::optional<float>& given = call.options.softmax_scale;
  return given ? static_cast<double>(*given) : 1 / std::sqrt(static_cast<double>(call.dim));
}

/// The score, or -inf where masked.
double score(const Call& call, const ModelOptions& model, const Head& x, std::int64_t i,
             std::int64_t j) {
  if (!is_visible(call, model.mutation, x.b, x.h, i, j)) return -infinity;
  const AttentionOptions& o = call.options;
  const std::int64_t diagonal = i + x.len_k - x.len_q;
  double bias = 0;
  if (!call.mask.shape.empty() && !call.mask.boolean) bias += call.mask.at(x.b, x.h, i, j);
  if (!call.alibi.empty()) {
    bias -= call.alibi[x.b * call.heads_q + x.h] * static_cast<double>(std::abs(j - diagonal));
  }
  double s = softmax_scale(call) * product(x, call.dim, i, j);
  if (o.softcap > 0) s = o.softcap * std::tanh(s / o.softcap);
  return through_function(o, {x.b, x.h, i, j, 1, x.len_q, x.len_k}, s + bias);
}

/// Running softmax of one row over some of its keys.
struct State {
  double m = -infinity, l = 0, codes = 0, lost = 0;
  Values o;

  void rescale(double m_new) {
    const double f = m == -infinity ? 0 : std::exp(m - m_new);
    l *= f, codes *= f, lost *= f;
    for (double& value : o) value *= f;
    m = m_new;
  }
  void add(const TileWeights& w, const double* v, std::int64_t dim_v) {
    codes += w.factor * w.codes, lost += w.factor * w.lost;
    for (std::size_t j = 0; j < w.value.size(); ++j) {
      l += w.factor * w.mass[j];
      const double f = w.factor * w.value[j];
      for (std::int64_t d = 0; d < dim_v && f != 0; ++d) o[d] += f * v[j * dim_v + d];
    }
  }
};

/// What smooth_k takes from all scores of row i. Where scores go through functions, it comes back
/// before.
double taken_from_row(const Call& call, const Head& x, std::int64_t i) {
  if (x.k.mean.empty() || call.options.softcap > 0 || call.options.score_function) return 0;
  return softmax_scale(call) * dot(&x.q_exact[i * call.dim], x.k.mean.data(), call.dim);
}

bool in_halves(const PRule& rule) { return rule.p == Format::f16 || rule.p == Format::bf16; }

/// The reference of P in a row that reaches `top`. To powers of two floats round alike whichever it
/// is, so that kernels may choose.
double reference_for(const PRule& rule, double top) {
  if (!rule.whole_references || !in_halves(rule)) return top;
  return std::ceil((top - rule.taken) * std::numbers::log2e) / std::numbers::log2e + rule.taken;
}

/// The mass of a row, but not its output, takes P of the largest score as it was before rounding.
void mend_mass(const PRule& rule, std::span<const double> s, State& state) {
  if (!rule.whole_references || !in_halves(rule) || state.l == 0) return;
  const double exact = state.l + rounded_off(rule, *std::max_element(s.begin(), s.end()), state.m);
  for (double& value : state.o) value *= exact / state.l;
  state.l = exact;
}

/// Keys [begin, end) of one row, tile by tile from the last to the first, or as they rise.
State attend_keys(const PRule& rule, std::span<const double> s, const Coded& v, std::int64_t dim_v,
                  std::int64_t tile_keys, std::int64_t begin, std::int64_t end) {
  State state;
  state.o.assign(static_cast<std::size_t>(dim_v), 0.0);
  const std::int64_t lowest = begin / tile_keys, highest = (end - 1) / tile_keys;
  for (std::int64_t n = 0; n <= highest - lowest && begin < end; ++n) {
    const std::int64_t tile = rule.rises ? lowest + n : highest - n;
    const std::int64_t first = std::max(begin, tile * tile_keys);
    const std::int64_t last = std::min(end, (tile + 1) * tile_keys);
    const auto scores = s.subspan(first, last - first);
    const double m_tile = *std::max_element(scores.begin(), scores.end());
    if (m_tile == -infinity) continue;
    state.rescale(std::max(state.m, reference_for(rule, m_tile)));
    std::span<const double> sv;
    if (rule.token_scale) sv = std::span<const double>(v.token_scale).subspan(first, last - first);
    state.add(round_p(rule, scores, state.m, state.codes, sv), &v.value[first * dim_v], dim_v);
  }
  const bool lossy = std::abs(state.lost) > state.codes / 1024;
  for (std::size_t d = 0; lossy && d < v.code_mean.size(); ++d) {
    state.o[d] += state.lost * v.code_mean[d];
  }
  if (begin < end) mend_mass(rule, s.subspan(begin, end - begin), state);
  return state;
}

/// All keys of a row from `first` on, the others it does not see: splits merged by (O, LSE).
State attend_splits(const PRule& rule, std::span<const double> s, const Coded& v,
                    std::int64_t dim_v, std::int64_t tile_keys, std::int64_t first,
                    std::int64_t split) {
  const auto keys = static_cast<std::int64_t>(s.size());
  if (split <= 0) split = std::max<std::int64_t>(keys, 1);
  State all;
  all.o.assign(static_cast<std::size_t>(dim_v), 0.0);
  for (std::int64_t begin = first; begin < keys; begin += split) {
    State part = attend_keys(rule, s, v, dim_v, tile_keys, begin, std::min(begin + split, keys));
    if (part.m == -infinity) continue;
    const double m = std::max(all.m, part.m);
    all.rescale(m);
    part.rescale(m);
    all.l += part.l;
    for (std::int64_t d = 0; d < dim_v; ++d) all.o[d] += part.o[d];
  }
  return all;
}

/// Sink, normalisation and V's mean; returns the LSE.
double finish(State& state, std::optional<double> sink, const Values& v_mean, double* out,
              std::int64_t dim_v) {
  if (state.m == -infinity) {
    std::fill(out, out + dim_v, 0.0);
    return sink.value_or(-infinity);
  }
  double total = state.l;
  if (sink) {
    state.rescale(std::max(state.m, *sink));
    total = state.l + std::exp(*sink - state.m);
  }
  for (std::int64_t d = 0; d < dim_v; ++d) {
    out[d] = state.o[d] / total;
    if (!v_mean.empty()) out[d] += state.l / total * v_mean[d];
  }
  return state.m + std::log(total);
}

/// Where the splits of row i begin, and how many keys each has.
std::pair<std::int64_t, std::int64_t> split_of(const Call& call, const ModelOptions& model,
                                               const Head& x, std::int64_t i) {
  const bool split = call.sequences[x.b].room_q * (call.heads_q / call.heads_k) <= model.split_rows;
  if (model.splits <= 1) return {0, split ? model.split_keys : 0};
  const AttentionOptions& o = call.options;
  const std::int64_t rows =
      model.tile_rows > 0 ? model.tile_rows : std::max<std::int64_t>(1, x.len_q);
  const std::int64_t first = i / rows * rows, past = std::min(first + rows, x.len_q);
  const std::int64_t shift = x.len_k - x.len_q, right = o.causal ? 0 : o.window_right;
  std::int64_t begin =
      o.window_left < 0 ? 0 : std::max<std::int64_t>(0, first + shift - o.window_left);
  begin = begin / 128 * 128;  // whatever the tiles are
  const std::int64_t end = right < 0 ? x.len_k : std::min(x.len_k, past + shift + right);
  const std::int64_t tiles = (std::max(end, begin) - begin + 127) / 128;
  return {begin, std::max<std::int64_t>(1, (tiles + model.splits - 1) / model.splits) * 128};
}

/// Mean of V's codes, but for tokens that are not finite: of four tiles of 64 keys, spread over the
/// sequence, in whole codes each.
Values mean_of_codes(const Coded& v, std::int64_t dim_v) {
  const auto keys = static_cast<std::int64_t>(v.token_scale.size());
  const std::int64_t tiles = (keys + 63) / 64;
  Values mean(static_cast<std::size_t>(dim_v));
  for (std::int64_t i = 0; i < 4 && keys > 0; ++i) {
    const std::int64_t first = i * tiles / 4 * 64, end = std::min(keys, first + 64);
    for (std::int64_t d = 0; d < dim_v; ++d) {
      double sum = 0;
      std::int64_t count = 0;
      for (std::int64_t j = first; j < end; ++j) {
        const double code = v.value[j * dim_v + d] / v.token_scale[j];
        if (std::isfinite(code)) sum += code, ++count;
      }
      if (count > 0) mean[d] += std::nearbyint(sum / static_cast<double>(count)) / 4;
    }
  }
  return mean;
}

void attend_head(const Call& call, const ModelOptions& model, const Head& x, ModelOutput& output) {
  const std::int64_t room = call.sequences[x.b].room_q;
  const PRule shared{model.recipe.p, model.recipe.p == Format::u8 && !x.v.token_scale.empty(),
                     model.lost_mass, room * (call.heads_q / call.heads_k) <= model.rising_rows};
#pragma omp parallel for schedule(dynamic, 4)
  for (std::int64_t i = 0; i < room; ++i) {
    const std::int64_t row = call.row(x.b, x.h, i);
    double* out = &output.out[row * call.dim_v];
    std::fill(out, out + call.dim_v, 0.0);
    output.lse[row] = -infinity;
    if (i >= x.len_q) continue;
    Values s(static_cast<std::size_t>(x.len_k));
    for (std::int64_t j = 0; j < x.len_k; ++j) s[j] = score(call, model, x, i, j);
    const auto [first, split] = split_of(call, model, x, i);
    PRule rule = shared;
    rule.whole_references = model.whole_references;
    rule.taken = taken_from_row(call, x, i);
    State state = attend_splits(rule, s, x.v, call.dim_v, model.tile_keys, first, split);
    std::optional<double> sink;
    if (!call.sinks.empty()) sink = call.sinks[x.h];
    output.lse[row] = finish(state, sink, x.v.mean, out, call.dim_v);
  }
}

/// The static scales of one sequence and head: an equal share of the (B, H, ...) tensor; a tensor
/// of one scale serves all.
std::span<const float> share(const std::vector<float>& scales, std::int64_t n, std::int64_t of) {
  if (scales.size() <= 1) return scales;
  const std::size_t width = scales.size() / static_cast<std::size_t>(of);
  return std::span<const float>(scales).subspan(static_cast<std::size_t>(n) * width, width);
}

/// per_tensor: one scale for everything, the largest that a sequence and head would have alone.
std::vector<float> tensor_scale(const Call& call, std::vector<float> Sequence::* x,
                                std::int64_t heads, std::int64_t dim, CodeRequest request) {
  float largest = 0;
  for (const Sequence& sequence : call.sequences) {
    const std::int64_t width = static_cast<std::int64_t>((sequence.*x).size()) / heads;
    for (std::int64_t h = 0; h < heads && width > 0; ++h) {
      const Coded coded = code_operand(head(sequence.*x, h, width), dim, request);
      largest = std::max(largest, static_cast<float>(coded.scale.at(0)));
    }
  }
  return {largest};
}

/// What the recipe asks of each operand, with its static scales.
struct Operands {
  CodeRequest q, k, v;
  std::vector<float> q_static, k_static, v_static;
};

Operands operands(const Call& call, const ModelOptions& model) {
  const Recipe& r = model.recipe;
  const bool rotate = r.rotate == Toggle::on;
  Operands o;
  o.q = {r.qk, Role::q, r.q_scale, r.smooth_q == Toggle::on, rotate, {}, model.mutation};
  o.k = {r.qk, Role::k, r.k_scale, r.smooth_k == Toggle::on, rotate, {}, model.mutation};
  o.v = {r.v, Role::v, r.v_scale, r.smooth_v == Toggle::on, false, {}, model.mutation};
  o.q_static = call.static_q;
  o.k_static = call.static_k;
  o.v_static = call.static_v;
  const auto pooled = [&](const CodeRequest& request, const std::vector<float>& given) {
    return given.empty() && request.scaling.granularity == Granularity::per_tensor &&
           info(request.format).scale != Format::none;
  };
  if (pooled(o.q, o.q_static)) {
    o.q_static = tensor_scale(call, &Sequence::q, call.heads_q, call.dim, o.q);
  }
  if (pooled(o.k, o.k_static)) {
    o.k_static = tensor_scale(call, &Sequence::k, call.heads_k, call.dim, o.k);
  }
  if (pooled(o.v, o.v_static)) {
    o.v_static = tensor_scale(call, &Sequence::v, call.heads_k, call.dim_v, o.v);
  }
  return o;
}

}  // namespace

ModelOutput model_attention(const Call& given, const ModelOptions& model) {
  const Call call = as_quantised(given, model);
  ModelOutput output;
  output.out.assign(static_cast<std::size_t>(call.total_rows() * call.dim_v), 0.0);
  output.lse.assign(static_cast<std::size_t>(call.total_rows()), -infinity);
  const Operands o = operands(call, model);
  const auto batch = static_cast<std::int64_t>(call.sequences.size());
  const std::int64_t group = call.heads_q / call.heads_k;
  for (std::int64_t b = 0; b < batch; ++b) {
    const Sequence& seq = call.sequences[b];
    for (std::int64_t hk = 0; hk < call.heads_k; ++hk) {
      Head x{b, 0, seq.len_q, seq.len_k, {}, {}, {}, {}, {}, model.recipe.q_scale.block};
      const auto k = head(seq.k, hk, seq.len_k * call.dim);
      CodeRequest k_request = o.k, v_request = o.v;
      k_request.static_scale = share(o.k_static, b * call.heads_k + hk, batch * call.heads_k);
      v_request.static_scale = share(o.v_static, b * call.heads_k + hk, batch * call.heads_k);
      if (!model.given_codes) {
        k_request.seen = v_request.seen = seen_keys(call, model, static_cast<std::size_t>(b), hk);
      }
      x.k = code_operand(k, call.dim, k_request);
      x.v = code_operand(head(seq.v, hk, seq.len_k * call.dim_v), call.dim_v, v_request);
      if (model.lost_mass == LostMass::value_mean && !x.v.token_scale.empty()) {
        x.v.code_mean = mean_of_codes(x.v, call.dim_v);
      }
      x.k_exact = widen(k);
      output.saturated[1] += x.k.saturated;
      output.saturated[2] += x.v.saturated;
      for (x.h = hk * group; x.h < (hk + 1) * group; ++x.h) {
        const auto q = head(seq.q, x.h, seq.len_q * call.dim);
        CodeRequest q_request = o.q;
        q_request.static_scale = share(o.q_static, b * call.heads_q + x.h, batch * call.heads_q);
        x.q = code_operand(q, call.dim, q_request);
        x.q_exact = widen(q);
        output.saturated[0] += x.q.saturated;
        attend_head(call, model, x, output);
      }
    }
  }
  return output;
}

}  // namespace qattn::test
