// What blocks of a cluster have together: a barrier, and each other's shared memory.
#include <cstring>

#include "isa/emu/block/block.hpp"

namespace qattn::emu {

/// Threads that have ended would not be waited for on hardware; here they are.
void Block::cluster_barrier(const Where& where) {
  use(Word::cluster_sync, where);
  check_barrier_site(kClusterBarrier, barriers_[kClusterBarrier], BarrierUse::sync, where);
  Barrier& all = first().barriers_[kClusterBarrier];
  Lane& me = *current_lane;
  if (options_.races) races_.release(me.thread, all.clock);
  all.waiting.push_back(&me);
  all.expected = cluster_blocks() * threads_;
  if (++all.arrived < all.expected) {
    wait(Waiting::barrier, where, kClusterBarrier);
    return;
  }
  for (Lane* l : all.waiting) {
    if (options_.races) l->block->races_.acquire(l->thread, all.clock);
    if (l != &me) l->block->wake(*l);
  }
  for (Block* block : cluster_) block->barriers_[kClusterBarrier] = {};
}

Block& Block::owner_of(std::uint32_t& address, const char* what, const Where& where) {
  const std::uint32_t rank = address >> kRankShift;
  if (rank == 0) return *this;  // an address of this block is one of the cluster, too
  if (rank > cluster_.size()) {
    throw Error(text("%s: address 0x%x is of no block of the cluster, at %s", what, address,
                     describe(where).c_str()));
  }
  address &= (1u << kRankShift) - 1;
  Block& owner = *cluster_[rank - 1];
  if (owner.has_ended()) {
    throw Error(text("%s: block %d of the cluster has ended, and its shared memory with it, at %s",
                     what, owner.rank_, describe(where).c_str()));
  }
  return owner;
}

void Block::load_cluster(std::uint32_t address, std::uint32_t bytes, void* to, const Where& where) {
  use(Word::load_cluster, where);
  Block& owner = owner_of(address, "load_cluster", where);
  owner.shared_.check_place(address, bytes, bytes, "load_cluster", where);
  owner.shared_.check_readable(address, bytes, "load_cluster", where);
  if (options_.races) {
    races_.read_of(owner.races_, SharedMemory::offset(address), bytes, current_lane->thread, where);
  }
  stats.shared_read += bytes;
  std::memcpy(to, owner.shared_.at(address), bytes);
}

void Block::store_cluster(std::uint32_t address, std::uint32_t bytes, const void* from,
                          const Where& where) {
  use(Word::store_cluster, where);
  Block& owner = owner_of(address, "store_cluster", where);
  owner.shared_.check_place(address, bytes, bytes, "store_cluster", where);
  owner.shared_.check_writable(address, bytes, "store_cluster", where);
  if (options_.races) {
    races_.write_of(owner.races_, SharedMemory::offset(address), bytes, current_lane->thread,
                    where);
  }
  owner.shared_.mark(address, bytes, ByteState::ready);
  owner.shared_.mark_swizzle(address, bytes, 0);
  stats.shared_written += bytes;
  std::memcpy(owner.shared_.at(address), from, bytes);
}

}  // namespace qattn::emu
