// A KV cache stated a second time, token by token: what every token should read as, which pages
// there are, what they weigh. It takes the choice of tiers from the cache under test (that is the
// allocator's test) but checks that every choice was allowed.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "kvcache/plain_quantizer.hpp"
#include "qattn/kv_cache.hpp"

namespace qattn::test {

/// K or V of a token: the values as they are stored (rotated unless K has a scale a channel,
/// without the mean), and their bits.
struct PlainPart {
  std::vector<float> stored;
  int bits = 16;
};

struct PlainToken {
  std::vector<float> k16, v16;  ///< as appended, rounded to the window's format
  PlainPart k, v;
};

/// Tokens that share a page.
struct PlainPage {
  std::int64_t first = 0;
  int tier = 0;
  std::map<std::int64_t, PlainToken> tokens;  ///< alive
  std::shared_ptr<int> identity = std::make_shared<int>(0);
};

struct PlainLayer {
  std::int64_t length = 0;
  std::vector<std::vector<PlainPage>> heads;
  std::vector<std::vector<float>> mean;    ///< a row a head, empty until something is quantised
  std::vector<std::vector<float>> over;    ///< likewise: what K is divided by
  std::vector<std::vector<float>> v_mean;  ///< likewise
};

/// Sums over rows, of one channel: x, x^2, t x; or of the rows' times t: 1, t, t^2.
using PlainSums = std::array<double, 2>;

using PlainSequence = std::vector<PlainLayer>;

class PlainCache {
 public:
  explicit PlainCache(const KvCacheOptions& options) : o_(options) {}

  void add(std::int64_t id);
  void fork(std::int64_t id, std::int64_t copy) { sequences_[copy] = sequences_.at(id); }
  void release(std::int64_t id) { sequences_.erase(id); }
  /// k, v: (S, Hkv, D), already rounded to the window's format; `tiers` as read() gave it after.
  /// Returns what was wrong with the tiers, or "".
  std::string append(std::int64_t id, std::int64_t layer, std::int64_t count,
                     const std::vector<float>& k, const std::vector<float>& v,
                     const std::vector<std::int32_t>& tiers);
  void truncate(std::int64_t id, std::int64_t length);
  /// Takes the tiers that a layer's pages now have; what was wrong with them, or "".
  std::string demote(std::int64_t id, std::int64_t layer, const std::vector<std::int32_t>& tiers);
  void evict(std::int64_t id, std::int64_t layer, std::int64_t head, std::int64_t begin,
             std::int64_t end);

  const std::map<std::int64_t, PlainSequence>& sequences() const { return sequences_; }
  /// What read() should give.
  void contents(std::int64_t id, std::int64_t layer, std::vector<float>& k, std::vector<float>& v,
                std::vector<std::int32_t>& tiers) const;
  /// What usage().bytes should be.
  std::int64_t layer_bytes(std::int64_t id, std::int64_t layer) const;
  /// What bytes() should say, but for `spare` and `total`.
  KvBytes bytes() const;

 private:
  bool in_window(std::int64_t first, std::int64_t length) const;
  bool k_by_channel() const { return o_.k_granularity == Granularity::per_channel; }
  /// K and V of a token as they read.
  void values(const PlainLayer& layer, std::size_t head, const PlainPage& page,
              const PlainToken& token, std::vector<float>& k, std::vector<float>& v) const;
  void open(const PlainLayer& layer, std::size_t head, PlainPage& page) const;
  bool balances() const { return o_.balance_k && !k_by_channel(); }
  void sum_rows(const std::vector<PlainPage>& pages, std::vector<float> PlainToken::* part,
                std::vector<PlainSums>& sums, double& count) const;
  void freeze_mean(PlainLayer& layer) const;
  void requantise(const PlainLayer& layer, std::size_t head, PlainPage& page, int tier) const;
  std::int64_t code_bytes(int tier) const;
  std::int64_t scale_bytes(int tier) const;
  std::int64_t page_bytes(int tier) const { return code_bytes(tier) + scale_bytes(tier); }

  KvCacheOptions o_;
  std::map<std::int64_t, PlainSequence> sequences_;
};

}  // namespace qattn::test
