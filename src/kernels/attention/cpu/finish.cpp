// What comes between the product and the softmax: means, softcap, biases, masks, bad values.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>

#include "kernels/attention/cpu/task.hpp"

namespace qattn::cpu {
namespace {

/// In eight sums, which need not wait for one another.
float dot(const float* x, const float* y, int n) {
  constexpr int sums = 8;
  float sum[sums] = {};
  int i = 0;
  for (; i + sums <= n; i += sums) {
    for (int j = 0; j < sums; ++j) sum[j] += x[i + j] * y[i + j];
  }
  for (int j = 0; i < n; ++i, ++j) sum[j] += x[i] * y[i];
  for (int step = sums / 2; step > 0; step /= 2) {
    for (int j = 0; j < step; ++j) sum[j] += sum[j + step];
  }
  return sum[0];
}

/// smooth_q: adds softmax_scale * (block mean of q) . (k - mu), exactly, to the scores of a tile.
void add_query_mean(const Job& job, const Task& t, std::int64_t first, int keys, Scratch& s) {
  const Sequence x = job.k_sequence(t.b, t.kv_head);
  const float *means[tile_rows], *mean_of[tile_rows];
  int count = 0;
  for (int r = 0; r < t.count; ++r) {
    const bool exists = t.rows[r].i < job.arrays.sequences[t.b].q_length;
    mean_of[r] = exists ? job.q_mean(t.b, t.rows[r].head, t.rows[r].i) : nullptr;
    if (exists && (count == 0 || means[count - 1] != mean_of[r])) means[count++] = mean_of[r];
  }
  float products[tile_rows][tile_keys];
  for (int j = 0; j < keys; ++j) {
    load_row(job.words(), x, first + j, {job.k_mean(t.b, t.kv_head), false}, s.row);
    for (int n = 0; n < count; ++n) products[n][j] = dot(means[n], s.row, job.d());
  }
  for (int r = 0, n = 0; r < t.count; ++r) {
    if (mean_of[r] == nullptr) continue;
    if (means[n] != mean_of[r]) ++n;
    float* scores = s.scores + r * tile_keys;
    for (int j = 0; j < keys; ++j) scores[j] += products[n][j] * job.problem.softmax_scale;
  }
}

/// One row of a tile. It sees keys first + begin to first + end - 1 at most.
struct TileRow {
  const Job& job;
  const SequenceInfo& seq;
  std::int64_t b;
  const Row& row;
  std::int64_t first;
  int keys;  ///< of the tile; entries behind are nobody's
  int begin, end;
  float* scores;

  const Problem& problem() const { return job.problem; }
  ScoreRun run() const {
    return {b, row.head, row.i, first + begin, end - begin, seq.q_length, seq.k_length};
  }
  /// Where the mask's element of key first + begin lies, in elements.
  std::int64_t mask_at() const {
    const auto& st = problem().mask_stride;
    return b * st[0] + row.head * st[1] + row.i * st[2] + (first + begin) * st[3];
  }
};

constexpr float largest = std::numeric_limits<float>::max();

/// Adds a bias for each key from begin to end.
void add_biases(const TileRow& x, const float* biases) {
  x.job.words().add_bias(x.scores + x.begin, x.end - x.begin, biases, Element::f32);
}

void add_alibi(const TileRow& x) {
  const TensorView& v = x.problem().tensors.alibi_slopes;
  const std::int64_t at =
      v.rank == 1 ? x.row.head * v.stride[0] : x.b * v.stride[0] + x.row.head * v.stride[1];
  const float slope = static_cast<const float*>(v.data)[at];
  const std::int64_t before = x.first + x.begin - (x.row.i + x.seq.k_length - x.seq.q_length);
  const int count = x.end - x.begin;
  float biases[tile_keys];
  const auto fill = [&](auto start) {  // vectors where four bytes hold the distance
    for (int j = 0; j < count; ++j) {
      const auto distance = static_cast<float>(std::abs(start + j));
      biases[j] = std::clamp(-slope * distance, -largest, largest);
    }
  };
  if (std::abs(before) < 1 << 30) {
    fill(static_cast<int>(before));
  } else {
    fill(before);
  }
  add_biases(x, biases);
}

void add_mask(const TileRow& x) {
  const TensorView& mask = x.problem().tensors.mask;
  const std::int64_t at = x.mask_at(), stride = x.problem().mask_stride[3];
  if (stride == 1) {
    const int bytes = mask.format == Format::f32 ? 4 : 2;
    x.job.words().add_bias(x.scores + x.begin, x.end - x.begin,
                           static_cast<const std::byte*>(mask.data) + at * bytes,
                           element_of(mask.format));
    return;
  }
  float biases[tile_keys];
  for (int j = 0; j < x.end - x.begin; ++j) biases[j] = read_float(mask, at + j * stride);
  add_biases(x, biases);
}

/// Is there a mask that says yes or no, functions apart?
bool hides_keys(const Problem& p) { return p.mask == MaskKind::boolean || p.block_mask_q > 0; }

/// Which keys of the tile the row sees by windows and such masks: a byte each, 0 if not.
void find_visible(const TileRow& x, std::uint8_t* visible) {
  const Problem& p = x.problem();
  std::memset(visible, 0, tile_keys);
  std::memset(visible + x.begin, 1, static_cast<std::size_t>(x.end - x.begin));
  const auto* bytes = static_cast<const std::uint8_t*>(p.tensors.mask.data);
  if (p.mask == MaskKind::boolean && x.begin < x.end) {
    const std::int64_t at = x.mask_at(), stride = p.mask_stride[3];
    std::uint8_t* out = visible + x.begin;
    const int count = x.end - x.begin;
    if (p.tensors.mask.format == Format::b1) {
      for (int j = 0; j < count; ++j) {
        const std::int64_t bit = at + j * stride;
        out[j] = bytes[bit >> 3] >> ((x.first + x.begin + j) & 7) & 1;
      }
    } else if (stride == 1) {
      std::memcpy(out, bytes + at, static_cast<std::size_t>(count));
    } else {
      for (int j = 0; j < count; ++j) out[j] = bytes[at + j * stride];
    }
  }
  for (int j = x.begin; p.block_mask_q > 0 && j < x.end;) {
    const std::int64_t key = x.first + j, next = (key / p.block_mask_k + 1) * p.block_mask_k;
    const int end = static_cast<int>(std::min<std::int64_t>(next - x.first, x.end));
    if (!p.block_visible(x.b, x.row.head, x.row.i, key)) {
      std::memset(visible + j, 0, static_cast<std::size_t>(end - j));
    }
    j = end;
  }
}

/// The caller's score function on a run of keys of one row.
void apply_score_function(const TileRow& x) {
  const Problem& p = x.problem();
  if (!p.score_function) return;
  const ScoreRun run = x.run();
  float* scores = x.scores + x.begin;
  float before[tile_keys];
  std::copy(scores, scores + run.count, before);
  p.score_function.apply(p.score_function.context, run, scores);
  for (int j = 0; j < run.count; ++j) {  // bad values stay bad, masked keys stay masked
    if (std::isnan(before[j]) || before[j] == -infinity) scores[j] = before[j];
  }
}

/// And the mask function.
void apply_mask_function(const TileRow& x, float* scores) {
  const Problem& p = x.problem();
  if (!p.mask_function) return;
  std::uint8_t visible[tile_keys];
  std::memset(visible, 1, sizeof visible);
  const ScoreRun run = x.run();
  p.mask_function.apply(p.mask_function.context, run, visible);
  for (int j = 0; j < run.count; ++j) {
    if (visible[j] == 0) scores[x.begin + j] = -infinity;
  }
}

/// Does the row see a key of those in `low`, whatever its score?
bool sees_any(const TileRow& x, const bool* low) {
  const Problem& p = x.problem();
  std::uint8_t visible[tile_keys];
  find_visible(x, visible);
  float allowed[tile_keys] = {};
  apply_mask_function(x, allowed);
  for (int j = x.begin; j < x.end; ++j) {
    if (!low[j] || visible[j] == 0 || allowed[j] == -infinity) continue;
    if (p.mask != MaskKind::additive) return true;
    const std::int64_t at = x.mask_at() + (j - x.begin) * p.mask_stride[3];
    if (read_float(p.tensors.mask, at) != -infinity) return true;
  }
  return false;
}

/// Notes scores below the floats before masks make others look like them. Are there any?
bool find_low(const TileRow& x, bool* low) {
  constexpr auto none = std::bit_cast<std::uint32_t>(-infinity);
  std::uint32_t any = 0;  // of integers compilers make vectors
  for (int j = x.begin; j < x.end; ++j) {
    any |= std::bit_cast<std::uint32_t>(x.scores[j]) == none ? 1u : 0u;
  }
  for (int j = x.begin; any != 0 && j < x.end; ++j) low[j] = x.scores[j] == -infinity;
  return any != 0;
}

/// Returns whether the row sees a key whose score lies below the floats.
bool finish_row(const TileRow& x, float offset) {
  const Problem& p = x.problem();
  const KernelTable& words = x.job.words();
  if (p.softcap > 0) {
    words.softcap(x.scores, padded(x.keys), offset, p.softcap);
  } else if (p.score_function) {
    for (int j = 0; j < x.keys; ++j) x.scores[j] += offset;
  }
  bool low[tile_keys];
  const bool any_low = find_low(x, low);
  if (x.begin < x.end) {
    if (p.tensors.alibi_slopes.present()) add_alibi(x);
    if (p.mask == MaskKind::additive) add_mask(x);
  }
  if (hides_keys(p)) {
    std::uint8_t visible[tile_keys];
    find_visible(x, visible);
    words.hide(x.scores, tile_keys, visible);
  } else {
    std::fill(x.scores, x.scores + x.begin, -infinity);
    std::fill(x.scores + x.end, x.scores + tile_keys, -infinity);
  }
  if (x.begin < x.end) {
    apply_score_function(x);
    apply_mask_function(x, x.scores);
  }
  return any_low && sees_any(x, low);
}

TileRow row_of(const Job& job, const Task& t, std::int64_t first, int r, float* scores) {
  const Row& row = t.rows[r];
  const int keys = static_cast<int>(std::min<std::int64_t>(tile_keys, t.key_end - first));
  const int begin = static_cast<int>(std::clamp<std::int64_t>(row.begin - first, 0, keys));
  const int end = static_cast<int>(std::clamp<std::int64_t>(row.end - first, begin, keys));
  return {job, job.arrays.sequences[t.b], t.b, row, first, keys, begin, end, scores};
}

}  // namespace

bool finish_scores_of_row(const Job& job, const Task& t, std::int64_t first, int r, float offset,
                          float* scores) {
  return finish_row(row_of(job, t, first, r, scores), offset);
}

bool needs_true_scores(const Problem& p) { return p.softcap > 0 || p.score_function; }

bool adds_biases(const Problem& p) {
  return p.mask == MaskKind::additive || p.tensors.alibi_slopes.present() || p.score_function;
}

bool adds_nothing(const Job& job) {
  const Problem& p = job.problem;
  return p.softcap <= 0 && p.mask == MaskKind::none && p.block_mask_q == 0 &&
         !p.tensors.alibi_slopes.present() && !job.config.smooth_q && !p.score_function &&
         !p.mask_function;
}

std::uint32_t finish_scores(const Job& job, const Task& t, const Tile& tile, std::int64_t first,
                            int keys, Scratch& s) {
  std::uint32_t below = 0;
  if (job.config.smooth_q) add_query_mean(job, t, first, keys, s);
  const auto* bad = tile.at<std::uint8_t>(&TileLayout::v_bad);
  const bool any_bad = *tile.at<std::uint8_t>(&TileLayout::any_bad) != 0;
  for (int r = 0; r < t.count; ++r) {
    const TileRow x = row_of(job, t, first, r, s.scores + r * tile_keys);
    if (finish_row(x, s.offset[r])) below |= 1u << r;
    for (int j = x.begin; any_bad && j < x.end; ++j) {
      if (bad[j] && x.scores[j] != -infinity) x.scores[j] = nan_value;
    }
  }
  return below;
}

}  // namespace qattn::cpu
