// Attention in float64 by its definition. Read score() and attend_row(): they are the specification
// (docs/NUMERICS.md, "The function, in this order"); everything else finds the operands.
#include "qattn/reference.hpp"

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <new>
#include <optional>
#include <string>
#include <vector>

#include "core/threads.hpp"
#include "reference/decode.hpp"
#include "reference/problem.hpp"

namespace qattn {
namespace {

using reference::load;
using reference::load_real;
using reference::Operand;
using reference::Problem;

constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr double nan = std::numeric_limits<double>::quiet_NaN();

/// One query row: sequence, query head, index inside the sequence; lengths of its sequence.
struct Row {
  std::int64_t b, h, i;
  std::int64_t sq, sk;
};

/// Offset of (b, h, i, j) in a mask that broadcasts to (B, Hq, Sq, Sk), aligned right.
std::int64_t mask_offset(const TensorView& mask, const Row& row, std::int64_t j) {
  const std::int64_t index[4] = {row.b, row.h, row.i, j};
  std::int64_t offset = 0;
  for (int dim = 0; dim < mask.rank; ++dim) {
    if (mask.shape[dim] != 1) offset += index[4 - mask.rank + dim] * mask.stride[dim];
  }
  return offset;
}

double alibi_slope(const TensorView& slopes, const Row& row) {
  return slopes.rank == 1
             ? load<float>(slopes, row.h * slopes.stride[0])
             : load<float>(slopes, row.b * slopes.stride[0] + row.h * slopes.stride[1]);
}

/// Score of query i and key j, or nothing where the key is masked. `dot(j)` is q.k and is asked for
/// visible keys only: what is masked is never read.
template <class Dot>
std::optional<double> score(const AttentionTensors& tensors, const AttentionOptions& options,
                            double softmax_scale, const Row& row, std::int64_t j, Dot dot) {
  const std::int64_t diagonal = row.i + row.sk - row.sq;
  if (options.causal && j > diagonal) return std::nullopt;
  if (options.window_left >= 0 && diagonal - j > options.window_left) return std::nullopt;
  if (options.window_right >= 0 && j - diagonal > options.window_right) return std::nullopt;

  if (tensors.block_mask.present()) {
    Row block = row;
    block.i /= options.block_mask_q;
    const std::int64_t at = mask_offset(tensors.block_mask, block, j / options.block_mask_k);
    if (load<std::uint8_t>(tensors.block_mask, at) == 0) return std::nullopt;
  }
  double bias = 0;
  if (tensors.mask.present()) {
    const std::int64_t at = mask_offset(tensors.mask, row, j);
    if (tensors.mask.format == Format::b1) {
      if ((load<std::uint8_t>(tensors.mask, at >> 3) >> j % 8 & 1) == 0) return std::nullopt;
    } else if (tensors.mask.format == Format::b8) {
      if (load<std::uint8_t>(tensors.mask, at) == 0) return std::nullopt;
    } else {
      bias += load_real(tensors.mask, at);
    }
  }
  if (tensors.alibi_slopes.present()) {
    const auto distance = static_cast<double>(std::abs(j - diagonal));
    bias -= alibi_slope(tensors.alibi_slopes, row) * distance;
  }
  if (bias == -infinity) return std::nullopt;

  // Finite f32 inputs cannot overflow a float64 sum: a product that is not finite had NaN or Inf
  // in it, and tanh or exp must not turn that into a plausible number.
  const double product = dot(j);
  if (!std::isfinite(product)) return nan;
  double s = softmax_scale * product;
  if (options.softcap > 0) s = options.softcap * std::tanh(s / options.softcap);
  s += bias;
  const ScoreRun one{row.b, row.h, row.i, j, 1, row.sq, row.sk};
  if (options.score_function && !std::isnan(s)) {
    float changed = static_cast<float>(s);  // the caller's function is one of floats
    options.score_function.apply(options.score_function.context, one, &changed);
    s = static_cast<double>(changed);
  }
  if (options.mask_function) {
    std::uint8_t visible = 1;
    options.mask_function.apply(options.mask_function.context, one, &visible);
    if (visible == 0) return std::nullopt;
  }
  return s;
}

/// K and V of one sequence and KV head as float64, token after token.
struct KeysValues {
  std::vector<double> k, v;
  std::vector<char> v_finite;  ///< a token: are all its values finite?
};

/// What one thread needs for a row; allocated before the threads start, since nothing may throw in
/// a parallel region.
struct Scratch {
  std::vector<double> q;
  std::vector<std::optional<double>> s;
};

std::vector<double> decode(const Operand& operand, std::int64_t b, std::int64_t h,
                           std::int64_t count) {
  std::vector<double> out(static_cast<std::size_t>(count * operand.dim));
  for (std::int64_t s = 0; s < count; ++s) {
    const std::int64_t base = operand.offset(b, s, h);
    for (std::int64_t d = 0; d < operand.dim; ++d) {
      out[s * operand.dim + d] = load_real(operand.view, base + d * operand.channel);
    }
  }
  return out;
}

KeysValues decode_keys_values(const Problem& problem, std::int64_t b, std::int64_t h) {
  const std::int64_t count = problem.len_k[b], dim = problem.v.dim;
  KeysValues kv{decode(problem.k, b, h, count), decode(problem.v, b, h, count), {}};
  for (std::int64_t s = 0; s < count; ++s) {
    const auto begin = kv.v.begin() + s * dim;
    kv.v_finite.push_back(
        std::all_of(begin, begin + dim, [](double value) { return std::isfinite(value); }));
  }
  return kv;
}

double dot_product(const double* a, const double* b, std::int64_t n) {
  double sum = 0;
#pragma omp simd reduction(+ : sum)
  for (std::int64_t d = 0; d < n; ++d) sum += a[d] * b[d];
  return sum;
}

/// Softmax over the visible scores and the sink; writes Dv values of O and returns the LSE.
double attend_row(const AttentionTensors& tensors, const AttentionOptions& options,
                  const Problem& problem, const Row& row, const KeysValues& kv, Scratch& scratch,
                  double* out) {
  const std::int64_t dim = problem.q.dim, dim_v = problem.v.dim;
  for (std::int64_t d = 0; d < dim_v; ++d) out[d] = 0;
  if (row.i >= row.sq) return -infinity;

  std::vector<double>& q = scratch.q;
  const std::int64_t base = problem.q.offset(row.b, row.i, row.h);
  for (std::int64_t d = 0; d < dim; ++d) {
    q[d] = load_real(problem.q.view, base + d * problem.q.channel);
  }
  const auto dot = [&](std::int64_t j) { return dot_product(q.data(), &kv.k[j * dim], dim); };

  const double sink = tensors.sinks.present()
                          ? load_real(tensors.sinks, row.h * tensors.sinks.stride[0])
                          : -infinity;
  std::vector<std::optional<double>>& s = scratch.s;
  double max = sink;
  bool any = false, bad = std::isnan(sink), bad_value = false;
  for (std::int64_t j = 0; j < row.sk; ++j) {
    s[j] = score(tensors, options, problem.softmax_scale, row, j, dot);
    if (!s[j]) continue;
    any = true;
    bad = bad || std::isnan(*s[j]);
    max = std::max(max, *s[j]);
  }
  if (!any) return sink;

  double sum = sink == -infinity ? 0.0 : std::exp(sink - max);
  for (std::int64_t j = 0; j < row.sk; ++j) {
    if (!s[j]) continue;
    const double p = std::exp(*s[j] - max);
    sum += p;
    bad_value = bad_value || !kv.v_finite[j];
    for (std::int64_t d = 0; d < dim_v; ++d) out[d] += p * kv.v[j * dim_v + d];
  }
  for (std::int64_t d = 0; d < dim_v; ++d) out[d] = bad || bad_value ? nan : out[d] / sum;
  return bad ? nan : max + std::log(sum);
}

/// Rows of a sequence that are asked for.
std::vector<std::int64_t> rows_of(const ReferenceOptions& reference, std::int64_t room) {
  std::vector<std::int64_t> rows;
  if (reference.rows.empty()) {
    for (std::int64_t i = 0; i < room; ++i) rows.push_back(i);
  }
  for (std::int64_t i : reference.rows) {
    if (i < room) rows.push_back(i);
  }
  return rows;
}

void compute(const AttentionTensors& tensors, const AttentionOptions& options,
             const Problem& problem, std::span<double> out, std::span<double> lse,
             const ReferenceOptions& reference) {
  const std::int64_t group = problem.q.heads / problem.k.heads, dim_v = problem.v.dim;
  const int threads = most_threads(reference.threads > 0 ? reference.threads : options.threads);
  const double units = static_cast<double>(problem.batch * problem.k.heads);
  for (std::int64_t b = 0; b < problem.batch; ++b) {
    const std::vector<std::int64_t> rows = rows_of(reference, problem.room_q[b]);
    const auto count = static_cast<std::int64_t>(rows.size());
    for (std::int64_t hk = 0; hk < problem.k.heads; ++hk) {
      const KeysValues kv = decode_keys_values(problem, b, hk);
      std::vector<Scratch> scratch(static_cast<std::size_t>(threads));
      for (Scratch& one : scratch) {
        one.q.resize(static_cast<std::size_t>(problem.q.dim));
        one.s.resize(static_cast<std::size_t>(problem.len_k[b]));
      }
      std::int64_t done = 0;
#pragma omp parallel for schedule(dynamic, 8) num_threads(team(threads))
      for (std::int64_t n = 0; n < group * count; ++n) {
        const Row row{b, hk * group + n / count, rows[n % count], problem.len_q[b],
                      problem.len_k[b]};
        const std::int64_t lead = problem.packed_q ? row.h : b * problem.q.heads + row.h;
        const std::int64_t at = lead * problem.rows + problem.first_q[b] + row.i;
        const double l = attend_row(tensors, options, problem, row, kv,
                                    scratch[omp_get_thread_num()], &out[at * dim_v]);
        if (!lse.empty()) lse[at] = l;
        std::int64_t now;
#pragma omp atomic capture
        now = ++done;
        if (reference.progress && omp_get_thread_num() == 0 && now % 64 == 0) {
          const double part = static_cast<double>(now) / static_cast<double>(group * count);
          reference.progress((static_cast<double>(b * problem.k.heads + hk) + part) / units);
        }
      }
    }
  }
  if (reference.progress) reference.progress(1.0);
}

/// Rows of all heads times the weight's transpose, and the bias. `heads` is as compute() leaves it;
/// only rows that it computed are written.
void project(const AttentionTensors& tensors, const Problem& problem,
             const std::vector<double>& heads, std::span<double> out,
             const ReferenceOptions& reference) {
  const TensorView &w = tensors.projection, &bias = tensors.projection_bias;
  const std::int64_t dim = problem.v.dim, features = w.shape[0];
  for (std::int64_t b = 0; b < problem.batch; ++b) {
    for (const std::int64_t i : rows_of(reference, problem.room_q[b])) {
      const std::int64_t row = problem.first_q[b] + i;  // inside its batch entry
      const std::int64_t token = (problem.packed_q ? 0 : b * problem.rows) + row;
      for (std::int64_t e = 0; e < features; ++e) {
        double sum = bias.present() ? load_real(bias, e * bias.stride[0]) : 0.0;
        for (std::int64_t h = 0; h < problem.q.heads; ++h) {
          const std::int64_t lead = problem.packed_q ? h : b * problem.q.heads + h;
          const double* o = &heads[(lead * problem.rows + row) * dim];
          for (std::int64_t d = 0; d < dim; ++d) {
            sum += o[d] * load_real(w, e * w.stride[0] + (h * dim + d) * w.stride[1]);
          }
        }
        out[token * features + e] = sum;
      }
    }
  }
}

/// The library's validator, asked about a float32 call whose outputs are of the right shape (the
/// reference has its own) and which has no scales (the reference reads none).
Status validate(const AttentionTensors& tensors, const AttentionOptions& options) {
  AttentionTensors call = tensors;
  call.lse = call.saturated = {};
  call.q_scale = call.k_scale = call.v_scale = {};
  call.q_global = call.k_global = call.v_global = {};
  call.k_mean = call.v_mean = {};
  const int last = tensors.q.rank - 1;
  call.out = tensors.q;
  call.out.data = nullptr;
  call.out.format = Format::f32;
  if (last >= 0 && last < max_rank && tensors.v.rank >= 1 && tensors.v.rank <= max_rank) {
    call.out.shape[last] = tensors.v.shape[tensors.v.rank - 1];
    if (const TensorView& w = tensors.projection; w.present() && last >= 2) {
      const bool first = options.layout == Layout::bshd;  // tokens before heads
      call.out.format = w.format;
      call.out.rank = last;
      call.out.shape[last - 2] = tensors.q.shape[first ? last - 2 : last - 1];
      call.out.shape[last - 1] = w.shape[0];
    }
    std::int64_t step = 1;
    for (int d = call.out.rank - 1; d >= 0; --d) {
      call.out.stride[d] = step;
      step *= call.out.shape[d];
    }
  }
  AttentionOptions exact = options;
  Result<Recipe> recipe = recipe_named("f32");
  if (!recipe.ok()) return recipe.status();
  exact.recipe = *recipe;
  Result<Plan> planned = plan(call, exact);
  return planned.ok() ? Status() : planned.status();
}

/// `features`: of the projection, or 0.
Status check_sizes(const Problem& problem, std::int64_t features, std::span<double> out,
                   std::span<double> lse, const ReferenceOptions& reference) {
  const std::int64_t rows = (problem.packed_q ? 1 : problem.batch) * problem.q.heads * problem.rows;
  const std::int64_t values =
      features > 0 ? rows / problem.q.heads * features : rows * problem.v.dim;
  if (static_cast<std::int64_t>(out.size()) != values) {
    return {Code::invalid_argument, "out holds " + std::to_string(out.size()) +
                                        " values: must be " + std::to_string(values)};
  }
  if (!lse.empty() && static_cast<std::int64_t>(lse.size()) != rows) {
    return {Code::invalid_argument, "lse holds " + std::to_string(lse.size()) +
                                        " values: must be 0 or " + std::to_string(rows)};
  }
  for (std::int64_t i : reference.rows) {
    if (i < 0 || i >= problem.rows) {
      return {Code::invalid_argument, "rows names row " + std::to_string(i) +
                                          ": must be from 0 to " +
                                          std::to_string(problem.rows - 1)};
    }
  }
  return {};
}

}  // namespace

Status reference_attention(const AttentionTensors& tensors, const AttentionOptions& options,
                           std::span<double> out, std::span<double> lse,
                           const ReferenceOptions& reference) {
  if (tensors.q.device.type != DeviceType::cpu) {
    return {Code::unsupported, "q is on a GPU: the reference reads host memory only"};
  }
  Status status = validate(tensors, options);
  if (!status.ok()) return status;
  try {
    Result<Problem> problem = reference::make_problem(tensors, options);
    if (!problem.ok()) return problem.status();
    const TensorView& w = tensors.projection;
    status = check_sizes(*problem, w.present() ? w.shape[0] : 0, out, lse, reference);
    if (!status.ok()) return status;
    if (!w.present()) {
      compute(tensors, options, *problem, out, lse, reference);
      return status;
    }
    const std::int64_t rows = (problem->packed_q ? 1 : problem->batch) * problem->rows;
    std::vector<double> heads(static_cast<std::size_t>(rows * problem->q.heads * problem->v.dim));
    compute(tensors, options, *problem, heads, lse, reference);
    project(tensors, *problem, heads, out, reference);
    return status;
  } catch (const std::bad_alloc&) {
    return {Code::out_of_memory, "the reference could not allocate its float64 copies"};
  }
}

}  // namespace qattn
