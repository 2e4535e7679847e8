// What happened before what: every agent has a vector clock of all agents' times, in the manner of
// FastTrack. Lanes that met at a barrier know the same but for their own time, so clocks are
// shared: a barrier makes one, not one a lane.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace qattn::emu {

/// Times of all agents. Several have one; nobody changes it while two do. One thread's alone.
class Snapshot {
 public:
  Snapshot() = default;
  /// The first `width` times of `from`, then zeros. Nothing, without `from`.
  Snapshot(std::size_t count, const std::uint32_t* from, std::size_t width);
  Snapshot(const Snapshot& other) : cells_(other.cells_) {
    if (cells_) ++cells_[0];
  }
  Snapshot(Snapshot&& other) noexcept : cells_(std::exchange(other.cells_, nullptr)) {}
  Snapshot& operator=(Snapshot other) noexcept {
    std::swap(cells_, other.cells_);
    return *this;
  }
  ~Snapshot() {
    if (cells_ && --cells_[0] == 0) delete[] cells_;
  }
  explicit operator bool() const { return cells_ != nullptr; }
  /// The same one, not equal times.
  bool operator==(const Snapshot& other) const = default;
  std::uint32_t* times() const { return cells_ + 1; }

 private:
  std::uint32_t* cells_ = nullptr;  ///< how many have it, then the times
};

/// What came before a barrier.
class Clock {
 public:
  bool empty() const { return times_.empty(); }
  void clear() { *this = Clock(); }

 private:
  friend class Order;
  bool has(const Snapshot& snapshot) const;
  std::vector<std::uint32_t> times_;
  std::vector<Snapshot> merged_;  ///< whose times are in times_
  mutable Snapshot frozen_;       ///< times_, for those who acquire them
};

/// The clocks of the agents of a block, or of all blocks of a cluster.
class Order {
 public:
  void prepare(int agents);

  /// The time of `agent` itself: of what it does now.
  std::uint32_t now(int agent) const { return own_[static_cast<std::size_t>(agent)]; }
  /// Up to which time `agent` has seen what `other` did; of that, what the async proxy sees.
  std::uint32_t seen(int agent, int other) const {
    const auto a = static_cast<std::size_t>(agent);
    return agent == other ? own_[a] : known_[a][other];
  }
  std::uint32_t visible(int agent, int other) const {
    const auto a = static_cast<std::size_t>(agent);
    return agent == other ? own_visible_[a] : known_[a][agents_ + other];
  }

  // Races says what these mean.
  void release(int agent, Clock& clock);
  void acquire(int agent, const Clock& clock);
  void meet(int first, int count);
  void fence_async(int agent);
  std::uint32_t begin(int agent, int issuer);
  std::uint32_t begin_for_all(int agent, int first);
  void observe(int agent, int other, std::uint32_t until);
  void observe(Clock& clock, int other, std::uint32_t until) const;

 private:
  /// How the last step of a kind went: neighbours ask for the same.
  struct Last {
    Snapshot from, with, result;
    int other = -1;
    std::uint32_t until = 0;
  };
  std::size_t count() const { return 2 * static_cast<std::size_t>(agents_); }
  std::size_t width() const { return fences_ ? count() : static_cast<std::size_t>(agents_); }
  Snapshot copy_of(const std::uint32_t* times) const { return {count(), times, width()}; }
  std::size_t fenced(std::size_t agent) const { return static_cast<std::size_t>(agents_) + agent; }
  void put(std::size_t agent, Snapshot snapshot);
  Snapshot least_of(std::size_t first) const;

  int agents_ = 0;
  bool fences_ = false;  ///< whether the second halves of the clocks are in use
  // Of each agent: a snapshot of the others' times, where its times are, and what it knows of
  // itself, its own time and what its own fences made visible.
  std::vector<Snapshot> of_;
  std::vector<const std::uint32_t*> known_;
  std::vector<std::uint32_t> own_, own_visible_;
  Last acquired_, fenced_, observed_;
  // begin_for_all(): the snapshots of 128 lanes, how many lanes have each; of the last time, too.
  std::vector<std::pair<Snapshot, int>> group_, last_group_;
  Snapshot least_;
};

}  // namespace qattn::emu
