// Quantisation of one operand, the same that attention() does inside. Formulas: docs/NUMERICS.md,
// "Formats and exactness": scale = amax * (1 / qmax), at least 2^-126; code = round half to even of
// x * (1 / scale), clamped to the format's range.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "qattn/attention.hpp"
#include "qattn/recipe.hpp"
#include "qattn/status.hpp"
#include "qattn/tensor_view.hpp"

namespace qattn {

struct QuantizeOptions {
  Format format = Format::s8;
  Role role = Role::k;
  Layout layout = Layout::bshd;
  Scaling scaling;  ///< automatic: per_token (V in 8-bit floats: per_channel; group where built in)
  bool smooth = false;  ///< subtract a mean first and return it (Q: per block; K, V: per sequence)
  bool rotate = false;  ///< Hadamard rotation of the rows (after the mean); Q and K only
  int threads = 0;      ///< CPU threads, at most: AttentionOptions::threads; 0 on a GPU
  /// What QuantizeTensors::static_scale was made for: AttentionOptions::scales_for. `role` says
  /// which of its formats and toggles count, and these must be `format`, `smooth` and `rotate`.
  /// quantize() refuses it without a static_scale.
  std::optional<Recipe> scales_for;
};

/// Shapes and formats that quantize() needs for its outputs (data pointers null, dense strides).
struct QuantizeShapes {
  TensorView codes;   ///< x's shape and order of dimensions
  TensorView scale;   ///< see Granularity
  TensorView global;  ///< nvfp4 only: (B, H) f32, one per head's matrix
  TensorView mean;    ///< if smooth: K, V (B, H, D); Q (B, H, ceil(S / block), D); f32
};

struct QuantizeTensors {
  TensorView x;             ///< (B, S, H, D) or (B, H, S, D), f32, f16 or bf16
  TensorView codes, scale;  ///< outputs
  TensorView global;        ///< output of nvfp4
  TensorView mean;          ///< output if smooth
  /// Optional input of scale's shape, positive and finite: used instead of amax, copied to scale.
  TensorView static_scale;
  TensorView
      cu_seqlens;  ///< optional (B + 1), s32 or on CPUs s64: x is packed (T, H, D) or (H, T, D)
};

struct QuantizeReport {
  std::int64_t saturated = 0;  ///< codes clipped to the format's range by a static scale
};

/// Errors: invalid_argument if x or the options are wrong (nothing is read but cu_seqlens, which is
/// copied to the host from a GPU, on `stream`).
Result<QuantizeShapes> quantize_shapes(const TensorView& x, const QuantizeOptions& options,
                                       const TensorView& cu_seqlens = {}, Stream stream = nullptr);

/// NaN or Inf in x makes its scale NaN (or, in formats with NaN codes and a static scale, the
/// code). Errors: invalid_argument names the tensor, the value and the rule; outputs stay
/// untouched. On a GPU the work is enqueued on `stream`; with cu_seqlens or static_scale the call
/// waits for it: the first decides the shapes, the second is checked and its clipping counted.
Result<QuantizeReport> quantize(const QuantizeTensors& tensors, const QuantizeOptions& options,
                                Stream stream = nullptr);

/// x = code * scale (* global), then the rotation undone, then + mean. Writes tensors.x (f). CPU
/// only.
Status dequantize(const QuantizeTensors& tensors, const QuantizeOptions& options);

/// Which scale serves token `s` (and, for V's channel granularities, where channel d's begins): the
/// index map of Granularity, for printing and testing.
std::int64_t scale_index(const Scaling& scaling, Role role, std::int64_t s);

/// Scales along the token dimension for S tokens: the last extent of the shapes in Granularity.
std::int64_t scale_count(const Scaling& scaling, Role role, std::int64_t tokens);

/// Static scales for diffusion models (document 003): s(t) = s(t_ref) * sigma(t) / sigma(t_ref).
/// `sigma` holds the noise level at each of the caller's steps, in whichever direction they run.
/// Errors: invalid_argument for a step out of range or a sigma that is not positive and finite.
Result<float> scheduled_scale(float scale_at_ref, std::span<const float> sigma, std::int64_t ref,
                              std::int64_t step);

}  // namespace qattn
