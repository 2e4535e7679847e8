// A cache on the host and one on the emulated device that are given the same calls.
#pragma once

#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "kv_backend.hpp"
#include "kvcache/gpu/data.hpp"
#include "qattn/kv_cache_gpu.hpp"

namespace qattn::test {

struct PairOptions {
  KvCacheOptions cache;
  KvGpuCapacity capacity;
  Format input = Format::f16;
  Layout layout = Layout::bshd;
  unsigned seed = 1;
  bool loud = false;  ///< channels 5, 37, ... of K vary fifty times as much as the others
  bool drift =
      false;  ///< means of K and V, and how loud those channels are, change every few calls
};

/// What an append is given.
struct Step {
  std::int64_t layer = 0;
  std::vector<std::int64_t> slots;   ///< the host's sequences have the same numbers
  std::vector<std::int32_t> counts;  ///< of each; all equal: no tensor of counts
  bool with_importance = false;
  float spread = 1.0f;    ///< of importance, as the power of ten
  bool bad_rows = false;  ///< some rows hold NaN or infinities
  bool all_bad = false;   ///< all do
  /// Those for which a pool of the device has no page: the host's are left alone.
  std::vector<std::int64_t> refused;
};

class Pair {
 public:
  explicit Pair(const PairOptions& options);

  /// One slot more in both.
  void add();
  /// A copy of a slot in both; its number.
  std::int64_t fork(std::int64_t slot);
  /// Both give a slot up.
  void release(std::int64_t slot);
  /// Both give a slot up and take it anew.
  void renew(std::int64_t slot);
  void truncate(std::int64_t slot, std::int64_t length);
  void evict(std::int64_t slot, std::int64_t layer, std::int64_t head, std::int64_t begin,
             std::int64_t end);
  void append(const Step& step);
  /// Random values; the device's tensor has room for all of its tokens.
  void set_importance(std::int64_t slot, std::int64_t layer, float spread);
  void observe(std::int64_t layer, const std::vector<std::int64_t>& slots, float spread);
  /// Both caches go through a file: the host's becomes what the device's file holds, which must be
  /// what it was, the device's what the file of that one holds.
  void through_files(const std::string& path);
  /// Tables, pages, their holders, means, lengths and usage() are the same, and no page of the
  /// device is lost.
  void compare() const;

  GpuKvCache& device() { return *device_; }
  KvCache& host() { return *host_; }
  /// The host's sequence of a slot, -1 where there is none.
  std::int64_t id(std::int64_t slot) const { return ids_[static_cast<std::size_t>(slot)]; }
  std::int64_t length(std::int64_t slot, std::int64_t layer) const;
  std::mt19937& random() { return random_; }

 private:
  std::vector<std::uint8_t> random_rows(std::int64_t rows, std::int64_t channels, const Step& step,
                                        bool loud);

  PairOptions o_;
  KvBackend backend_;
  std::unique_ptr<KvCache> host_;
  std::unique_ptr<GpuKvCache> device_;
  std::vector<std::int64_t> ids_;  ///< the host's sequence of every slot; -1: it has none
  std::mt19937 random_;
  int calls_ = 0;  ///< of append()
};

/// All of a cache's device memory but the slots' error words and the plan under way.
std::vector<std::uint8_t> memory_of(const GpuKvCache& cache);

}  // namespace qattn::test
