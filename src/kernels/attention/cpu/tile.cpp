// One task: up to 32 query rows against a run of keys, tile by tile from the last to the first.
#include <algorithm>
#include <bit>
#include <cstring>

#include "formats/scale.hpp"
#include "kernels/attention/cpu/task.hpp"
#include "qattn/quantize.hpp"

namespace qattn::cpu {
namespace {

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
  } else if (is_split(job.config.qk)) {
    w.qk_bf16x2(s.q_bf16, t.count, tile.at<std::uint16_t>(&TileLayout::k), keys, job.d(), s.q_scale,
                scale, s.scores);
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

/// Multiplies P with V, both sums of two bf16 values.
void multiply_sums(const Job& job, const Task& t, const Tile& tile, int keys, Scratch& s) {
  const int filled = (keys + 31) / 32 * 32;
  for (int r = 0; r < t.count; ++r) {
    float* p = s.p + r * tile_keys;
    std::fill(p + keys, p + filled, 0.0f);
    job.words().split_bf16(p, filled, tile_keys, s.p_bf16 + r * 2 * tile_keys);
  }
  job.words().pv_bf16x2(s.p_bf16, t.count, tile.at<std::uint16_t>(&TileLayout::v), keys, job.dv(),
                        s.alpha, s.beta, s.out);
}

/// Multiplies P with V, sub-block by sub-block of V's scales. `lossy`: SoftmaxTile's.
void multiply_values(const Job& job, const Task& t, const Tile& tile, int keys, std::uint32_t lossy,
                     Scratch& s) {
  const KernelTable& w = job.words();
  const Config& c = job.config;
  if (is_split(c.pv)) return multiply_sums(job, t, tile, keys, s);
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
  const bool floats = tile.floats != nullptr;
  x.p = c.pv == Engine::f32 || is_split(c.pv) || floats ? s.p : nullptr;
  x.p_bf16 = c.pv == Engine::bf16 && !floats ? s.p_bf16 : nullptr;
  x.codes = c.pv == Engine::integer ? s.codes : nullptr;
  x.mass = s.mass;
  x.rest = s.rest;
  if (c.v_token_scale) {
    x.v_log = tile.at<float>(&TileLayout::v_log);
    x.v_inverse = tile.at<float>(&TileLayout::v_inverse);
    x.biased = adds_biases(job.problem);
  }
  const bool plain = is_unmasked(job, t, tile, first);
  if (floats) {
    job.words().qk_float_rows(s.q, job.d(), t.count, tile.floats->k, keys, job.problem.d, s.q_scale,
                              s.scores);
  } else {
    multiply_queries(job, t, tile, keys16, s);
  }
  x.below = plain ? ~0u : finish_scores(job, t, tile, first, keys, s);
  job.words().softmax(x);
  if (floats) {
    job.words().pv_float_rows(s.p, t.count, tile.floats->v, keys, job.problem.dv, s.alpha, s.beta,
                              s.out);
    return;
  }
  multiply_values(job, t, tile, keys16, x.lossy, s);
}

/// Tiles that go through KernelTable::attend() together: all but those to whose scores a caller's
/// function or Q's means add something.
class FusedTiles {
 public:
  FusedTiles(const Job& job, const Task& t, Scratch& s) : job_(job), task_(t), scratch_(s) {
    const Config& c = job.config;
    const int width = job.d() * bytes_of(c.qk);
    // A caller's function may use the tiles of AMX itself.
    const bool calls = job.problem.score_function || job.problem.mask_function;
    open_ = job.words().attend != nullptr && !calls && !c.smooth_q && c.v_block == tile_keys &&
            job.words().attends(c.qk, c.rounding, t.count, width) &&
            (c.pv == Engine::integer || (parts_of(c.pv) > 0 && !c.v_channel_scale));
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
                             job.d() * bytes_of(job.config.qk),
                             s.q_scale,
                             s.correction,
                             begin_,
                             end_,
                             s.max,
                             s.sum,
                             s.mass,
                             s.out,
                             job.dv(),
                             adds_nothing(job) ? ScoreChange{} : ScoreChange{change_row, this},
                             adds_biases(job.problem)};
    if (count_ > 0) job.words().attend(rows, tiles_, count_);
    count_ = 0;
  }

 private:
  static constexpr int most = 32;

  static bool change_row(const void* context, std::int64_t first, int r, float* scores) {
    const auto& x = *static_cast<const FusedTiles*>(context);
    return finish_scores_of_row(x.job_, x.task_, first, r, x.scratch_.offset[r], scores);
  }

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
  if (tile.floats != nullptr) return run_tile(job, t, tile, first, s);
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
