// What prefill kernels know of their rows from tile to tile: references, sums, and what became of
// them.
#pragma once

#include "isa/fragment.hpp"
#include "kernels/attention/common/score.hpp"
#include "kernels/attention/rows/register_output.cuh"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

/// Holds what P V has added up, wherever that is. rescale() multiplies it, a factor for each of the
/// R rows of a thread. All lanes of a warp call it, or none, where no reference moves.
template <class T, int R>
concept OutputOfRows = requires(T& output, const float (&by)[R]) { output.rescale(by); };

/// The rows of a thread: R of them. `S` gives Fragment, m_tiles, keys, u8; tile_p: is P relative to
/// its own tile? whole_references: is it to powers of two, which seldom move, and update_max() has
/// the choice? does_blocks_again: may it be asked for what Hopper's kernel has left?
template <class S>
struct RowState {
  using F = typename S::Fragment;
  static constexpr int R = F::rows * S::m_tiles;

  const AttentionParams& p;
  float max[R], sum[R] = {};
  float excess[R] = {};      ///< add_excess()
  float exact[R] = {};       ///< Hopper: the same of P before rounding, times u8_value_unit
  float peak[R];             ///< whole references: this lane's largest exponent of P
  float lse_offset[R] = {};  ///< what smooth_k took from all scores, in units of log2
  unsigned bad_rows = 0;     ///< bit r: row r of this thread is NaN
  /// 16-bit V: a row has met NaN or Inf there, and may not have seen it.
  bool needs_fallback = false;

  QATTN_DEVICE explicit RowState(const AttentionParams& params) : p(params) {
#pragma unroll
    for (int r = 0; r < R; ++r) max[r] = unseen, peak[r] = -tile::infinity();
  }

  /// Tokens of a tile of zeros join the sums as if V's scale were 2^-90, times the slack: 2^98.
  static constexpr float slack = S::tile_p || S::whole_references ? 8.0f : 0.0f;
  /// Does it do blocks again that Hopper's kernel has left? Then P rounds as there, relative to the
  /// maximum: what made it leave them must not show in their other rows.
  QATTN_DEVICE bool refers_to_maximum() const {
    if constexpr (!S::whole_references) {
      return true;
    } else if constexpr (S::does_blocks_again) {
      return p.fallback_flags != nullptr;
    } else {
      return false;
    }
  }
  QATTN_DEVICE float reach() const {
    return S::whole_references && refers_to_maximum() ? 0.0f : slack;
  }
  /// The reference for rows that reach `top`. To powers of two floats round alike: which of them it
  /// is, does not matter.
  QATTN_DEVICE float reference_for(float top) const {
    return refers_to_maximum() ? top : ceilf(top);
  }

  /// The reference before a key was seen. Powers of two are subtracted as they are: it lies below
  /// all scores, but lets those that are masked be 0.
  static constexpr float unseen = S::whole_references ? -0x1p127f : -__builtin_huge_valf();

  /// Takes the tile's maxima into the references; what was accumulated shrinks accordingly. Where P
  /// is relative to its own tile, or to powers of two, any reference serves that keeps exponentials
  /// in range: it moves only when a maximum is far above it, which is rare.
  template <OutputOfRows<R> Output>
  QATTN_DEVICE void update_max(const float (&top)[R], Output& output) {
    float rescale[R];
    bool changed = false;
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const float next = top[r] > max[r] + reach() ? reference_for(top[r]) : max[r];
      rescale[r] = max[r] == unseen ? 0.0f : isa::exp2(max[r] - next);
      // Nothing has joined the output before the first reference.
      changed |= next != max[r] && max[r] != unseen;
      max[r] = next;
      sum[r] *= rescale[r];
      if constexpr (S::u8) excess[r] *= rescale[r], exact[r] *= rescale[r];
    }
    if (isa::any(changed)) output.rescale(rescale);
  }

  /// Takes a tile's largest exponents of P, to the bit what P itself is made of, from the lanes'
  /// own scores `top`, times `scale`. They ask one another for maxima only when a reference has to
  /// move: beside the key that moves it older exponents are forgotten.
  template <OutputOfRows<R> Output>
  QATTN_DEVICE void take_peaks(const float (&top)[R], const float (&scale)[R], Output& output) {
    float near[R];
    bool above = false;
#pragma unroll
    for (int r = 0; r < R; ++r) {
      near[r] = fmaf(top[r], scale[r], -max[r]);
      above |= near[r] > reach();
    }
    if (isa::any(above)) {
      float row_top[R], before[R];
#pragma unroll
      for (int r = 0; r < R; ++r) row_top[r] = top[r] * scale[r], before[r] = max[r];
      isa::row_maxima<F>(row_top);
      update_max(row_top, output);
#pragma unroll
      for (int r = 0; r < R; ++r) {
        if (max[r] != before[r]) peak[r] = -tile::infinity();
        near[r] = fmaf(top[r], scale[r], -max[r]);
      }
    }
#pragma unroll
    for (int r = 0; r < R; ++r) peak[r] = fmaxf(peak[r], near[r]);
  }

  /// The reference that is subtracted in exponents: 0 where nothing was seen, so that masked scores
  /// give 0 and not NaN.
  QATTN_DEVICE static float reference(float top) { return top == -tile::infinity() ? 0.0f : top; }

  /// update_max() after bring_near(): maxima of far rows leave V's scales out, which they have no
  /// bits for. `ref`: what is subtracted in exponents of near scores.
  template <OutputOfRows<R> Output>
  QATTN_DEVICE void update_far_max(const float (&top)[R], const float (&far)[R], float (&ref)[R],
                                   Output& output) {
    float raised[R];
#pragma unroll
    for (int r = 0; r < R; ++r) raised[r] = far[r] != 0.0f ? far[r] : top[r];
    update_max(raised, output);
#pragma unroll
    for (int r = 0; r < R; ++r) ref[r] = reference(max[r]) - far[r];
  }

  /// What V's codes, 128 too large (register_output.cuh), add to each channel, the part of this
  /// lane. `count`: its sums of a tile's P; `share`: the tile's weight, times u8_share_unit. (With
  /// the sums of all four lanes a channel of zeros would end as exactly 0; their shuffles cost 5 %
  /// at D 64, 1 % at D 128, H200.)
  QATTN_DEVICE void add_excess(const std::uint32_t (&count)[R], const float (&share)[R]) {
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const auto codes = static_cast<std::int32_t>(count[r]);
      excess[r] = fmaf(u8_sum_as_float<S>(codes), share[r], excess[r]);
    }
  }
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
