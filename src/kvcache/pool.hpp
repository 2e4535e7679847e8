// Pages of one size, in slabs of 64: a page is a number, its bytes lie in slab page / 64. A
// device's pool is one long slab. Pages carry a count of the page tables that hold them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <vector>

namespace qattn::kv {

class PagePool {
 public:
  static constexpr std::int32_t slab_pages = 64;

  explicit PagePool(std::int64_t page_bytes) : page_bytes_(page_bytes) {}

  /// A page with one reference, the lowest free number. Throws std::bad_alloc.
  std::int32_t allocate();
  void retain(std::int32_t page) { ++slab(page).references[place(page)]; }
  /// Frees the page with its last reference, and a slab with its last page.
  void release(std::int32_t page);
  std::int32_t references(std::int32_t page) const { return slab(page).references[place(page)]; }

  std::byte* page(std::int32_t page) const {
    return slab(page).bytes.get() + static_cast<std::int64_t>(place(page)) * page_bytes_;
  }
  std::int64_t page_bytes() const { return page_bytes_; }
  std::int64_t pages_used() const { return used_; }
  /// Everything that this object holds beyond itself.
  std::int64_t allocated_bytes() const;

 private:
  static constexpr std::align_val_t alignment{64};
  struct Free {
    void operator()(std::byte* bytes) const { ::operator delete(bytes, alignment); }
  };
  struct Slab {
    std::unique_ptr<std::byte, Free> bytes;  ///< null: no page of it is in use
    std::uint64_t free = ~std::uint64_t{0};  ///< a bit a page
    std::array<std::int32_t, slab_pages> references{};
  };
  static std::size_t place(std::int32_t page) {
    return static_cast<std::size_t>(page) % slab_pages;
  }
  const Slab& slab(std::int32_t page) const {
    return slabs_[static_cast<std::size_t>(page) / slab_pages];
  }
  Slab& slab(std::int32_t page) { return slabs_[static_cast<std::size_t>(page) / slab_pages]; }

  std::int64_t page_bytes_;
  std::int64_t used_ = 0;
  std::size_t first_free_ = 0;  ///< no slab before it has a free page
  std::vector<Slab> slabs_;
};

}  // namespace qattn::kv
