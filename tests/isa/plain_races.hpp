// The race checker written plainly: a vector clock an agent, every barrier a loop over all of them.
// The emulator's own (src/isa/emu/block/races.hpp, order.hpp), which says what the functions mean,
// must find the same races with the same texts: races_fuzz_test.cpp.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "isa/emu/block/races.hpp"

namespace qattn::isa_test {

using emu::Proxy;
using emu::Where;

/// What an agent has seen of every other one; the second half: what of it the async proxy sees.
using PlainClock = std::vector<std::uint32_t>;

class PlainRaces {
 public:
  PlainRaces() = default;
  PlainRaces(const PlainRaces&) = delete;
  PlainRaces& operator=(const PlainRaces&) = delete;

  static constexpr int kBarrierAgents = 16;

  /// A block begins; `blocks`: so many, of a cluster, share these clocks.
  void prepare(int lanes, std::uint32_t bytes, int blocks = 1);
  /// The block of this rank shares the clocks of the cluster's first. Agents, offsets and times are
  /// told as each block knows them; clocks (PlainClock) are of all.
  void join(PlainRaces& first, int rank);

  int wgmma_agent(int warpgroup) const { return lanes_ + warpgroup; }
  int store_agent(int warp) const { return lanes_ + lanes_ / 128 + 1 + warp; }
  int barrier_agent(int index) const {
    return lanes_ + lanes_ / 128 + 1 + lanes_ / 32 + index % kBarrierAgents;
  }

  // ---- Order ----
  /// Everything that `agent` did so far becomes known to those who acquire `clock`.
  void release(int agent, PlainClock& clock);
  void acquire(int agent, const PlainClock& clock);
  /// Lanes first..first+count-1 see each other's past (sync_warp).
  void meet(int first, int count);
  /// Generic accesses that `agent` has seen come before async ones ordered after this.
  void fence_async(int agent);
  /// `agent` begins an operation on behalf of `issuer`; the operation's time.
  std::uint32_t begin(int agent, int issuer);
  /// The same for the 128 lanes from `first`: it knows what all of them know.
  std::uint32_t begin_for_all(int agent, int first);
  /// `agent` has seen the operations of `other` up to time `until`.
  void observe(int agent, int other, std::uint32_t until);
  void observe(PlainClock& clock, int other, std::uint32_t until) const {
    std::uint32_t& time = clock[static_cast<std::size_t>(base_ + other)];
    time = time > until ? time : until;
  }
  PlainClock empty_clock() const { return PlainClock(first_->stride_, 0); }

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
  void read_of(const PlainRaces& owner, std::uint32_t offset, std::uint32_t bytes, int agent,
               const Where& where) {
    first_->read_at(offset + owner.memory_, bytes, base_ + agent, Proxy::generic, where);
  }
  void write_of(const PlainRaces& owner, std::uint32_t offset, std::uint32_t bytes, int agent,
                const Where& where) {
    first_->write_at(offset + owner.memory_, bytes, base_ + agent, Proxy::generic, where);
  }

  // ---- What agents know, by their places among all of the cluster ----
  int agents() const { return agents_; }
  std::uint32_t& seen(int agent, int other) {
    return clocks_[static_cast<std::size_t>(agent) * stride_ + static_cast<std::size_t>(other)];
  }
  std::uint32_t& visible(int agent, int other) { return seen(agent, agents_ + other); }

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

  std::size_t width() const { return fences_ ? stride_ : static_cast<std::size_t>(agents_); }
  std::string agent_name(int agent) const;
  std::string agent_name_in_block(int agent) const;

  // A granule is a 4-byte word, or one byte of a word that narrower accesses have split.
  template <class Visit>
  void visit_granules(std::uint32_t offset, std::uint32_t bytes, Visit visit);
  void touch(std::uint32_t word);
  void split(std::uint32_t word);
  std::uint32_t offset_of(std::uint32_t granule) const;
  Reads* reads_of(std::uint32_t granule) {
    return &reads_[granule * static_cast<std::size_t>(groups_)];
  }
  void check_writers(std::uint32_t granule, const Access& by, Proxy proxy, const char* verb);
  void check_atomics(std::uint32_t granule, const Access& by, const char* verb);
  void check_readers(std::uint32_t granule, const Access& by);
  void record_read(std::uint32_t granule, const Access& by);
  void record_later_read(std::uint32_t granule, const Access& by);
  [[noreturn]] void fail_fence(std::uint32_t granule, const Access& by, const char* verb) const;
  [[noreturn]] void fail(std::uint32_t granule, const Access& by, const char* verb, int other,
                         const char* earlier, const Where* place) const;

  PlainRaces* first_ = this;  ///< whoever has the clocks
  int base_ = 0;              ///< this block's agents begin there
  std::uint32_t memory_ = 0;  ///< and its shared memory
  int lanes_ = 0, block_agents_ = 0, blocks_ = 1;
  int agents_ = 0, groups_ = 0;  ///< of all blocks
  std::size_t stride_ = 0;
  bool fences_ = false;  ///< whether the second halves of the clocks are in use
  std::uint32_t words_ = 0;
  PlainClock clocks_;
  std::vector<Write> writes_;
  std::vector<Reads> reads_;
  std::vector<std::uint8_t> split_;
  // Cells are cleared when a block first touches their page.
  std::uint32_t generation_ = 0;
  std::vector<std::uint32_t> page_generation_;
  // Rare: readers that found their group's slot taken, and atomic writers.
  std::unordered_map<std::uint32_t, std::vector<Access>> more_reads_, atomics_;
};

}  // namespace qattn::isa_test
