// What the steps of one CPU task share.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

#include "formats/bf16.hpp"
#include "formats/f16.hpp"
#include "kernels/attention/cpu/kernel.hpp"

namespace qattn::cpu {

inline constexpr float infinity = std::numeric_limits<float>::infinity();
inline constexpr float nan_value = std::numeric_limits<float>::quiet_NaN();

/// A query row: head and index inside the sequence, and the keys [begin, end) that windows leave.
struct Row {
  std::int64_t head, i, begin, end;
};

struct Task {
  std::int64_t b, kv_head;
  std::int64_t key_begin, key_end;  ///< the split's keys
  std::int64_t partial;             ///< first row in the partials, or -1
  int count;
  Row rows[tile_rows];
};

inline float read_float(const TensorView& view, std::int64_t offset) {
  if (view.format == Format::f32) return static_cast<const float*>(view.data)[offset];
  const std::uint16_t code = static_cast<const std::uint16_t*>(view.data)[offset];
  return view.format == Format::f16 ? formats::F16::decode(code) : formats::Bf16::decode(code);
}

// task.cpp
/// row.begin and row.end: keys that causal and window masks leave to query row.i (bottom-right
/// alignment).
void set_window(const Problem& problem, const SequenceInfo& sequence, Row& row);
/// The sequence and key of a slot; b is -1 where the slot belongs to nobody.
struct SlotOwner {
  std::int64_t b, key;
};
SlotOwner owner_of(const Job& job, std::int64_t slot);
std::int64_t sequence_of_task(const Job& job, std::int64_t index);
/// Query heads of a group whose rows fill a task together: tiles of K and V are read once for them.
/// Below 2: a task has rows of one head.
std::int64_t heads_per_group(const SequenceInfo& sequence);
/// Of a sequence that does not pack itself.
std::int64_t tasks_of(const Problem& p, const SequenceInfo& sequence);
/// Of a sequence that packs itself, the KV heads of one split follow each other.
Task make_task(const Job& job, std::int64_t index);
/// Quantises the task's query rows into the engine's form.
void load_queries(const Job& job, const Task& t, Scratch& s);

// finish.cpp
/// Are the scores passed through a function for which K's mean must be back in place?
bool needs_true_scores(const Problem& p);
/// May what is added to scores be of any size?
bool adds_biases(const Problem& p);
/// Is nothing added to scores but windows, and nothing else of theirs changed?
bool adds_nothing(const Job& job);
/// Everything between the product and the softmax that the plain case does without. Returns
/// SoftmaxTile::below.
std::uint32_t finish_scores(const Job& job, const Task& t, const Tile& tile, std::int64_t first,
                            int keys, Scratch& s);
/// The same of row r of a tile, without smooth_q and bad values of V, which show in K's scales.
/// Returns its bit.
bool finish_scores_of_row(const Job& job, const Task& t, std::int64_t first, int r, float offset,
                          float* scores);

// tile.cpp
/// First keys of the lowest and the last tile of which some row sees a key; last < lowest: none.
struct TileRange {
  std::int64_t lowest, last;
};
TileRange tiles_of(const Task& t);
/// Loads the queries; nothing is seen yet.
void start_rows(const Job& job, const Task& t, Scratch& s);
/// Does the block mask forbid every row every key of the tile?
bool wholly_forbidden(const Problem& p, const Task& t, std::int64_t first);
/// One tile of a task whose tiles do not exist at the same time.
void run_single_tile(const Job& job, const Task& t, const Tile& tile, std::int64_t first,
                     Scratch& s);
/// Writes rows that have seen everything, or the task's partial result.
void finish_rows(const Job& job, const Task& t, const Scratch& s);

// project.cpp
/// Puts a row of one head where the projection wants it.
void join_row(const Job& job, std::int64_t b, const Row& row, const float* out);

// write.cpp
/// Normalises one row and writes it and its LSE. `max`, `sum`, `out` as the tiles left them.
void write_row(const Job& job, std::int64_t b, const Row& row, float max, float sum, float offset,
               float* out);

}  // namespace qattn::cpu
