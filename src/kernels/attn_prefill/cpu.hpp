// Attention on CPUs: operands are quantised and repacked once per call into the workspace, then
// tasks of up to 32 query rows walk the keys in tiles of 128, from last to first.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/plan.hpp"
#include "kernels/cpu/words.hpp"
#include "kernels/quantize/rows.hpp"

namespace qattn::cpu {

detail::Kernel attention_kernel_scalar();
detail::Kernel attention_kernel_avx512vnni();

/// Everything that selects code. Derived from the problem alone, so results do not depend on the
/// number of threads or on the rest of the batch.
struct Config : detail::PlanData {
  const Words* words = nullptr;
  bool integer_qk = false;     ///< s8 panels and dot4, else float panels
  bool integer_pv = false;     ///< u8 P times s8 V
  bool v_token_scale = false;  ///< V's scale per token is folded into P
  int v_block = tile_keys;     ///< keys under one V scale inside a tile (divides tile_keys)
  Rounding rounding = Rounding::f32;
  bool smooth_k = false, smooth_q = false, smooth_v = false, rotate = false;
  /// Sequences of at most tile_rows rows (query heads of a group times queries) are split into runs
  /// of this many keys, which are merged by (O, LSE).
  std::int64_t split_keys = 1024;
  int threads = 1;
};

/// One sequence of the batch, as the contents of the index tensors say.
struct SequenceInfo {
  std::int64_t q_begin, q_length, q_rows;  ///< q_rows: rows that exist in out (q_length are used)
  std::int64_t k_begin, k_length;
  std::int64_t slot;    ///< first key slot in the prepared panels (multiple of tile_keys)
  std::int64_t splits;  ///< 0: tasks by row block; else runs of keys of one packed block
  std::int64_t first_task, first_partial;
};

/// Scratch of one thread.
struct Scratch {
  float* q;                                            ///< [tile_rows][d] float engine
  std::int8_t* q_codes;                                ///< [tile_rows][d] integer engine
  float *scores, *p;                                   ///< [tile_rows][tile_keys]
  std::uint8_t* codes;                                 ///< [tile_rows][tile_keys]
  float* out;                                          ///< [tile_rows][dv padded]
  float *max, *sum, *alpha, *beta, *q_scale, *offset;  ///< [tile_rows]
  std::int32_t* correction;                            ///< [tile_rows]
  float* rows;          ///< [tile_keys][256] a tile of V, or rows of Q and K
  float* row;           ///< [3][256]
  std::uint8_t* bytes;  ///< [tile_keys][256]
  float* token_amax;    ///< [longest sequence]
  float* group_amax;    ///< [longest sequence rounded up to blocks], or [groups][dv padded]
  std::int64_t saturated[3];
};

/// Everything that lives in the workspace.
struct Arrays {
  SequenceInfo* sequences;     ///< [batch]
  float *k_mean, *v_mean;      ///< [batch * heads_kv][padded]
  float* q_scale;              ///< [heads_q][tokens_q] scale of every query row
  float* q_global;             ///< [batch * heads_q]
  float* q_mean;               ///< [batch * heads_q][blocks][d padded]
  float* head_amax[3];         ///< [batch * heads] for per_tensor and the global scales
  std::uint8_t* k_codes;       ///< integer panels [heads_kv][slots / 16][d / 4][16][4]
  float* k_panels;             ///< float panels [heads_kv][slots / 16][d][16]
  float* k_scale;              ///< [heads_kv][slots]
  std::int8_t* v_codes;        ///< [heads_kv][slots / 4][dv padded][4]
  float* v_panels;             ///< [heads_kv][slots][dv padded]
  float* v_scale;              ///< [heads_kv][slots / v_block][dv padded], or [heads_kv][slots]
  float *v_inverse, *v_plain;  ///< [heads_kv][slots] with v_token_scale
  std::uint8_t* v_bad;         ///< [heads_kv][slots] token holds NaN or Inf in V
  std::uint8_t* v_bad_tile;    ///< [heads_kv][slots / tile_keys]
  float* partials;             ///< [rows][dv padded + 2] of split sequences
  Scratch* scratch;            ///< [threads]
  std::int64_t slots;          ///< key slots per head, all sequences
  std::int64_t q_blocks;       ///< smooth_q blocks per head
};

struct Job {
  const Problem& problem;
  const Config& config;
  Arrays arrays;

  const Words& words() const { return *config.words; }
  int d() const { return problem.d; }
  int dv() const { return padded(problem.dv); }
  std::int64_t unit(std::int64_t b, std::int64_t head) const { return b * problem.heads_kv + head; }
  /// Place of a query row in q_scale.
  std::int64_t q_place(std::int64_t b, std::int64_t head, std::int64_t i) const {
    const std::int64_t first = problem.varlen_q ? arrays.sequences[b].q_begin : b * problem.max_q;
    return head * problem.tokens_q + first + i;
  }
  /// Q's mean of the block that row i lies in (smooth_q).
  float* q_mean(std::int64_t b, std::int64_t head, std::int64_t i) const {
    const std::int64_t block = i / config.recipe.q_scale.block;
    return arrays.q_mean +
           ((b * problem.heads_q + head) * arrays.q_blocks + block) * padded(problem.d);
  }
  const float* k_mean(std::int64_t b, std::int64_t kv_head) const {
    return config.smooth_k ? arrays.k_mean + unit(b, kv_head) * padded(problem.d) : nullptr;
  }
  const float* v_mean(std::int64_t b, std::int64_t kv_head) const {
    return config.smooth_v ? arrays.v_mean + unit(b, kv_head) * padded(problem.dv) : nullptr;
  }
  Sequence q_sequence(std::int64_t b, std::int64_t head) const;
  Sequence k_sequence(std::int64_t b, std::int64_t head) const;
  Sequence v_sequence(std::int64_t b, std::int64_t head) const;
};

/// Scales that the caller gave for one operand.
struct GivenScale {
  TensorView view;
  ScaleMap map;

  /// Of token `s` (inside its sequence, or its page if paged) and channel `c`; `outer` is the batch
  /// entry or the page.
  float at(std::int64_t outer, std::int64_t head, std::int64_t s, int c) const {
    return static_cast<const float*>(view.data)[map.offset(view, outer, head, s, c)];
  }
  std::uint8_t code_at(std::int64_t outer, std::int64_t head, std::int64_t s, int c) const {
    return static_cast<const std::uint8_t*>(view.data)[map.offset(view, outer, head, s, c)];
  }
};
GivenScale given_scale(const Job& job, Role role);

/// Row `token` of pre-quantised Q or K in the float engine's terms: values without a free scale.
void decode_codes(const Job& job, Role role, const Sequence& x, std::int64_t b, std::int64_t head,
                  std::int64_t token, float* row);

/// Lays the arrays out from `base`; with base null only counts. Returns bytes.
std::size_t layout(const Problem& problem, const Config& config, void* base, Arrays& arrays);

// cpu_prepare.cpp: one (sequence, head) each; called from a parallel loop.
void prepare_means(const Job& job, std::int64_t b, std::int64_t head, Scratch& scratch);
void prepare_head_amax(const Job& job, Role role, std::int64_t b, std::int64_t head,
                       Scratch& scratch);
void prepare_q(const Job& job, std::int64_t b, std::int64_t head, Scratch& scratch);
void prepare_k(const Job& job, std::int64_t b, std::int64_t head, Scratch& scratch);
void prepare_v(const Job& job, std::int64_t b, std::int64_t head, Scratch& scratch);
/// Does the operand need a maximum over everything before its scales are known?
bool needs_head_amax(const Config& config, Role role);

// cpu_tile.cpp
void run_task(const Job& job, std::int64_t task, Scratch& scratch);
/// Merges the splits of one (sequence, KV head) and writes its rows.
void merge_splits(const Job& job, std::int64_t b, std::int64_t head, Scratch& scratch);

}  // namespace qattn::cpu
