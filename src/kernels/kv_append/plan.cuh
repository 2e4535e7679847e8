// The plan of an append to one slot, by one block of threads: which pages are new, grow or leave
// the window, which tiers that asks for, which pages of the pools. Nothing of the cache changes.
// The host's AppendPlan (kvcache/append.cpp) in parallel.
#pragma once

#include "kernels/kv_append/allocate.cuh"
#include "kernels/kv_append/key_norm.cuh"
#include "kernels/kv_append/shares.cuh"
#include "kernels/kv_append/weights.cuh"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

struct PlanAppend {
  using Params = AppendParams;
  static constexpr int threads = Allocator::threads, min_blocks = 1;
  static constexpr int shared_bytes = Allocator::shared_bytes;
  static constexpr bool dependent = true;

  /// What every thread knows of the slot.
  struct AppendState {
    std::int64_t b, slot;
    std::int64_t old_length, new_length;
    std::uint32_t error;
  };

  static QATTN_DEVICE isa::SharedAddress scratch() {
    return Allocator::shared(Allocator::scratch_at);
  }
  static QATTN_DEVICE bool any(bool value) { return block_any<threads>(value, scratch()); }

  static QATTN_DEVICE AppendState facts(const Params& p) {
    const kv::DeviceCache& cache = p.state.cache;
    AppendState f{};
    f.b = isa::block().x;
    f.slot = p.shortens() ? p.slot : isa::load_global(p.slots + f.b);
    if (f.slot < 0 || f.slot >= cache.slots) {
      f.slot = -1;
      f.error = kv::slot_unused;
      return f;
    }
    f.error = isa::load_global(cache.errors + f.slot);
    f.old_length = isa::load_global(cache.lengths + cache.layer_index(f.slot, p.layer));
    const std::int64_t count = p.counts != nullptr ? isa::load_global(p.counts + f.b) : p.tokens;
    if (count < 0 || count > p.tokens) {
      f.error |= kv::slot_count;
      f.new_length = f.old_length;
      return f;
    }
    f.new_length = f.old_length + count;
    if (f.new_length > p.state.most_tokens) f.error |= kv::slot_capacity;
    if (p.importance != nullptr && formats::kv_blocks(f.new_length) > p.blocks) {
      f.error |= kv::slot_weight;
    }
    return f;
  }

  static QATTN_DEVICE kv::HeadPlan* head_plan(const Params& p, const AppendState& f,
                                              std::int32_t h) {
    return p.state.heads + p.state.plan_head(f.b, h);
  }
  static QATTN_DEVICE PageList pages(const Params& p, const AppendState& f) {
    const kv::DeviceCache& cache = p.state.cache;
    const std::int64_t head = p.state.plan_head(f.b, 0), page = head * cache.most_pages;
    return {p.state.pages + page,
            p.state.steps + page,
            p.state.step_prices + page * (p.state.prices.tiers - 1),
            p.state.heads + head,
            cache.heads_kv,
            cache.most_pages};
  }
  static QATTN_DEVICE kv::Entry entry(const Params& p, const AppendState& f, std::int32_t h,
                                      std::int32_t i) {
    return load_struct(p.state.cache.table(f.slot, p.layer, h) + i);
  }

  /// Does a table's last page take the next tokens?
  static QATTN_DEVICE bool grows(const Params& p, const AppendState& f, const kv::Entry& last) {
    const std::int64_t size = p.state.cache.page_size;
    return f.old_length % size != 0 && f.new_length > f.old_length &&
           last.first == f.old_length / size * size;
  }

  /// How many pages there are and will be in every table. Returns whether some table has no room;
  /// `fast`: the last page of every table takes all tokens, and the window stays where it is.
  static QATTN_DEVICE bool count_pages(const Params& p, const AppendState& f, bool& fast) {
    const kv::DeviceCache& cache = p.state.cache;
    const std::int64_t size = cache.page_size, page = f.old_length / size;
    const bool fills = f.old_length % size != 0 && f.new_length <= (page + 1) * size &&
                       p.state.window_begin(f.new_length) == p.state.window_begin(f.old_length);
    bool full = false, slow = !fills;
    for (std::int32_t h = isa::thread(); h < cache.heads_kv; h += threads) {
      const std::int32_t old =
          isa::load_global(cache.counts + cache.head_index(f.slot, p.layer, h));
      kv::Entry last;
      if (old > 0) last = entry(p, f, h, old - 1);
      const bool tail = old > 0 && grows(p, f, last);
      const std::int64_t first = page + (tail ? 1 : 0), end = (f.new_length + size - 1) / size;
      const std::int64_t count =
          old + (f.new_length > f.old_length && end > first ? end - first : 0);
      full |= count > cache.most_pages;
      slow |= !tail || last.tier != 0;
      kv::HeadPlan* plan = head_plan(p, f, h);
      isa::store_global(&plan->old_count, old);
      isa::store_global(&plan->new_count, static_cast<std::int32_t>(count));
      isa::store_global(&plan->jobs, 0);
      isa::store_global(&plan->sets, 0u);
    }
    fast = !any(slow);
    return any(full);
  }

  /// The entry of a page of the table to be, without what this call changes in old ones.
  static QATTN_DEVICE kv::Entry entry_to_be(const Params& p, const AppendState& f, std::int32_t h,
                                            std::int32_t i, std::int32_t old, std::int32_t count) {
    if (i < old) return entry(p, f, h, i);
    const std::int64_t size = p.state.cache.page_size;
    kv::Entry e;
    e.page = -1;
    e.first = static_cast<std::int32_t>(((f.new_length - 1) / size - (count - 1 - i)) * size);
    e.importance = -1.0f;
    return e;
  }

  /// What becomes of a page, and what is known of its importance; `bad`: it is out of range.
  static QATTN_DEVICE kv::Candidate classify(const Params& p, const AppendState& f, std::int32_t h,
                                             std::int32_t i, std::int32_t old, std::int32_t count,
                                             bool& bad) {
    const kv::Entry e = entry_to_be(p, f, h, i, old, count);
    const bool inside = p.state.in_window(e.first, f.new_length);
    kv::Candidate c{e.importance, e.tier, e.path, 0};
    int kind = 0;
    if (e.tier != 0 || !inside) kind |= kv::page_candidate;
    if (i >= old) kind |= kv::page_new;
    if (i < old && i + 1 == old && grows(p, f, e)) {
      kind |= kv::page_grows;
      if (e.tier != 0) {
        kind |= kv::page_opens;
        c.tier = c.path = 0;
        if (inside) kind &= ~kv::page_candidate;
        if (inside && e.guess != 0) c.importance = -1.0f;  // guessed anew when it leaves
      }
    }
    if (i < old && e.tier == 0 && !inside) kind |= kv::page_leaves;
    c.kind = static_cast<std::uint16_t>(kind);
    if ((kind & ~kv::page_candidate) == 0 || p.importance == nullptr) return c;
    const float* row = p.importance + p.state.plan_head(f.b, h) * p.blocks;
    c.importance = page_weight(p.state.cache, e.first, formats::kv_blocks(f.new_length), bad,
                               [&](std::int64_t n) { return isa::load_global(row + n); });
    return c;
  }

  /// All pages to state.pages. Bytes that the window takes; whether some importance is bad, and
  /// whether a page is quantised that was not.
  struct Staged {
    std::int64_t window_bytes;
    bool bad, quantises;
  };
  static QATTN_DEVICE Staged stage(const Params& p, const AppendState& f) {
    const kv::DeviceCache& cache = p.state.cache;
    std::int64_t inside = 0;
    bool bad = false, quantises = false;
    for (std::int32_t h = 0; h < cache.heads_kv; ++h) {
      const kv::HeadPlan* plan = head_plan(p, f, h);
      const std::int32_t old = isa::load_global(&plan->old_count);
      const std::int32_t count = isa::load_global(&plan->new_count);
      kv::Candidate* out = p.state.pages + p.state.plan_head(f.b, h) * cache.most_pages;
      for (std::int32_t i = isa::thread(); i < count; i += threads) {
        const kv::Candidate c = classify(p, f, h, i, old, count, bad);
        inside += (c.kind & kv::page_candidate) == 0 ? p.state.window_bytes : 0;
        quantises |= (c.kind & kv::page_candidate) != 0 && c.tier == 0;
        store_struct(out + i, c);
      }
    }
    Staged s{};
    s.window_bytes = block_sum<threads>(inside, scratch());
    s.bad = any(bad);
    s.quantises = any(quantises);
    return s;
  }

  /// Importance of pages that are quantised now and of which nothing is known, half a warp each.
  static QATTN_DEVICE void weigh_keys(const Params& p, const AppendState& f) {
    const kv::DeviceCache& cache = p.state.cache;
    const std::int64_t size = cache.page_size;
    for (std::int32_t h = 0; h < cache.heads_kv; ++h) {
      const kv::HeadPlan* plan = head_plan(p, f, h);
      const std::int32_t old = isa::load_global(&plan->old_count);
      const std::int32_t count = isa::load_global(&plan->new_count);
      kv::Candidate* out = p.state.pages + p.state.plan_head(f.b, h) * cache.most_pages;
      for (std::int32_t first = 0; first < count; first += threads / row_lanes) {
        const std::int32_t i = first + isa::thread() / row_lanes;
        kv::Candidate c{};
        if (i < count) c = load_struct(out + i);
        const bool asked = (c.kind & kv::page_candidate) != 0 && c.tier == 0 &&
                           (c.kind & kv::page_opens) == 0 && c.importance < 0;
        if (!isa::any(asked)) continue;
        kv::Entry e;
        if (asked) e = entry_to_be(p, f, h, i, old, count);
        const bool has_new = asked && (c.kind & (kv::page_new | kv::page_grows)) != 0;
        const std::int64_t begin = f.old_length > e.first ? f.old_length : e.first;
        std::int64_t end = f.new_length < e.first + size ? f.new_length : e.first + size;
        if (!has_new) end = begin;
        c.importance = key_weight(p, f.b, h, f.old_length, e, begin, end);
        c.kind = static_cast<std::uint16_t>(c.kind | kv::page_guess);
        if (asked && row_lane() == 0) store_struct(out + i, c);
      }
    }
  }

  /// The job of a page, without numbers of pages; false: nothing happens to it.
  static QATTN_DEVICE bool make_job(const Params& p, const AppendState& f, std::int32_t i,
                                    const kv::Entry& e, const kv::Candidate& c, int tier,
                                    kv::AppendJob& job) {
    const std::int64_t size = p.state.cache.page_size;
    if ((c.kind & ~kv::page_candidate) == 0 && tier == e.tier) return false;
    job.to = e;
    job.to.importance = c.importance;
    if ((c.kind & kv::page_guess) != 0) job.to.guess = 1;
    const bool opens = (c.kind & kv::page_opens) != 0;
    if (opens && (tier == 0 || p.importance != nullptr)) job.to.guess = 0;
    job.index = i;
    job.from_page = e.page;
    job.from_tier = e.tier;
    if ((c.kind & (kv::page_new | kv::page_grows)) != 0) {
      job.to.live |= kv::live_bits(f.old_length, f.new_length, e.first, size);
      const std::int64_t begin = f.old_length - e.first, end = f.new_length - e.first;
      job.begin = static_cast<std::uint8_t>(begin > 0 ? begin : 0);
      job.end = static_cast<std::uint8_t>(end < size ? end : size);
    }
    if (tier != e.tier) job.to.tier = static_cast<std::uint8_t>(tier);
    if (opens) job.to.path = 0;
    if (tier > 0) job.to.path = static_cast<std::uint8_t>(job.to.path | 1u << (tier - 1));
    const bool shared = e.page >= 0 && is_shared(p.state, e.tier, e.page);
    job.in_place = tier == 0 && e.page >= 0 && !opens && !shared ? 1 : 0;
    if (shared) job.given = -1;
    return true;
  }

  /// Jobs of a head, by one warp, 32 pages at a time; pages are ranked among those that the head
  /// takes from, or gives back to, the same pool.
  static QATTN_DEVICE void emit(const Params& p, const AppendState& f, const Allocator& allocator,
                                std::int32_t h, bool fast) {
    const kv::DeviceCache& cache = p.state.cache;
    kv::HeadPlan* plan = head_plan(p, f, h);
    const std::int32_t old = isa::load_global(&plan->old_count);
    const std::int32_t count = isa::load_global(&plan->new_count);
    const std::int64_t base = p.state.plan_head(f.b, h) * cache.most_pages;
    const std::uint32_t below = (1u << isa::lane()) - 1;
    std::int32_t jobs = 0, drops = 0, takes[kv::most_tiers] = {}, gives[kv::most_tiers] = {};
    for (std::int32_t first = fast ? count - 1 : 0; first < count; first += 32) {
      const std::int32_t i = first + isa::lane();
      kv::AppendJob job{};
      bool has = false, bad = false;
      if (i < count) {
        const kv::Candidate c =
            fast ? classify(p, f, h, i, old, count, bad) : load_struct(p.state.pages + base + i);
        const bool free = (c.kind & kv::page_candidate) != 0;
        const int tier = free ? allocator.tier(c, h * std::int64_t{cache.most_pages} + i) : 0;
        has = make_job(p, f, i, entry_to_be(p, f, h, i, old, count), c, tier, job);
      }
      const int take = has && job.in_place == 0 ? job.to.tier : -1;
      const bool drop = has && job.drops();
      const int give = has && job.lets_go() && !drop ? job.from_tier : -1;
      drops += __builtin_popcount(isa::ballot(drop));
#pragma unroll
      for (int t = 0; t < kv::most_tiers; ++t) {
        if (t >= cache.pools) continue;
        const std::uint32_t taken = isa::ballot(take == t), given = isa::ballot(give == t);
        if (take == t) job.to.page = takes[t] + __builtin_popcount(taken & below);
        if (give == t) job.given = gives[t] + __builtin_popcount(given & below);
        takes[t] += __builtin_popcount(taken);
        gives[t] += __builtin_popcount(given);
      }
      const std::uint32_t here = isa::ballot(has);
      if (has) {
        store_struct(p.state.jobs + base + jobs + __builtin_popcount(here & below), job);
      }
      jobs += __builtin_popcount(here);
    }
    if (isa::lane() != 0) return;
    isa::store_global(&plan->jobs, jobs);
    isa::store_global(&plan->drops, drops);
#pragma unroll
    for (int t = 0; t < kv::most_tiers; ++t) {
      isa::store_global(plan->takes + t, takes[t]);
      isa::store_global(plan->gives + t, gives[t]);
    }
  }

  /// Heads one behind the other: sums of what those before take and give, and of all.
  static QATTN_DEVICE void add_heads(const Params& p, const AppendState& f) {
    const int t = isa::thread() % kv::most_tiers, which = isa::thread() / kv::most_tiers;
    if (which > 1) return;
    std::int32_t sum = 0;
    for (std::int32_t h = 0; h < p.state.cache.heads_kv; ++h) {
      kv::HeadPlan* plan = head_plan(p, f, h);
      std::int32_t* number = (which == 0 ? plan->takes : plan->gives) + t;
      const std::int32_t own = isa::load_global(number);
      isa::store_global(number, sum);
      sum += own;
    }
    kv::SlotPlan* plan = p.state.plans + f.b;
    isa::store_global((which == 0 ? plan->takes : plan->gives) + t, sum);
  }

  /// Sets of means and powers of two that the layer has.
  static QATTN_DEVICE std::int32_t sets(const Params& p, const AppendState& f) {
    const kv::DeviceCache& cache = p.state.cache;
    return isa::load_global(cache.set_counts + cache.layer_index(f.slot, p.layer));
  }

  /// Tiers, and jobs of all heads. Returns what is wrong.
  static QATTN_DEVICE std::uint32_t make(const Params& p, const AppendState& f, bool& quantises) {
    bool fast = false;
    if (count_pages(p, f, fast)) return kv::slot_capacity;
    Allocator allocator{p.state.prices, pages(p, f)};
    isa::sync_threads();  // other threads read what count_pages() wrote
    if (fast) {
      if (any(bad_tails(p, f))) return kv::slot_weight;
    } else {
      const Staged staged = stage(p, f);
      if (staged.bad) return kv::slot_weight;
      if (p.state.key_norm != 0 && p.importance == nullptr) {
        weigh_keys(p, f);
        isa::sync_threads();
      }
      quantises = staged.quantises;
      if (p.state.has_budget != 0) {
        allocator.weigh();
        const int reserved = kv::reserved_sets(sets(p, f), quantises, p.state.cache.sets);
        const std::int64_t fixed = reserved * p.state.mean_bytes + staged.window_bytes;
        const std::int64_t rest = p.state.allowed_bytes(f.new_length) - fixed;
        const std::int64_t need = allocator.bytes() - (rest > 0 ? rest : 0);
        if (!allocator.find(need)) return kv::slot_budget;
      }
    }
    for (std::int32_t h = isa::warp(); h < p.state.cache.heads_kv; h += threads / 32) {
      emit(p, f, allocator, h, fast);
    }
    isa::sync_threads();
    add_heads(p, f);
    return 0;
  }
  static QATTN_DEVICE bool bad_tails(const Params& p, const AppendState& f) {
    bool bad = false;
    for (std::int32_t h = isa::thread(); h < p.state.cache.heads_kv; h += threads) {
      const kv::HeadPlan* plan = head_plan(p, f, h);
      const std::int32_t count = isa::load_global(&plan->new_count);
      classify(p, f, h, count - 1, count, count, bad);
    }
    return bad;
  }

  static QATTN_DEVICE void run(const Params& p) {
    isa::grid_dependency_launch();
    isa::grid_dependency_wait();
    AppendState f = facts(p);
    if (!p.shortens() && f.slot >= 0 && any(named_twice<threads>(p.slots, p.batch, f.b))) {
      f.error |= kv::slot_twice;
    }
    bool quantises = false;
    const bool asked = p.shortens() || f.new_length > f.old_length;
    if (f.error == 0 && asked) f.error = make(p, f, quantises);
    if (isa::thread() != 0) return;
    const bool changes = f.error == 0 && asked;
    if (p.shortens()) f.error = 0;
    kv::SlotPlan* plan = p.state.plans + f.b;
    isa::store_global(&plan->slot, static_cast<std::int32_t>(f.slot));
    isa::store_global(&plan->error, f.error);
    isa::store_global(&plan->old_length, static_cast<std::int32_t>(f.old_length));
    isa::store_global(&plan->new_length, static_cast<std::int32_t>(f.new_length));
    isa::store_global(&plan->changes, changes ? 1 : 0);
    isa::store_global(&plan->quantises, quantises ? 1 : 0);
    isa::store_global(&plan->sets, changes ? sets(p, f) : 0);
    isa::store_global(&plan->granted, 0);
  }
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
