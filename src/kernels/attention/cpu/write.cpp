// From sums of tiles to rows of the result.
#include <algorithm>
#include <cmath>

#include "kernels/attention/cpu/task.hpp"
#include "kernels/operand/rows.hpp"

namespace qattn::cpu {
namespace {

std::byte* output_row(const Job& job, std::int64_t b, const Row& row) {
  const TokenTensor& o = job.problem.out;
  const std::int64_t token = job.arrays.sequences[b].q_begin + row.i;
  const std::int64_t element = b * o.batch + token * o.token + row.head * o.head;
  return static_cast<std::byte*>(o.data) + element * (info(o.format).bits / 8);
}

}  // namespace

void write_row(const Job& job, std::int64_t b, const Row& row, float max, float sum, float offset,
               float* out) {
  const Problem& p = job.problem;
  const std::int64_t kv_head = row.head / p.group();
  float top = max == -infinity ? max : max + offset;
  // Keys that the row sees have scores below the floats, by themselves or with what smooth_k took.
  const bool below = top == -infinity && (max != -infinity || sum == sum_of_below);
  float p_sink = 0.0f;
  float factor = 1.0f;  // of everything accumulated so far
  const bool exists = row.i < job.arrays.sequences[b].q_length;
  if (p.tensors.sinks.present() && exists) {
    const TensorView& v = p.tensors.sinks;
    const float sink = read_float(v, row.head * v.stride[0]);
    const float joint = sink > top || std::isnan(sink) ? sink : top;
    if (joint != -infinity) {
      factor = top == -infinity ? 0.0f : std::exp(top - joint);
      const float weight = std::exp(sink - joint);
      sum = sum * factor + weight;
      p_sink = weight / sum;
      top = joint;
    }
  }
  float lse = -infinity;
  if (below) {
    std::fill(out, out + p.dv, nan_value);
    lse = nan_value;
  } else if (top == -infinity) {
    std::fill(out, out + p.dv, 0.0f);
  } else if (max == -infinity) {  // the sink alone
    std::fill(out, out + p.dv, 0.0f);
    lse = top;
  } else if (!(std::fabs(top) < infinity) || !(sum > 0.0f && sum < infinity)) {
    std::fill(out, out + p.dv, nan_value);
    lse = nan_value;
  } else {
    const float* mean = job.config.smooth_v || p.tensors.v_mean.present()
                            ? job.arrays.v_mean + job.unit(b, kv_head) * job.dv()
                            : nullptr;
    for (int c = 0; c < p.dv; ++c) {
      out[c] = out[c] * factor / sum + (mean ? (1.0f - p_sink) * mean[c] : 0.0f);
    }
    lse = top + std::log(sum);
  }
  if (p.projects()) {
    join_row(job, b, row, out);
  } else {
    store_row(job.words(), out, p.dv, p.out.format, output_row(job, b, row));
  }
  if (!p.tensors.lse.present()) return;
  const auto& st = p.tensors.lse.stride;
  const std::int64_t token = job.arrays.sequences[b].q_begin + row.i;
  const std::int64_t at =
      p.varlen_q ? row.head * st[0] + token * st[1] : b * st[0] + row.head * st[1] + row.i * st[2];
  static_cast<float*>(p.tensors.lse.data)[at] = lse;
}

void merge_splits(const Job& job, std::int64_t b, std::int64_t head, Scratch& s) {
  const SequenceInfo& seq = job.arrays.sequences[b];
  if (seq.splits == 0) return;
  const int dv = job.dv();
  const std::int64_t rows = job.problem.group() * seq.q_rows;
  const float* first =
      job.arrays.partials + (seq.first_partial + head * seq.splits * rows) * (dv + 2);
  for (std::int64_t r = 0; r < rows; ++r) {
    float top = -infinity, sum = 0.0f;
    for (std::int64_t k = 0; k < seq.splits; ++k) {
      const float max = first[(k * rows + r) * (dv + 2) + dv];
      if (!std::isnan(top) && (std::isnan(max) || max > top)) top = max;
    }
    std::fill(s.out, s.out + dv, 0.0f);
    bool below = false;
    for (std::int64_t k = seq.splits - 1; k >= 0; --k) {
      const float* partial = first + (k * rows + r) * (dv + 2);
      below |= partial[dv] == -infinity && partial[dv + 1] == sum_of_below;
      if (partial[dv] == -infinity) continue;
      const float weight = job.words().exp_one(partial[dv] - top);
      for (int c = 0; c < dv; ++c) s.out[c] += weight * partial[c];
      sum += weight * partial[dv + 1];
    }
    if (top == -infinity && below) sum = sum_of_below;
    const Row row{head * job.problem.group() + r / seq.q_rows, r % seq.q_rows, 0, 0};
    write_row(job, b, row, top, sum, 0.0f, s.out);
  }
}

}  // namespace qattn::cpu
