// The parts of a prefill kernel that know a thread's rows.
#pragma once

#include "kernels/attention/common/epilogue.cuh"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

/// What a warp that owns rows has of them, whatever multiplies the matrices. `S`: as the parts say.
template <class S>
struct RowParts {
  using F = typename S::Fragment;
  using Scores = typename ScoreRules<S>::Scores;
  static constexpr int M = S::m_tiles, R = F::rows * M;

  const AttentionParams& p;
  const WorkTile& work;
  RowMap<S> map;
  RegisterOutput<S> output;
  RowState<S> state;
  ScoreRules<S> rules;

  QATTN_DEVICE RowParts(const AttentionParams& params, const WorkTile& w, int row_warp)
      : p(params), work(w), map(params, w, row_warp), state(params) {}

  QATTN_DEVICE Epilogue<S> epilogue() { return {map, state, output}; }
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
