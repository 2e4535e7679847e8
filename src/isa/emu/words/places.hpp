// Places, emulated. Meanings: isa.hpp.
#pragma once

#include "isa/emu/block/block.hpp"
#include "isa/isa.hpp"

namespace qattn::isa {
inline namespace QATTN_TARGET {

using emu::Where;
using emu::Word;

inline constexpr bool is_emulated = true;
inline constexpr int target_architecture = 120;

inline int thread() { return emu::current_lane->thread; }
inline int warp_lanes() { return emu::current_block().warp_lanes(); }
inline int lane() { return emu::current_lane->lane; }
inline Index3 block() {
  const emu::Position p = emu::current_block().index();
  return {p.x, p.y, p.z};
}
inline Index3 grid() {
  const emu::Position p = emu::current_block().grid();
  return {p.x, p.y, p.z};
}
inline SharedAddress shared_base() { return emu::SharedMemory::kBase; }

}  // namespace QATTN_TARGET
}  // namespace qattn::isa
