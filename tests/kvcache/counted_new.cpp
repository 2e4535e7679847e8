#include "kvcache/counted_new.hpp"

#include <atomic>
#include <cstdlib>
#include <new>

namespace {

thread_local bool counting = false;
thread_local std::int64_t room = -1;  // allocations that still succeed; -1: all
std::atomic<std::int64_t> held{0};

/// Lies before every block.
struct alignas(64) Header {
  std::size_t bytes;
  bool counted;
};

void* take(std::size_t bytes) {
  if (room == 0) throw std::bad_alloc();
  if (room > 0) --room;
  auto* header = static_cast<Header*>(
      std::aligned_alloc(alignof(Header), (bytes + 2 * sizeof(Header) - 1) / 64 * 64));
  if (header == nullptr) throw std::bad_alloc();
  *header = {bytes, counting};
  if (counting) held += static_cast<std::int64_t>(bytes);
  return header + 1;
}

void give(void* block) {
  if (block == nullptr) return;
  auto* header = static_cast<Header*>(block) - 1;
  if (header->counted) held -= static_cast<std::int64_t>(header->bytes);
  std::free(header);
}

}  // namespace

void* operator new(std::size_t n) { return take(n); }
void* operator new[](std::size_t n) { return take(n); }
void* operator new(std::size_t n, std::align_val_t) { return take(n); }
void* operator new[](std::size_t n, std::align_val_t) { return take(n); }
void operator delete(void* p) noexcept { give(p); }
void operator delete[](void* p) noexcept { give(p); }
void operator delete(void* p, std::size_t) noexcept { give(p); }
void operator delete[](void* p, std::size_t) noexcept { give(p); }
void operator delete(void* p, std::align_val_t) noexcept { give(p); }
void operator delete[](void* p, std::align_val_t) noexcept { give(p); }
void operator delete(void* p, std::size_t, std::align_val_t) noexcept { give(p); }
void operator delete[](void* p, std::size_t, std::align_val_t) noexcept { give(p); }

namespace qattn::test {

std::int64_t counted_bytes() { return held; }
Counted::Counted() : before_(counting) { counting = true; }
Counted::~Counted() { counting = before_; }
MemoryLimit::MemoryLimit(std::int64_t allocations) { room = allocations; }
MemoryLimit::~MemoryLimit() { room = -1; }

}  // namespace qattn::test
