// A paged KV cache in mixed precision: the newest tokens and the first ones in 16 bits, the others
// in tiers of 2, 3, 4 or 8 bits, so that the average stays within a budget. Decode reads it as it
// lies; there is no second copy. Meaning, layout and errors: docs/NUMERICS.md, "Mixed-precision KV
// cache".
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "qattn/attention.hpp"
#include "qattn/status.hpp"
#include "qattn/tensor_view.hpp"

namespace qattn {

/// Bits of the codes of K and of V: 2, 3, 4 or 8 each.
struct KvTier {
  int k_bits = 4;
  int v_bits = 4;
  bool operator==(const KvTier&) const = default;
};

/// What a page's importance is until it is told: append(), observe() and set_importance() do. What
/// they tell is in the unit of decode()'s mass, and observe() averages into it. The error that a
/// page is expected to cause is its importance times what its tier loses (docs/NUMERICS.md).
enum class KvImportance : std::int32_t {
  uniform,  ///< every page weighs the same
  /// Inverse of the mean square of its keys' elements, without keys that smooth_k would leave out:
  /// small keys draw attention. A guess, in another unit, which the first observe() replaces.
  key_norm,
};

struct KvCacheOptions {
  std::int64_t layers = 1;
  std::int64_t heads_kv = 1;
  /// Head dimension of Q and K, from 1 to 576. Pages hold multiples of 32, the rest zeros, which
  /// count as bytes; a cache on a GPU takes no others, and none above 256.
  std::int64_t d = 128;
  std::int64_t dv = 128;               ///< of V, from 1 to 512: likewise
  Format window_format = Format::f16;  ///< f16 or bf16: what rows are kept in first
  std::int64_t page_size = 16;         ///< tokens: 16, 32 or 64; a page lies in one tier
  std::int64_t window = 128;  ///< newest tokens in 16 bits: a multiple of page_size, at least one
  std::int64_t sinks = 16;    ///< first tokens in 16 bits: a multiple of page_size
  /// Best first; no later one may have more bits of K or of V. At most 7.
  std::vector<KvTier> tiers = {{8, 8}, {4, 4}, {3, 3}, {2, 2}};
  /// Bits an element of K and V on average, window, scales and page tables counted, in every
  /// (sequence, layer). 0: no budget, every page stays in the first tier.
  double average_bits = 0;
  /// The budget holds from this length on; below it a sequence may take as many bytes as at it. 0:
  /// twice shortest_length(). A length at which the window alone is too much is refused.
  std::int64_t budget_from = 0;
  /// Subtract each channel's mean, frozen when a page is first quantised: of the keys that are then
  /// in 16 bits, without those 4 to 8 times as large as the median and more. Keys or values that
  /// drift later get another mean, and powers of two, for their pages: up to 8 of each.
  bool smooth_k = true;
  /// Divide loud channels of K by powers of two and multiply Q by them, frozen with the mean and
  /// from the same keys; where no channel is loud nothing changes. Not with K's scales per channel,
  /// which need it not.
  bool balance_k = true;
  /// Subtract each channel's mean of V, frozen with K's, in heads whose V is far from 0 beside what
  /// it varies; exact, for the weights of a softmax add up to 1.
  bool smooth_v = true;
  /// Hadamard rotation of K and V before they are quantised; of V alone with K's scales per
  /// channel, which want the channels as they are.
  bool rotate = true;
  /// Scales of K in tiers: per_token, or per_channel over the tokens of a page, which suits keys
  /// some of whose channels vary far more than others, and costs 2 d + 16 bytes a page and head
  /// instead of 2 page_size. V has a scale a token.
  Granularity k_granularity = Granularity::per_token;
  KvImportance importance = KvImportance::uniform;
  float importance_decay = 0.9f;  ///< observe(): what is kept of the old value, in [0, 1)
  /// A page that was demoted before is demoted again only where that costs this much less than
  /// demoting another: 0.25 is a quarter.
  float hysteresis = 0.25f;
  int threads = 0;  ///< CPU threads, at most: AttentionOptions::threads
};

/// Memory of a cache in bytes. total is what is allocated and the sum of the others.
struct KvBytes {
  std::int64_t codes = 0;   ///< of pages in tiers; a page that several sequences share counts once
  std::int64_t scales = 0;  ///< of the same pages
  std::int64_t window = 0;  ///< pages in 16 bits
  std::int64_t tables = 0;  ///< page tables: place, tier, first token, tokens alive, importance
  std::int64_t means = 0;   ///< of K's and V's channels
  std::int64_t spare = 0;   ///< free pages of the pools, room to grow, bookkeeping
  std::int64_t total = 0;
};

/// One (sequence, layer).
struct KvUsage {
  std::int64_t length = 0;                ///< tokens appended and not truncated
  std::int64_t bytes = 0;                 ///< what the budget counts; shared pages count in full
  std::int64_t allowed_bytes = 0;         ///< by the budget; 0: no budget
  double average_bits = 0;                ///< 8 bytes / elements of K and V of `length` tokens
  std::int64_t window_tokens = 0;         ///< alive in 16 bits, summed over heads
  std::vector<std::int64_t> tier_tokens;  ///< alive in each tier, summed over heads
  std::int64_t balanced_channels = 0;     ///< of K, that balance_k divides, summed over heads
  std::int64_t shifted_heads = 0;         ///< heads whose V lost its mean
};

/// New tokens of some sequences.
struct KvAppendTensors {
  TensorView k;  ///< (B, S, Hkv, D) or (B, Hkv, S, D); packed (T, Hkv, D) or (Hkv, T, D); f
  TensorView v;  ///< the same with Dv
  TensorView cu_seqlens;  ///< (B + 1) s32 or s64: k and v are packed
  /// Optional (B, Hkv, ceil(S' / 16)) f32, S' the longest length after the call: importance of
  /// blocks by position, for the pages that this call fills or quantises. From a prefill's own
  /// attention, say, since what is quantised without it weighs the same everywhere. From 0 to 1e15,
  /// in the unit of decode()'s mass where observe() follows.
  TensorView importance;
};

namespace detail {
struct KvCacheData;
}

/// Not thread-safe: one call at a time, but decode() of several threads may read one cache. Calls
/// that fail leave it as it was. A child of fork() has what another thread was changing half
/// changed: callers hold their own lock over fork().
class KvCache {
 public:
  /// Errors: invalid_argument names the option, its value and the rule; a budget that does not hold
  /// at budget_from names the shortest length at which it does.
  static Result<KvCache> create(const KvCacheOptions& options);
  /// The shortest length, in whole pages, from which on the budget holds with every page in the
  /// last tier. Errors: invalid_argument if it holds at none.
  static Result<std::int64_t> shortest_length(const KvCacheOptions& options);

  KvCache(KvCache&&) noexcept;
  KvCache& operator=(KvCache&&) noexcept;
  ~KvCache();

  const KvCacheOptions& options() const;

  /// An empty sequence; the number is never given twice.
  Result<std::int64_t> add_sequence();
  /// A sequence with the same contents. Pages are shared until one of the two changes them.
  Result<std::int64_t> fork(std::int64_t sequence);
  Status release(std::int64_t sequence);
  Result<std::int64_t> length(std::int64_t sequence, std::int64_t layer) const;

  /// Appends S tokens to each of B different sequences in one layer: a prefill or a decode step.
  /// Tokens that leave the window are quantised, and pages demoted as far as the budget asks.
  /// A quantised page that was cut and grows is in 16 bits again first, and its tokens are rounded
  /// twice. Errors: invalid_argument; out_of_memory, also if the budget cannot hold, which only
  /// files of earlier versions bring about.
  Status append(std::int64_t layer, std::span<const std::int64_t> sequences,
                const KvAppendTensors& tensors, Layout layout = Layout::bshd);
  /// Forgets tokens [length, ...) in every layer that has them. The budget of what is left is
  /// smaller: pages are demoted as far as it asks. Errors: invalid_argument; out_of_memory, with
  /// nothing changed, where there is no memory for these.
  Status truncate(std::int64_t sequence, std::int64_t length);
  /// Forgets tokens [begin, end) of one KV head, or of all (-1), in one layer, or in all (-1);
  /// the others keep their positions. Pages without tokens are freed, and K's means of a layer
  /// without quantised pages are forgotten.
  Status evict(std::int64_t sequence, std::int64_t layer, std::int64_t head, std::int64_t begin,
               std::int64_t end);

  /// Folds probability mass into importance: mass (B, Hq, ceil(S / 16)) f32 as decode() gives it;
  /// what counts for a KV head is the root of the mean square over its query heads. It is averaged
  /// into what a page was told or observed before (importance_decay) and replaces what key_norm
  /// guessed. Errors: invalid_argument, also for a mass that is negative or not finite.
  Status observe(std::int64_t layer, std::span<const std::int64_t> sequences,
                 const TensorView& mass);
  /// Sets importance: (Hkv, ceil(S / 16)) f32, from 0 to 1e15, of one sequence and layer; in the
  /// unit of mass where observe() follows.
  Status set_importance(std::int64_t sequence, std::int64_t layer, const TensorView& importance);

  /// The decoded contents of one (sequence, layer), K's mean and rotation undone: k (Hkv, S, D), v
  /// (Hkv, S, Dv) f32; tiers (Hkv, S) s32: -1 evicted, 0 16 bits, 1 the first tier, and so on.
  /// Evicted tokens read as NaN. Any of the three may be absent.
  Status read(std::int64_t sequence, std::int64_t layer, const TensorView& k, const TensorView& v,
              const TensorView& tiers) const;

  /// Writes everything to a .safetensors file, shared pages once: beside `path` first, then under
  /// its name. Errors: invalid_argument names the file.
  Status save(const std::string& path) const;
  /// The cache that save(), or a GpuKvCache's, wrote; sequences keep their numbers. Errors:
  /// invalid_argument says what is wrong with the file, whatever it holds.
  static Result<KvCache> load(const std::string& path, int threads = 0);

  KvBytes bytes() const;
  Result<KvUsage> usage(std::int64_t sequence, std::int64_t layer) const;

  const detail::KvCacheData& data() const { return *data_; }

 private:
  explicit KvCache(std::unique_ptr<detail::KvCacheData> data);
  std::unique_ptr<detail::KvCacheData> data_;
};

/// Queries of B sequences against one layer of their caches. They are the newest Sq tokens: query i
/// is at position length - Sq + i, and its own K and V were appended before.
struct KvDecodeTensors {
  TensorView q;          ///< (B, Sq, Hq, D) or (B, Hq, Sq, D), f; Sq 1 to 8
  TensorView out;        ///< (B, Sq, Hq, Dv) or (B, Hq, Sq, Dv), f
  TensorView lse;        ///< optional (B, Hq, Sq) f32
  TensorView sinks;      ///< optional (Hq) f32: logits that only join the denominator
  TensorView tree_mask;  ///< optional (B, Sq, Sq) b8: may query i look at the j-th newest token?
  /// Optional (B, Hq, ceil(S / 16)) f32, S the longest sequence: the probability that lies on each
  /// block of 16 tokens, averaged over the Sq queries; what observe() takes.
  TensorView mass;
};

struct KvDecodeOptions {
  Layout layout = Layout::bshd;
  std::optional<float> softmax_scale;  ///< default 1 / sqrt(D); finite
  bool causal = true;                  ///< a query sees no token behind its own
  std::int64_t window_left = -1;       ///< keys at or behind position - left; -1: unlimited
  float softcap = 0.0f;                ///< s = c * tanh(s / c); 0: off
  int threads = 0;                     ///< 0: the cache's
  /// Adds to the score of every token whose K has 2, 3 or 4 bits half the variance that rounding K
  /// left in it, so that exp(score) is right in the mean: without it tokens in few bits get too
  /// little weight beside others (docs/NUMERICS.md). Not with a softcap, nor on a GPU where K has a
  /// scale a channel.
  bool debias = false;
};

/// Attention over window, sinks and every tier in one call. The order of operations is
/// attention()'s (softmax scale, softcap, masks, sink); evicted tokens count as masked. A query
/// that sees no key gives O = 0 and LSE = -inf (with a sink: its logit). NaN or Inf in a token
/// makes the queries NaN that see it. Errors: invalid_argument names the tensor, the value and the
/// rule; outputs stay untouched.
Status decode(const KvCache& cache, std::int64_t layer, std::span<const std::int64_t> sequences,
              const KvDecodeTensors& tensors, const KvDecodeOptions& options = {});

}  // namespace qattn
