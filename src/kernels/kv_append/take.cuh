// Grants the plans of a call, slot by slot in the call's order, as long as every pool has pages,
// and makes lengths, counts and free pages what they are afterwards. One block of threads.
#pragma once

#include "kernels/kv_append/block.cuh"
#include "kernels/kv_append/shares.cuh"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

struct TakePages {
  using Params = AppendParams;
  static constexpr int threads = 256, min_blocks = 1;
  static constexpr int at_once = threads / kv::most_tiers;  ///< slots whose plans are read together
  // Shared memory: what slots take, what they give back, their errors, pages of every pool that all
  // who shared them have dropped.
  static constexpr int gives_at = 4 * threads, errors_at = 2 * gives_at;
  static constexpr int dropped_at = errors_at + 4 * at_once;
  static constexpr int shared_bytes = dropped_at + 4 * kv::most_tiers;
  static constexpr bool dependent = true;

  static QATTN_DEVICE isa::SharedAddress at(int offset, int index) {
    return isa::shared_base() + static_cast<isa::SharedAddress>(offset + 4 * index);
  }

  /// By warp 0, a lane a pool: places in the rings for `count` slots from `first` on.
  static QATTN_DEVICE void grant(const Params& p, std::int32_t first, std::int32_t count,
                                 std::int64_t& taken, std::int64_t& given, kv::Ring ring) {
    const int t = isa::lane();
    const bool mine = t < p.state.cache.pools;
    for (std::int32_t n = 0; n < count; ++n) {
      kv::SlotPlan* plan = p.state.plans + first + n;
      const int index = n * kv::most_tiers + t;
      const std::int64_t takes = mine ? isa::load_shared<std::int32_t>(at(0, index)) : 0;
      const std::int64_t gives = mine ? isa::load_shared<std::int32_t>(at(gives_at, index)) : 0;
      const auto error = isa::load_shared<std::uint32_t>(at(errors_at, n));
      const bool enough = isa::all(taken + takes <= ring.count);
      const bool granted = error == 0 && enough;
      if (granted && mine) {
        isa::store_global(plan->takes + t, wrapped(p, t, ring.head + taken));
        isa::store_global(plan->gives + t, wrapped(p, t, ring.head + ring.count + given));
        taken += takes;
        given += gives;
      }
      if (t == 0) {
        isa::store_global(&plan->granted, granted ? 1 : 0);
        if (error == 0 && !enough && !p.shortens()) {
          isa::store_global(&plan->error, std::uint32_t{kv::slot_pool});
        }
      }
    }
  }
  /// A place in a ring from one that is less than twice round.
  static QATTN_DEVICE std::int32_t wrapped(const Params& p, int pool, std::int64_t place) {
    place = p.state.ring_place(pool, place);
    return static_cast<std::int32_t>(p.state.ring_place(pool, place));
  }

  /// Rings after the call.
  static QATTN_DEVICE void share_out(const Params& p) {
    const int pools = p.state.cache.pools, t = isa::thread() % kv::most_tiers;
    std::int64_t taken = 0, given = 0;
    kv::Ring ring;
    if (isa::warp() == 0 && isa::lane() < pools) ring = load_struct(p.state.rings + isa::lane());
    for (std::int32_t first = 0; first < p.batch; first += at_once) {
      const std::int32_t b = first + isa::thread() / kv::most_tiers;
      std::uint32_t error = 1;
      std::int32_t takes = 0, gives = 0;
      if (b < p.batch) {
        const kv::SlotPlan* plan = p.state.plans + b;
        error = isa::load_global(&plan->error);
        // A plan with an error, or without jobs, has not written these.
        if (error == 0 && changes(plan) && t < pools) {
          takes = isa::load_global(plan->takes + t);
          gives = isa::load_global(plan->gives + t);
        }
      }
      isa::sync_threads();
      isa::store_shared(at(0, isa::thread()), takes);
      isa::store_shared(at(gives_at, isa::thread()), gives);
      if (t == 0) isa::store_shared(at(errors_at, isa::thread() / kv::most_tiers), error);
      isa::sync_threads();
      const std::int32_t left = p.batch - first;
      if (isa::warp() == 0) grant(p, first, left < at_once ? left : at_once, taken, given, ring);
    }
    if (isa::warp() == 0 && isa::lane() < pools) {
      ring.head = wrapped(p, isa::lane(), ring.head + taken);
      ring.count = static_cast<std::int32_t>(ring.count - taken + given);
      store_struct(p.state.rings + isa::lane(), ring);
    }
  }
  static QATTN_DEVICE bool changes(const kv::SlotPlan* plan) {
    return isa::load_global(&plan->changes) != 0;
  }

  /// The call's i-th head, where its slot is granted its pages and it drops some that it shared.
  static QATTN_DEVICE bool drops(const Params& p, std::int64_t i) {
    return i < std::int64_t{p.batch} * p.state.cache.heads_kv &&
           isa::load_global(&p.state.plans[i / p.state.cache.heads_kv].granted) != 0 &&
           isa::load_global(&p.state.heads[i].drops) != 0;
  }
  /// f(does this lane have a page?, its tier, the page) by all lanes of a warp, for the pages that
  /// heads dropped, in order, until f says no: every so many heads from the first, a job a lane.
  template <class F>
  static QATTN_DEVICE void visit_dropped(const Params& p, std::int64_t first, std::int64_t every,
                                         F f) {
    const std::int64_t heads = std::int64_t{p.batch} * p.state.cache.heads_kv;
    for (std::int64_t base = first; base < heads; base += 32 * every) {
      std::uint32_t open = isa::ballot(drops(p, base + every * isa::lane()));
      for (; open != 0; open &= open - 1) {
        const std::int64_t i = base + every * __builtin_popcount(~open & (open - 1));
        const kv::AppendJob* jobs = p.state.jobs + i * p.state.cache.most_pages;
        const std::int32_t count = isa::load_global(&p.state.heads[i].jobs);
        for (std::int32_t at = isa::lane(); isa::any(at < count); at += 32) {
          kv::AppendJob job{};
          job.from_page = -1;
          if (at < count) job = load_struct(jobs + at);
          if (!f(job.drops(), job.from_tier, job.from_page)) return;
        }
      }
    }
  }

  /// Takes what granted slots drop off the counts. Pages that nobody holds any more are free: which
  /// slot's drop was the last one is chance, so they are found anew and put in the call's order.
  static QATTN_DEVICE void drop_shared(const Params& p) {
    const int warp = isa::warp();
    visit_dropped(p, warp, threads / 32, [&](bool mine, int tier, std::int32_t page) {
      if (mine && isa::atomic_add_global(share_count(p.state, tier, page), no_holder) == 0) {
        isa::atomic_add_shared(at(dropped_at, tier), 1u);
      }
      return true;
    });
    isa::sync_threads();
    if (warp >= p.state.cache.pools) return;
    auto left = static_cast<int>(isa::load_shared<std::uint32_t>(at(dropped_at, warp)));
    if (left == 0) return;
    kv::Ring ring = load_struct(p.state.rings + warp);
    visit_dropped(p, 0, 1, [&](bool mine, int tier, std::int32_t page) {
      mine =
          mine && tier == warp && isa::load_global(share_count(p.state, tier, page)) == no_holder;
      if (mine) isa::store_global(share_count(p.state, tier, page), 0u);
      isa::sync_warp();  // later lanes that dropped the page see that it is done
      left -= push_free(p.state, warp, ring, mine, page);
      return left > 0;
    });
    if (isa::lane() == 0) store_struct(p.state.rings + warp, ring);
  }

  static QATTN_DEVICE void run(const Params& p) {
    isa::grid_dependency_launch();
    isa::grid_dependency_wait();
    const kv::DeviceCache& cache = p.state.cache;
    if (isa::thread() < kv::most_tiers) isa::store_shared(at(dropped_at, isa::thread()), 0u);
    share_out(p);
    isa::sync_threads();
    for (std::int32_t b = isa::thread(); b < p.batch; b += threads) {
      kv::SlotPlan* plan = p.state.plans + b;
      const std::int64_t slot = isa::load_global(&plan->slot);
      const std::uint32_t error = isa::load_global(&plan->error);
      if (error != 0) {
        if (slot >= 0) isa::atomic_or_global(cache.errors + slot, error);
        set_device_error(p.state);
        continue;
      }
      if (!changes(plan)) {
        isa::store_global(&plan->granted, 0);
        continue;
      }
      const std::int64_t layer = cache.layer_index(slot, p.layer);
      isa::store_global(cache.lengths + layer, isa::load_global(&plan->new_length));
    }
    isa::sync_threads();
    const std::int64_t heads = std::int64_t{p.batch} * cache.heads_kv;
    bool shares = false;
    for (std::int64_t i = isa::thread(); i < heads; i += threads) {
      const kv::SlotPlan* plan = p.state.plans + i / cache.heads_kv;
      if (isa::load_global(&plan->granted) == 0) continue;
      const std::int64_t slot = isa::load_global(&plan->slot);
      isa::store_global(cache.counts + cache.head_index(slot, p.layer, i % cache.heads_kv),
                        isa::load_global(&p.state.heads[i].new_count));
      shares |= isa::load_global(&p.state.heads[i].drops) != 0;
    }
    if (block_any<threads>(shares, isa::shared_base())) drop_shared(p);
  }
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
