// mbarriers: arrivals, bytes, phases.
#include "isa/emu/units/mbarriers.hpp"

#include <algorithm>

#include "isa/emu/fault.hpp"

namespace qattn::emu {
namespace {

constexpr int kLargestCount = (1 << 20) - 1;

unsigned offset(std::uint32_t address) { return SharedMemory::offset(address); }

}  // namespace

void Mbarriers::init(std::uint32_t address, int arrivals, const Where& where) {
  block_.count(Word::mbarrier_init);
  if (arrivals < 1 || arrivals > kLargestCount) {
    throw Error(text("mbarrier_init: %d arrivals, at %s", arrivals, emu::describe(where).c_str()));
  }
  block_.write_as(current_lane->thread, address, 8, "mbarrier_init", where);
  block_.shared().mark(address, 8, ByteState::mbarrier);
  Mbarrier barrier;
  barrier.index = static_cast<int>(all_.size());
  barrier.count = barrier.pending = arrivals;
  barrier.initialiser = current_lane->thread;
  all_[address] = barrier;
}

void Mbarriers::fence_init() {
  for (auto& [address, barrier] : all_) {
    if (barrier.initialiser == current_lane->thread) barrier.fenced = true;
  }
}

Mbarrier& Mbarriers::find(std::uint32_t address, const char* what, const Where& where) {
  block_.shared().check_place(address, 8, 8, what, where);
  const auto it = all_.find(address);
  if (it == all_.end()) {
    throw Error(text("%s: no mbarrier was initialised at shared memory +0x%x, at %s", what,
                     offset(address), emu::describe(where).c_str()));
  }
  // Whoever uses it must come after its initialisation.
  if (block_.options().races) {
    block_.races().read(offset(address), 8, current_lane->thread, Proxy::generic, where);
  }
  return it->second;
}

void Mbarriers::end_phase(std::uint32_t address, Mbarrier& barrier, const Where& where) {
  if (barrier.pending < 0) {
    throw Error(text("mbarrier +0x%x: more arrivals than its %d in phase %u, at %s",
                     offset(address), barrier.count, barrier.phase, emu::describe(where).c_str()));
  }
  if (barrier.pending > 0 || barrier.missing_bytes != 0) return;
  ++barrier.phase;
  barrier.pending = barrier.count;
  barrier.arrived.clear();
  barrier.completed = barrier.arriving;
  for (Lane* lane : barrier.waiting) block_.wake(*lane);
  barrier.waiting.clear();
}

void Mbarriers::arrive(std::uint32_t address, const Where& where) {
  block_.count(Word::mbarrier_arrive);
  Mbarrier& barrier = find(address, "mbarrier_arrive", where);
  const int thread = current_lane->thread;
  if (std::count(barrier.arrived.begin(), barrier.arrived.end(), thread)) {
    throw Error(text("mbarrier +0x%x: thread %d arrives twice in phase %u, at %s", offset(address),
                     thread, barrier.phase, emu::describe(where).c_str()));
  }
  barrier.arrived.push_back(thread);
  if (planted_fault().at(Fault::lost_arrival, barrier.index)) return;
  if (block_.options().races) block_.races().release(thread, barrier.arriving);
  --barrier.pending;
  end_phase(address, barrier, where);
}

void Mbarriers::expect(std::uint32_t address, std::uint32_t bytes, const Where& where) {
  Mbarrier& barrier = find(address, "mbarrier_expect", where);
  if (planted_fault().at(Fault::few_bytes, barrier.index)) bytes -= 16;
  if (planted_fault().at(Fault::many_bytes, barrier.index)) bytes += 16;
  barrier.missing_bytes += bytes;
  if (barrier.missing_bytes > kLargestCount) {
    throw Error(text("mbarrier +0x%x: %lld bytes expected, more than it counts, at %s",
                     offset(address), static_cast<long long>(barrier.missing_bytes),
                     emu::describe(where).c_str()));
  }
}

void Mbarriers::wait(std::uint32_t address, std::uint32_t parity, const Where& where) {
  block_.count(Word::mbarrier_wait);
  Mbarrier& barrier = find(address, "mbarrier_wait", where);
  if (planted_fault().at(Fault::lost_wait, barrier.index)) return;
  while ((barrier.phase & 1) == (parity & 1)) {
    barrier.waiting.push_back(current_lane);
    block_.wait(Waiting::mbarrier, where, address, parity & 1);
  }
  if (block_.options().races) block_.races().acquire(current_lane->thread, barrier.completed);
}

bool Mbarriers::test(std::uint32_t address, std::uint32_t parity, const Where& where) {
  block_.count(Word::mbarrier_wait);
  Mbarrier& barrier = find(address, "mbarrier_test", where);
  if ((barrier.phase & 1) == (parity & 1)) {
    block_.poll(where);
    return false;
  }
  if (block_.options().races) block_.races().acquire(current_lane->thread, barrier.completed);
  return true;
}

std::string Mbarriers::describe(std::uint32_t address, std::uint32_t parity) {
  const Mbarrier& b = all_[address];
  return text(
      "wait at mbarrier +0x%x for parity %u: phase %u lacks %d of %d arrivals and %lld "
      "bytes",
      offset(address), parity, b.phase, b.pending, b.count,
      static_cast<long long>(b.missing_bytes));
}

Mbarrier& Mbarriers::ready(std::uint32_t address, const char* what, const Where& where) {
  Mbarrier& barrier = find(address, what, where);
  if (!barrier.fenced) {
    throw Error(text("%s: mbarrier +0x%x was initialised without fence_mbarrier_init, at %s", what,
                     offset(address), emu::describe(where).c_str()));
  }
  return barrier;
}

void Mbarriers::complete(std::uint32_t address, std::uint32_t bytes, int agent, std::uint32_t time,
                         const Where& where) {
  Mbarrier& barrier = all_.at(address);
  if (block_.options().races) {
    block_.races().observe(barrier.arriving, agent, time);
  }
  barrier.missing_bytes -= bytes;
  end_phase(address, barrier, where);
}

std::string Mbarriers::check_end() {
  for (const auto& [address, b] : all_) {
    if (b.pending != b.count || b.missing_bytes != 0) {
      return text(
          "the kernel ended in the middle of a phase: mbarrier +0x%x phase %u lacks %d of "
          "%d arrivals and %lld bytes",
          offset(address), b.phase, b.pending, b.count, static_cast<long long>(b.missing_bytes));
    }
  }
  return {};
}

}  // namespace qattn::emu
