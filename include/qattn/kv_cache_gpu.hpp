// The mixed-precision KV cache (kv_cache.hpp) in the memory of a GPU. It holds what KvCache holds
// for the same calls, bit for bit, and decides the same; but everything that changes lies on the
// device, and append(), decode(), observe() and set_importance() only enqueue kernels: they do not
// allocate, do not wait and can be captured in a graph, which then replays on the cache as it is.
// Meaning and errors: docs/NUMERICS.md, "Mixed-precision KV cache"; what a GPU cannot tell at once:
// "On a GPU" there.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "qattn/kv_cache.hpp"

namespace qattn {

/// What memory is there for. All of it is taken by create().
struct KvGpuCapacity {
  std::int64_t sequences = 1;  ///< at a time
  std::int64_t tokens = 0;     ///< of each
  /// Pages in 16 bits, then of each tier, shared by all sequences, layers and heads; a page that
  /// changes its tier needs its new place before the old one is free. Empty: as many as are ever
  /// needed, which with several tiers is more than the budget's bytes.
  std::vector<std::int64_t> pages;
};

/// New tokens, in the cache's device memory.
struct KvGpuAppendTensors {
  TensorView slots;   ///< (B) s32: the sequences, each once
  TensorView k;       ///< (B, S, Hkv, D) or (B, Hkv, S, D); f
  TensorView v;       ///< the same with Dv
  TensorView counts;  ///< optional (B) s32: only the first counts[b] of the S tokens are there
  /// Optional (B, Hkv, N) f32, N at least ceil(S' / 16), S' the longest length after the call: as
  /// KvAppendTensors::importance. Only values of pages that the call fills or quantises are read.
  TensorView importance;
};

/// Not thread-safe, and one stream at a time: calls that share a cache are ordered by the caller.
class GpuKvCache {
 public:
  /// Errors: invalid_argument names the option, its value and the rule; out_of_memory; unsupported
  /// where the device has no such kernels.
  static Result<GpuKvCache> create(const KvCacheOptions& options, const KvGpuCapacity& capacity,
                                   Device device, Stream stream = nullptr);
  GpuKvCache(GpuKvCache&&) noexcept;
  GpuKvCache& operator=(GpuKvCache&&) noexcept;
  ~GpuKvCache();  ///< on the stream of create()

  const KvCacheOptions& options() const;
  /// Is a sequence in that slot? After load(): was it in the file?
  bool holds(std::int64_t slot) const noexcept;

  /// The slot of an empty sequence, the lowest that is free: what `slots` tensors hold.
  Result<std::int64_t> add_sequence(Stream stream = nullptr);
  /// A slot with the same contents, in the same pages: it takes none. An append that writes into a
  /// page that others hold, too (the open one), or moves it to another tier takes a page of its own
  /// for it, as KvCache does; one that finds none fails like any append. A page is free again when
  /// nobody holds it. A slot whose error word is set hands on that word and nothing else.
  Result<std::int64_t> fork(std::int64_t slot, Stream stream = nullptr);
  Status release(std::int64_t slot, Stream stream = nullptr);

  /// Enqueues the append of S tokens (or counts[b]) to each of B slots in one layer. Errors that
  /// only the device can see (a pool without pages, a budget that cannot hold, more tokens than
  /// capacity, bad slots, counts or importance) leave that slot as it was and set its error word
  /// and the device's (device_errors()): nothing is appended to that slot any more, and decode
  /// makes its queries NaN, until it is released.
  Status append(std::int64_t layer, const KvGpuAppendTensors& tensors, Layout layout = Layout::bshd,
                Stream stream = nullptr);
  /// Enqueue what KvCache's do. Where a pool has no page for one that the budget asks to be demoted
  /// when a slot is shorter, no page of that layer is, and the next append that opens a page is
  /// to do it.
  Status truncate(std::int64_t slot, std::int64_t length, Stream stream = nullptr);
  Status evict(std::int64_t slot, std::int64_t layer, std::int64_t head, std::int64_t begin,
               std::int64_t end, Stream stream = nullptr);

  /// Enqueues KvCache::observe() of slots (B) s32: mass (B, Hq, N) f32, N at least ceil(S / 16). A
  /// mass that is negative, not finite or beyond 1e15 leaves its slot as it was and sets the
  /// device's error word.
  Status observe(std::int64_t layer, const TensorView& slots, const TensorView& mass,
                 Stream stream = nullptr);

  /// Enqueues KvCache::set_importance(): importance (Hkv, N) f32, N at least ceil(S / 16), S the
  /// length when the kernel runs. Too few blocks, a value that is not from 0 to 1e15 in the first
  /// ceil(S / 16), or a slot in which something went wrong: nothing of the slot changes, and the
  /// device's error word is set.
  Status set_importance(std::int64_t slot, std::int64_t layer, const TensorView& importance,
                        Stream stream = nullptr);

  // These wait for the stream.

  /// Ok, or what went wrong in a slot since it was added.
  Status status(std::int64_t slot, Stream stream = nullptr) const;
  Result<std::int64_t> length(std::int64_t slot, std::int64_t layer, Stream stream = nullptr) const;
  /// KvCache::usage(). Of a slot in which something went wrong: as it was before.
  Result<KvUsage> usage(std::int64_t slot, std::int64_t layer, Stream stream = nullptr) const;
  /// KvCache::read() into tensors in host memory. For tests: it copies page by page.
  Status read(std::int64_t slot, std::int64_t layer, const TensorView& k, const TensorView& v,
              const TensorView& tiers, Stream stream = nullptr) const;

  /// Writes the file that KvCache::save() writes, which KvCache::load() and load() read: slots are
  /// the numbers of its sequences, and the next one is the highest slot's plus 1. A copy of all
  /// pages in use lies in host memory meanwhile. Errors: invalid_argument names the file, or a slot
  /// in which something went wrong, which a file cannot say: release it first.
  Status save(const std::string& path, Stream stream = nullptr) const;
  /// The cache of a file, which lies in host memory meanwhile: its options, and its sequences in
  /// the slots of their numbers. Errors: as KvCache::load() and create(); invalid_argument names
  /// the capacity that is too small for the file's sequences, tokens or pages, and nothing is
  /// allocated then.
  static Result<GpuKvCache> load(const std::string& path, const KvGpuCapacity& capacity,
                                 Device device, Stream stream = nullptr);

  /// What is allocated, used or not: pools in `codes`, `scales` and `window`; free lists, the
  /// counts of pages' holders and the plan of the append under way in `spare`.
  KvBytes bytes() const;

  struct Data;
  const Data& data() const { return *data_; }

 private:
  explicit GpuKvCache(std::unique_ptr<Data> data);
  std::unique_ptr<Data> data_;
};

/// Bytes of decode()'s workspace for a call of such shapes, whatever the cache holds. Errors: as
/// decode()'s.
Result<std::size_t> decode_workspace(const GpuKvCache& cache, std::int64_t layer,
                                     const TensorView& slots, const KvDecodeTensors& tensors,
                                     const KvDecodeOptions& options = {});

/// Enqueues KvCache's decode() of slots (B) s32, with tensors in the cache's device memory; mass
/// may have any number of blocks: those behind the sequence are zeros, those that it lacks are left
/// out. `workspace`: decode_workspace() bytes of the device, aligned to 256, in use until the
/// kernels have run. Nothing is allocated and nothing waits. A slot that is in no use, whose error
/// word is set or that has fewer than Sq tokens makes its queries and their mass NaN and sets the
/// device's error word. Errors: invalid_argument, and unsupported where the device has no kernel
/// for D and Dv, and of debias where K has a scale a channel, name the tensor or option, its value
/// and the rule; outputs stay untouched.
Status decode(const GpuKvCache& cache, std::int64_t layer, const TensorView& slots,
              const KvDecodeTensors& tensors, const KvDecodeOptions& options, void* workspace,
              std::size_t workspace_bytes, Stream stream = nullptr);

}  // namespace qattn
