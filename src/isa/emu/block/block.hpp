// One block of a grid: its lanes as coroutines on one thread, their collectives and barriers, its
// shared memory. Blocks are reused from launch to launch for their stacks.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "isa/emu/block/chain.hpp"
#include "isa/emu/block/fiber.hpp"
#include "isa/emu/block/races.hpp"
#include "isa/emu/block/shared_memory.hpp"
#include "isa/emu/error.hpp"
#include "isa/emu/options.hpp"

namespace qattn::emu {

class Block;
struct Units;

struct Position {
  int x = 0, y = 0, z = 0;
};

/// What a lane waits for.
enum class Waiting : std::uint8_t { nothing, warp, warpgroup, barrier, mbarrier, poll, finished };

/// `sync` must be one place of the code for all that wait, as __syncthreads() and bar.sync must.
enum class BarrierUse : std::uint8_t { arrive, sync, sync_anywhere };

struct Lane {
  Fiber fiber;
  Block* block = nullptr;
  int thread = 0, lane = 0, warp = 0;
  Waiting waiting = Waiting::nothing;
  std::uint32_t address = 0, parity = 0;  ///< of the barrier it waits at
  Where where;
  bool waited = false;  ///< for the kernels before this one (grid_dependency_wait)
};

/// The lane that runs on this thread; null outside of kernels.
constinit inline thread_local Lane* current_lane = nullptr;

/// The arguments that the lanes of a collective brought.
template <class T>
struct Arguments {
  void* const* all;
  T& operator[](int i) const { return *static_cast<T*>(all[i]); }
};

class Block {
 public:
  Block(int threads);
  ~Block();

  void prepare(std::uint32_t shared_bytes, const Options& options);
  /// This kernel's place in a chain; `earlier`: what the kernels before it touched.
  void prepare_chain(Chain chain, const Footprint* earlier);
  const Footprint& touched() const { return touched_; }
  /// Runs all threads of a cluster's blocks, the first of which is `index`, to their end. Throws
  /// Error.
  static void run(std::span<Block* const> cluster, Position index, Position grid,
                  const std::function<void()>& body);

  int threads() const { return threads_; }
  int warps() const { return threads_ / warp_lanes_; }
  int warp_lanes() const { return warp_lanes_; }
  Position index() const { return index_; }
  Position grid() const { return grid_; }
  int rank() const { return rank_; }  ///< in the cluster
  int cluster_blocks() const { return static_cast<int>(cluster_.size()); }
  const Options& options() const { return options_; }
  SharedMemory& shared() { return shared_; }
  Races& races() { return races_; }
  Units& units() { return *units_; }
  int elected_lane() const { return elected_lane_; }
  Lane& lane(int thread) { return lanes_[static_cast<std::size_t>(thread)]; }
  Stats stats;

  /// A word that the kernel's target or this GPU lacks is an error.
  void require(Word word, const Where& where) const {
    if (!vocabulary_.has(word)) [[unlikely]]
      refuse(word, where);
  }
  /// Of a word for warps of so many lanes.
  void require_lanes(int lanes, Word word, const Where& where) const {
    require(word, where);
    if (warp_lanes_ != lanes) [[unlikely]]
      refuse_lanes(word, lanes, where);
  }
  void use(Word word, const Where& where) {
    require(word, where);
    count(word);
  }
  void count(Word word, std::uint64_t lanes = 1) {
    stats.lanes[static_cast<std::size_t>(word)] += lanes;
  }
  std::uint64_t random();
  /// Whether an asynchronous operation that is issued now takes effect at once.
  bool takes_effect_now();

  // ---- Shared memory, for the current lane or, in a collective, on behalf of `thread` ----
  void load(std::uint32_t address, std::uint32_t bytes, void* to, const Where& where);
  void store(std::uint32_t address, std::uint32_t bytes, const void* from, const Where& where);
  const std::uint8_t* read_as(int thread, std::uint32_t address, std::uint32_t bytes,
                              const char* what, const Where& where);
  std::uint8_t* write_as(int thread, std::uint32_t address, std::uint32_t bytes, const char* what,
                         const Where& where);
  std::uint32_t* atomic_shared(std::uint32_t address, const Where& where);

  /// The block whose shared memory holds a cluster's address, and its address there.
  Block& owner_of(std::uint32_t& address, const char* what, const Where& where);
  void load_cluster(std::uint32_t address, std::uint32_t bytes, void* to, const Where& where);
  void store_cluster(std::uint32_t address, std::uint32_t bytes, const void* from,
                     const Where& where);

  // ---- Global memory ----
  /// Counts an access. `waited`: has the lane that asked for it waited for the kernels before?
  void touch_global(const void* at, std::size_t bytes, Touch touch, bool waited,
                    const Where& where);
  void touch_global(const void* at, std::size_t bytes, Touch touch, const Where& where) {
    touch_global(at, bytes, touch, current_lane->waited, where);
  }

  // ---- Collectives: the arguments for the last lane to arrive, null for the others, afterwards
  // ----
  void* const* gather_warp(Word word, void* argument, const Where& where);
  void release_warp();
  void* const* gather_warpgroup(Word word, void* argument, const Where& where);
  void release_warpgroup();
  void sync_warp(const Where& where);
  void barrier(int id, int threads, BarrierUse use, const Where& where);
  void cluster_barrier(const Where& where);

  // ---- Scheduling ----
  void wait(Waiting why, const Where& where, std::uint32_t address = 0, std::uint32_t parity = 0);
  void wake(Lane& lane) { runnable_[lane.warp] |= std::uint64_t{1} << lane.lane; }
  /// Lets the others run; the lane comes back when something has changed.
  void poll(const Where& where);
  /// The same for what another block may change, on another thread.
  void poll_outside(const Where& where);
  void end_polls() { first().idle_polls_ = 0; }  ///< that has happened

 private:
  struct Group {
    int arrived = 0;
    Word word = Word::none;
    Where where;
    std::array<void*, 128> arguments;
  };
  struct Barrier {
    int arrived = 0, expected = 0;
    std::vector<Lane*> waiting;
    std::array<Where, 32> sites;  ///< where each warp's first lane arrived
    Where first;                  ///< where the block's first sync was
    bool synced = false;          ///< there was one
    std::uint32_t warps = 0;
    Clock clock;
  };

  [[noreturn]] void refuse(Word word, const Where& where) const;
  [[noreturn]] void refuse_lanes(Word word, int lanes, const Where& where) const;
  static void enter(boost::context::detail::transfer_t transfer);
  /// Of the cluster, whose common state it holds.
  Block& first() { return *cluster_.front(); }
  void reset(Position index);
  void check_end();
  bool has_ended() const { return alive_ == 0; }
  bool cluster_has_ended() const;
  Lane* pick();
  Lane* next_of_cluster();
  Lane* next_of_warp(int warp);
  Lane* next_runnable();
  Lane* take(int warp, int lane);
  bool wake_pollers();
  bool advance();
  bool wait_for_others();
  void resume(Fiber& from, Lane& to, bool last);
  void leave(Fiber& from, bool last);
  std::uint64_t all_lanes() const { return ~std::uint64_t{0} >> (64 - warp_lanes_); }
  bool gather(Group& group, Waiting kind, int size, int slot, Word word, void* argument,
              const Where& where);
  void check_barrier_site(int id, Barrier& barrier, BarrierUse use, const Where& where);
  void fail(const std::string& error);
  std::string deadlock_report();
  void describe_lanes(std::string& report);
  std::string describe_waiting(const Lane& lane);

  const int threads_;
  Stacks stacks_;
  std::vector<Lane> lanes_;
  Fiber host_;
  Options options_;
  Vocabulary vocabulary_;
  Position index_, grid_;
  std::vector<Block*> cluster_;  ///< all blocks of the cluster, this one too
  int rank_ = 0;
  const std::function<void()>* body_ = nullptr;
  std::string error_;

  std::array<std::uint64_t, 32> runnable_{};  ///< lanes of each warp
  std::vector<Lane*> pollers_;
  int idle_polls_ = 0, outside_polls_ = 0;
  int warp_lanes_ = 32;
  int warp_ = 0, alive_ = 0;
  std::uint64_t random_state_ = 0;

  SharedMemory shared_;
  Races races_;
  std::array<Group, 32> warp_groups_;
  std::array<Group, 8> warpgroups_;
  std::array<Barrier, 17> barriers_;  ///< the last is cluster_sync's, of the cluster's first block
  std::unique_ptr<Units> units_;
  int elected_lane_ = 0;
  Chain chain_ = Chain::none;
  const Footprint* earlier_ = nullptr;
  Footprint touched_;
};

inline constexpr int kClusterBarrier = 16;
/// Addresses of a cluster's shared memory name the block, its rank and one, above this bit.
inline constexpr int kRankShift = 24;

inline Block& current_block() { return *current_lane->block; }

/// Runs `execute(block, arguments)` once, when all lanes of the warp have come.
template <class T, class Execute>
void warp_collective(Word word, T& argument, const Where& where, Execute execute) {
  Block& block = current_block();
  if (void* const* all = block.gather_warp(word, &argument, where)) {
    execute(block, Arguments<T>{all});
    block.release_warp();
  }
}

/// The same for the 128 lanes of a warpgroup.
template <class T, class Execute>
void warpgroup_collective(Word word, T& argument, const Where& where, Execute execute) {
  Block& block = current_block();
  if (void* const* all = block.gather_warpgroup(word, &argument, where)) {
    execute(block, Arguments<T>{all});
    block.release_warpgroup();
  }
}

}  // namespace qattn::emu
