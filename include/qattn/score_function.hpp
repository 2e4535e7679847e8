// Score and mask functions of the caller (FlexAttention's score_mod and mask_mod): any C++ callable
// or a C function pointer. The callable is inlined into a loop over a run of keys in the caller's
// own unit; the library calls that loop, so a function costs one indirect call per 128 keys.
//
// The callable is also what a GPU kernel inlines: it is called for one score at a time with the
// same arguments, and knows nothing of runs, tiles or threads. For both places it is a functor
//   struct RelativeBias {
//     float slope;
//     QATTN_HOST_DEVICE float operator()(float score, std::int64_t batch, std::int64_t head,
//                                        std::int64_t query, std::int64_t key) const {
//       return score - slope * static_cast<float>(query < key ? key - query : query - key);
//     }
//   };
// (or a lambda marked alike, which nvcc takes with --extended-lambda) that
//   - is a class whose copy is its bytes (DeviceScoreFunction, DeviceMaskFunction): a kernel gets
//     it by value, so no std::function and no virtual functions; what its pointers and references
//     (which C++ does not let a concept see) point to must lie where the kernel can read it;
//   - returns exactly float or bool;
//   - calls only functions that the device has: its own marked ones and <cmath>'s.
// The two places agree bit by bit where the arithmetic does: operators of C++ without contraction
// (-ffp-contract=off, -fmad=false). GPU kernels of attention refuse functions as yet.
#pragma once

#include <concepts>
#include <cstdint>
#include <type_traits>

/// Marks a functor's operator() for host code and kernels alike.
#if defined(__CUDACC__) || defined(__HIPCC__)
#define QATTN_HOST_DEVICE __host__ __device__
#else
#define QATTN_HOST_DEVICE
#endif

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
  bool operator==(const ScoreFunction&) const = default;
};

/// Hides keys: writes 0 where the query may not look. The same rules.
struct MaskFunction {
  void (*apply)(const void* context, const ScoreRun& run, std::uint8_t* visible) = nullptr;
  const void* context = nullptr;
  explicit operator bool() const { return apply != nullptr; }
  bool operator==(const MaskFunction&) const = default;
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

/// Callables that kernels can take as a parameter: see the head of this file.
template <class F>
concept DeviceScoreFunction =
    std::is_class_v<F> && std::is_trivially_copyable_v<F> && requires(const F& f, std::int64_t n) {
      { f(0.0f, n, n, n, n) } -> std::same_as<float>;
    };
template <class F>
concept DeviceMaskFunction =
    std::is_class_v<F> && std::is_trivially_copyable_v<F> && requires(const F& f, std::int64_t n) {
      { f(n, n, n, n) } -> std::same_as<bool>;
    };

}  // namespace qattn
