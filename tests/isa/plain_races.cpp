#include "plain_races.hpp"

#include <algorithm>
#include <bit>

namespace qattn::isa_test {

using emu::describe;
using emu::Error;
using emu::text;

namespace {

constexpr std::uint32_t kPageWords = 64;

/// to = max(to, from)
void raise(std::uint32_t* to, const std::uint32_t* from, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) to[i] = std::max(to[i], from[i]);
}

/// to = min(to, from)
void lower(std::uint32_t* to, const std::uint32_t* from, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) to[i] = std::min(to[i], from[i]);
}

}  // namespace

void PlainRaces::prepare(int lanes, std::uint32_t bytes, int blocks) {
  const std::uint32_t words = (bytes + 3) / 4 * static_cast<std::uint32_t>(blocks);
  first_ = this;
  base_ = 0;
  memory_ = 0;
  lanes_ = lanes;
  blocks_ = blocks;
  block_agents_ = barrier_agent(kBarrierAgents - 1) + 1;
  if (blocks > 1) block_agents_ = (block_agents_ + 31) / 32 * 32;  // a warp is one group of readers
  agents_ = blocks * block_agents_;
  stride_ = 2 * static_cast<std::size_t>(agents_);
  fences_ = false;
  clocks_.assign(static_cast<std::size_t>(agents_) * stride_, 0);
  for (int a = 0; a < agents_; ++a) seen(a, a) = 1;
  const int groups = (agents_ + 31) / 32;
  if (words != words_ || groups != groups_) {
    words_ = words;
    groups_ = groups;
    writes_.assign(words, {});
    reads_.assign(words * static_cast<std::size_t>(groups), {});
    split_.assign(words, 0);
    page_generation_.assign(words / kPageWords + 1, 0);
    generation_ = 0;
  }
  ++generation_;
  more_reads_.clear();
  atomics_.clear();
}

void PlainRaces::join(PlainRaces& first, int rank) {
  first_ = &first;
  lanes_ = first.lanes_;
  base_ = rank * first.block_agents_;
  memory_ = 4 * first.words_ / static_cast<std::uint32_t>(first.blocks_) *
            static_cast<std::uint32_t>(rank);
}

// ---- Order
// ---------------------------------------------------------------------------------------

void PlainRaces::release(int agent, PlainClock& clock) {
  if (first_ != this) return first_->release(base_ + agent, clock);
  if (clock.empty()) clock.assign(stride_, 0);
  raise(clock.data(), &seen(agent, 0), width());
  ++seen(agent, agent);
}

void PlainRaces::acquire(int agent, const PlainClock& clock) {
  if (first_ != this) return first_->acquire(base_ + agent, clock);
  if (!clock.empty()) raise(&seen(agent, 0), clock.data(), width());
}

void PlainRaces::meet(int first, int count) {
  if (first_ != this) return first_->meet(base_ + first, count);
  thread_local PlainClock all;
  all.assign(stride_, 0);
  for (int a = first; a < first + count; ++a) raise(all.data(), &seen(a, 0), width());
  for (int a = first; a < first + count; ++a) {
    std::copy(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(width()), &seen(a, 0));
    ++seen(a, a);
  }
}

void PlainRaces::fence_async(int agent) {
  if (first_ != this) return first_->fence_async(base_ + agent);
  fences_ = true;
  raise(&visible(agent, 0), &seen(agent, 0), static_cast<std::size_t>(agents_));
  ++seen(agent, agent);
}

std::uint32_t PlainRaces::begin(int agent, int issuer) {
  if (first_ != this) return first_->begin(base_ + agent, base_ + issuer);
  const std::uint32_t time = seen(agent, agent) + 1;
  std::copy_n(&seen(issuer, 0), width(), &seen(agent, 0));
  return seen(agent, agent) = time;
}

std::uint32_t PlainRaces::begin_for_all(int agent, int first) {
  if (first_ != this) return first_->begin_for_all(base_ + agent, base_ + first);
  const std::uint32_t time = seen(agent, agent) + 1;
  std::uint32_t* common = &seen(agent, 0);
  std::copy_n(&seen(first, 0), width(), common);
  for (int lane = first + 1; lane < first + 128; ++lane) lower(common, &seen(lane, 0), width());
  return seen(agent, agent) = time;
}

void PlainRaces::observe(int agent, int other, std::uint32_t until) {
  if (first_ != this) return first_->observe(base_ + agent, base_ + other, until);
  std::uint32_t& time = seen(agent, other);
  time = std::max(time, until);
}

// ---- Granules
// ------------------------------------------------------------------------------------

void PlainRaces::touch(std::uint32_t word) {
  if (page_generation_[word / kPageWords] == generation_) [[likely]]
    return;
  page_generation_[word / kPageWords] = generation_;
  const std::uint32_t first = word / kPageWords * kPageWords;
  const std::uint32_t end = std::min(first + kPageWords, words_);
  std::fill(writes_.begin() + first, writes_.begin() + end, Write{});
  std::fill(split_.begin() + first, split_.begin() + end, std::uint8_t{0});
  std::fill(reads_of(first), reads_of(first) + (end - first) * static_cast<std::size_t>(groups_),
            Reads{});
}

void PlainRaces::split(std::uint32_t word) {
  if (split_[word]) return;
  split_[word] = 1;
  // The bytes' granules follow the words'; most kernels never need them.
  if (writes_.size() == words_) {
    writes_.resize(std::size_t{5} * words_);
    reads_.resize(std::size_t{5} * words_ * static_cast<std::size_t>(groups_));
  }
  for (std::uint32_t g = words_ + 4 * word; g < words_ + 4 * word + 4; ++g) {
    writes_[g] = writes_[word];
    std::copy_n(reads_of(word), groups_, reads_of(g));
    more_reads_.erase(g);
    atomics_.erase(g);
    if (const auto it = more_reads_.find(word); it != more_reads_.end()) {
      more_reads_[g] = std::vector<Access>(it->second);
    }
    if (const auto it = atomics_.find(word); it != atomics_.end()) {
      atomics_[g] = std::vector<Access>(it->second);
    }
  }
}

template <class Visit>
void PlainRaces::visit_granules(std::uint32_t offset, std::uint32_t bytes, Visit visit) {
  const std::uint32_t first = offset / 4, last = (offset + bytes - 1) / 4;
  for (std::uint32_t word = first; word <= last; ++word) {
    touch(word);
    if (bytes < 4) split(word);
    if (!split_[word]) {
      visit(word);
      continue;
    }
    const std::uint32_t begin = std::max(offset, 4 * word);
    const std::uint32_t end = std::min(offset + bytes, 4 * word + 4);
    for (std::uint32_t byte = begin; byte < end; ++byte) visit(words_ + byte);
  }
}

std::uint32_t PlainRaces::offset_of(std::uint32_t granule) const {
  const std::uint32_t bytes = 4 * words_ / static_cast<std::uint32_t>(blocks_);
  return (granule < words_ ? 4 * granule : granule - words_) % bytes;
}

// ---- Accesses
// ------------------------------------------------------------------------------------

std::string PlainRaces::agent_name(int agent) const {
  if (blocks_ > 1) {
    const std::string of_block = text(" of block %d of the cluster", agent / block_agents_);
    return agent_name_in_block(agent % block_agents_) + of_block;
  }
  return agent_name_in_block(agent);
}

std::string PlainRaces::agent_name_in_block(int agent) const {
  if (agent < lanes_) return text("thread %d", agent);
  if (agent < store_agent(0)) return text("wgmma of warpgroup %d", agent - lanes_);
  if (agent < barrier_agent(0)) return text("a bulk store of warp %d", agent - store_agent(0));
  return "a bulk load";
}

void PlainRaces::fail(std::uint32_t granule, const Access& by, const char* verb, int other,
                      const char* earlier, const Where* place) const {
  std::string message = text("race: %s %s shared memory +0x%x at %s, not ordered after %s of %s",
                             agent_name(by.agent).c_str(), verb, offset_of(granule),
                             describe(by.where).c_str(), earlier, agent_name(other).c_str());
  if (place) message += " at " + describe(*place);
  throw Error(message);
}

void PlainRaces::fail_fence(std::uint32_t granule, const Access& by, const char* verb) const {
  const Write& last = writes_[granule];
  throw Error(
      text("%s %s shared memory +0x%x at %s, written by %s at %s without "
           "fence_async_proxy between",
           agent_name(by.agent).c_str(), verb, offset_of(granule), describe(by.where).c_str(),
           agent_name(last.agent).c_str(), describe(last.where).c_str()));
}

inline void PlainRaces::check_writers(std::uint32_t granule, const Access& by, Proxy proxy,
                                      const char* verb) {
  const Write& last = writes_[granule];
  if (last.time == 0) return;
  if (last.agent != by.agent && seen(by.agent, last.agent) < last.time) {
    fail(granule, by, verb, last.agent, "the write", &last.where);
  }
  if (proxy == Proxy::async && last.proxy == Proxy::generic &&
      visible(by.agent, last.agent) < last.time) {
    fail_fence(granule, by, verb);
  }
}

void PlainRaces::check_atomics(std::uint32_t granule, const Access& by, const char* verb) {
  for (const Access& a : atomics_[granule]) {
    if (a.agent != by.agent && seen(by.agent, a.agent) < a.time) {
      fail(granule, by, verb, a.agent, "the atomic operation", &a.where);
    }
  }
}

void PlainRaces::check_readers(std::uint32_t granule, const Access& by) {
  Reads* groups = reads_of(granule);
  for (int group = 0; group < groups_; ++group) {
    std::uint32_t lanes = groups[group].lanes;
    for (; lanes; lanes &= lanes - 1) {
      const int reader = 32 * group + std::countr_zero(lanes);
      if (reader != by.agent && seen(by.agent, reader) < groups[group].time) {
        fail(granule, by, "writes", reader, "the read", nullptr);
      }
    }
    groups[group] = {};
  }
  if (more_reads_.empty()) return;
  const auto more = more_reads_.find(granule);
  if (more == more_reads_.end()) return;
  for (const Access& reader : more->second) {
    if (reader.agent != by.agent && seen(by.agent, reader.agent) < reader.time) {
      fail(granule, by, "writes", reader.agent, "the read", &reader.where);
    }
  }
  more_reads_.erase(more);
}

inline void PlainRaces::record_read(std::uint32_t granule, const Access& by) {
  Reads& slot = reads_of(granule)[by.agent / 32];
  const std::uint32_t lane = 1u << (by.agent % 32);
  if (slot.lanes == 0 || slot.lanes == lane) {
    slot = {by.time, lane};
  } else if (slot.time == by.time) {
    slot.lanes |= lane;
  } else {
    record_later_read(granule, by);
  }
}

void PlainRaces::record_later_read(std::uint32_t granule, const Access& by) {
  Reads& slot = reads_of(granule)[by.agent / 32];
  const std::uint32_t lane = 1u << (by.agent % 32);
  // Readers that come before this one need no memory: who is ordered after it, is after them.
  bool ordered = true;
  for (std::uint32_t lanes = slot.lanes & ~lane; lanes; lanes &= lanes - 1) {
    const int reader = by.agent / 32 * 32 + std::countr_zero(lanes);
    ordered = ordered && seen(by.agent, reader) >= slot.time;
  }
  if (ordered) {
    slot = {by.time, lane};
    return;
  }
  auto& more = more_reads_[granule];
  const auto mine =
      std::find_if(more.begin(), more.end(), [&](const Access& a) { return a.agent == by.agent; });
  if (mine == more.end()) {
    more.push_back(by);
  } else {
    *mine = by;
  }
}

void PlainRaces::read_at(std::uint32_t offset, std::uint32_t bytes, int agent, Proxy proxy,
                         const Where& where) {
  const Access by{agent, seen(agent, agent), where};
  visit_granules(offset, bytes, [&](std::uint32_t granule) {
    check_writers(granule, by, proxy, "reads");
    if (writes_[granule].atomic) check_atomics(granule, by, "reads");
    record_read(granule, by);
  });
}

void PlainRaces::write_at(std::uint32_t offset, std::uint32_t bytes, int agent, Proxy proxy,
                          const Where& where) {
  const Access by{agent, seen(agent, agent), where};
  const Write now{where, by.time, static_cast<std::uint16_t>(agent), proxy, false};
  visit_granules(offset, bytes, [&](std::uint32_t granule) {
    check_writers(granule, by, proxy, "writes");
    if (writes_[granule].atomic) check_atomics(granule, by, "writes");
    check_readers(granule, by);
    writes_[granule] = now;
  });
  if (bytes < 4) return;
  for (std::uint32_t word = offset / 4; word < (offset + bytes) / 4; ++word) {
    if (!split_[word]) continue;
    split_[word] = 0;  // one writer again
    writes_[word] = now;
    std::fill_n(reads_of(word), groups_, Reads{});
    more_reads_.erase(word);
    atomics_.erase(word);
  }
}

void PlainRaces::atomic_at(std::uint32_t offset, std::uint32_t bytes, int agent,
                           const Where& where) {
  const Access by{agent, seen(agent, agent), where};
  visit_granules(offset, bytes, [&](std::uint32_t granule) {
    check_writers(granule, by, Proxy::generic, "updates");
    check_readers(granule, by);
    // Atomic operations do not race with each other: the plain write before them stays the last.
    Write& last = writes_[granule];
    auto& all = atomics_[granule];
    if (!last.atomic) all.clear();
    last.atomic = true;
    const auto mine =
        std::find_if(all.begin(), all.end(), [&](const Access& a) { return a.agent == agent; });
    if (mine == all.end()) {
      all.push_back(by);
    } else {
      *mine = by;
    }
  });
}

}  // namespace qattn::isa_test
