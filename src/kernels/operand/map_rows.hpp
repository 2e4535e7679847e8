// Tensor maps of tokens where they lie.
#pragma once

#include <algorithm>
#include <string>
#include <utility>

#include "isa/tensor_map.hpp"
#include "kernels/operand/sequence.hpp"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

/// Rows of `d` elements in place, of 16 bits or `width` bytes: boxes of `rows` tokens, of a page at
/// most, a panel wide, which is what a swizzle spans. `pack` > 1: of so many heads of rows / pack
/// tokens each. Empty, or why TMA cannot read them.
inline std::string map_rows(const tile::Rows& x, int d, int rows, isa::TensorMap& map, int pack = 1,
                            int width = 2) {
  const int panel = std::min(width * d, 128);
  isa::TensorShape t;
  t.address = x.data;
  t.element_bytes = width;
  t.rank = 4;
  const bool packed = x.cu_seqlens != nullptr, paged = x.page_table != nullptr;
  if (paged) rows = std::min(rows, x.page_size);
  const std::int64_t tokens = packed ? x.total : paged ? x.page_size : x.max_length;
  const std::int64_t sizes[4] = {x.channels, tokens, x.heads,
                                 packed  ? 1
                                 : paged ? x.total
                                         : x.batches};
  const std::int64_t strides[4] = {1, x.token, x.head, x.batch};
  for (int i = 0; i < 4; ++i) {
    if (sizes[i] > 1 && strides[i] < 0) return "tensor map: a stride is negative";
    t.sizes[i] = static_cast<std::uint64_t>(sizes[i]);
    // A dimension of one element has any stride; this one is a multiple of 16 bytes.
    t.stride_bytes[i] = static_cast<std::uint64_t>(sizes[i] > 1 ? width * strides[i] : 16);
    t.box[i] = 1;
  }
  t.box[0] = static_cast<std::uint32_t>(panel / width);
  t.box[1] = static_cast<std::uint32_t>(rows);
  if (pack > 1) {
    std::swap(t.sizes[1], t.sizes[2]);
    std::swap(t.stride_bytes[1], t.stride_bytes[2]);
    t.box[1] = static_cast<std::uint32_t>(pack);
    t.box[2] = static_cast<std::uint32_t>(rows / pack);
  }
  t.swizzle = isa::swizzle_of(panel);
  return isa::make_tensor_map(t, map);
}

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
