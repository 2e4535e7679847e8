// Tasks of few query rows: decode.
//
// Such a task does little with a byte, so memory decides. A head's rows of 128 bytes or so lie
// between those of the other heads (bshd): read head by head, every line is waited for by itself
// (7 GB/s a core where plain reading gives 15, Sapphire Rapids), tile by tile of all heads the
// hardware's prefetcher brings most of them (13 GB/s).
#include <algorithm>

#include "kernels/attention/cpu/task.hpp"

namespace qattn::cpu {
namespace {

/// A head's own part of the scratch.
Scratch scratch_of(const Job& job, const Scratch& s, int n) {
  Scratch own = s;
  const int rows = n * tile_rows;
  const auto shift = [&](auto*& queries, int parts) {
    if (queries != nullptr) queries += rows * parts * job.d();
  };
  shift(own.q, 1), shift(own.q_codes, 1), shift(own.q_panels, 1);
  shift(own.q_bf16, parts_of(job.config.qk));
  own.out += rows * job.dv();
  for (float** x : {&own.q_scale, &own.offset, &own.max, &own.sum, &own.mass}) *x += rows;
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

/// One tile of one head; `next` is read after it, unless null.
void run_place(const Job& job, Walk& w, const TilePlace& place, const TilePlace* next) {
  const Task& t = w.task;
  Scratch& s = w.scratch;
  FoundRows found;
  Tile tile{s.tile, &job.arrays.tile, nullptr};
  if (t.count <= job.config.float_rows_in_place) {
    FoundFloats floats;
    find_float_tile(job, t.b, place, next, tile, floats, s);
    tile.floats = &floats;
    return run_single_tile(job, t, tile, place.first, s);
  }
  const bool in_place = t.count <= job.config.rows_in_place;
  if (!in_place || !find_tile(job, t.b, place, next, tile, found, s)) {
    if (next != nullptr) fetch(job, t.b, *next);
    pack_tile(job, t.b, place.head, place.first, tile, s);
  } else {
    tile.found = &found;
  }
  run_single_tile(job, t, tile, place.first, s);
}

/// The tiles of heads in turn: from the last keys to the first, as in run_task(), since P may be
/// rounded against the maximum so far. P in codes has its tile's own, and rises: 12 % less time for
/// 32768 keys of 8 heads from memory (two Zen 5 cores), whose prefetchers follow rising addresses.
class Places {
 public:
  Places(const Job& job, const Walk* walks, int count)
      : job_(job),
        walks_(walks),
        count_(count),
        range_(tiles_of(walks->task)),
        rises_(job.config.pv == Engine::integer) {}

  struct Place {
    int walk;
    TilePlace tile;
  };
  Place first() const {
    return seen({0, {walks_[0].task.kv_head, rises_ ? range_.lowest : range_.last}});
  }
  Place after(Place p) const { return seen(step(p)); }
  bool exists(const Place& p) const {
    return p.tile.first >= range_.lowest && p.tile.first <= range_.last;
  }

 private:
  Place step(Place p) const {
    const bool last = p.walk + 1 == count_;
    p.walk = last ? 0 : p.walk + 1;
    const int ahead = !last ? 0 : rises_ ? tile_keys : -tile_keys;
    return {p.walk, {walks_[p.walk].task.kv_head, p.tile.first + ahead}};
  }
  /// From `p` on the first that no block mask forbids.
  Place seen(Place p) const {
    while (exists(p) && wholly_forbidden(job_.problem, walks_[p.walk].task, p.tile.first)) {
      p = step(p);
    }
    return p;
  }

  const Job& job_;
  const Walk* walks_;
  int count_;
  TileRange range_;  ///< the same for every head
  bool rises_;
};

}  // namespace

int tasks_in_turn(const Job& job, std::int64_t task, std::int64_t most) {
  const Problem& p = job.problem;
  const SequenceInfo& sequence = job.arrays.sequences[sequence_of_task(job, task)];
  if (!packs_itself(p, sequence)) return 0;
  return static_cast<int>(std::min(most, p.heads_kv - (task - sequence.first_task) % p.heads_kv));
}

void run_in_turn(const Job& job, std::int64_t task, int count, Scratch& scratch) {
  Walk walks[most_heads_in_turn];
  for (int n = 0; n < count; ++n) {
    walks[n] = {make_task(job, task + n), scratch_of(job, scratch, n)};
    start_rows(job, walks[n].task, walks[n].scratch);
  }
  const Places places(job, walks, count);
  for (Places::Place p = places.first(); places.exists(p);) {
    const Places::Place next = places.after(p);
    run_place(job, walks[p.walk], p.tile, places.exists(next) ? &next.tile : nullptr);
    p = next;
  }
  for (int n = 0; n < count; ++n) {
    finish_rows(job, walks[n].task, walks[n].scratch);
    for (int i = 0; i < 3; ++i) scratch.saturated[i] += walks[n].scratch.saturated[i];
  }
}

}  // namespace qattn::cpu
