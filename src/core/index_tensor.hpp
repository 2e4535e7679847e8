// Index tensors (cu_seqlens, seqused, page tables): s32 anywhere, s64 in host memory, where numbers
// are read as they are and the checks of their values compare 64 bits.
#pragma once

#include <cstdint>

#include "qattn/status.hpp"
#include "qattn/tensor_view.hpp"

namespace qattn {

/// The number at an offset in elements.
inline std::int64_t index_at(const TensorView& view, std::int64_t offset) {
  if (view.format == Format::s64) return static_cast<const std::int64_t*>(view.data)[offset];
  return static_cast<const std::int32_t*>(view.data)[offset];
}

/// Number i of a list.
inline std::int64_t index_entry(const TensorView& view, std::int64_t i) {
  return index_at(view, i * view.stride[0]);
}

/// Is it in a format that index_at() reads where it lies? Nothing else of it is looked at.
Status check_index_format(const char* name, const TensorView& view);

}  // namespace qattn
