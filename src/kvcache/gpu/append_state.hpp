// What append, observe, fork and release on a device keep in its memory beyond the cache that
// decode reads: free pages, how many tables share a page, and the plan of the append under way.
#pragma once

#include <cstdint>

#include "kvcache/device_view.hpp"
#include "kvcache/prices.hpp"

namespace qattn::kv {

/// Free pages of a pool, oldest first: numbers at head, head + 1, ... (round the end) of an array
/// as long as the pool. Pages that an append gives back lie behind those that it may take, so that
/// taking and giving back never meet.
struct Ring {
  std::int32_t head = 0, count = 0;
};

/// What an append makes of a page: bits of Candidate::kind.
enum PageKind : std::uint16_t {
  page_candidate = 1,  ///< not in the window (any more): the allocator chooses its tier
  page_new = 2,
  page_grows = 4,
  page_leaves = 8,  ///< was in 16 bits
  page_guess = 16,  ///< importance is key_norm's
  page_opens = 32,  ///< was cut in a tier, grows and is in 16 bits first
};

/// The tiers that a page's hull leads through, worse ones in order.
struct PageSteps {
  std::uint32_t ends = 0;  ///< three bits a step, 0 behind the last

  QATTN_HD int end(int n) const { return static_cast<int>(ends >> (3 * n) & 7u); }
  QATTN_HD void push(int n, int tier) { ends |= static_cast<std::uint32_t>(tier) << (3 * n); }
};
static_assert(Prices::most_tiers < 8);

/// One page to be made: what `from_page` holds (if any), then new tokens [begin, end) of the page,
/// in to.tier. to.page is a rank among the pages of that tier that the head takes, or, in place,
/// the page. A page that other tables hold, too, is never written: what is made of it is a copy.
struct AppendJob {
  Entry to;
  std::int32_t from_page;  ///< -1: none
  std::int32_t index;      ///< of the page's entry in its table
  std::int32_t given;      ///< rank among the pages of from_tier that it gives back; -1: shared
  std::uint8_t from_tier, begin, end, in_place;

  /// Its codes become rows of 16 bits first, beside those of new tokens.
  QATTN_HD bool opens() const { return from_page >= 0 && from_tier > 0 && begin < end; }
  /// The table does not hold from_page any more.
  QATTN_HD bool lets_go() const { return in_place == 0 && from_page >= 0; }
  /// It did so with other tables: the page is free only if all of them let go.
  QATTN_HD bool drops() const { return lets_go() && given < 0; }
};
static_assert(sizeof(AppendJob) == 40);

/// An append to one head.
struct HeadPlan {
  std::uint32_t sets = 0;  ///< that parts of what leaves the window take, four bits each
  std::int32_t jobs = 0, old_count = 0, new_count = 0;
  std::int32_t takes[most_tiers] = {};  ///< pages of each pool; later: taken by heads before it
  std::int32_t gives[most_tiers] = {};
  std::int32_t drops = 0;  ///< pages that it lets go and shared
};

/// An append to one slot.
struct SlotPlan {
  std::int32_t slot = -1;
  std::uint32_t error = 0;
  std::int32_t old_length = 0, new_length = 0;
  std::int32_t changes = 0;             ///< there is something to do
  std::int32_t quantises = 0;           ///< pages leave the window: they need a set
  std::int32_t sets = 0;                ///< that there were
  std::int32_t granted = 0;             ///< it is carried out
  std::int32_t takes[most_tiers] = {};  ///< of all heads; later: place in the ring of the first
  std::int32_t gives[most_tiers] = {};
};

struct AppendState {
  DeviceCache cache;
  std::int32_t* free_pages[most_tiers] = {};
  std::uint32_t* shares[most_tiers] = {};  ///< of every page: tables beyond the first that hold it
  Ring* rings = nullptr;                   ///< [pools]
  // Of the append under way; its b-th slot comes first.
  SlotPlan* plans = nullptr;              ///< [slots]
  HeadPlan* heads = nullptr;              ///< [slots][heads_kv]
  Candidate* pages = nullptr;             ///< [slots][heads_kv][most_pages]
  PageSteps* steps = nullptr;             ///< likewise
  std::uint64_t* step_prices = nullptr;   ///< [slots][tiers - 1][heads_kv][most_pages]
  AppendJob* jobs = nullptr;              ///< [slots][heads_kv][most_pages]
  std::uint32_t* device_error = nullptr;  ///< the device's sticky error word

  Prices prices;
  std::int32_t has_budget = 0, key_norm = 0;
  std::int64_t budget_from = 0;
  double budget_per_token = 0;    ///< bytes
  std::int64_t mean_bytes = 0;    ///< of a set, that the budget counts
  std::int64_t window_bytes = 0;  ///< of a page in 16 bits with its entry
  float decay = 0;
  std::int64_t most_tokens = 0;  ///< of a sequence

  /// First token behind the sinks that is still in 16 bits at that length, as on the host.
  QATTN_HD std::int64_t window_begin(std::int64_t length) const {
    const std::int64_t old = length > cache.window_tokens ? length - cache.window_tokens : 0;
    return old / cache.page_size * cache.page_size;
  }
  QATTN_HD bool in_window(std::int64_t first, std::int64_t length) const {
    return first < cache.sinks || first >= window_begin(length);
  }
  /// Bytes that the budget allows one (sequence, layer) of that length.
  QATTN_HD std::int64_t allowed_bytes(std::int64_t length) const {
    const std::int64_t tokens = length > budget_from ? length : budget_from;
    return static_cast<std::int64_t>(
        formats::mul_rn(static_cast<double>(tokens), budget_per_token));
  }
  QATTN_HD std::int64_t plan_head(std::int64_t b, std::int64_t head) const {
    return b * cache.heads_kv + head;
  }
  QATTN_HD std::int64_t ring_place(int pool, std::int64_t place) const {
    const std::int64_t capacity = cache.pool[pool].capacity;
    return place < capacity ? place : place - capacity;
  }
};

}  // namespace qattn::kv
