// The judge: attention in float64, written to be obviously right, not fast. It shares no code with
// the kernels and ignores the recipe (inputs are used as they are).
#pragma once

#include <cstdint>
#include <functional>
#include <span>

#include "qattn/attention.hpp"

namespace qattn {

struct ReferenceOptions {
  /// Only these query rows (index inside the sequence) are computed, for every head and sequence;
  /// empty: all. The others are left untouched in `out`.
  std::span<const std::int64_t> rows;
  int threads = 0;  ///< at most: AttentionOptions::threads; 0: the options'
  /// Called with the fraction done (0 to 1), from one thread; may be empty.
  std::function<void(double)> progress;
};

/// O and LSE in float64 by the definition at the top of attention.hpp. `out` is dense
/// (B, Hq, Sq, Dv) (packed variable length: (Hq, T, Dv); projected: (B, Sq, E) and (T, E)), `lse`
/// may be empty or (B, Hq, Sq) / (Hq, T). q, k, v must be f32, f16 or bf16. Errors as plan() and
/// run().
Status reference_attention(const AttentionTensors& tensors, const AttentionOptions& options,
                           std::span<double> out, std::span<double> lse = {},
                           const ReferenceOptions& reference = {});

/// Differences between an output and the reference (docs/NUMERICS.md, "Metrics").
struct ErrorMetrics {
  double nrmse = 0;  ///< |o - ref| / |ref|, Frobenius
  double max_abs_err = 0;
  double cosine = 1;            ///< over everything
  double worst_row_cosine = 1;  ///< the lowest cosine of one row of Dv values
  std::int64_t rows = 0;
  std::int64_t nan_rows = 0;      ///< rows of the output that hold NaN or Inf
  std::int64_t nan_ref_rows = 0;  ///< the same of the reference
};

/// `out` and `ref` hold rows of `row` values. Rows that are zero in both count as equal. Values
/// that are NaN in both, or the same Inf, are left out, but their rows counted; a NaN or Inf that
/// only one of them has makes every error and cosine NaN, and so do values of which all are left
/// out.
ErrorMetrics compare(std::span<const float> out, std::span<const double> ref, std::int64_t row);

}  // namespace qattn
