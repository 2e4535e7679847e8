// Races between the lanes of a block: every word of shared memory knows its last writer and its
// readers since then, and clocks (order.hpp) say whether they come before. Values and schedules
// alone miss most races; the clocks show them in every schedule.
//
// Agents are the lanes and the hardware that reads and writes on their behalf: wgmma of each
// warpgroup, bulk copies of each mbarrier, bulk stores of each warp.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "isa/emu/block/order.hpp"
#include "isa/emu/error.hpp"

namespace qattn::emu {

/// Ordinary loads and stores, or TMA and wgmma: a fence orders the first before the second.
enum class Proxy : std::uint8_t { generic, async };

class Races {
 public:
  Races() = default;
  Races(const Races&) = delete;
  Races& operator=(const Races&) = delete;

  static constexpr int kBarrierAgents = 16;

  /// A block begins; `blocks`: so many, of a cluster, share these clocks.
  void prepare(int lanes, std::uint32_t bytes, int blocks = 1);
  /// The block of this rank shares the clocks of the cluster's first. Agents, offsets and times are
  /// told as each block knows them; clocks (Clock) are of all.
  void join(Races& first, int rank);

  int wgmma_agent(int warpgroup) const { return lanes_ + warpgroup; }
  int store_agent(int warp) const { return lanes_ + lanes_ / 128 + 1 + warp; }
  int barrier_agent(int index) const {
    return lanes_ + lanes_ / 128 + 1 + lanes_ / 32 + index % kBarrierAgents;
  }

  // ---- Order ----
  /// Everything that `agent` did so far becomes known to those who acquire `clock`.
  void release(int agent, Clock& clock) { order().release(base_ + agent, clock); }
  void acquire(int agent, const Clock& clock) { order().acquire(base_ + agent, clock); }
  /// Lanes first..first+count-1 see each other's past (sync_warp).
  void meet(int first, int count) { order().meet(base_ + first, count); }
  /// Generic accesses that `agent` has seen come before async ones ordered after this.
  void fence_async(int agent) { order().fence_async(base_ + agent); }
  /// `agent` begins an operation on behalf of `issuer`; the operation's time.
  std::uint32_t begin(int agent, int issuer) {
    return order().begin(base_ + agent, base_ + issuer);
  }
  /// The same for the 128 lanes from `first`: it knows what all of them know.
  std::uint32_t begin_for_all(int agent, int first) {
    return order().begin_for_all(base_ + agent, base_ + first);
  }
  /// `agent` has seen the operations of `other` up to time `until`; or who acquires `clock` will.
  void observe(int agent, int other, std::uint32_t until) {
    order().observe(base_ + agent, base_ + other, until);
  }
  void observe(Clock& clock, int other, std::uint32_t until) const {
    first_->order_.observe(clock, base_ + other, until);
  }

  /// What agents know, by their places among all of the cluster.
  const Order& known() const { return first_->order_; }

  // ---- Accesses: throw Error at a race ----
  void read(std::uint32_t offset, std::uint32_t bytes, int agent, Proxy proxy, const Where& where) {
    first_->read_at(offset + memory_, bytes, base_ + agent, proxy, where);
  }
  void write(std::uint32_t offset, std::uint32_t bytes, int agent, Proxy proxy,
             const Where& where) {
    first_->write_at(offset + memory_, bytes, base_ + agent, proxy, where);
  }
  void atomic(std::uint32_t offset, std::uint32_t bytes, int agent, const Where& where) {
    first_->atomic_at(offset + memory_, bytes, base_ + agent, where);
  }
  /// Ordinary accesses to the memory of `owner`, a block of the same cluster.
  void read_of(const Races& owner, std::uint32_t offset, std::uint32_t bytes, int agent,
               const Where& where) {
    first_->read_at(offset + owner.memory_, bytes, base_ + agent, Proxy::generic, where);
  }
  void write_of(const Races& owner, std::uint32_t offset, std::uint32_t bytes, int agent,
                const Where& where) {
    first_->write_at(offset + owner.memory_, bytes, base_ + agent, Proxy::generic, where);
  }

 private:
  void read_at(std::uint32_t offset, std::uint32_t bytes, int agent, Proxy proxy,
               const Where& where);
  void write_at(std::uint32_t offset, std::uint32_t bytes, int agent, Proxy proxy,
                const Where& where);
  void atomic_at(std::uint32_t offset, std::uint32_t bytes, int agent, const Where& where);

  struct Write {
    Where where;
    std::uint32_t time = 0;
    std::uint16_t agent = 0;
    Proxy proxy = Proxy::generic;
    bool atomic = false;
  };
  /// Lanes of one group of 32 agents that read at the same time of their own clocks.
  struct Reads {
    std::uint32_t time = 0, lanes = 0;
  };
  struct Access {
    int agent;
    std::uint32_t time;
    Where where;
  };

  Order& order() { return first_->order_; }
  std::string agent_name(int agent) const;
  std::string agent_name_in_block(int agent) const;

  // A granule is a 4-byte word, or one byte of a word that narrower accesses have split.
  template <class Visit>
  void visit_granules(std::uint32_t offset, std::uint32_t bytes, Visit visit);
  void touch(std::uint32_t word);
  void touch_page(std::uint32_t word);
  void split(std::uint32_t word);
  std::uint32_t offset_of(std::uint32_t granule) const;
  /// Of the agents 32 * group and on. What nobody reads is not cleared: readers_ says who did.
  Reads& reads_of(std::uint32_t granule, int group) {
    return reads_.get()[static_cast<std::size_t>(group) * 5 * words_ + granule];
  }
  static std::uint64_t bit_of(int group) { return std::uint64_t{1} << (group % 64); }
  void check_writers(std::uint32_t granule, const Access& by, Proxy proxy, const char* verb);
  void check_atomics(std::uint32_t granule, const Access& by, const char* verb);
  void check_readers(std::uint32_t granule, const Access& by);
  void check_more_readers(std::uint32_t granule, const Access& by);
  void record_read(std::uint32_t granule, const Access& by);
  void record_later_read(std::uint32_t granule, const Access& by);
  [[noreturn]] void fail_fence(std::uint32_t granule, const Access& by, const char* verb) const;
  [[noreturn]] void fail(std::uint32_t granule, const Access& by, const char* verb, int other,
                         const char* earlier, const Where* place) const;

  Races* first_ = this;       ///< whoever has the clocks
  int base_ = 0;              ///< this block's agents begin there
  std::uint32_t memory_ = 0;  ///< and its shared memory
  int lanes_ = 0, block_agents_ = 0, blocks_ = 1;
  int agents_ = 0, groups_ = 0;  ///< of all blocks
  Order order_;                  ///< of all blocks, where first_ is this
  std::uint32_t words_ = 0;
  std::vector<Write> writes_;
  struct Free {
    void operator()(Reads* p) const { std::free(p); }
  };
  std::unique_ptr<Reads[], Free> reads_;
  std::vector<std::uint64_t> readers_;  ///< groups that read since the last write
  std::vector<std::uint8_t> split_;
  // Cells are cleared when a block first touches their page.
  std::uint32_t generation_ = 0;
  std::vector<std::uint32_t> page_generation_;
  // Rare: readers that found their group's slot taken, and atomic writers.
  std::unordered_map<std::uint32_t, std::vector<Access>> more_reads_, atomics_;
};

}  // namespace qattn::emu
