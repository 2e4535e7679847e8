#include "isa/emu/block/order.hpp"

#include <algorithm>
#include <cstring>

namespace qattn::emu {
namespace {

// GCC and clang lower these eight numbers to whatever vectors the target has.
using Times8 [[gnu::vector_size(32)]] = std::uint32_t;

/// to = max(to, from), or their minima.
template <bool maxima>
[[gnu::always_inline]] inline void join_all(std::uint32_t* to, const std::uint32_t* from,
                                            std::size_t count) {
  std::size_t i = 0;
  for (; i + 8 <= count; i += 8) {
    Times8 x, y;
    std::memcpy(&x, to + i, sizeof x);
    std::memcpy(&y, from + i, sizeof y);
    x = (maxima ? x > y : x < y) ? x : y;
    std::memcpy(to + i, &x, sizeof x);
  }
  for (; i < count; ++i) to[i] = maxima ? std::max(to[i], from[i]) : std::min(to[i], from[i]);
}

#if defined(__x86_64__)
template <bool maxima>
[[gnu::target("avx2")]] void join_avx2(std::uint32_t* to, const std::uint32_t* from,
                                       std::size_t count) {
  join_all<maxima>(to, from, count);
}
#endif

template <bool maxima>
void join(std::uint32_t* to, const std::uint32_t* from, std::size_t count) {
#if defined(__x86_64__)
  static const bool avx2 = __builtin_cpu_supports("avx2");
  if (avx2) return join_avx2<maxima>(to, from, count);
#endif
  join_all<maxima>(to, from, count);
}

/// to = max(to, from)
void raise(std::uint32_t* to, const std::uint32_t* from, std::size_t count) {
  join<true>(to, from, count);
}

/// to = min(to, from)
void lower(std::uint32_t* to, const std::uint32_t* from, std::size_t count) {
  join<false>(to, from, count);
}

void raise(std::uint32_t& to, std::uint32_t from) { to = std::max(to, from); }

}  // namespace

Snapshot::Snapshot(std::size_t count, const std::uint32_t* from, std::size_t width)
    : cells_(new std::uint32_t[count + 1]) {
  cells_[0] = 1;
  if (from == nullptr) width = 0;
  if (width > 0) std::memcpy(times(), from, width * sizeof *from);
  std::fill(times() + width, times() + count, 0u);
}

bool Clock::has(const Snapshot& snapshot) const {
  return std::find(merged_.rbegin(), merged_.rend(), snapshot) != merged_.rend();
}

void Order::prepare(int agents) {
  agents_ = agents;
  fences_ = false;
  const auto n = static_cast<std::size_t>(agents);
  const Snapshot nothing(count(), nullptr, 0);
  of_.assign(n, nothing);
  known_.assign(n, nothing.times());
  own_.assign(n, 1);
  own_visible_.assign(n, 0);
  acquired_ = fenced_ = observed_ = {};
  last_group_.clear();
  least_ = {};
}

void Order::put(std::size_t agent, Snapshot snapshot) {
  known_[agent] = snapshot.times();
  of_[agent] = std::move(snapshot);
}

void Order::release(int agent, Clock& clock) {
  const auto a = static_cast<std::size_t>(agent);
  if (clock.empty()) clock.times_.assign(count(), 0);
  clock.frozen_ = {};
  std::uint32_t* times = clock.times_.data();
  if (!clock.has(of_[a])) {
    raise(times, known_[a], width());
    // An mbarrier's clock is never cleared. What it forgets here it may only merge again.
    if (clock.merged_.size() >= 64)
      clock.merged_.erase(clock.merged_.begin(), clock.merged_.begin() + 32);
    clock.merged_.push_back(of_[a]);
  }
  raise(times[a], own_[a]);
  raise(times[fenced(a)], own_visible_[a]);
  ++own_[a];
}

void Order::acquire(int agent, const Clock& clock) {
  if (clock.empty()) return;
  const auto a = static_cast<std::size_t>(agent);
  if (!clock.frozen_) clock.frozen_ = copy_of(clock.times_.data());
  Snapshot result = clock.frozen_;
  if (!clock.has(of_[a]) && of_[a] != result) {
    if (acquired_.from != of_[a] || acquired_.with != clock.frozen_) {
      result = copy_of(known_[a]);
      raise(result.times(), clock.times_.data(), width());
      acquired_ = {of_[a], clock.frozen_, result};
    }
    result = acquired_.result;
  }
  put(a, std::move(result));
  raise(own_visible_[a], known_[a][fenced(a)]);
}

void Order::meet(int first, int count) {
  const auto begin = static_cast<std::size_t>(first), end = begin + static_cast<std::size_t>(count);
  const Snapshot all = copy_of(known_[begin]);
  std::uint32_t* times = all.times();
  for (std::size_t a = begin + 1; a < end; ++a) {
    if (of_[a] != of_[a - 1]) raise(times, known_[a], width());
  }
  for (std::size_t a = begin; a < end; ++a) {
    raise(times[a], own_[a]);
    raise(times[fenced(a)], own_visible_[a]);
    own_visible_[a] = times[fenced(a)];
    ++own_[a];
    put(a, all);
  }
}

void Order::fence_async(int agent) {
  fences_ = true;
  const auto a = static_cast<std::size_t>(agent);
  if (!fenced_.result || fenced_.from != of_[a]) {
    const Snapshot result = copy_of(known_[a]);
    raise(result.times() + agents_, known_[a], static_cast<std::size_t>(agents_));
    fenced_ = {of_[a], {}, result};
  }
  put(a, fenced_.result);
  raise(own_visible_[a], own_[a]);
  ++own_[a];
}

std::uint32_t Order::begin(int agent, int issuer) {
  const auto a = static_cast<std::size_t>(agent), i = static_cast<std::size_t>(issuer);
  Snapshot copy = copy_of(known_[i]);
  copy.times()[i] = own_[i];
  copy.times()[fenced(i)] = own_visible_[i];
  put(a, std::move(copy));
  own_visible_[a] = known_[a][fenced(a)];
  return ++own_[a];
}

/// The least that the lanes of group_ know.
Snapshot Order::least_of(std::size_t first) const {
  const auto shared = [&](const Snapshot& snapshot) {
    return std::find(group_.begin(), group_.end(), std::pair(snapshot, 1)) == group_.end();
  };
  Snapshot least(count(), nullptr, 0);
  std::uint32_t* times = least.times();
  std::fill_n(times, width(), ~0u);
  for (std::size_t lane = first; lane < first + 128; ++lane) {
    if (shared(of_[lane])) continue;
    // Alone with its snapshot, a lane knows more of itself than that says.
    const std::uint32_t own = std::min(times[lane], own_[lane]);
    const std::uint32_t own_visible = std::min(times[fenced(lane)], own_visible_[lane]);
    lower(times, known_[lane], width());
    times[lane] = own;
    times[fenced(lane)] = fences_ ? own_visible : 0;
  }
  // Of lanes that share one, each knows no more of the others than these of themselves.
  for (const auto& [snapshot, lanes] : group_) {
    if (lanes > 1) lower(times, snapshot.times(), width());
  }
  return least;
}

std::uint32_t Order::begin_for_all(int agent, int first) {
  const auto a = static_cast<std::size_t>(agent), begin = static_cast<std::size_t>(first);
  group_.clear();
  for (std::size_t lane = begin; lane < begin + 128; ++lane) {
    const auto same = std::find_if(group_.rbegin(), group_.rend(),
                                   [&](const auto& g) { return g.first == of_[lane]; });
    if (same != group_.rend()) {
      ++same->second;
    } else {
      group_.emplace_back(of_[lane], 1);
    }
  }
  const bool alone =
      std::any_of(group_.begin(), group_.end(), [](const auto& g) { return g.second == 1; });
  Snapshot least = group_.front().first;
  if (alone) {  // their own times count, too, which move while snapshots stay
    least = least_of(begin);
  } else if (group_.size() > 1) {
    if (!least_ || group_ != last_group_) {
      least_ = least_of(begin);
      last_group_ = group_;
    }
    least = least_;
  }
  put(a, std::move(least));
  own_visible_[a] = known_[a][fenced(a)];
  return ++own_[a];
}

void Order::observe(int agent, int other, std::uint32_t until) {
  const auto a = static_cast<std::size_t>(agent), o = static_cast<std::size_t>(other);
  if (known_[a][o] >= until) return;
  if (observed_.from != of_[a] || observed_.other != other || observed_.until != until) {
    const Snapshot result = copy_of(known_[a]);
    result.times()[o] = until;
    observed_ = {of_[a], {}, result, other, until};
  }
  put(a, observed_.result);
}

void Order::observe(Clock& clock, int other, std::uint32_t until) const {
  if (clock.empty()) clock.times_.assign(count(), 0);
  std::uint32_t& time = clock.times_[static_cast<std::size_t>(other)];
  if (time >= until) return;
  clock.frozen_ = {};
  time = until;
}

}  // namespace qattn::emu
