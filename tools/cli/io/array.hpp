// A tensor that owns its memory: what files are read into and written from.
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>
#include <optional>
#include <string>
#include <vector>

#include "qattn/qattn.hpp"

namespace qattn::io {

/// Memory aligned to a cache line, which is also what the widest vector loads like best.
template <class T>
struct AlignedAllocator {
  using value_type = T;
  static constexpr std::align_val_t alignment{64};

  AlignedAllocator() = default;
  template <class U>
  AlignedAllocator(const AlignedAllocator<U>&) {}

  T* allocate(std::size_t count) {
    return static_cast<T*>(::operator new(count * sizeof(T), alignment));
  }
  void deallocate(T* pointer, std::size_t) { ::operator delete(pointer, alignment); }
  bool operator==(const AlignedAllocator&) const = default;
};

using Bytes = std::vector<std::byte, AlignedAllocator<std::byte>>;

/// Row-major and dense.
struct Array {
  Format format = Format::none;
  std::vector<std::int64_t> shape;
  Bytes bytes;

  std::int64_t count() const;
  TensorView view() const;
};

/// A zeroed array of the shape and format of `like`, whose strides are ignored.
Array zeros_like(const TensorView& like);
Array zeros(Format format, std::vector<std::int64_t> shape);

/// Bytes of a dense tensor, or nothing where an extent is negative or the product overflows.
std::optional<std::int64_t> dense_bytes(Format format, const std::vector<std::int64_t>& shape);

/// "(1, 8, 4096, 128)"
std::string shape_text(const std::vector<std::int64_t>& shape);

}  // namespace qattn::io
