// A KV cache on a device as kernels see it: plain pointers to memory whose addresses never change,
// with everything that changes from step to step (tables, lengths, free pages) in that memory, so
// that a captured graph replays on the cache as it then is.
#pragma once

#include <cstdint>

#include "formats/kv/layout.hpp"
#include "kvcache/entry.hpp"
#include "kvcache/keys/drift.hpp"

namespace qattn::kv {

inline constexpr int most_tiers = 8;  ///< the 16-bit window's included

/// Bits of a slot's error word.
enum SlotError : std::uint32_t {
  slot_unused = 1,    ///< no sequence has it
  slot_budget = 2,    ///< even the last tier is too much for the budget
  slot_pool = 4,      ///< a pool has no page left
  slot_capacity = 8,  ///< more tokens, or more pages of a table, than there is room for
  slot_count = 16,    ///< a number of new tokens below 0 or above S
  slot_weight = 32,   ///< an importance that is not from 0 to 1e15, or too few blocks of them
  slot_twice = 64,    ///< a call named it twice
};

/// Bit of the device's sticky error word that says: some slot's word is not 0, or observe()
/// or set_importance() refused.
inline constexpr std::uint32_t device_error_bit = 4;

/// One pool: pages of one tier, one behind the other.
struct DevicePool {
  std::uint8_t* pages = nullptr;
  formats::KvPage layout{};
  std::int32_t capacity = 0;  ///< pages

  QATTN_HD std::uint8_t* page(std::int32_t number) const {
    return pages + static_cast<std::int64_t>(number) * layout.bytes();
  }
  QATTN_HD std::uint8_t* block(std::int32_t number, int i) const {
    return page(number) + i * layout.block_bytes();
  }
  /// Bits of the page's tokens whose K is bad, then zeros; where K has a scale a channel.
  QATTN_HD std::uint64_t* bad_tokens(std::int32_t number) const {
    return reinterpret_cast<std::uint64_t*>(page(number) + layout.bad_tokens());
  }
};

struct DeviceCache {
  std::int32_t d = 0, dv = 0;
  std::int32_t page_size = 0;                 ///< tokens
  std::int32_t window_tokens = 0, sinks = 0;  ///< options.window and options.sinks
  std::int32_t layers = 0, heads_kv = 0;
  std::int32_t slots = 0;       ///< sequences that it has room for
  std::int32_t most_pages = 0;  ///< entries of a page table
  std::int32_t pools = 0;       ///< 1 + tiers; pool 0 keeps rows in 16 bits
  std::int32_t bf16 = 0;        ///< those rows are bf16, not f16
  std::int32_t rotate = 0, smooth_k = 0;
  std::int32_t k_by_channel = 0;  ///< K in tiers has a scale a channel, and is not rotated
  std::int32_t balance_k = 0;     ///< K in tiers is divided by powers of two of its channels
  std::int32_t smooth_v = 0;      ///< V in tiers may lack its mean
  std::int32_t sets = 1;          ///< of means and powers of two that a layer has room for
  DevicePool pool[most_tiers];

  Entry* entries = nullptr;            ///< [slots][layers][heads_kv][most_pages], by `first`
  std::int32_t* counts = nullptr;      ///< [slots][layers][heads_kv] entries in use
  std::int32_t* lengths = nullptr;     ///< [slots][layers] tokens
  std::int32_t* set_counts = nullptr;  ///< [slots][layers] sets in use (kvcache/keys/drift.hpp)
  float* k_means = nullptr;            ///< [slots][layers][sets][heads_kv][d]; zeros until then
  /// Likewise: exponents of what K is divided by. With balance_k alone.
  std::uint8_t* k_shifts = nullptr;
  float* v_means = nullptr;  ///< [slots][layers][sets][heads_kv][dv] likewise; with smooth_v alone

  /// [slots] SlotError: not 0 where a slot is in no use, or where its contents are not what was
  /// asked for. Nothing is appended to it then, and decode gives its queries NaN. Null: for decode
  /// alone, no slot is like that.
  std::uint32_t* errors = nullptr;

  QATTN_HD std::int32_t blocks_per_page() const { return page_size / formats::kv_block_tokens; }
  QATTN_HD bool rotates_k() const { return rotate != 0 && k_by_channel == 0; }
  QATTN_HD std::int64_t layer_index(std::int64_t slot, std::int64_t layer) const {
    return slot * layers + layer;
  }
  QATTN_HD std::int64_t head_index(std::int64_t slot, std::int64_t layer, std::int64_t head) const {
    return layer_index(slot, layer) * heads_kv + head;
  }
  QATTN_HD Entry* table(std::int64_t slot, std::int64_t layer, std::int64_t head) const {
    return entries + head_index(slot, layer, head) * most_pages;
  }
  QATTN_HD bool freezes() const { return smooth_k != 0 || balance_k != 0 || smooth_v != 0; }
  QATTN_HD std::int64_t set_index(std::int64_t slot, std::int64_t layer, std::int64_t head,
                                  int set) const {
    return (layer_index(slot, layer) * sets + set) * heads_kv + head;
  }
  QATTN_HD float* v_mean(std::int64_t slot, std::int64_t layer, std::int64_t head, int set) const {
    return v_means + set_index(slot, layer, head, set) * dv;
  }
  QATTN_HD std::uint8_t* k_shift(std::int64_t slot, std::int64_t layer, std::int64_t head,
                                 int set) const {
    return k_shifts + set_index(slot, layer, head, set) * d;
  }
  QATTN_HD float* k_mean(std::int64_t slot, std::int64_t layer, std::int64_t head, int set) const {
    return k_means + set_index(slot, layer, head, set) * d;
  }
};

}  // namespace qattn::kv
