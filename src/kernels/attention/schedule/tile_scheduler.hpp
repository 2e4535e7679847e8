// In which order blocks of rows are dealt to a GPU: so that all multiprocessors end together and
// what they read at a time fits L2.
#pragma once

#include <cstdint>
#include <string>

#include "core/problem.hpp"
#include "kernels/attention/common/params.hpp"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

/// Of a plan, from shapes and the device alone. Heads come in groups; a group's blocks from the
/// last to the first, which in a causal sequence is from the longest to the shortest, its heads
/// beside one another; the next group's the other way round.
/// Folded: of works that blocks of a grid take in turn, each second turn is taken backwards.
struct TileScheduler {
  std::int32_t heads_per_group =
      0;                        ///< heads of a group (of all sequences); 0: one head after another
  bool shortest_first = false;  ///< the first group begins with its shortest blocks, for the last
                                ///< one is to end with them
  std::int32_t snake = 0;       ///< work tiles of a turn; 0: all turns run the same way
};

/// How works come to the blocks of a grid.
struct Dealing {
  int rows = 128;       ///< query rows of a work, of one head
  int blocks = 1;       ///< that run at a time
  int bytes = 2;        ///< of a key's and a value's channel together, as the kernel reads them
  bool in_turn = true;  ///< these blocks take all works in turn; false: a block starts as one ends
  int least_turns = 0;  ///< works of a group, in turns of these blocks
};
TileScheduler plan_order(const Problem& problem, const Dealing& dealing);

/// Its lines of a plan's text, if it orders anything.
std::string text_of(const TileScheduler& order);

void set_order(const TileScheduler& order, AttentionParams& params);

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
