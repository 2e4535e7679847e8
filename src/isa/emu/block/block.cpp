#include "isa/emu/block/block.hpp"

#include <algorithm>
#include <bit>
#include <boost/context/detail/fcontext.hpp>
#include <chrono>
#include <cstring>
#include <thread>
#include <type_traits>

#include "isa/emu/units/units.hpp"

namespace qattn::emu {

Block::Block(int threads)
    : threads_(threads),
      stacks_(threads),
      lanes_(static_cast<std::size_t>(threads)),
      vocabulary_(options_.vocabulary()),
      units_(std::make_unique<Units>(*this)) {
  for (int i = 0; i < threads; ++i) {
    Lane& l = lane(i);
    l.block = this;
    l.thread = i;
    stacks_.give(i, l.fiber);
    create_sanitizer_fiber(l.fiber);
  }
}

Block::~Block() {
  for (Lane& l : lanes_) destroy_sanitizer_fiber(l.fiber);
}

void Block::prepare(std::uint32_t shared_bytes, const Options& options) {
  options_ = options;
  vocabulary_ = options.vocabulary();
  warp_lanes_ = options.warp_lanes_here();
  for (Lane& l : lanes_) {
    l.lane = l.thread % warp_lanes_;
    l.warp = l.thread / warp_lanes_;
  }
  shared_.prepare(shared_bytes);
  stats = {};
  stats.warp_lanes = warp_lanes_;
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
  if (options_.races && rank_ == 0) races_.prepare(threads_, shared_.bytes(), cluster_blocks());
  if (options_.races && rank_ > 0) races_.join(first().races_, rank_);
  for (Group& g : warp_groups_) g.arrived = 0;
  for (Group& g : warpgroups_) g.arrived = 0;
  for (Barrier& b : barriers_) b = {};
  runnable_ = {};
  pollers_.clear();
  idle_polls_ = outside_polls_ = 0;
  units_->mbarriers.reset();
  for (AsyncUnit* unit : units_->all()) unit->reset();
  elected_lane_ = options_.order == LaneOrder::forward ? 0
                  : options_.order == LaneOrder::reverse
                      ? warp_lanes_ - 1
                      : static_cast<int>(random() % static_cast<unsigned>(warp_lanes_));
  for (Lane& l : lanes_) {
    l.waiting = Waiting::nothing;
    l.waited = false;
    restart(l.fiber, enter);
    wake(l);
  }
}

void Block::run(std::span<Block* const> cluster, Position index, Position grid,
                const std::function<void()>& body) {
  Block& first = *cluster.front();
  for (int rank = 0; rank < static_cast<int>(cluster.size()); ++rank) {
    Block& block = *cluster[static_cast<std::size_t>(rank)];
    block.cluster_.assign(cluster.begin(), cluster.end());
    block.rank_ = rank;
    block.grid_ = grid;
    block.body_ = &body;
    block.reset({index.x + rank, index.y, index.z});
    ++block.stats.blocks;
  }
  adopt_thread(first.host_);
  Block& begin = first.options_.order == LaneOrder::reverse ? *cluster.back() : first;
  begin.resume(first.host_, *begin.pick(), false);
  for (Block* block : cluster) block->check_end();
  if (!first.error_.empty()) throw Error(first.error_);
}

void Block::check_end() {
  std::string error;
  if (!first().error_.empty()) return;
  if (chain_ == Chain::beside &&
      std::none_of(lanes_.begin(), lanes_.end(), [](const Lane& l) { return l.waited; })) {
    error = "ends without grid_dependency_wait() in any thread, and the kernel started beside one";
  }
  for (AsyncUnit* unit : units_->all()) {
    if (error.empty()) error = unit->check_end();
  }
  if (error.empty()) error = units_->mbarriers.check_end();
  fail(error);
}

/// Of all blocks, the first error counts.
void Block::fail(const std::string& error) {
  if (error.empty() || !first().error_.empty()) return;
  first().error_ = text("block (%d,%d,%d): ", index_.x, index_.y, index_.z) + error;
}

void Block::refuse(Word word, const Where& where) const {
  throw Error(text("%s, in kernel %s, at %s", vocabulary_.lack(word).c_str(),
                   kernel_name(options_.kernel).c_str(), describe(where).c_str()));
}

void Block::refuse_lanes(Word word, int lanes, const Where& where) const {
  throw Error(text("%s is for warps of %d lanes, not of %d, in kernel %s, at %s", name(word), lanes,
                   warp_lanes_, kernel_name(options_.kernel).c_str(), describe(where).c_str()));
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
    block.fail(text("thread %d (warp %d lane %d): ", me.thread, me.warp, me.lane) + e.what());
  }
  me.waiting = Waiting::finished;
  --block.alive_;
  const std::string& error = block.first().error_;
  Lane* next = nullptr;
  if (error.empty()) {
    try {
      next = block.pick();
    } catch (const std::exception& e) {  // an asynchronous operation completed, with an error
      block.fail(e.what());
    }
  }
  if (next) block.resume(me.fiber, *next, true);
  if (error.empty() && !block.cluster_has_ended()) block.fail(block.deadlock_report());
  block.leave(me.fiber, true);
}

void Block::resume(Fiber& from, Lane& to, bool last) {
  ++stats.switches;
  current_lane = &to;
  switch_to(from, to.fiber, last);
}

void Block::leave(Fiber& from, bool last) {
  current_lane = nullptr;
  switch_to(from, first().host_, last);
}

Lane* Block::take(int warp, int lane_index) {
  warp_ = warp;
  runnable_[static_cast<std::size_t>(warp)] &= ~(std::uint64_t{1} << lane_index);
  Lane& l = lane(warp_lanes_ * warp + lane_index);
  l.waiting = Waiting::nothing;
  return &l;
}

namespace {

/// std::popcount, which is a call where the instruction is not known to be there.
std::uint64_t ones_of(std::uint64_t bits) {
  bits -= bits >> 1 & 0x5555555555555555u;
  bits = (bits & 0x3333333333333333u) + (bits >> 2 & 0x3333333333333333u);
  return ((bits + (bits >> 4)) & 0x0f0f0f0f0f0f0f0fu) * 0x0101010101010101u >> 56;
}

}  // namespace

/// The first lane of the warp that can run, in an order that is not random; or none.
Lane* Block::next_of_warp(int warp) {
  const std::uint64_t lanes = runnable_[static_cast<std::size_t>(warp)];
  if (lanes == 0) return nullptr;
  const bool forward = options_.order == LaneOrder::forward;
  return take(warp, forward ? std::countr_zero(lanes) : 63 - std::countl_zero(lanes));
}

Lane* Block::next_runnable() {
  const int n = warps();
  if (options_.order == LaneOrder::random) {
    // One number for the warp and the lane, without divisions.
    const std::uint64_t draw = random();
    int w = static_cast<int>((draw >> 32) * static_cast<std::uint64_t>(n) >> 32);
    for (int i = 0; i < n; ++i, w = w + 1 == n ? 0 : w + 1) {
      std::uint64_t lanes = runnable_[static_cast<std::size_t>(w)];
      if (lanes == 0) continue;
      for (auto skip = (draw & 0xffffffffu) * ones_of(lanes) >> 32; skip > 0; --skip) {
        lanes &= lanes - 1;
      }
      return take(w, std::countr_zero(lanes));
    }
    return nullptr;
  }
  // Staying within a warp as long as it can run keeps collectives together.
  const bool forward = options_.order == LaneOrder::forward;
  for (int i = 0, w = warp_; i < n; ++i) {
    if (Lane* next = next_of_warp(w)) return next;
    w = forward ? (w + 1 == n ? 0 : w + 1) : (w == 0 ? n - 1 : w - 1);
  }
  return nullptr;
}

bool Block::cluster_has_ended() const {
  return std::all_of(cluster_.begin(), cluster_.end(), [](Block* b) { return b->has_ended(); });
}

/// Of this block as long as it can run, then of its neighbours.
Lane* Block::next_of_cluster() {
  const int n = cluster_blocks();
  if (n == 1) return next_runnable();
  int rank = rank_, step = options_.order == LaneOrder::reverse ? n - 1 : 1;
  if (options_.order == LaneOrder::random) {
    rank = static_cast<int>(first().random() % static_cast<std::uint64_t>(n));
  }
  for (int i = 0; i < n; ++i, rank = (rank + step) % n) {
    if (Lane* next = cluster_[static_cast<std::size_t>(rank)]->next_runnable()) return next;
  }
  return nullptr;
}

Lane* Block::pick() {
  if (options_.schedule == Schedule::random && alive_ > 0 && random() % 8 == 0) {
    advance();
  }
  for (;;) {
    if (Lane* next = next_of_cluster()) return next;
    if (cluster_has_ended()) return nullptr;
    // Late operations complete when nobody can go on without them.
    if (std::any_of(cluster_.begin(), cluster_.end(), [](Block* b) { return b->advance(); })) {
      first().idle_polls_ = 0;
      wake_pollers();
    } else if (++first().idle_polls_ > 1000 || !wake_pollers()) {
      if (!wait_for_others()) return nullptr;
    }
  }
}

/// Ends one of the asynchronous operations that nothing orders; false: there is none.
bool Block::advance() {
  std::size_t count = 0;
  for (const AsyncUnit* unit : units_->all()) count += unit->unordered();
  if (count == 0) return false;
  std::size_t i = options_.schedule == Schedule::random ? random() % count : count - 1;
  for (AsyncUnit* unit : units_->all()) {
    if (i < unit->unordered()) {
      unit->complete(i);
      return true;
    }
    i -= unit->unordered();
  }
  return false;
}

/// Gives other blocks time, if a lane waits for one. False: enough of it.
bool Block::wait_for_others() {
  constexpr std::chrono::microseconds nap(100);
  constexpr int most_naps = 600'000;
  if (first().outside_polls_ == 0 || first().idle_polls_ > most_naps) return false;
  std::this_thread::sleep_for(nap);
  return wake_pollers();
}

bool Block::wake_pollers() {
  bool any = false;
  for (Block* block : cluster_) {
    any = any || !block->pollers_.empty();
    for (Lane* l : block->pollers_) block->wake(*l);
    block->pollers_.clear();
  }
  return any;
}

void Block::wait(Waiting why, const Where& where, std::uint32_t address, std::uint32_t parity) {
  Lane& me = *current_lane;
  me.waiting = why;
  me.where = where;
  me.address = address;
  me.parity = parity;
  Lane* next = nullptr;
  // What pick() finds first, if it draws no number.
  if (options_.order != LaneOrder::random && options_.schedule != Schedule::random) {
    next = next_of_warp(warp_);
  }
  if (next == nullptr) next = pick();
  if (next == &me) return;
  if (next) {
    resume(me.fiber, *next, false);
  } else {
    fail(deadlock_report());
    leave(me.fiber, true);
  }
}

void Block::poll(const Where& where) {
  pollers_.push_back(current_lane);
  wait(Waiting::poll, where);
}

void Block::poll_outside(const Where& where) {
  ++first().outside_polls_;
  poll(where);
  --first().outside_polls_;
}

// ---- Collectives
// ---------------------------------------------------------------------------------

namespace {

/// Equal places are nearly always one object of the compiler's, which is the faster question.
bool is_same_place(const Where& a, const Where& b) {
  static_assert(std::is_trivially_copyable_v<Where>);
  return std::memcmp(&a, &b, sizeof a) == 0 || (a.line() == b.line() && a.column() == b.column());
}

}  // namespace

bool Block::gather(Group& group, Waiting kind, int size, int slot, Word word, void* argument,
                   const Where& where) {
  require(word, where);
  if (group.arrived == 0) {
    group.word = word;
    group.where = where;
  } else if (group.word != word || !is_same_place(group.where, where)) {
    throw Error(text("divergent collective: %s at %s, while other lanes of the %s are in %s at %s",
                     name(word), describe(where).c_str(),
                     kind == Waiting::warp ? "warp" : "warpgroup", name(group.word),
                     describe(group.where).c_str()));
  }
  group.arguments[static_cast<std::size_t>(slot)] = argument;
  if (++group.arrived < size) {
    wait(kind, where);
    return false;
  }
  count(word, static_cast<std::uint64_t>(size));
  return true;
}

void* const* Block::gather_warp(Word word, void* argument, const Where& where) {
  const Lane& me = *current_lane;
  Group& group = warp_groups_[static_cast<std::size_t>(me.warp)];
  return gather(group, Waiting::warp, warp_lanes_, me.lane, word, argument, where)
             ? group.arguments.data()
             : nullptr;
}

void Block::release_warp() {
  const Lane& me = *current_lane;
  const auto warp = static_cast<std::size_t>(me.warp);
  warp_groups_[warp].arrived = 0;
  runnable_[warp] |= all_lanes() & ~(std::uint64_t{1} << me.lane);
}

void* const* Block::gather_warpgroup(Word word, void* argument, const Where& where) {
  const Lane& me = *current_lane;
  if (me.warp / 4 * 4 + 4 > warps()) {
    throw Error(text("%s: warp %d belongs to no warpgroup of four warps, at %s", name(word),
                     me.warp, describe(where).c_str()));
  }
  Group& group = warpgroups_[static_cast<std::size_t>(me.warp / 4)];
  return gather(group, Waiting::warpgroup, 128, me.thread % 128, word, argument, where)
             ? group.arguments.data()
             : nullptr;
}

void Block::release_warpgroup() {
  const Lane& me = *current_lane;
  const int first = me.warp / 4 * 4;
  warpgroups_[static_cast<std::size_t>(me.warp / 4)].arrived = 0;
  for (int w = first; w < first + 4; ++w) {
    runnable_[static_cast<std::size_t>(w)] |=
        w == me.warp ? all_lanes() & ~(std::uint64_t{1} << me.lane) : all_lanes();
  }
}

void Block::sync_warp(const Where& where) {
  char none = 0;
  warp_collective(Word::sync_warp, none, where, [](Block& block, Arguments<char>) {
    if (block.options_.races) {
      block.races_.meet(block.warp_lanes_ * current_lane->warp, block.warp_lanes_);
    }
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
  if (id < 0 || id >= kClusterBarrier || threads <= 0 || threads % warp_lanes_ ||
      threads > threads_) {
    throw Error(
        text("barrier %d of %d threads: ids are 0 to 15, counts multiples of %d up to the "
             "block's %d, at %s",
             id, threads, warp_lanes_, threads_, describe(where).c_str()));
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

}  // namespace qattn::emu
