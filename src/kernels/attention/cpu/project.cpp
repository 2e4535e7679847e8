// The output projection. Tasks leave a token's heads side by side, rounded to out's format. When
// all of them are there, blocks of these rows are multiplied with panels of the weight. It is a
// step of its own because a task has one head: the rows of all of them wait in a shared cache.
#include <algorithm>
#include <cstring>

#include "kernels/attention/cpu/task.hpp"
#include "kernels/operand/rows.hpp"

namespace qattn::cpu {
namespace {

constexpr int panels = project_columns / lanes;
/// Channels that are multiplied before the next ones are looked at: of bf16, 64 KiB of panels.
constexpr std::int64_t depth = 512;

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

std::int64_t features(const Problem& p) { return p.tensors.projection.shape[0]; }

int weight_bytes(const Config& c) { return bytes_of(c.projection); }

std::int64_t row_blocks(const Problem& p) { return ceil_div(p.tokens_q, project_rows); }
std::int64_t column_blocks(const Problem& p) { return ceil_div(features(p), project_columns); }

/// Panel g: of all, where several blocks of rows share them, else of the thread's block.
std::byte* panel_at(const Job& job, std::int64_t g, const Scratch& s) {
  const std::int64_t bytes = joined_width(job.problem) * lanes * weight_bytes(job.config);
  return job.arrays.weight ? job.arrays.weight + g * bytes : s.weight + g % panels * bytes;
}

/// Columns 16 g to 16 g + 15 of the weight's transpose, and their bias. Those behind the last one
/// repeat it.
void pack_panel(const Job& job, std::int64_t g, Scratch& s) {
  const Problem& p = job.problem;
  const TensorView &w = p.tensors.projection, &bias = p.tensors.projection_bias;
  const auto width = static_cast<int>(p.heads_q * p.dv), whole = static_cast<int>(joined_width(p));
  const int bytes = weight_bytes(job.config), given = info(w.format).bits / 8;
  const std::uint8_t* rows[lanes];
  for (int i = 0; i < lanes; ++i) {
    const std::int64_t e = std::min(g * lanes + i, features(p) - 1);
    rows[i] = static_cast<const std::uint8_t*>(w.data) + e * w.stride[0] * given;
    if (given != bytes) {
      float* row = s.weight_rows + i * padded(whole);
      job.words().load_row(rows[i], element_of(w.format), width, nullptr, row);
      rows[i] = reinterpret_cast<const std::uint8_t*>(row);
    } else if (whole != width) {
      auto* row = reinterpret_cast<std::uint8_t*>(s.weight_rows + i * padded(whole));
      std::memcpy(row, rows[i], static_cast<std::size_t>(width * bytes));
      std::memset(row + width * bytes, 0, static_cast<std::size_t>((whole - width) * bytes));
      rows[i] = row;
    }
    job.arrays.bias[g * lanes + i] = bias.present() ? read_float(bias, e * bias.stride[0]) : 0.0f;
  }
  job.words().transpose_packs(rows, whole * bytes, 0,
                              reinterpret_cast<std::uint8_t*>(panel_at(job, g, s)));
}

void pack_columns(const Job& job, std::int64_t block, Scratch& s) {
  const std::int64_t end = std::min((block + 1) * panels, ceil_div(features(job.problem), lanes));
  for (std::int64_t g = block * panels; g < end; ++g) pack_panel(job, g, s);
}

/// Bias and products of `rows` rows from `token` on, [rows][project_columns].
void multiply(const Job& job, std::int64_t token, int rows, std::int64_t block, const Scratch& s) {
  const Problem& p = job.problem;
  const std::int64_t width = joined_width(p), first = block * panels;
  const int bytes = weight_bytes(job.config);
  const std::int64_t groups = std::min<std::int64_t>(ceil_div(features(p), lanes) - first, panels);
  float* sums = s.projected;
  for (int r = 0; r < rows; ++r) {
    std::memcpy(sums + r * project_columns, job.arrays.bias + first * lanes,
                sizeof(float) * static_cast<std::size_t>(groups * lanes));
  }
  for (std::int64_t k = 0; k < width; k += depth) {
    const LinearTile tile{
        job.arrays.joined + (token * width + k) * bytes, width,         rows,
        panel_at(job, first, s) + k * lanes * bytes,     lanes * width, static_cast<int>(groups),
        static_cast<int>(std::min(depth, width - k)),    sums,          project_columns};
    (job.config.projection == Engine::bf16 ? job.words().linear_bf16
                                           : job.words().linear_f32)(tile);
  }
}

}  // namespace

void join_row(const Job& job, std::int64_t b, const Row& row, const float* out) {
  const Problem& p = job.problem;
  const std::int64_t first = p.varlen_q ? job.arrays.sequences[b].q_begin : b * p.max_q;
  const std::int64_t width = joined_width(p), end = (row.head + 1) * p.dv;
  const int bytes = weight_bytes(job.config);
  std::byte* to = job.arrays.joined + ((first + row.i) * width + end - p.dv) * bytes;
  if (job.config.projection == Engine::bf16) {
    store_row(job.words(), out, p.dv, Format::bf16, to);
  } else {
    store_row(job.words(), out, p.dv, Format::f32, to);
    round_row(job.words(), p.out.format, reinterpret_cast<float*>(to), p.dv);
  }
  if (row.head + 1 < p.heads_q) return;
  std::memset(to + p.dv * bytes, 0, static_cast<std::size_t>((width - end) * bytes));
}

bool shares_panels(const Problem& p) { return row_blocks(p) > 1; }

std::int64_t weight_blocks(const Problem& p) {
  return p.projects() && shares_panels(p) ? column_blocks(p) : 0;
}

void pack_weight(const Job& job, std::int64_t index, Scratch& s) { pack_columns(job, index, s); }

std::int64_t projection_blocks(const Problem& p) {
  return p.projects() ? row_blocks(p) * column_blocks(p) : 0;
}

void project(const Job& job, std::int64_t index, Scratch& s) {
  const Problem& p = job.problem;
  const std::int64_t block = index % column_blocks(p),
                     token = index / column_blocks(p) * project_rows;
  const auto rows = static_cast<int>(std::min<std::int64_t>(p.tokens_q - token, project_rows));
  const std::int64_t e = block * project_columns;
  const auto count = static_cast<int>(std::min<std::int64_t>(features(p) - e, project_columns));
  if (!shares_panels(p)) pack_columns(job, block, s);
  multiply(job, token, rows, block, s);
  for (int r = 0; r < rows; ++r) {
    const std::int64_t t = token + r;
    const std::int64_t at =
        p.varlen_q ? t * p.out.token : t / p.max_q * p.out.batch + t % p.max_q * p.out.token;
    std::byte* to = static_cast<std::byte*>(p.out.data) + (at + e) * (info(p.out.format).bits / 8);
    const float* sums = s.projected + r * project_columns;
    if (p.out.format != Format::bf16) {
      store_row(job.words(), sums, count, p.out.format, to);
      continue;
    }
    std::uint16_t codes[project_columns];
    job.words().encode_bf16(sums, padded(count), codes);
    std::memcpy(to, codes, sizeof(std::uint16_t) * static_cast<std::size_t>(count));
  }
}

}  // namespace qattn::cpu
