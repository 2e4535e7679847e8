// All hardware beside the lanes of one block. A new unit is its own file, a member, and an entry of
// all().
#pragma once

#include <array>

#include "isa/emu/units/bulk.hpp"
#include "isa/emu/units/copy_async.hpp"
#include "isa/emu/units/mbarriers.hpp"
#include "isa/emu/units/wgmma.hpp"

namespace qattn::emu {

struct Units {
  explicit Units(Block& block)
      : mbarriers(block), copy_async(block), bulk(block, mbarriers), wgmma(block) {}

  Mbarriers mbarriers;
  CopyAsync copy_async;
  BulkCopies bulk;
  WgmmaUnit wgmma;

  std::array<AsyncUnit*, 3> all() { return {&wgmma, &copy_async, &bulk}; }
};

/// Of the current block, for a word that it has.
inline Units& units_for(Word word, const Where& where) {
  Block& block = current_block();
  block.require(word, where);
  return block.units();
}

}  // namespace qattn::emu
