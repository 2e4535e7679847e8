// What a KV cache is made of. Page tables are arrays of numbers, pools are arrays of pages: nothing
// in either points anywhere, so that both can lie on a device.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "core/operand.hpp"
#include "formats/kv/layout.hpp"
#include "kernels/cpu/words.hpp"
#include "kvcache/entry.hpp"
#include "kvcache/keys/drift.hpp"
#include "kvcache/pool.hpp"
#include "qattn/kv_cache.hpp"

namespace qattn::kv {

/// The longest sequence.
inline constexpr std::int64_t most_tokens = std::int64_t{1} << 30;

using Table = std::vector<Entry>;

/// What pages are moved by before they are quantised (kvcache/keys/drift.hpp); none until a page is
/// quantised, and where the options ask for none of them. A head need not have all sets.
struct Sets {
  std::int64_t count = 0, heads = 0;
  std::vector<float> k_mean;          ///< [count][heads][d]; zeros without smooth_k
  std::vector<std::uint8_t> k_shift;  ///< [count][heads][d] exponents of what K is divided by
  std::vector<float> v_mean;          ///< [count][heads][dv]; zeros of heads that keep theirs

  void resize(std::int64_t sets, const KvCacheOptions& options);
  std::int64_t index(std::int64_t head, int set) const { return set * heads + head; }
  Frames frames(std::int64_t head, int set, std::int64_t d, std::int64_t dv) const {
    const std::int64_t i = index(head, set);
    return {{k_mean.empty() ? nullptr : k_mean.data() + i * d,
             k_shift.empty() ? nullptr : k_shift.data() + i * d},
            {v_mean.empty() ? nullptr : v_mean.data() + i * dv, nullptr}};
  }
};

struct Layer {
  std::int64_t length = 0;
  std::vector<Table> tables;  ///< [heads_kv]
  Sets sets;

  /// After tokens went: sets that no page was quantised with any more go, too, but for those below
  /// one that stays.
  void forget_sets(const KvCacheOptions& options) {
    std::int64_t stay = 0;
    for (const Table& table : tables) {
      for (const Entry& e : table) {
        if (e.tier > 0) stay = std::max<std::int64_t>(stay, e.set + 1);
      }
    }
    if (stay < sets.count) sets.resize(stay, options);
  }
};

struct Sequence {
  std::int64_t id = 0;
  std::vector<Layer> layers;
};

/// Channels that pages have for rows of that many: panels of codes want multiples of 32, and what
/// is behind a row is zeros.
inline constexpr std::int64_t stored_channels(std::int64_t channels) {
  return (channels + 31) / 32 * 32;
}
/// Room for a row of K or of V.
inline constexpr int most_channels = most_key_channels;
static_assert(stored_channels(most_key_channels) == most_channels);
static_assert(stored_channels(most_value_channels) <= most_channels);

/// Is K over powers of two of its channels what is quantised?
inline bool balances_k(const KvCacheOptions& o) {
  return o.balance_k && o.k_granularity != Granularity::per_channel;
}
/// Is something of K or V frozen when a layer's first page is quantised?
inline bool freezes(const KvCacheOptions& o) { return o.smooth_k || balances_k(o) || o.smooth_v; }

inline void Sets::resize(std::int64_t sets, const KvCacheOptions& o) {
  if (sets == 0) {
    *this = {};
    return;
  }
  const auto rows = static_cast<std::size_t>(sets * o.heads_kv);
  const auto d = static_cast<std::size_t>(stored_channels(o.d));
  const auto dv = static_cast<std::size_t>(stored_channels(o.dv));
  k_mean.resize(rows * d);
  k_shift.resize(balances_k(o) ? rows * d : 0);
  v_mean.resize(o.smooth_v ? rows * dv : 0);
  count = sets;
  heads = o.heads_kv;
}

}  // namespace qattn::kv

namespace qattn::detail {

struct KvCacheData {
  KvCacheOptions options;
  std::int64_t budget_from = 0;
  int most_sets = 1;  ///< of a layer of a sequence: as many as the budget has room for
  const cpu::KernelTable* words = nullptr;
  std::vector<kv::PagePool> pools;      ///< [1 + tiers]; pools[0]: 16 bits
  std::vector<kv::Sequence> sequences;  ///< by ascending id
  std::int64_t next_id = 0;

  // Channels as pages, means and kernels have them; options.d and options.dv are the callers'.
  int d() const { return static_cast<int>(kv::stored_channels(options.d)); }
  int dv() const { return static_cast<int>(kv::stored_channels(options.dv)); }
  std::int64_t blocks_per_page() const { return options.page_size / formats::kv_block_tokens; }
  /// Layout of a block of tier 0 (16 bits), 1, ...
  formats::KvBlock block(int tier) const {
    if (tier == 0) return {d(), dv(), formats::kv_window_bits, formats::kv_window_bits};
    const KvTier& t = options.tiers[static_cast<std::size_t>(tier) - 1];
    return {d(), dv(), t.k_bits, t.v_bits};
  }
  /// Does a tier other than 0 have a scale a channel for K, and not one a token?
  bool k_by_channel() const { return options.k_granularity == Granularity::per_channel; }
  bool balances_k() const { return kv::balances_k(options); }
  formats::KvPage layout(int tier) const {
    return {block(tier), static_cast<int>(blocks_per_page()), tier > 0 && k_by_channel()};
  }
  std::int64_t page_bytes(int tier) const { return layout(tier).bytes(); }
  /// Pools without pages, as the options have them.
  void make_pools() {
    pools.reserve(options.tiers.size() + 1);
    for (std::size_t t = 0; t <= options.tiers.size(); ++t) {
      pools.emplace_back(page_bytes(static_cast<int>(t)));
    }
  }
  kv::PagePool& pool(int tier) { return pools[static_cast<std::size_t>(tier)]; }
  const kv::PagePool& pool(int tier) const { return pools[static_cast<std::size_t>(tier)]; }
  std::byte* page(const kv::Entry& e) const { return pool(e.tier).page(e.page); }

  /// First token behind the sinks that is still in 16 bits when a sequence has `length` tokens.
  std::int64_t window_begin(std::int64_t length) const {
    const std::int64_t old = length > options.window ? length - options.window : 0;
    return old / options.page_size * options.page_size;
  }
  /// Does a page that begins at `first` lie in 16 bits at that length?
  bool in_window(std::int64_t first, std::int64_t length) const {
    return first < options.sinks || first >= window_begin(length);
  }
  /// Bytes that the budget allows one (sequence, layer) of that length; -1: there is none.
  std::int64_t allowed_bytes(std::int64_t length) const;

  int threads() const;
  kv::Sequence* find(std::int64_t id);
  const kv::Sequence* find(std::int64_t id) const {
    return const_cast<KvCacheData*>(this)->find(id);
  }
  void drop(const kv::Entry& e) { pool(e.tier).release(e.page); }
};

}  // namespace qattn::detail

namespace qattn::kv {

/// Mean over a page's blocks of a row of values a block; blocks at and behind `blocks` do not
/// count.
inline float page_weight(const detail::KvCacheData& cache, std::int64_t first, const float* row,
                         std::int64_t blocks) {
  const std::int64_t begin = first / formats::kv_block_tokens;
  const std::int64_t end = std::min(begin + cache.blocks_per_page(), blocks);
  float sum = 0;
  for (std::int64_t i = begin; i < end; ++i) sum += row[i];
  return end > begin ? sum / static_cast<float>(end - begin) : 0.0f;
}

inline Status invalid(std::string message) {
  return Status(Code::invalid_argument, std::move(message));
}

/// Bytes of one set of a layer's means and powers of two, of which the budget counts at least one.
std::int64_t mean_bytes(const KvCacheOptions& options);

/// How many sets a layer may have so that the budget holds from `budget_from` on in any case.
int sets_within(const KvCacheOptions& options, std::int64_t budget_from);

/// Bytes that K and V of one token and layer may take on average.
double budget_per_token(const KvCacheOptions& options);

/// usage() of a (sequence, layer) of that cache.
KvUsage usage_of(const detail::KvCacheData& cache, const Layer& layer);

/// Does the budget allow a layer that is cut to `length` tokens what it then takes?
bool fits(const detail::KvCacheData& cache, const Layer& layer, std::int64_t length);

/// What is wrong with the options by themselves, the budget apart.
Status check_options(const KvCacheOptions& options);

/// A head (-1: all) and a range of tokens to be evicted.
Status check_eviction(const KvCacheOptions& options, std::int64_t head, std::int64_t begin,
                      std::int64_t end);

/// A sequence of this cache and a layer of it (-1 where `any` allows it), or why not.
Status check_place(const detail::KvCacheData& cache, std::int64_t sequence, std::int64_t layer,
                   bool any = false);

}  // namespace qattn::kv
