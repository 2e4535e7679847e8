// Attention on CPUs: operands are quantised and repacked once per call into the workspace, then
// tasks of up to 32 query rows walk the keys in tiles of 128, from last to first (or, of few rows
// with P in codes, from first to last).
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include "core/operand.hpp"
#include "core/plan.hpp"
#include "kernels/cpu/words.hpp"
#include "kernels/operand/rows.hpp"

namespace qattn::cpu {

/// A block of the output projection; rows are a multiple of the six that are multiplied at once.
inline constexpr int project_rows = 48, project_columns = 64;

/// One entry of the registry per instruction set, best first.
std::array<detail::Kernel, 7> attention_kernels();

/// Enough for runs of a kilobyte or more; a head's state takes up to 64 KiB.
inline constexpr int most_heads_in_turn = 16;

/// Everything that selects code. Derived from the problem alone, so results do not depend on the
/// number of threads or on the rest of the batch.
struct Config : detail::PlanData {
  const KernelTable* words = nullptr;
  Engine qk = Engine::f32, pv = Engine::f32;
  bool v_token_scale = false;    ///< V's scale per token is folded into P (Rounding::u8_token)
  bool v_channel_scale = false;  ///< the product with V is multiplied by a scale per channel
  int v_block = tile_keys;       ///< keys under one such scale inside a tile (divides tile_keys)
  Rounding rounding = Rounding::f32;
  bool smooth_k = false, smooth_q = false, smooth_v = false, rotate = false;
  bool finds_seen = false;  ///< some keys may be hidden, and keys share something
  /// Sequences of at most tile_rows rows (query heads of a group times queries) are split into runs
  /// of this many keys, which are merged by (O, LSE).
  std::int64_t split_keys = 1024;
  /// Sequences of at most so many rows take given codes from where they lie.
  int rows_in_place = 0;
  /// Sequences of at most so many rows take K and V in floats from where they lie, without panels.
  int float_rows_in_place = 0;
  /// Sequences of at most tile_rows rows take their tiles from so many heads in turn.
  int heads_in_turn = 1;
  int threads = 1;
  Engine projection = Engine::f32;  ///< of its products

  bool balances() const { return recipe.balance_k == Toggle::on; }
};

/// 128 keys of one head, quantised and in the engines' panels: byte offsets into its store.
struct TileLayout {
  /// Integer [8][d / 4][16][4] codes + 128; bf16 [8][d / 2][16][2], of parts [8][parts][d / 2][16]
  /// [2]; f32 [8][d][16]; d filled.
  std::size_t k;
  std::size_t k_scale;  ///< [tile_keys] f32
  /// Integer [32][dv][4]; bf16 [64][dv][2], of parts [parts][64][dv][2]; f32 [128][dv]; dv padded.
  std::size_t v;
  std::size_t v_scale;    ///< [tile_keys / v_block][dv padded] with v_channel_scale
  std::size_t v_log;      ///< [tile_keys] log of the scale, with v_token_scale
  std::size_t v_inverse;  ///< [tile_keys] 1 / scale, with v_token_scale
  std::size_t v_bad;      ///< [tile_keys] bytes: the token holds NaN or Inf in V
  std::size_t any_bad;    ///< one byte
  std::size_t bytes;      ///< of the whole store
};
TileLayout tile_layout(const Problem& problem, const Config& config);

/// Where the codes of a tile lie. Its groups, and those of the tile to be read next.
struct FoundRows {
  CodeRows k, v;
  const std::uint8_t* groups[4][tile_keys / 16];
};

/// Rows of floats of a tile.
struct FoundFloats {
  FloatRows k, v;
  const void *k_row[tile_keys], *v_row[tile_keys];
  const void *next_k[tile_keys], *next_v[tile_keys];
};

struct Tile {
  std::byte* store;
  const TileLayout* layout;
  /// Codes that are not in the store's panels but where the caller has them, or null.
  const FoundRows* found = nullptr;
  /// The same of floats.
  const FoundFloats* floats = nullptr;

  template <class T>
  T* at(std::size_t TileLayout::* part) const {
    return reinterpret_cast<T*>(store + layout->*part);
  }
};

/// One sequence of the batch, as the contents of the index tensors say.
struct SequenceInfo {
  std::int64_t q_begin, q_length, q_rows;  ///< q_rows: rows that exist in out (q_length are used)
  std::int64_t k_begin, k_length;
  std::int64_t slot;    ///< first key slot in the prepared panels (multiple of tile_keys)
  std::int64_t splits;  ///< 0: tasks by row block; else runs of keys of one packed block
  std::int64_t first_task, first_partial;
};

/// Floats that any row of a call fits into.
inline int row_width(const Problem& p) { return std::max(256, padded(std::max(p.d, p.dv))); }

/// Scratch of one thread; d is filled. A head in turn has its own queries (q to q_codes and
/// q_panels), q_scale, offset, correction, max, sum and out.
struct Scratch {
  float* q;                                                   ///< [tile_rows][d] floats
  std::uint16_t* q_bf16;                                      ///< [tile_rows][parts][d] bf16
  std::int8_t* q_codes;                                       ///< [tile_rows][d] integer engine
  float *scores, *p;                                          ///< [tile_rows][tile_keys]
  std::uint16_t* p_bf16;                                      ///< [tile_rows][parts][tile_keys]
  std::uint8_t *codes, *rest;                                 ///< [tile_rows][tile_keys]
  float* out;                                                 ///< [tile_rows][dv padded]
  float *max, *sum, *mass, *alpha, *beta, *q_scale, *offset;  ///< [tile_rows]
  std::int32_t* correction;                                   ///< [tile_rows]
  float* rows;              ///< [tile_keys][dv padded] a tile of V, or its rows in floats
  float* k_rows;            ///< [tile_keys][d padded] a tile of K, with float_rows_in_place
  float* row;               ///< [row width]
  std::uint8_t* bytes;      ///< [tile_keys][row width] codes of a tile, or 16 rows of K
  std::uint8_t* codes_row;  ///< [row width]
  float* token_amax;        ///< [longest sequence] where a coarse granularity needs it
  float* group_amax;        ///< [most groups of a sequence], likewise
  std::byte* tile;          ///< store of a tile that only this thread's task uses
  std::uint8_t* q_panels;   ///< [tile_rows / 16][d / 4][16][4] for products in place
  float* projected;         ///< [project_rows][project_columns]
  float* weight_rows;       ///< [16][joined_width() padded] of a weight that is not read as it lies
  std::byte* weight;        ///< [project_columns / 16] panels, unless all threads share them
  std::int64_t saturated[3];
};

/// Everything that lives in the workspace.
struct Arrays {
  SequenceInfo* sequences;  ///< [batch]
  float *k_mean, *v_mean;   ///< [batch * heads_kv][padded]
  float* balance;           ///< [batch * heads_kv][2][padded] factors of K's rows, of Q's
  bool* loud;               ///< [batch * heads_kv]: is K balanced?
  Seen* seen;               ///< [heads_kv][slots] with Config::finds_seen, else null
  float* q_scale;           ///< [heads_q][tokens_q]; only where scales need a pass of their own
  float* k_scale;           ///< [heads_kv][slots]; likewise
  float* v_channel;         ///< [heads_kv][v_groups][dv padded]; likewise
  float* q_mean;            ///< [batch * heads_q][blocks][d padded]
  float* head_amax[3];      ///< [batch * heads] of Q, K, V
  std::byte* tiles;         ///< [heads_kv][slots / tile_keys] stores
  float* partials;          ///< [rows][dv padded + 2] of split sequences
  std::byte* joined;        ///< [tokens_q][joined_width()] in the projection's engine's type
  std::byte* weight;        ///< [E / 16] panels [joined_width()][16], in bf16 of pairs; or null
  float* bias;              ///< [E padded]
  Scratch* scratch;         ///< [threads]
  TileLayout tile;
  std::int64_t slots;     ///< key slots per head, all sequences
  std::int64_t v_groups;  ///< rows of v_channel per head
  std::int64_t q_blocks;  ///< smooth_q blocks per head
};

struct Job {
  const Problem& problem;
  const Config& config;
  Arrays arrays;

  const KernelTable& words() const { return *config.words; }
  /// Channels of Q and K in products: those behind the last one are zeros.
  int d() const { return filled(problem.d); }
  int dv() const { return padded(problem.dv); }
  std::int64_t unit(std::int64_t b, std::int64_t head) const { return b * problem.heads_kv + head; }
  /// Place of a query row in q_scale, of a key in k_scale.
  std::int64_t k_place(std::int64_t b, std::int64_t head, std::int64_t s) const {
    return head * arrays.slots + arrays.sequences[b].slot + s;
  }
  Tile prepared_tile(std::int64_t b, std::int64_t head, std::int64_t first) const {
    const std::int64_t index = k_place(b, head, first) / tile_keys;
    return {arrays.tiles + index * static_cast<std::int64_t>(arrays.tile.bytes), &arrays.tile};
  }
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
  /// Factors of K's rows, or of Q's; null where K is not loud.
  const float* balance(Role role, std::int64_t b, std::int64_t kv_head) const {
    const std::int64_t place = 2 * unit(b, kv_head) + (role == Role::q ? 1 : 0);
    const bool any = config.balances() && arrays.loud[unit(b, kv_head)];
    return any ? arrays.balance + place * padded(problem.d) : nullptr;
  }
  const Seen* seen(std::int64_t b, std::int64_t kv_head) const {
    return config.finds_seen ? arrays.seen + k_place(b, kv_head, 0) : nullptr;
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

/// May a sequence's rows fit into one task? Of packed queries only the contents know.
inline bool may_be_short(const Problem& p) {
  return p.varlen_q || p.group() * p.max_q <= tile_rows;
}

/// Lays the arrays out from `base`; with base null only counts. Returns bytes.
std::size_t layout(const Problem& problem, const Config& config, void* base, Arrays& arrays);

// seen.cpp
/// Arrays::seen of one tile of keys, which begins at `first`.
void find_seen_keys(const Job& job, std::int64_t b, std::int64_t kv_head, std::int64_t first);
/// After all tiles of (b, kv_head): keys seen slightly are seen or not; where every key is seen
/// faintly at most, they share after all.
void settle_seen_keys(const Job& job, std::int64_t b, std::int64_t kv_head, Scratch& scratch);

// scales.cpp: what must be known before any tile. One (sequence, head) each.
/// Means of K and V, and K's balance.
bool has_means(const Problem& problem, const Config& config);
void prepare_means(const Job& job, std::int64_t b, std::int64_t head, Scratch& scratch);
/// The maximum over a head, and the means of Q's blocks (smooth_q).
bool needs_head_pass(const Problem& problem, const Config& config, Role role);
void prepare_head(const Job& job, Role role, std::int64_t b, std::int64_t head, Scratch& scratch);
void prepare_scales(const Job& job, Role role, std::int64_t b, std::int64_t head, Scratch& scratch);
/// Does the operand need a maximum over a whole head before its scales are known?
bool needs_head_amax(const Problem& problem, const Config& config, Role role);
/// Does it need prepare_scales()? Scales per token and per block of V inside a tile do not.
bool needs_scale_pass(const Problem& problem, const Config& config, Role role);
/// First row of a sequence in Arrays::v_channel.
std::int64_t v_group_base(const Job& job, std::int64_t b);
/// One scale of a head or tensor, from head_amax.
float head_scale(const Job& job, Role role, std::int64_t b, std::int64_t head);

// pack.cpp
/// A row of Q or K as the recipe holds it: `codes` for formats with a free scale, `row` (padded)
/// the values without their outermost scale, which is returned (NaN for a bad row).
float quantized_row(const Job& job, Role role, const Sequence& x, std::int64_t b, std::int64_t head,
                    std::int64_t token, Scratch& scratch, float* row, std::uint8_t* codes);
/// A tile of one sequence: its keys begin at `first`.
struct TilePlace {
  std::int64_t head, first;
};
/// Finds a tile's codes where they lie, and puts their scales into `tile`. `next` is read after it,
/// unless null. Returns false if the number of keys is no multiple of 16: they must be packed then.
bool find_tile(const Job& job, std::int64_t b, const TilePlace& place, const TilePlace* next,
               const Tile& tile, FoundRows& found, Scratch& scratch);
/// The same for floats. Operands that do not lie there as the recipe has them, or hold bad values,
/// are brought into rows of the scratch.
void find_float_tile(const Job& job, std::int64_t b, const TilePlace& place, const TilePlace* next,
                     const Tile& tile, FoundFloats& found, Scratch& scratch);
/// Quantises keys [first, first + 128) and lays them out.
void pack_tile(const Job& job, std::int64_t b, std::int64_t head, std::int64_t first,
               const Tile& tile, Scratch& scratch);

// tile.cpp
/// Are the sequence's rows one task (of each KV head and split), which finds or packs its tiles?
bool packs_itself(const Problem& problem, const SequenceInfo& sequence);
void run_task(const Job& job, std::int64_t task, Scratch& scratch);

// in_place.cpp
/// How many tasks from `task` on, at most `most`, are heads that may run in turn; 0: run_task()'s.
int tasks_in_turn(const Job& job, std::int64_t task, std::int64_t most);
void run_in_turn(const Job& job, std::int64_t task, int count, Scratch& scratch);

// project.cpp: after all heads. Both loops are empty without a projection.
/// Hq * Dv, filled: products take bf16 in pairs.
inline std::int64_t joined_width(const Problem& p) { return (p.heads_q * p.dv + 7) / 8 * 8; }
/// Are the weight's rows widened or filled before they become panels?
inline bool copies_weight(const Problem& p, const Config& c) {
  const bool widens = c.projection == Engine::f32 && p.out.format != Format::f32;
  return widens || joined_width(p) != p.heads_q * p.dv;
}
/// Are the weight's panels there for all threads? Else each makes those of the block that it is at.
bool shares_panels(const Problem& problem);
std::int64_t weight_blocks(const Problem& problem);
void pack_weight(const Job& job, std::int64_t block, Scratch& scratch);
std::int64_t projection_blocks(const Problem& problem);
void project(const Job& job, std::int64_t block, Scratch& scratch);

// write.cpp
/// Merges the splits of one (sequence, KV head) and writes its rows.
void merge_splits(const Job& job, std::int64_t b, std::int64_t head, Scratch& scratch);

}  // namespace qattn::cpu
