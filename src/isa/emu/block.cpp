#include "isa/emu/block.hpp"

#include <algorithm>
#include <bit>
#include <boost/context/detail/fcontext.hpp>
#include <chrono>
#include <cstring>
#include <thread>

#include "isa/emu/async_engine.hpp"
#include "isa/emu/wgmma.hpp"

namespace qattn::emu {

Block::Block(int threads)
    : threads_(threads),
      stacks_(threads),
      lanes_(static_cast<std::size_t>(threads)),
      async_(std::make_unique<AsyncEngine>(*this)),
      wgmma_(std::make_unique<WgmmaUnit>(*this)) {
  for (int i = 0; i < threads; ++i) {
    Lane& l = lane(i);
    l.block = this;
    l.thread = i;
    l.lane = i % 32;
    l.warp = i / 32;
    stacks_.give(i, l.fiber);
    create_sanitizer_fiber(l.fiber);
  }
}

Block::~Block() {
  for (Lane& l : lanes_) destroy_sanitizer_fiber(l.fiber);
}

void Block::prepare(std::uint32_t shared_bytes, const Options& options) {
  options_ = options;
  shared_.prepare(shared_bytes);
  stats = {};
  prepare_chain(Chain::none, nullptr);
}

void Block::prepare_chain(Chain chain, const Footprint* earlier) {
  chain_ = chain;
  earlier_ = earlier;
  touched_.clear();
}

void Block::reset(Position index) {
  index_ = index;
  error_.clear();
  alive_ = threads_;
  warp_ = options_.order == LaneOrder::reverse ? warps() - 1 : 0;
  random_state_ = options_.seed +
                  0x9E3779B97F4A7C15ull * static_cast<std::uint64_t>(
                                              1 + index.x + 7919 * (index.y + 104729LL * index.z));
  shared_.prepare(shared_.bytes());
  if (options_.races) races_.prepare(threads_, shared_.bytes());
  for (Group& g : warp_groups_) g.arrived = 0;
  for (Group& g : warpgroups_) g.arrived = 0;
  for (Barrier& b : barriers_) b = {};
  runnable_ = {};
  pollers_.clear();
  idle_polls_ = outside_polls_ = 0;
  async_->reset();
  wgmma_->reset();
  elected_lane_ = options_.order == LaneOrder::forward   ? 0
                  : options_.order == LaneOrder::reverse ? 31
                                                         : static_cast<int>(random() % 32);
  for (Lane& l : lanes_) {
    l.waiting = Waiting::nothing;
    l.copies.clear();
    l.copy_groups.clear();
    l.waited = false;
    restart(l.fiber, enter);
    wake(l);
  }
}

void Block::run(Position index, Position grid, const std::function<void()>& body) {
  grid_ = grid;
  body_ = &body;
  reset(index);
  ++stats.blocks;
  adopt_thread(host_);
  resume(host_, *pick(), false);
  if (error_.empty() && chain_ == Chain::beside &&
      std::none_of(lanes_.begin(), lanes_.end(), [](const Lane& l) { return l.waited; })) {
    error_ = "ends without grid_dependency_wait() in any thread, and the kernel started beside one";
  }
  if (error_.empty() && alive_ == 0) error_ = wgmma_->check_end();
  if (error_.empty() && alive_ == 0) error_ = async_->check_end();
  if (!error_.empty()) {
    throw Error(text("block (%d,%d,%d): ", index_.x, index_.y, index_.z) + error_);
  }
}

std::uint64_t Block::random() {  // splitmix64
  std::uint64_t z = random_state_ += 0x9E3779B97F4A7C15ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

bool Block::takes_effect_now() {
  if (options_.schedule == Schedule::random) return random() % 2 == 0;
  return options_.schedule == Schedule::early;
}

// ---- Scheduling
// ----------------------------------------------------------------------------------

void Block::enter(boost::context::detail::transfer_t transfer) {
  Lane& me = *current_lane;
  Block& block = *me.block;
  arrived(me.fiber, transfer);
  try {
    (*block.body_)();
    if (block.chain_ == Chain::early && !me.waited) {
      throw Error("ends without grid_dependency_wait(), and the kernel started early");
    }
  } catch (const std::exception& e) {
    block.error_ = text("thread %d (warp %d lane %d): ", me.thread, me.warp, me.lane) + e.what();
  }
  me.waiting = Waiting::finished;
  --block.alive_;
  Lane* next = nullptr;
  if (block.error_.empty()) {
    try {
      next = block.pick();
    } catch (const std::exception& e) {  // an asynchronous operation completed, with an error
      block.error_ = e.what();
    }
  }
  if (next) block.resume(me.fiber, *next, true);
  if (block.error_.empty() && block.alive_ > 0) block.error_ = block.deadlock_report();
  block.leave(me.fiber, true);
}

void Block::resume(Fiber& from, Lane& to, bool last) {
  ++stats.switches;
  current_lane = &to;
  switch_to(from, to.fiber, last);
}

void Block::leave(Fiber& from, bool last) {
  current_lane = nullptr;
  switch_to(from, host_, last);
}

Lane* Block::take(int warp, int lane_index) {
  warp_ = warp;
  runnable_[static_cast<std::size_t>(warp)] &= ~(1u << lane_index);
  Lane& l = lane(32 * warp + lane_index);
  l.waiting = Waiting::nothing;
  return &l;
}

Lane* Block::next_runnable() {
  const int n = warps();
  if (options_.order == LaneOrder::random) {
    int total = 0;
    for (int w = 0; w < n; ++w) total += std::popcount(runnable_[static_cast<std::size_t>(w)]);
    if (total == 0) return nullptr;
    int skip = static_cast<int>(random() % static_cast<std::uint64_t>(total));
    for (int w = 0;; ++w) {
      std::uint32_t lanes = runnable_[static_cast<std::size_t>(w)];
      const int here = std::popcount(lanes);
      if (skip < here) {
        while (skip-- > 0) lanes &= lanes - 1;
        return take(w, std::countr_zero(lanes));
      }
      skip -= here;
    }
  }
  // Staying within a warp as long as it can run keeps collectives together.
  const bool forward = options_.order == LaneOrder::forward;
  for (int i = 0, w = warp_; i < n; ++i) {
    const std::uint32_t lanes = runnable_[static_cast<std::size_t>(w)];
    if (lanes) return take(w, forward ? std::countr_zero(lanes) : 31 - std::countl_zero(lanes));
    w = forward ? (w + 1 == n ? 0 : w + 1) : (w == 0 ? n - 1 : w - 1);
  }
  return nullptr;
}

Lane* Block::pick() {
  if (options_.schedule == Schedule::random && alive_ > 0 && random() % 8 == 0) {
    async_->advance();
  }
  for (;;) {
    if (Lane* next = next_runnable()) return next;
    if (alive_ == 0) return nullptr;
    // Late operations complete when nobody can go on without them.
    if (async_->advance()) {
      idle_polls_ = 0;
      wake_pollers();
    } else if (++idle_polls_ > 1000 || !wake_pollers()) {
      if (!wait_for_others()) return nullptr;
    }
  }
}

/// Gives other blocks time, if a lane waits for one. False: enough of it.
bool Block::wait_for_others() {
  constexpr std::chrono::microseconds nap(100);
  constexpr int most_naps = 600'000;
  if (outside_polls_ == 0 || idle_polls_ > most_naps) return false;
  std::this_thread::sleep_for(nap);
  return wake_pollers();
}

bool Block::wake_pollers() {
  if (pollers_.empty()) return false;
  for (Lane* l : pollers_) wake(*l);
  pollers_.clear();
  return true;
}

void Block::wait(Waiting why, const Where& where, std::uint32_t address, std::uint32_t parity) {
  Lane& me = *current_lane;
  me.waiting = why;
  me.where = where;
  me.address = address;
  me.parity = parity;
  Lane* next = pick();
  if (next == &me) return;
  if (next) {
    resume(me.fiber, *next, false);
  } else {
    error_ = deadlock_report();
    leave(me.fiber, true);
  }
}

void Block::poll(const Where& where) {
  pollers_.push_back(current_lane);
  wait(Waiting::poll, where);
}

void Block::poll_outside(const Where& where) {
  ++outside_polls_;
  poll(where);
  --outside_polls_;
}

// ---- Collectives
// ---------------------------------------------------------------------------------

bool Block::gather(Group& group, int size, int slot, Word word, void* argument,
                   const Where& where) {
  if (group.arrived == 0) {
    group.word = word;
    group.where = where;
  } else if (group.word != word || group.where.line() != where.line() ||
             group.where.column() != where.column()) {
    throw Error(text("divergent collective: %s at %s, while other lanes of the %s are in %s at %s",
                     name(word), describe(where).c_str(), size == 32 ? "warp" : "warpgroup",
                     name(group.word), describe(group.where).c_str()));
  }
  group.arguments[static_cast<std::size_t>(slot)] = argument;
  if (++group.arrived < size) {
    wait(size == 32 ? Waiting::warp : Waiting::warpgroup, where);
    return false;
  }
  count(word, static_cast<std::uint64_t>(size));
  return true;
}

void* const* Block::gather_warp(Word word, void* argument, const Where& where) {
  const Lane& me = *current_lane;
  Group& group = warp_groups_[static_cast<std::size_t>(me.warp)];
  return gather(group, 32, me.lane, word, argument, where) ? group.arguments.data() : nullptr;
}

void Block::release_warp() {
  const Lane& me = *current_lane;
  const auto warp = static_cast<std::size_t>(me.warp);
  warp_groups_[warp].arrived = 0;
  runnable_[warp] |= ~(1u << me.lane);
}

void* const* Block::gather_warpgroup(Word word, void* argument, const Where& where) {
  const Lane& me = *current_lane;
  if (me.warp / 4 * 4 + 4 > warps()) {
    throw Error(text("%s: warp %d belongs to no warpgroup of four warps, at %s", name(word),
                     me.warp, describe(where).c_str()));
  }
  Group& group = warpgroups_[static_cast<std::size_t>(me.warp / 4)];
  return gather(group, 128, me.thread % 128, word, argument, where) ? group.arguments.data()
                                                                    : nullptr;
}

void Block::release_warpgroup() {
  const Lane& me = *current_lane;
  const int first = me.warp / 4 * 4;
  warpgroups_[static_cast<std::size_t>(me.warp / 4)].arrived = 0;
  for (int w = first; w < first + 4; ++w) {
    runnable_[static_cast<std::size_t>(w)] |= w == me.warp ? ~(1u << me.lane) : ~0u;
  }
}

void Block::sync_warp(const Where& where) {
  char none = 0;
  warp_collective(Word::sync_warp, none, where, [](Block& block, Arguments<char>) {
    if (block.options_.races) block.races_.meet(32 * current_lane->warp, 32);
  });
}

void Block::check_barrier_site(int id, Barrier& barrier, BarrierUse use, const Where& where) {
  const auto warp = static_cast<std::size_t>(current_lane->warp);
  const std::uint32_t bit = 1u << warp;
  Where& site = barrier.sites[warp];
  if ((barrier.warps & bit) && site.line() != where.line()) {
    throw Error(text("divergent barrier %d: at %s, while other lanes of the warp are at %s", id,
                     describe(where).c_str(), describe(site).c_str()));
  }
  barrier.warps |= bit;
  site = where;
  if (use != BarrierUse::sync) return;
  if (!barrier.synced) barrier.first = where;
  barrier.synced = true;
  const Where& first = barrier.first;
  if (first.line() != where.line() || std::string_view(first.file_name()) != where.file_name()) {
    throw Error(text("divergent barrier %d: at %s, while another warp is at %s", id,
                     describe(where).c_str(), describe(first).c_str()));
  }
}

void Block::barrier(int id, int threads, BarrierUse use, const Where& where) {
  const bool wait_here = use != BarrierUse::arrive;
  if (id < 0 || id > kClusterBarrier || threads <= 0 || threads % 32 || threads > threads_) {
    throw Error(
        text("barrier %d of %d threads: ids are 0 to 15, counts multiples of 32 up to the "
             "block's %d, at %s",
             id, threads, threads_, describe(where).c_str()));
  }
  Barrier& b = barriers_[static_cast<std::size_t>(id)];
  if (b.arrived == 0) b.expected = threads;
  if (b.expected != threads) {
    throw Error(text("barrier %d: %d threads here, %d at its first arrival, at %s", id, threads,
                     b.expected, describe(where).c_str()));
  }
  check_barrier_site(id, b, use, where);
  Lane& me = *current_lane;
  if (options_.races) races_.release(me.thread, b.clock);
  if (wait_here) b.waiting.push_back(&me);
  if (++b.arrived < b.expected) {
    if (wait_here) wait(Waiting::barrier, where, static_cast<std::uint32_t>(id));
    return;
  }
  for (Lane* l : b.waiting) {
    if (options_.races) races_.acquire(l->thread, b.clock);
    if (l != &me) wake(*l);
  }
  b.waiting.clear();
  b.arrived = 0;
  b.warps = 0;
  b.synced = false;
  b.clock.clear();
}

// ---- Deadlock
// ------------------------------------------------------------------------------------

std::string Block::describe_waiting(const Lane& lane) {
  switch (lane.waiting) {
    case Waiting::finished:
      return "finished";
    case Waiting::warp: {
      const Group& g = warp_groups_[static_cast<std::size_t>(lane.warp)];
      return text("wait in %s, %d of 32 lanes arrived", name(g.word), g.arrived);
    }
    case Waiting::warpgroup: {
      const Group& g = warpgroups_[static_cast<std::size_t>(lane.warp / 4)];
      return text("wait in %s, %d of 128 lanes arrived", name(g.word), g.arrived);
    }
    case Waiting::barrier: {
      const Barrier& b = barriers_[lane.address];
      if (lane.address == kClusterBarrier) {
        return text("wait in cluster_sync, %d of %d threads arrived", b.arrived, b.expected);
      }
      return text("wait at barrier %u, %d of %d threads arrived", lane.address, b.arrived,
                  b.expected);
    }
    case Waiting::mbarrier:
      return async_->describe_mbarrier(lane.address, lane.parity);
    case Waiting::poll:
      return "poll";
    case Waiting::nothing:
      break;
  }
  return "can run";
}

std::string Block::deadlock_report() {
  std::string report = "deadlock";
  for (int first = 0; first < threads_;) {
    const Lane& l = lane(first);
    int end = first + 1;
    for (; end < threads_; ++end) {  // neighbours that wait for the same, at the same place
      const Lane& other = lane(end);
      if (other.waiting != l.waiting || other.address != l.address || other.parity != l.parity) {
        break;
      }
      if (l.waiting == Waiting::warp && other.warp != l.warp) break;
      if (l.waiting != Waiting::finished && other.where.line() != l.where.line()) break;
    }
    report += first + 1 == end ? text("\n  thread %d: ", first)
                               : text("\n  threads %d to %d: ", first, end - 1);
    report += describe_waiting(l);
    if (l.waiting != Waiting::finished) report += ", at " + describe(l.where);
    first = end;
  }
  return report;
}

}  // namespace qattn::emu
