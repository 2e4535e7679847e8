// The allocator of tiers (kvcache/allocator.hpp) for a block of threads. The host takes steps of
// the pages' hulls from a queue, cheapest first, of equal prices the first page's, until the bytes
// fit. The steps of a page come in order, so one that is cheaper than the one before it is taken
// right after: the queue gives steps in the order of (largest price so far, page, step). What fits
// is therefore the shortest prefix in that order, and its end is found by digits of the key,
// without a sort.
#pragma once

#include "kernels/kv_append/block.cuh"
#include "kernels/kv_append/params.hpp"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

/// Doubles as integers of the same order; no NaN, and no -0: a difference of equals is +0.
QATTN_DEVICE std::uint64_t price_key(double price) {
  std::uint64_t bits;
  __builtin_memcpy(&bits, &price, sizeof bits);
  constexpr std::uint64_t sign = std::uint64_t{1} << 63;
  return (bits & sign) != 0 ? ~bits : bits | sign;
}

/// Pages of all heads of a layer, and their steps.
struct PageList {
  const kv::Candidate* pages;  ///< [heads][stride]
  kv::PageSteps* steps;        ///< [heads][stride]
  std::uint64_t* prices;       ///< [tiers - 1][heads][stride]: of every page's n-th step
  const kv::HeadPlan* heads;   ///< whose new_count pages there are
  std::int32_t head_count;
  std::int64_t stride;

  /// f(number of a page) for those of the calling thread, always the same ones.
  template <int Threads, class F>
  QATTN_DEVICE void numbers(F f) const {
    for (std::int32_t h = 0; h < head_count; ++h) {
      const std::int32_t count = isa::load_global(&heads[h].new_count);
      for (std::int32_t i = isa::thread(); i < count; i += Threads) f(h * stride + i);
    }
  }
  /// f(page, its number) likewise, of those that the allocator may move.
  template <int Threads, class F>
  QATTN_DEVICE void candidates(F f) const {
    numbers<Threads>([&](std::int64_t number) {
      const kv::Candidate c = load_struct(pages + number);
      if ((c.kind & kv::page_candidate) != 0) f(c, number);
    });
  }
  QATTN_DEVICE std::uint64_t* price(std::int64_t number, int step) const {
    return prices + step * (head_count * stride) + number;
  }
};

struct Allocator {
  static constexpr int threads = kv::importance_lanes;
  static constexpr int lanes_at = 0;  ///< one double a thread
  static constexpr int select_at = lanes_at + 8 * threads;
  static constexpr int scratch_at = select_at + WeightedSelect::shared_bytes;
  static constexpr int shared_bytes = scratch_at + 8 * (threads / 32);
  static constexpr std::int64_t unit = 8;  ///< bytes of pages and entries are multiples of it

  const kv::Prices& prices;
  PageList list;
  float average = 1.0f;  ///< of known importances
  bool demotes = false;
  std::uint64_t last_price = 0;  ///< the last step's, and its page
  std::int64_t last_page = 0;
  std::uint32_t left = 0;  ///< units that the steps of that page at that price are to free

  static QATTN_DEVICE isa::SharedAddress shared(int offset) {
    return isa::shared_base() + static_cast<isa::SharedAddress>(offset);
  }
  static QATTN_DEVICE int start(int tier) { return tier == 0 ? 1 : tier; }
  QATTN_DEVICE std::uint32_t freed(int from, int to) const {
    return static_cast<std::uint32_t>((prices.bytes_of(from) - prices.bytes_of(to)) / unit);
  }

  /// The average of the importances that are known, in the host's order. Collective.
  QATTN_DEVICE void weigh() {
    double sum = 0;
    std::int64_t known = 0;
    list.candidates<threads>([&](const kv::Candidate& c, std::int64_t) {
      if (!(c.importance >= 0)) return;
      sum = formats::add_rn(sum, static_cast<double>(c.importance));
      ++known;
    });
    known = block_sum<threads>(known, shared(scratch_at));
    const isa::SharedAddress mine = shared(lanes_at + 8 * isa::thread());
    isa::store_shared(mine, sum);
    for (int half = threads / 2; half > 0; half /= 2) {
      isa::sync_threads();
      if (isa::thread() >= half) continue;
      sum = formats::add_rn(
          sum, isa::load_shared<double>(mine + static_cast<isa::SharedAddress>(8 * half)));
      isa::store_shared(mine, sum);
    }
    isa::sync_threads();
    const auto total = isa::load_shared<double>(shared(lanes_at));
    if (known > 0) average = static_cast<float>(total / static_cast<double>(known));
  }

  /// Bytes of the pages where they are, those in 16 bits in the first tier. Collective.
  QATTN_DEVICE std::int64_t bytes() const {
    std::int64_t sum = 0;
    list.candidates<threads>(
        [&](const kv::Candidate& c, std::int64_t) { sum += prices.bytes_of(start(c.tier)); });
    return block_sum<threads>(sum, shared(scratch_at));
  }

  /// All steps of the calling thread's pages to memory; what they have in common.
  struct Range {
    std::uint64_t low = ~std::uint64_t{0}, high = 0, units = 0;
  };
  QATTN_DEVICE Range price_steps() const {
    Range r;
    list.numbers<threads>([&](std::int64_t number) {
      kv::Candidate c = load_struct(list.pages + number);
      kv::PageSteps steps;
      if ((c.kind & kv::page_candidate) != 0) {
        if (!(c.importance >= 0)) c.importance = average;
        std::uint64_t top = 0;
        double price = 0;
        int n = 0;
        for (int at = start(c.tier), to; (to = prices.next(c, at, price)) != 0; at = to) {
          const std::uint64_t key = price_key(price);
          top = key > top ? key : top;
          isa::store_global(list.price(number, n), top);
          steps.push(n++, to);
          r.low = top < r.low ? top : r.low;
          r.units += freed(at, to);
        }
        r.high = top > r.high ? top : r.high;
      }
      isa::store_global(&list.steps[number].ends, steps.ends);
    });
    r.low = block_min<threads>(r.low, shared(scratch_at));
    r.high = block_max<threads>(r.high, shared(scratch_at));
    r.units = block_sum<threads>(r.units, shared(scratch_at));
    return r;
  }

  /// f(largest price so far, units freed, tier) for every step of a page, until f says no.
  template <class F>
  QATTN_DEVICE void visit(std::int64_t number, int tier, F f) const {
    const kv::PageSteps steps{isa::load_global(&list.steps[number].ends)};
    for (int n = 0, at = start(tier); steps.end(n) != 0; at = steps.end(n++)) {
      if (!f(isa::load_global(list.price(number, n)), freed(at, steps.end(n)), steps.end(n))) {
        return;
      }
    }
  }
  /// f(number, price, units) for all steps of the calling thread's pages.
  template <class F>
  QATTN_DEVICE void visit_all(F f) const {
    list.candidates<threads>([&](const kv::Candidate& c, std::int64_t number) {
      visit(number, c.tier, [&](std::uint64_t key, std::uint32_t units, int) {
        f(number, key, units);
        return true;
      });
    });
  }

  /// Finds the last step that is needed to free `need` bytes; false: all steps together do not.
  /// After weigh(). Collective.
  QATTN_DEVICE bool find(std::int64_t need) {
    if (need <= 0) return true;
    const Range range = price_steps();
    const std::uint64_t units = (static_cast<std::uint64_t>(need) + unit - 1) / unit;
    if (range.units < units) return false;
    left = static_cast<std::uint32_t>(units);
    const WeightedSelect select{shared(select_at)};
    const int bits = bit_length(range.low ^ range.high);
    const std::uint64_t prefix = bits == 64 ? 0 : range.low >> bits << bits;
    last_price = select.run<threads>(prefix, bits, left, [&](auto add) {
      visit_all([&](std::int64_t, std::uint64_t key, std::uint32_t weight) { add(key, weight); });
    });
    const auto most = static_cast<std::uint64_t>(list.head_count * list.stride - 1);
    const std::uint64_t page = select.run<threads>(0, bit_length(most), left, [&](auto add) {
      visit_all([&](std::int64_t number, std::uint64_t key, std::uint32_t weight) {
        if (key == last_price) add(static_cast<std::uint64_t>(number), weight);
      });
    });
    last_page = static_cast<std::int64_t>(page);
    demotes = true;
    isa::sync_threads();  // other threads read steps
    return true;
  }

  /// The tier of a page, after find().
  QATTN_DEVICE int tier(const kv::Candidate& page, std::int64_t number) const {
    int tier = start(page.tier);
    if (!demotes) return tier;
    std::uint32_t open = left;
    visit(number, page.tier, [&](std::uint64_t key, std::uint32_t units, int to) {
      if (key > last_price || (key == last_price && number > last_page)) return false;
      if (key == last_price && number == last_page) {
        if (open == 0) return false;
        open = open > units ? open - units : 0;
      }
      tier = to;
      return true;
    });
    return tier;
  }
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
