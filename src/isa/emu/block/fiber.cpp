#include "isa/emu/block/fiber.hpp"

#include <sys/mman.h>

#include <boost/context/detail/fcontext.hpp>
#include <new>

#include "isa/emu/sanitizers.hpp"

#if defined(QATTN_ASAN)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(QATTN_TSAN)
#include <sanitizer/tsan_interface.h>
#endif

// A switch of our own where no sanitizer must be told: it keeps the registers that a call keeps
// and returns, so that returns stay predicted. Boost's jumps, and saves the floating-point control
// words too, which no kernel changes.
#if defined(__x86_64__) && !defined(QATTN_ASAN) && !defined(QATTN_TSAN)
#define QATTN_OWN_SWITCH
extern "C" void qattn_emu_switch(void** from, void* to);
asm(R"(
.text
.p2align 4
.globl qattn_emu_switch
.hidden qattn_emu_switch
.type qattn_emu_switch,@function
qattn_emu_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size qattn_emu_switch,.-qattn_emu_switch
)");
#endif

namespace qattn::emu {
namespace {

namespace context = boost::context::detail;

constexpr std::size_t kPage = 4096;
// Sanitizers and -O0 spread a kernel's registers over the stack several times. Only pages that are
// touched cost memory.
constexpr std::size_t kStackBytes = 256 * 1024;
// Guard page, stack, and a page for the stagger of up to 64 cache lines.
constexpr std::size_t kSlotBytes = kPage + kStackBytes + kPage;

}  // namespace

Stacks::Stacks(int count) : bytes_(kSlotBytes * static_cast<std::size_t>(count)) {
  void* p = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) throw std::bad_alloc();
  base_ = static_cast<char*>(p);
  for (int i = 0; i < count; ++i) {
    mprotect(base_ + kSlotBytes * static_cast<std::size_t>(i), kPage, PROT_NONE);
  }
}

Stacks::~Stacks() {
#if defined(QATTN_ASAN)
  __asan_unpoison_memory_region(base_, bytes_);
#endif
  munmap(base_, bytes_);
}

void Stacks::give(int index, Fiber& fiber) const {
  const std::size_t stagger = static_cast<std::size_t>(index * 7 % 64) * 64;
  fiber.stack = base_ + kSlotBytes * static_cast<std::size_t>(index) + kPage + stagger;
  fiber.stack_bytes = kStackBytes;
}

#ifdef QATTN_OWN_SWITCH
void restart(Fiber& fiber, void (*entry)(context::transfer_t)) {
  // As after a call: the entry function finds a return address, which it never uses, at 16 n + 8.
  // Below it what the switch pops: where it returns to, and six registers.
  void** top = reinterpret_cast<void**>(fiber.stack + fiber.stack_bytes - 64);
  *--top = nullptr;
  *--top = reinterpret_cast<void*>(entry);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  fiber.context = top;
}

void switch_to(Fiber& from, Fiber& to, bool) { qattn_emu_switch(&from.context, to.context); }

void arrived(Fiber&, context::transfer_t) {}
#else
void restart(Fiber& fiber, void (*entry)(context::transfer_t)) {
#if defined(QATTN_ASAN)
  // Frames that were abandoned left their poison behind.
  __asan_unpoison_memory_region(fiber.stack, fiber.stack_bytes);
  fiber.asan_fake_stack = nullptr;
#endif
  fiber.context = context::make_fcontext(fiber.stack + fiber.stack_bytes, fiber.stack_bytes, entry);
}

void switch_to(Fiber& from, Fiber& to, bool last) {
#if defined(QATTN_ASAN)
  __sanitizer_start_switch_fiber(last ? nullptr : &from.asan_fake_stack, to.stack, to.stack_bytes);
#endif
#if defined(QATTN_TSAN)
  __tsan_switch_to_fiber(to.tsan_fiber, 0);
#endif
  (void)last;
  arrived(from, context::jump_fcontext(to.context, &from));
}

void arrived([[maybe_unused]] Fiber& self, context::transfer_t transfer) {
  Fiber& previous = *static_cast<Fiber*>(transfer.data);
  previous.context = transfer.fctx;
#if defined(QATTN_ASAN)
  const void* stack = nullptr;
  std::size_t bytes = 0;
  __sanitizer_finish_switch_fiber(self.asan_fake_stack, &stack, &bytes);
  if (previous.stack == nullptr) {
    previous.stack = static_cast<char*>(const_cast<void*>(stack));
    previous.stack_bytes = bytes;
  }
#endif
}
#endif

void create_sanitizer_fiber([[maybe_unused]] Fiber& fiber) {
#if defined(QATTN_TSAN)
  fiber.tsan_fiber = __tsan_create_fiber(0);
#endif
}

void destroy_sanitizer_fiber([[maybe_unused]] Fiber& fiber) {
#if defined(QATTN_TSAN)
  if (fiber.tsan_fiber) __tsan_destroy_fiber(fiber.tsan_fiber);
#endif
}

void adopt_thread(Fiber& fiber) {
  fiber = Fiber{};
#if defined(QATTN_TSAN)
  fiber.tsan_fiber = __tsan_get_current_fiber();
#endif
}

}  // namespace qattn::emu
