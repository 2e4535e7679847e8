// What lanes wait for when none can go on.
#include "isa/emu/block/block.hpp"
#include "isa/emu/units/units.hpp"

namespace qattn::emu {

std::string Block::describe_waiting(const Lane& lane) {
  switch (lane.waiting) {
    case Waiting::finished:
      return "finished";
    case Waiting::warp: {
      const Group& g = warp_groups_[static_cast<std::size_t>(lane.warp)];
      return text("wait in %s, %d of %d lanes arrived", name(g.word), g.arrived, warp_lanes_);
    }
    case Waiting::warpgroup: {
      const Group& g = warpgroups_[static_cast<std::size_t>(lane.warp / 4)];
      return text("wait in %s, %d of 128 lanes arrived", name(g.word), g.arrived);
    }
    case Waiting::barrier: {
      const Barrier& b = barriers_[lane.address];
      if (lane.address == kClusterBarrier) {
        const Barrier& all = first().barriers_[kClusterBarrier];
        return text("wait in cluster_sync, %d of %d threads arrived", all.arrived, all.expected);
      }
      return text("wait at barrier %u, %d of %d threads arrived", lane.address, b.arrived,
                  b.expected);
    }
    case Waiting::mbarrier:
      return units_->mbarriers.describe(lane.address, lane.parity);
    case Waiting::poll:
      return "poll";
    case Waiting::nothing:
      break;
  }
  return "can run";
}

std::string Block::deadlock_report() {
  std::string report = "deadlock";
  for (Block* block : cluster_) {
    if (cluster_blocks() > 1) report += text("\n block %d of the cluster", block->rank_);
    block->describe_lanes(report);
  }
  return report;
}

void Block::describe_lanes(std::string& report) {
  for (int begin = 0; begin < threads_;) {
    const Lane& l = lane(begin);
    int end = begin + 1;
    for (; end < threads_; ++end) {  // neighbours that wait for the same, at the same place
      const Lane& other = lane(end);
      if (other.waiting != l.waiting || other.address != l.address || other.parity != l.parity) {
        break;
      }
      if (l.waiting == Waiting::warp && other.warp != l.warp) break;
      if (l.waiting != Waiting::finished && other.where.line() != l.where.line()) break;
    }
    report += begin + 1 == end ? text("\n  thread %d: ", begin)
                               : text("\n  threads %d to %d: ", begin, end - 1);
    report += describe_waiting(l);
    if (l.waiting != Waiting::finished) report += ", at " + describe(l.where);
    begin = end;
  }
}

}  // namespace qattn::emu
