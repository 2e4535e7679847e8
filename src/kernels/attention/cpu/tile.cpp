// One task: up to 32 query rows against a run of keys, tile by tile from the last to the first.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>

#include "formats/scale.hpp"
#include "kernels/attention/cpu/task.hpp"
#include "qattn/quantize.hpp"

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

/// Block mask of one row's keys [first, first + keys).
void apply_block_mask(const Problem& p, std::int64_t b, const Row& row, std::int64_t first,
                      int keys, float* scores) {
  for (int j = 0; j < keys;) {
    const std::int64_t key = first + j, next = (key / p.block_mask_k + 1) * p.block_mask_k;
    const int end = static_cast<int>(std::min<std::int64_t>(next - first, keys));
    if (!p.block_visible(b, row.head, row.i, key)) std::fill(scores + j, scores + end, -infinity);
    j = end;
  }
}

constexpr float largest = std::numeric_limits<float>::max();

/// score + bias. Numbers that leave the floats together stay the largest: -infinity means masked.
float add_bias(float score, float bias) {
  const float sum = score + bias;
  return std::isfinite(score) && std::isfinite(bias) ? std::clamp(sum, -largest, largest) : sum;
}

/// Additive mask or boolean mask of one row's keys [first, first + keys).
void apply_mask(const Problem& p, std::int64_t b, const Row& row, std::int64_t first, int keys,
                float* scores) {
  const auto& st = p.mask_stride;
  const std::int64_t base = b * st[0] + row.head * st[1] + row.i * st[2];
  for (int j = 0; j < keys; ++j) {
    const std::int64_t at = base + (first + j) * st[3];
    if (p.tensors.mask.format == Format::b1) {
      const auto* bytes = static_cast<const std::uint8_t*>(p.tensors.mask.data);
      if ((bytes[at >> 3] >> ((first + j) & 7) & 1) == 0) scores[j] = -infinity;
    } else if (p.mask == MaskKind::boolean) {
      if (static_cast<const std::uint8_t*>(p.tensors.mask.data)[at] == 0) scores[j] = -infinity;
    } else {
      const float bias = read_float(p.tensors.mask, at);
      scores[j] = bias == -infinity ? -infinity : add_bias(scores[j], bias);
    }
  }
}

/// The caller's score function on a run of keys of one row.
void apply_score_function(const Problem& p, const ScoreRun& run, float* scores) {
  if (!p.score_function) return;
  float before[tile_keys];
  std::copy(scores, scores + run.count, before);
  p.score_function.apply(p.score_function.context, run, scores);
  for (int j = 0; j < run.count; ++j) {  // bad values stay bad, masked keys stay masked
    if (std::isnan(before[j]) || before[j] == -infinity) scores[j] = before[j];
  }
}
/// And the mask function.
void apply_mask_function(const Problem& p, const ScoreRun& run, float* scores) {
  if (!p.mask_function) return;
  std::uint8_t visible[tile_keys];
  std::memset(visible, 1, sizeof visible);
  p.mask_function.apply(p.mask_function.context, run, visible);
  for (int j = 0; j < run.count; ++j) {
    if (visible[j] == 0) scores[j] = -infinity;
  }
}

/// A run of keys of one row in a tile: keys first + begin to first + end - 1.
struct KeyRun {
  const SequenceInfo& seq;
  std::int64_t b;
  const Row& row;
  std::int64_t first;
  int begin, end;

  ScoreRun run() const {
    return {b, row.head, row.i, first + begin, end - begin, seq.q_length, seq.k_length};
  }
};

/// Does the row see a key of those in `low`, whatever its score?
bool sees_any(const Problem& p, const KeyRun& keys, const bool* low) {
  float scores[tile_keys] = {};
  const int begin = keys.begin, end = keys.end;
  if (p.mask != MaskKind::none) {
    apply_mask(p, keys.b, keys.row, keys.first + begin, end - begin, scores + begin);
  }
  if (p.block_mask_q > 0) apply_block_mask(p, keys.b, keys.row, keys.first, end, scores);
  apply_mask_function(p, keys.run(), scores + begin);
  for (int j = begin; j < end; ++j) {
    if (low[j] && scores[j] != -infinity) return true;
  }
  return false;
}

/// Notes scores below the floats before masks make others look like them. Are there any?
bool find_low(const float* scores, const KeyRun& keys, bool* low) {
  bool any = false;
  for (int j = keys.begin; j < keys.end; ++j) any |= scores[j] == -infinity;
  for (int j = keys.begin; any && j < keys.end; ++j) low[j] = scores[j] == -infinity;
  return any;
}

/// Are the scores passed through a function for which K's mean must be back in place?
bool needs_true_scores(const Problem& p) { return p.softcap > 0 || p.score_function; }

/// Everything between the product and the softmax that the plain case does without. Returns
/// SoftmaxTile::below.
std::uint32_t finish_scores(const Job& job, const Task& t, const Tile& tile, std::int64_t first,
                            int keys, Scratch& s) {
  std::uint32_t below = 0;
  const Problem& p = job.problem;
  const SequenceInfo& seq = job.arrays.sequences[t.b];
  if (job.config.smooth_q) add_query_mean(job, t, first, keys, s);
  const auto* bad = tile.at<std::uint8_t>(&TileLayout::v_bad);
  const bool any_bad = *tile.at<std::uint8_t>(&TileLayout::any_bad) != 0;
  for (int r = 0; r < t.count; ++r) {
    const Row& row = t.rows[r];
    float* scores = s.scores + r * tile_keys;
    for (int j = 0; needs_true_scores(p) && j < keys; ++j) scores[j] += s.offset[r];
    if (p.softcap > 0) job.words().softcap(scores, keys, p.softcap);
    const int begin = static_cast<int>(std::clamp<std::int64_t>(row.begin - first, 0, keys));
    const int end = static_cast<int>(std::clamp<std::int64_t>(row.end - first, begin, keys));
    const KeyRun seen{seq, t.b, row, first, begin, end};
    bool low[tile_keys];
    const bool any_low = find_low(scores, seen, low);
    if (p.tensors.alibi_slopes.present()) {
      const TensorView& v = p.tensors.alibi_slopes;
      const std::int64_t at =
          v.rank == 1 ? row.head * v.stride[0] : t.b * v.stride[0] + row.head * v.stride[1];
      const float slope = static_cast<const float*>(v.data)[at];
      const std::int64_t diagonal = row.i + seq.k_length - seq.q_length;
      for (int j = 0; j < keys; ++j) {
        const auto distance = static_cast<float>(std::abs(first + j - diagonal));
        scores[j] = add_bias(scores[j], std::clamp(-slope * distance, -largest, largest));
      }
    }
    if (p.mask != MaskKind::none && begin < end) {
      apply_mask(p, t.b, row, first + begin, end - begin, scores + begin);
    }
    if (p.block_mask_q > 0) apply_block_mask(p, t.b, row, first, keys, scores);
    if (begin < end) {
      apply_score_function(p, seen.run(), scores + begin);
      apply_mask_function(p, seen.run(), scores + begin);
    }
    if (any_low && sees_any(p, seen, low)) below |= 1u << r;
    std::fill(scores, scores + begin, -infinity);
    std::fill(scores + end, scores + tile_keys, -infinity);
    if (!any_bad) continue;
    for (int j = begin; j < end; ++j) {
      if (bad[j] && scores[j] != -infinity) scores[j] = nan_value;
    }
  }
  return below;
}

/// May what is added to scores be of any size?
bool adds_biases(const Problem& p) {
  return p.mask == MaskKind::additive || p.tensors.alibi_slopes.present() || p.score_function;
}

/// Is nothing added to scores but windows, and nothing else of theirs changed?
bool adds_nothing(const Job& job) {
  const Problem& p = job.problem;
  return p.softcap <= 0 && p.mask == MaskKind::none && p.block_mask_q == 0 &&
         !p.tensors.alibi_slopes.present() && !job.config.smooth_q && !p.score_function &&
         !p.mask_function;
}

bool sees_all(const Task& t, std::int64_t first) {
  for (int r = 0; r < t.count; ++r) {
    if (t.rows[r].begin > first || t.rows[r].end < first + tile_keys) return false;
  }
  return true;
}

/// May the tile skip finish_scores()? Every row sees every key of it and nothing is added.
bool is_unmasked(const Job& job, const Task& t, const Tile& tile, std::int64_t first) {
  return adds_nothing(job) && *tile.at<std::uint8_t>(&TileLayout::any_bad) == 0 &&
         sees_all(t, first);
}

void multiply_queries(const Job& job, const Task& t, const Tile& tile, int keys, Scratch& s) {
  const KernelTable& w = job.words();
  const auto* scale = tile.at<float>(&TileLayout::k_scale);
  if (tile.found != nullptr) {
    w.qk_s8_rows(s.q_panels, t.count, tile.found->k, keys, job.d(), s.q_scale, s.correction, scale,
                 s.scores);
  } else if (job.config.qk == Engine::integer) {
    w.qk_s8(s.q_codes, t.count, tile.at<std::uint8_t>(&TileLayout::k), keys, job.d() / 4, s.q_scale,
            s.correction, scale, s.scores);
  } else if (job.config.qk == Engine::bf16) {
    w.qk_bf16(s.q_bf16, t.count, tile.at<std::uint16_t>(&TileLayout::k), keys, job.d() / 2,
              s.q_scale, scale, s.scores);
  } else {
    w.qk_f32(s.q, t.count, tile.at<float>(&TileLayout::k), keys, job.d(), s.q_scale, scale,
             s.scores);
  }
}

CodeRows from_group(const CodeRows& rows, int group) {
  return {rows.group + group, rows.next ? rows.next + group : nullptr, rows.stride};
}

/// Codes of P of one sub-block of V's scales times V: keys [j, j + count).
void multiply_codes(const Job& job, const Tile& tile, const std::uint8_t* codes, int rows, int j,
                    int count, const float* alpha, const float* beta, const float* scale,
                    float* out) {
  const KernelTable& w = job.words();
  const int dv = job.dv();
  if (tile.found != nullptr) {
    const CodeRows from = from_group(tile.found->v, j / 16);
    w.pv_u8s8_rows(codes + j, rows, from, count, dv, alpha, beta, scale, out);
  } else {
    w.pv_u8s8(codes + j, rows, tile.at<std::int8_t>(&TileLayout::v) + j * dv, count, dv, alpha,
              beta, scale, out);
  }
}

/// Multiplies P with V, sub-block by sub-block of V's scales. `lossy`: SoftmaxTile's.
void multiply_values(const Job& job, const Task& t, const Tile& tile, int keys, std::uint32_t lossy,
                     Scratch& s) {
  const KernelTable& w = job.words();
  const Config& c = job.config;
  const int dv = job.dv();
  const int block = c.v_channel_scale ? c.v_block : tile_keys;
  for (int j = 0; j < keys; j += block) {
    if (j > 0) std::fill(s.alpha, s.alpha + t.count, 1.0f);  // applied once
    const int count = std::min(block, keys - j);
    const float* scale =
        c.v_channel_scale ? tile.at<float>(&TileLayout::v_scale) + j / block * dv : nullptr;
    if (c.pv == Engine::integer) {
      multiply_codes(job, tile, s.codes, t.count, j, count, s.alpha, s.beta, scale, s.out);
      for (std::uint32_t left = lossy; left != 0; left &= left - 1) {
        const int r = std::countr_zero(left);
        const float alpha = 1.0f, beta = s.beta[r] * (1.0f / 255.0f);
        multiply_codes(job, tile, s.rest + r * tile_keys, 1, j, count, &alpha, &beta, scale,
                       s.out + r * dv);
      }
    } else if (c.pv == Engine::bf16) {
      w.pv_bf16(s.p_bf16 + j, t.count, tile.at<std::uint16_t>(&TileLayout::v) + j * dv, count, dv,
                s.alpha, s.beta, scale, s.out);
    } else {
      w.pv_f32(s.p + j, t.count, tile.at<float>(&TileLayout::v) + j * dv, count, dv, s.alpha,
               s.beta, scale, s.out);
    }
  }
}

}  // namespace

bool wholly_forbidden(const Problem& p, const Task& t, std::int64_t first) {
  for (int r = 0; r < t.count && p.block_mask_q > 0; ++r) {
    if (r > 0 && t.rows[r].head == t.rows[r - 1].head &&
        t.rows[r].i / p.block_mask_q == t.rows[r - 1].i / p.block_mask_q) {
      continue;  // the same block of the mask
    }
    for (std::int64_t j = first; j < std::min(first + tile_keys, t.key_end);
         j = (j / p.block_mask_k + 1) * p.block_mask_k) {
      if (p.block_visible(t.b, t.rows[r].head, t.rows[r].i, j)) return false;
    }
  }
  return p.block_mask_q > 0;
}

namespace {

/// One tile, step by step.
void run_tile(const Job& job, const Task& t, const Tile& tile, std::int64_t first, Scratch& s) {
  const Config& c = job.config;
  const int keys = static_cast<int>(std::min<std::int64_t>(tile_keys, t.key_end - first));
  const int keys16 = padded(keys);
  SoftmaxTile x{};
  x.scores = s.scores;
  x.rows = t.count;
  x.keys = keys16;
  x.rounding = c.rounding;
  x.max = s.max;
  x.sum = s.sum;
  x.alpha = s.alpha;
  x.beta = s.beta;
  x.p = c.pv == Engine::f32 ? s.p : nullptr;
  x.p_bf16 = c.pv == Engine::bf16 ? s.p_bf16 : nullptr;
  x.codes = c.pv == Engine::integer ? s.codes : nullptr;
  x.mass = s.mass;
  x.rest = s.rest;
  if (c.v_token_scale) {
    x.v_log = tile.at<float>(&TileLayout::v_log);
    x.v_inverse = tile.at<float>(&TileLayout::v_inverse);
    x.biased = adds_biases(job.problem);
  }
  const bool plain = is_unmasked(job, t, tile, first);
  multiply_queries(job, t, tile, keys16, s);
  x.below = plain ? ~0u : finish_scores(job, t, tile, first, keys, s);
  job.words().softmax(x);
  multiply_values(job, t, tile, keys16, x.lossy, s);
}

/// Tiles that go through KernelTable::attend() together: all but those whose scores or V need a
/// look.
class FusedTiles {
 public:
  FusedTiles(const Job& job, const Task& t, Scratch& s) : job_(job), task_(t), scratch_(s) {
    const Config& c = job.config;
    const int width = job.d() * (c.qk == Engine::integer ? 1 : 2);
    open_ = job.words().attend != nullptr &&
            job.words().attends(c.qk, c.rounding, t.count, width) && adds_nothing(job) &&
            c.v_block == tile_keys &&
            (c.pv == Engine::integer || (c.pv == Engine::bf16 && !c.v_channel_scale));
    for (int r = 0; r < t.count; ++r) {
      begin_[r] = t.rows[r].begin;
      end_[r] = t.rows[r].end;
    }
  }

  /// False: run it step by step.
  bool add(const Tile& tile, std::int64_t first) {
    const Config& c = job_.config;
    if (!open_) return false;
    if (count_ == most) run();
    AttentionTile& x = tiles_[count_++];
    const bool bad = *tile.at<std::uint8_t>(&TileLayout::any_bad) != 0;
    x = {first,
         bad || !sees_all(task_, first),
         bad,
         tile.at<void>(&TileLayout::k),
         tile.at<void>(&TileLayout::v),
         tile.at<float>(&TileLayout::k_scale),
         nullptr,
         nullptr,
         nullptr};
    if (c.v_token_scale) {
      x.v_log = tile.at<float>(&TileLayout::v_log);
      x.v_inverse = tile.at<float>(&TileLayout::v_inverse);
    }
    if (c.v_channel_scale) x.v_scale = tile.at<float>(&TileLayout::v_scale);
    return true;
  }

  void run() {
    const Job& job = job_;
    const Scratch& s = scratch_;
    const bool integer = job.config.qk == Engine::integer;
    const AttentionRows rows{job.config.qk,
                             job.config.rounding,
                             integer ? static_cast<const void*>(s.q_codes) : s.q_bf16,
                             task_.count,
                             job.d() * (integer ? 1 : 2),
                             s.q_scale,
                             s.correction,
                             begin_,
                             end_,
                             s.max,
                             s.sum,
                             s.mass,
                             s.out,
                             job.dv()};
    if (count_ > 0) job.words().attend(rows, tiles_, count_);
    count_ = 0;
  }

 private:
  static constexpr int most = 32;
  const Job& job_;
  const Task& task_;
  Scratch& scratch_;
  bool open_;
  int count_ = 0;
  std::int64_t begin_[tile_rows], end_[tile_rows];
  AttentionTile tiles_[most];
};

}  // namespace

bool packs_itself(const Problem& problem, const SequenceInfo& sequence) {
  return problem.group() * sequence.q_rows <= tile_rows;
}

void run_single_tile(const Job& job, const Task& t, const Tile& tile, std::int64_t first,
                     Scratch& s) {
  FusedTiles fused(job, t, s);
  if (!fused.add(tile, first)) run_tile(job, t, tile, first, s);
  fused.run();
}

TileRange tiles_of(const Task& t) {
  std::int64_t begin = t.key_end, end = t.key_begin;
  for (int r = 0; r < t.count; ++r) {
    if (t.rows[r].begin == t.rows[r].end) continue;
    begin = std::min(begin, t.rows[r].begin);
    end = std::max(end, t.rows[r].end);
  }
  if (begin >= end) return {0, -1};
  return {begin / tile_keys * tile_keys, (end - 1) / tile_keys * tile_keys};
}

void start_rows(const Job& job, const Task& t, Scratch& s) {
  load_queries(job, t, s);
  std::fill(s.max, s.max + t.count, -infinity);
  std::fill(s.sum, s.sum + t.count, 0.0f);
  std::fill(s.mass, s.mass + t.count, 0.0f);
  std::memset(s.out, 0, sizeof(float) * static_cast<std::size_t>(t.count * job.dv()));
}

void finish_rows(const Job& job, const Task& t, const Scratch& s) {
  const int dv = job.dv();
  for (int r = 0; r < t.count; ++r) {
    // Where scores were made true, the offset is inside them already.
    const float offset = needs_true_scores(job.problem) ? 0.0f : s.offset[r];
    if (t.partial < 0) {
      write_row(job, t.b, t.rows[r], s.max[r], s.sum[r], offset, s.out + r * dv);
      continue;
    }
    float* partial = job.arrays.partials + (t.partial + r) * (dv + 2);
    std::memcpy(partial, s.out + r * dv, sizeof(float) * static_cast<std::size_t>(dv));
    partial[dv] = s.max[r] == -infinity ? -infinity : s.max[r] + offset;
    const bool below = s.max[r] != -infinity && partial[dv] == -infinity;
    partial[dv + 1] = below ? sum_of_below : s.sum[r];
  }
}

void run_task(const Job& job, std::int64_t index, Scratch& s) {
  const Task t = make_task(job, index);
  start_rows(job, t, s);
  const TileRange range = tiles_of(t);
  FusedTiles fused(job, t, s);
  for (std::int64_t first = range.last; first >= range.lowest; first -= tile_keys) {
    if (wholly_forbidden(job.problem, t, first)) continue;
    const Tile tile = job.prepared_tile(t.b, t.kv_head, first);
    if (fused.add(tile, first)) continue;
    fused.run();
    run_tile(job, t, tile, first, s);
  }
  fused.run();
  finish_rows(job, t, s);
}

}  // namespace qattn::cpu
