// Tasks of few query rows: decode.
//
// Such a task does little with a byte, so memory decides. A head's rows of 128 bytes or so lie
// between those of the other heads (bshd): read head by head, every line is waited for by itself
// (7 GB/s a core where plain reading gives 15, Sapphire Rapids), tile by tile of all heads the
// hardware's prefetcher brings most of them (13 GB/s).
#include <algorithm>

#include "kernels/attn_prefill/cpu_task.hpp"

namespace qattn::cpu {
namespace {

/// A head's own part of the scratch.
Scratch scratch_of(const Job& job, const Scratch& s, int n) {
  Scratch own = s;
  const int rows = n * tile_rows;
  const auto shift = [&](auto*& queries) {
    if (queries != nullptr) queries += rows * job.d();
  };
  shift(own.q), shift(own.q_bf16), shift(own.q_codes), shift(own.q_panels);
  own.out += rows * job.dv();
  for (float** x : {&own.q_scale, &own.offset, &own.max, &own.sum}) *x += rows;
  own.correction += rows;
  for (std::int64_t& count : own.saturated) count = 0;
  return own;
}

/// One head under way.
struct Walk {
  Task task;
  Scratch scratch;
};

/// Rows of a tile into L2, while the one before is packed.
void fetch(const Job& job, std::int64_t b, const TilePlace& place) {
  for (const Sequence& x : {job.k_sequence(b, place.head), job.v_sequence(b, place.head)}) {
    const std::int64_t end = std::min<std::int64_t>(place.first + tile_keys, x.length);
    const int bytes = x.channels * x.bits / 8;
    for (std::int64_t j = place.first; j < end; ++j) {
      const std::byte* row = x.row(j);
      for (int i = 0; i < bytes; i += 64) __builtin_prefetch(row + i, 0, 2);
    }
  }
}

void run_place(const Job& job, Walk& w, std::int64_t first, const TilePlace* next) {
  const Task& t = w.task;
  if (wholly_forbidden(job.problem, t, first)) return;
  Scratch& s = w.scratch;
  Tile tile{s.tile, &job.arrays.tile, &s.k_rows, &s.v_rows};
  const bool in_place = t.count <= job.config.rows_in_place;
  if (!in_place || !find_tile(job, t.b, {t.kv_head, first}, next, tile, s)) {
    if (next != nullptr) fetch(job, t.b, *next);
    tile = {s.tile, &job.arrays.tile};
    pack_tile(job, t.b, t.kv_head, first, tile, s);
  }
  run_single_tile(job, t, tile, first, s);
}

}  // namespace

int tasks_in_turn(const Job& job, std::int64_t task, std::int64_t most) {
  if (job.config.heads_in_turn == 1 && job.config.rows_in_place == 0) return 0;
  const Task t = make_task(job, task);
  if (t.count == 0 || !packs_itself(job.problem, job.arrays.sequences[t.b])) return 0;
  return static_cast<int>(std::min(most, job.problem.heads_kv - t.kv_head));
}

void run_in_turn(const Job& job, std::int64_t task, int count, Scratch& scratch) {
  Walk walks[most_heads_in_turn];
  TileRange range{0, -1};
  for (int n = 0; n < count; ++n) {
    Walk& w = walks[n];
    w = {make_task(job, task + n), scratch_of(job, scratch, n)};
    start_rows(job, w.task, w.scratch);
    if (n == 0) range = tiles_of(w.task);  // the same for every head
  }
  for (std::int64_t first = range.last; first >= range.lowest; first -= tile_keys) {
    for (int n = 0; n < count; ++n) {
      const bool last = n + 1 == count;
      const TilePlace next{walks[last ? 0 : n + 1].task.kv_head, last ? first - tile_keys : first};
      run_place(job, walks[n], first, next.first >= range.lowest ? &next : nullptr);
    }
  }
  for (int n = 0; n < count; ++n) {
    finish_rows(job, walks[n].task, walks[n].scratch);
    for (int i = 0; i < 3; ++i) scratch.saturated[i] += walks[n].scratch.saturated[i];
  }
}

}  // namespace qattn::cpu
