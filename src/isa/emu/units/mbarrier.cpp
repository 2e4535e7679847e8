// mbarriers: arrivals, bytes, phases.
#include <algorithm>

#include "isa/emu/units/async_engine.hpp"

namespace qattn::emu {
namespace {

constexpr int kLargestCount = (1 << 20) - 1;

unsigned offset(std::uint32_t address) { return SharedMemory::offset(address); }

}  // namespace

void AsyncEngine::reset() {
  mbarriers_.clear();
  loads_.clear();
  stores_.assign(static_cast<std::size_t>(block_.threads()), {});
}

void AsyncEngine::init(std::uint32_t address, int arrivals, const Where& where) {
  block_.count(Word::mbarrier_init);
  if (arrivals < 1 || arrivals > kLargestCount) {
    throw Error(text("mbarrier_init: %d arrivals, at %s", arrivals, describe(where).c_str()));
  }
  block_.write_as(current_lane->thread, address, 8, "mbarrier_init", where);
  block_.shared().mark(address, 8, ByteState::mbarrier);
  Mbarrier barrier;
  barrier.index = static_cast<int>(mbarriers_.size());
  barrier.count = barrier.pending = arrivals;
  barrier.initialiser = current_lane->thread;
  mbarriers_[address] = barrier;
}

void AsyncEngine::fence_init() {
  for (auto& [address, barrier] : mbarriers_) {
    if (barrier.initialiser == current_lane->thread) barrier.fenced = true;
  }
}

AsyncEngine::Mbarrier& AsyncEngine::find(std::uint32_t address, const char* what,
                                         const Where& where) {
  block_.shared().check_place(address, 8, 8, what, where);
  const auto it = mbarriers_.find(address);
  if (it == mbarriers_.end()) {
    throw Error(text("%s: no mbarrier was initialised at shared memory +0x%x, at %s", what,
                     offset(address), describe(where).c_str()));
  }
  // Whoever uses it must come after its initialisation.
  if (block_.options().races) {
    block_.races().read(offset(address), 8, current_lane->thread, Proxy::generic, where);
  }
  return it->second;
}

void AsyncEngine::complete_phase(std::uint32_t address, Mbarrier& barrier, const Where& where) {
  if (barrier.pending < 0) {
    throw Error(text("mbarrier +0x%x: more arrivals than its %d in phase %u, at %s",
                     offset(address), barrier.count, barrier.phase, describe(where).c_str()));
  }
  if (barrier.pending > 0 || barrier.missing_bytes != 0) return;
  ++barrier.phase;
  barrier.pending = barrier.count;
  barrier.arrived.clear();
  barrier.completed = barrier.arriving;
  for (Lane* lane : barrier.waiting) block_.wake(*lane);
  barrier.waiting.clear();
}

void AsyncEngine::arrive(std::uint32_t address, const Where& where) {
  block_.count(Word::mbarrier_arrive);
  Mbarrier& barrier = find(address, "mbarrier_arrive", where);
  const int thread = current_lane->thread;
  if (std::count(barrier.arrived.begin(), barrier.arrived.end(), thread)) {
    throw Error(text("mbarrier +0x%x: thread %d arrives twice in phase %u, at %s", offset(address),
                     thread, barrier.phase, describe(where).c_str()));
  }
  barrier.arrived.push_back(thread);
  if (block_.options().races) block_.races().release(thread, barrier.arriving);
  --barrier.pending;
  complete_phase(address, barrier, where);
}

void AsyncEngine::expect(std::uint32_t address, std::uint32_t bytes, const Where& where) {
  Mbarrier& barrier = find(address, "mbarrier_expect", where);
  barrier.missing_bytes += bytes;
  if (barrier.missing_bytes > kLargestCount) {
    throw Error(text("mbarrier +0x%x: %lld bytes expected, more than it counts, at %s",
                     offset(address), static_cast<long long>(barrier.missing_bytes),
                     describe(where).c_str()));
  }
}

void AsyncEngine::wait(std::uint32_t address, std::uint32_t parity, const Where& where) {
  block_.count(Word::mbarrier_wait);
  Mbarrier& barrier = find(address, "mbarrier_wait", where);
  while ((barrier.phase & 1) == (parity & 1)) {
    barrier.waiting.push_back(current_lane);
    block_.wait(Waiting::mbarrier, where, address, parity & 1);
  }
  if (block_.options().races) block_.races().acquire(current_lane->thread, barrier.completed);
}

bool AsyncEngine::test(std::uint32_t address, std::uint32_t parity, const Where& where) {
  block_.count(Word::mbarrier_wait);
  Mbarrier& barrier = find(address, "mbarrier_test", where);
  if ((barrier.phase & 1) == (parity & 1)) {
    block_.poll(where);
    return false;
  }
  if (block_.options().races) block_.races().acquire(current_lane->thread, barrier.completed);
  return true;
}

std::string AsyncEngine::describe_mbarrier(std::uint32_t address, std::uint32_t parity) {
  const Mbarrier& b = mbarriers_[address];
  return text(
      "wait at mbarrier +0x%x for parity %u: phase %u lacks %d of %d arrivals and %lld "
      "bytes",
      offset(address), parity, b.phase, b.pending, b.count,
      static_cast<long long>(b.missing_bytes));
}

std::string AsyncEngine::check_end() {
  if (!loads_.empty()) {
    return text("the kernel ended with %zu bulk loads in flight, one from %s", loads_.size(),
                describe(loads_.front().where).c_str());
  }
  for (const auto& [address, b] : mbarriers_) {
    if (b.pending != b.count || b.missing_bytes != 0) {
      return text(
          "the kernel ended in the middle of a phase: mbarrier +0x%x phase %u lacks %d of "
          "%d arrivals and %lld bytes",
          offset(address), b.phase, b.pending, b.count, static_cast<long long>(b.missing_bytes));
    }
  }
  for (StoreGroups& thread : stores_) {
    for (Store& store : thread.stores) {
      if (!store.read) {
        return "the kernel ended while a bulk store may still read shared memory: no "
               "bulk_wait_read after the one from " +
               describe(store.transfer.where);
      }
      write_store(store);
    }
  }
  return {};
}

}  // namespace qattn::emu
