// What the hardware that works beside the lanes has in common. A word begins an operation; it takes
// effect between then and what waits for it, when the schedule says so: at once, as late as the
// waits allow, or at a seeded random time. One file a unit, and a member of Units (units.hpp).
//
// What a wait waits for is one of two things. Operations of a kind that end in order are counted in
// groups (Groups below): the lane or warpgroup that began them waits for all but the newest.
// Operations that nothing orders end at mbarriers (mbarriers.hpp), which lanes wait for.
#pragma once

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "isa/emu/block/block.hpp"

namespace qattn::emu {

class AsyncUnit {
 public:
  explicit AsyncUnit(Block& block) : block_(block) {}
  virtual ~AsyncUnit() = default;
  AsyncUnit(const AsyncUnit&) = delete;
  AsyncUnit& operator=(const AsyncUnit&) = delete;

  /// A block of threads begins: nothing is in flight.
  virtual void reset() = 0;
  /// How many operations in flight may end now without a lane that waits for them by name; the
  /// block ends some at random times, and the youngest when nobody can go on without.
  virtual std::size_t unordered() const { return 0; }
  /// Ends one of those, 0 the oldest.
  virtual void complete(std::size_t) {}
  /// What the kernel's end must not leave behind; empty: nothing.
  virtual std::string check_end() = 0;

 protected:
  /// Does an operation that begins now take effect at once?
  bool at_once() { return block_.takes_effect_now(); }

  Block& block_;
};

/// Operations that end in the order in which they began, in groups.
template <class Operation>
class Groups {
 public:
  void clear() {
    operations_.clear();
    groups_.clear();
    open_ = 0;
  }
  bool empty() const { return operations_.empty(); }
  std::vector<Operation>& operations() { return operations_; }  ///< in flight, the oldest first
  const std::vector<Operation>& operations() const { return operations_; }

  void begin(Operation operation) {
    operations_.push_back(std::move(operation));
    ++open_;
  }
  void commit() {
    groups_.push_back(open_);
    open_ = 0;
  }
  /// visit(operation) for those of all groups but the newest `left`.
  template <class Visit>
  void visit(int left, Visit visit_one) {
    const std::size_t count = finished(left);
    for (std::size_t i = 0; i < count; ++i) visit_one(operations_[i]);
  }
  /// The same, and they are in flight no more.
  template <class Visit>
  void wait(int left, Visit end_one) {
    const std::size_t count = finished(left);
    if (static_cast<int>(groups_.size()) <= left) return;
    for (std::size_t i = 0; i < count; ++i) end_one(operations_[i]);
    operations_.erase(operations_.begin(),
                      operations_.begin() + static_cast<std::ptrdiff_t>(count));
    groups_.erase(groups_.begin(), groups_.end() - left);
  }

 private:
  std::size_t finished(int left) const {
    std::size_t count = 0;
    for (int i = 0; i < static_cast<int>(groups_.size()) - left; ++i) {
      count += groups_[static_cast<std::size_t>(i)];
    }
    return count;
  }

  std::vector<Operation> operations_;  ///< committed groups first, then the open one
  std::vector<std::size_t> groups_;
  std::size_t open_ = 0;
};

}  // namespace qattn::emu
