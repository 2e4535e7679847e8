// Score and mask functions of the caller (FlexAttention's score_mod and mask_mod): any C++ callable
// or a C function pointer. The callable is inlined into a loop over a run of keys in the caller's
// own unit; the library calls that loop, so a function costs one indirect call per 128 keys.
#pragma once

#include <cstdint>

namespace qattn {

/// A run of keys of one query row.
struct ScoreRun {
  std::int64_t batch = 0, head = 0;    ///< sequence and query head
  std::int64_t query = 0;              ///< index inside the sequence
  std::int64_t key = 0;                ///< the first key of the run, inside the sequence
  std::int64_t count = 0;              ///< keys of the run
  std::int64_t queries = 0, keys = 0;  ///< lengths of the sequence, as seqused says
};

/// Changes scores after softcap, bias and ALiBi; keys that a mask hides stay hidden. Must be pure
/// and callable from several threads; `context` must outlive the call. A score that is NaN stays
/// NaN whatever the function makes of it.
struct ScoreFunction {
  void (*apply)(const void* context, const ScoreRun& run, float* scores) = nullptr;
  const void* context = nullptr;
  explicit operator bool() const { return apply != nullptr; }
};

/// Hides keys: writes 0 where the query may not look. The same rules.
struct MaskFunction {
  void (*apply)(const void* context, const ScoreRun& run, std::uint8_t* visible) = nullptr;
  const void* context = nullptr;
  explicit operator bool() const { return apply != nullptr; }
};

/// float f(float score, int64 batch, int64 head, int64 query, int64 key); `f` is kept by address.
template <class F>
ScoreFunction score_function(const F& f) {
  return {[](const void* context, const ScoreRun& run, float* scores) {
            const F& call = *static_cast<const F*>(context);
            for (std::int64_t j = 0; j < run.count; ++j) {
              scores[j] = call(scores[j], run.batch, run.head, run.query, run.key + j);
            }
          },
          &f};
}
template <class F>
ScoreFunction score_function(const F&& f) = delete;  // a temporary would be gone before the call

/// bool f(int64 batch, int64 head, int64 query, int64 key); `f` is kept by address.
template <class F>
MaskFunction mask_function(const F& f) {
  return {[](const void* context, const ScoreRun& run, std::uint8_t* visible) {
            const F& call = *static_cast<const F*>(context);
            for (std::int64_t j = 0; j < run.count; ++j) {
              visible[j] = call(run.batch, run.head, run.query, run.key + j) ? 1 : 0;
            }
          },
          &f};
}
template <class F>
MaskFunction mask_function(const F&& f) = delete;

}  // namespace qattn
