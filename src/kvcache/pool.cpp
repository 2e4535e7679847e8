#include "kvcache/pool.hpp"

#include <bit>

namespace qattn::kv {

std::int32_t PagePool::allocate() {
  while (first_free_ < slabs_.size() && slabs_[first_free_].free == 0) ++first_free_;
  if (first_free_ == slabs_.size()) slabs_.emplace_back();
  Slab& slab = slabs_[first_free_];
  if (!slab.bytes) {
    const auto size = static_cast<std::size_t>(page_bytes_) * slab_pages;
    slab.bytes.reset(static_cast<std::byte*>(::operator new(size, alignment)));
  }
  const int place = std::countr_zero(slab.free);
  slab.free &= slab.free - 1;
  slab.references[static_cast<std::size_t>(place)] = 1;
  ++used_;
  return static_cast<std::int32_t>(first_free_) * slab_pages + place;
}

void PagePool::release(std::int32_t page) {
  Slab& s = slab(page);
  if (--s.references[place(page)] > 0) return;
  s.free |= std::uint64_t{1} << place(page);
  --used_;
  const std::size_t index = static_cast<std::size_t>(page) / slab_pages;
  if (index < first_free_) first_free_ = index;
  if (s.free != ~std::uint64_t{0}) return;
  s.bytes.reset();
  while (!slabs_.empty() && !slabs_.back().bytes) slabs_.pop_back();
  if (slabs_.empty()) slabs_.shrink_to_fit();
}

std::int64_t PagePool::allocated_bytes() const {
  std::int64_t bytes = static_cast<std::int64_t>(slabs_.capacity() * sizeof(Slab));
  for (const Slab& s : slabs_) {
    if (s.bytes) bytes += page_bytes_ * slab_pages;
  }
  return bytes;
}

}  // namespace qattn::kv
