// What the kernels are told that encode without detours: 16-bit rows in 16-byte pieces to s8 or
// e4m3 with a scale per token or per tile of 64, V in s8 per token and in e4m3 per channel, K less
// its mean.
#pragma once

#include <cstdint>

#include "isa/isa.hpp"
#include "kernels/operand/prepare.hpp"

namespace qattn::kernels {

/// Which tokens of a tile share a scale.
enum class SharedScales : std::int32_t {
  none,
  tile,     ///< all of them
  thread,   ///< those of the same (key % 8) / 2: K's per_thread
  joint,    ///< the same but for tokens that are far smaller: V's per_thread
  channel,  ///< V in e4m3: PreparedTiles::channel_scale; the tokens have none
};

struct PlainRows {
  tile::Rows rows;
  PreparedRows out;
  const float* mean = nullptr;  ///< [batches][heads][padded]: K: subtracted; Q: for dot_mean
  /// Powers of two for the channels of s8 rows, [batches][heads of K][2][padded]; the first are
  /// this operand's. Null: all are 1, as they are where `loud`, [batches][heads of K], says so.
  const float* factors = nullptr;
  const std::uint32_t* loud = nullptr;
  std::int32_t heads_per_mean = 1;  ///< and per factors
  SharedScales shared = SharedScales::none;
};

struct PlainParams {
  PlainRows row[2];  ///< Q, K
  tile::Rows v;
  PreparedTiles v_out;
  SharedScales v_shared = SharedScales::none;
  std::int32_t blocks[3] = {};  ///< slot tiles of all heads, of Q, K, V
  std::int32_t lead = 0;        ///< of the blocks of Q and V, how many come before the others
  bool values_lead = false;     ///< those of V in front of those of Q
  bool e4m3 = false;            ///< codes of Q and K
  isa::Element input = isa::Element::bf16;
  /// The first of two passes: no codes, but what FinishMeans reads.
  bool first_pass = false;
  float* sums[3] = {};  ///< of K's rows; of V maxima: [heads][slot tiles][Channels]

  QATTN_CONSTEXPR const tile::Rows& rows(int role) const { return role == 2 ? v : row[role].rows; }
};

inline namespace QATTN_TARGET {

/// What the path without detours is told of all three operands. False: it does not serve them, or
/// not sequences that are packed, paged or used in part.
bool plan_plain(const Problem& problem, const Recipe& recipe, const PrepareLayout& layout,
                void* workspace, PlainParams& params);

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
