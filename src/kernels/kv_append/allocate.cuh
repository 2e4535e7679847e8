// The allocator of tiers (kvcache/allocator.hpp) for a block of threads. The host takes steps of the
// pages' hulls from a queue, cheapest first, of equal prices the first page's, until the bytes fit.
// The steps of a page come in order, so one that is cheaper than the one before it is taken right
// after: the queue gives steps in the order of (largest price so far, page, step). What fits is
// therefore the shortest prefix in that order, and its end is found by digits of the key, without a
// sort. Prices are worked out anew in every pass: there is no room to keep them in.
#pragma once

#include "kernels/kv_append/block.cuh"
#include "kernels/kv_append/params.hpp"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

/// Doubles as integers of the same order; no NaN. +0 and -0 are one.
QATTN_DEVICE std::uint64_t price_key(double price) {
  const double canonical = formats::add_rn(price, 0.0);
  std::uint64_t bits;
  __builtin_memcpy(&bits, &canonical, sizeof bits);
  constexpr std::uint64_t sign = std::uint64_t{1} << 63;
  return (bits & sign) != 0 ? ~bits : bits | sign;
}

/// Pages of all heads of a layer.
struct PageList {
  const kv::Candidate* pages;  ///< [heads][stride]
  const kv::HeadPlan* heads;   ///< whose new_count pages there are
  std::int32_t head_count;
  std::int64_t stride;

  /// f(page, its number, its place in its table) for those of the calling thread.
  template <int Threads, class F>
  QATTN_DEVICE void visit(F f) const {
    for (std::int32_t h = 0; h < head_count; ++h) {
      const std::int32_t count = isa::load_global(&heads[h].new_count);
      for (std::int32_t i = isa::thread(); i < count; i += Threads) {
        const std::int64_t number = h * stride + i;
        f(load_struct(pages + number), number, i);
      }
    }
  }
};

struct Allocator {
  static constexpr int threads = kv::importance_lanes;
  static constexpr int lanes_at = 0;  ///< one double a thread
  static constexpr int bins_at = lanes_at + 8 * threads;
  static constexpr int scratch_at = bins_at + 1032;
  static constexpr int shared_bytes = scratch_at + 8 * (threads / 32);
  static constexpr std::int64_t unit = 8;  ///< bytes of pages and entries are multiples of it

  const kv::Prices& prices;
  float average = 1.0f;  ///< of known importances
  bool demotes = false;
  std::uint64_t last_price = 0;  ///< the last step's, and its page
  std::int64_t last_page = 0;
  std::uint32_t left = 0;  ///< units that the steps of that page at that price are to free

  static QATTN_DEVICE isa::SharedAddress shared(int offset) {
    return isa::shared_base() + static_cast<isa::SharedAddress>(offset);
  }

  QATTN_DEVICE kv::Candidate weighed(kv::Candidate c) const {
    if (!(c.importance >= 0)) c.importance = average;
    return c;
  }
  static QATTN_DEVICE int start(const kv::Candidate& c) { return c.tier == 0 ? 1 : c.tier; }

  /// f(largest price so far, units freed, tier) for every step of a page, in order, until f says no.
  template <class F>
  QATTN_DEVICE void steps(const kv::Candidate& page, F f) const {
    std::uint64_t top = 0;
    double price = 0;
    for (int at = start(page), to; (to = prices.next(page, at, price)) != 0; at = to) {
      const std::uint64_t key = price_key(price);
      top = key > top ? key : top;
      const std::int64_t freed = prices.bytes_of(at) - prices.bytes_of(to);
      if (!f(top, static_cast<std::uint32_t>(freed / unit), to)) return;
    }
  }

  /// The average of the importances that are known, in the host's order. Collective.
  QATTN_DEVICE void weigh(const PageList& list) {
    double sum = 0;
    std::int64_t known = 0;
    list.visit<threads>([&](const kv::Candidate& c, std::int64_t, std::int32_t) {
      if ((c.kind & kv::page_candidate) == 0 || !(c.importance >= 0)) return;
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
  QATTN_DEVICE std::int64_t bytes(const PageList& list) const {
    std::int64_t sum = 0;
    list.visit<threads>([&](const kv::Candidate& c, std::int64_t, std::int32_t) {
      if ((c.kind & kv::page_candidate) != 0) sum += prices.bytes_of(start(c));
    });
    return block_sum<threads>(sum, shared(scratch_at));
  }

  /// Finds the last step that is needed to free `need` bytes; false: all steps together do not.
  /// After weigh(). Collective.
  QATTN_DEVICE bool find(const PageList& list, std::int64_t need) {
    if (need <= 0) return true;
    const auto visit = [&](auto f) {
      list.visit<threads>([&](const kv::Candidate& c, std::int64_t number, std::int32_t) {
        if ((c.kind & kv::page_candidate) == 0) return;
        steps(weighed(c), [&](std::uint64_t key, std::uint32_t freed, int) {
          f(key, number, freed);
          return true;
        });
      });
    };
    std::uint64_t low = ~std::uint64_t{0}, high = 0, total = 0;
    visit([&](std::uint64_t key, std::int64_t, std::uint32_t freed) {
      low = key < low ? key : low;
      high = key > high ? key : high;
      total += freed;
    });
    total = block_sum<threads>(total, shared(scratch_at));
    low = block_min<threads>(low, shared(scratch_at));
    high = block_max<threads>(high, shared(scratch_at));
    const std::uint64_t units = (static_cast<std::uint64_t>(need) + unit - 1) / unit;
    if (total < units) return false;
    left = static_cast<std::uint32_t>(units);
    const int bits = bit_length(low ^ high);
    const std::uint64_t shared_bits = bits == 64 ? 0 : low >> bits << bits;
    last_price = weighted_select<threads>(
        shared_bits, bits, left, shared(bins_at), [&](auto add) {
          visit([&](std::uint64_t key, std::int64_t, std::uint32_t freed) { add(key, freed); });
        });
    const auto most = static_cast<std::uint64_t>(list.head_count * list.stride - 1);
    last_page = static_cast<std::int64_t>(weighted_select<threads>(
        0, bit_length(most), left, shared(bins_at), [&](auto add) {
          visit([&](std::uint64_t key, std::int64_t number, std::uint32_t freed) {
            if (key == last_price) add(static_cast<std::uint64_t>(number), freed);
          });
        }));
    demotes = true;
    return true;
  }

  /// The tier of a page, after find().
  QATTN_DEVICE int tier(const kv::Candidate& page, std::int64_t number) const {
    int tier = start(page);
    if (!demotes) return tier;
    std::uint32_t open = left;
    steps(weighed(page), [&](std::uint64_t key, std::uint32_t freed, int to) {
      if (key > last_price || (key == last_price && number > last_page)) return false;
      if (key == last_price && number == last_page) {
        if (open == 0) return false;
        open = open > freed ? open - freed : 0;
      }
      tier = to;
      return true;
    });
    return tier;
  }
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
