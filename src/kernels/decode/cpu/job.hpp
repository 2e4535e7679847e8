// What the parts of the CPU's decode share.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/cpu/words.hpp"
#include "kernels/decode/call.hpp"

namespace qattn::cpu {

inline constexpr int tile_blocks = tile_keys / formats::kv_block_tokens;

/// The query rows of one (sequence, KV head), ready for all kinds of pages that name one set.
struct Queries {
  float* raw;           ///< [rows][d] times the softmax scale, for pages in 16 bits
  std::int8_t* planes;  ///< [2 rows][d] rotated; not made where K has a scale a channel
  float *sum, *scale;   ///< [rows]; the softmax scale is in `scale`
  float* offset;        ///< [rows] softmax scale * q . mean
  float* noise;         ///< [rows] half of (softmax scale * |q|)^2 with `debias`, or 0
};

/// Half of the sum of squares.
float half_square(const float* x, int n);

/// Pages of one tier and set of one (sequence, KV head). P times V's scale is rounded against its
/// largest in a tile, and scales of one tier are alike.
struct Task {
  std::int64_t batch, head;  ///< of KV
  int tier;                  ///< 0: 16 bits
  int set;                   ///< of means and powers of two
  std::int64_t begin, end;   ///< entries in the table, among which it takes its own
  std::int64_t partial;      ///< its place among the partial results
  std::int64_t first_tile;   ///< its place among the mass records, with `mass`

  bool takes(const kv::Entry& e) const { return e.tier == tier && e.set == set; }
};

/// What a task leaves, per row.
struct Partial {
  float* out;         ///< [rows][dv] not yet divided; rotated unless of tier 0
  float *max, *sum;   ///< [rows]
  std::uint8_t* bad;  ///< [rows] the row sees a token whose V holds NaN or Inf
};

/// Mass of one tile: sums of exp(s - top) by row and block.
struct TileMass {
  std::int32_t block[tile_blocks];  ///< which block of the sequence, may repeat; -1: none
  bool side_by_side;                ///< as many blocks as there can be, one behind the other
  float* sums;                      ///< [rows][tile_blocks]
  float* top;                       ///< [rows]
};

struct Scratch {
  std::vector<std::uint8_t> k_panels, v_panels;  ///< codes: [tile_keys][d], [tile_keys][dv]
  std::vector<float> k_rows, v_rows, k_floats;   ///< of the window: rows, and K's panels
  std::vector<float> scores, p;                  ///< [rows][tile_keys]
  std::vector<std::int8_t> planes;               ///< [2 rows][tile_keys]
  std::vector<float> alpha, beta, shift;         ///< [rows]
  std::vector<std::int8_t> q_planes;             ///< [2 rows][d] times a page's channel scales
  std::vector<float> q_sum, q_scale, q_noise;    ///< [rows] theirs

  Scratch(const kv::DecodeCall& call);
};

/// Zeroes nothing but what it owns: `partial` is set to an empty result first. `mass` is null or
/// the records of this task's tiles.
void run_codes_task(const kv::DecodeCall& call, const Task& task, const Queries& queries,
                    const Partial& partial, TileMass* mass, Scratch& scratch);
void run_window_task(const kv::DecodeCall& call, const Task& task, const Queries& queries,
                     const Partial& partial, TileMass* mass, Scratch& scratch);

}  // namespace qattn::cpu
