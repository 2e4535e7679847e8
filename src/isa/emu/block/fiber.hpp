// Stackful coroutines, one per lane: a switch of our own on x86-64, elsewhere and under
// AddressSanitizer and ThreadSanitizer, which are told, Boost.Context's raw jump.
#pragma once

#include <cstddef>

// Named, not included: who only plans calls has the words, and needs no Boost for it.
namespace boost::context::detail {
struct transfer_t;
}

namespace qattn::emu {

struct Fiber {
  void* context = nullptr;  ///< where its stack ends, or a boost::context::detail::fcontext_t
  char* stack = nullptr;  ///< lowest address; null for a thread's own stack until it is first left
  std::size_t stack_bytes = 0;
  void* asan_fake_stack = nullptr;
  void* tsan_fiber = nullptr;
};

/// `count` stacks with a guard page below each. Tops are staggered so that equal frames of
/// different lanes do not compete for the same cache sets.
class Stacks {
 public:
  explicit Stacks(int count);
  ~Stacks();
  Stacks(const Stacks&) = delete;
  Stacks& operator=(const Stacks&) = delete;
  void give(int index, Fiber& fiber) const;

 private:
  char* base_ = nullptr;
  std::size_t bytes_ = 0;
};

/// Makes the fiber start at `entry` when first switched to. It may have been abandoned mid-way.
void restart(Fiber& fiber, void (*entry)(boost::context::detail::transfer_t));

/// Leaves `from`, which is running, for `to`. A `last` switch never comes back.
void switch_to(Fiber& from, Fiber& to, bool last = false);

/// First statement of an entry function: completes the switch that led here.
void arrived(Fiber& self, boost::context::detail::transfer_t transfer);

void create_sanitizer_fiber(Fiber& fiber);
void destroy_sanitizer_fiber(Fiber& fiber);
/// For the fiber that stands for the calling thread.
void adopt_thread(Fiber& fiber);

}  // namespace qattn::emu
