// Lays a Call out in tensors: any layout, strides, packing, pages, and outputs between sentinels.
#pragma once

#include <cstdint>
#include <vector>

#include "support/call.hpp"
#include "support/tensor.hpp"

namespace qattn::test {

struct LayoutOptions {
  Layout layout = Layout::bshd;
  Strides strides = Strides::dense;
  Format input = Format::f32, output = Format::f32;
  bool packed_q = false, packed_k = false;  ///< cu_seqlens
  bool seqused_q = false, seqused_k = false;
  bool zero_stride_kv = false;    ///< dense K and V: every sequence reads the first one's memory
  std::int64_t page_size = 0;     ///< 0: not paged
  std::uint64_t page_seed = 1;    ///< order of the pages in the pool
  std::int64_t shared_pages = 0;  ///< leading pages that sequences 1, 2, ... share with sequence 0
  bool lse = true;
  Format bias = Format::f32;  ///< format of additive masks and sinks
  bool memory = true;         ///< false: the views alone, as plan() takes them
  bool operator==(const LayoutOptions&) const = default;
};

/// The tensors of one call and their views. Everything that no token owns is NaN.
struct Laid {
  Tensor q, k, v, out, lse, saturated;
  Tensor sinks, mask, block_mask, alibi;
  Tensor cu_q, cu_k, used_q, used_k, pages;
  Tensor q_scale, k_scale, v_scale;
  LayoutOptions how;
  bool packed_q = false;

  AttentionTensors tensors() const;
  /// The inputs as they are now are what violation() compares with.
  void freeze();
  /// Rows in Call::row() order.
  std::vector<float> read_out(const Call& call) const;
  std::vector<float> read_lse(const Call& call) const;
  /// Empty if inputs are unchanged and nothing outside the outputs was written; else what was.
  std::string violation() const;
};

Laid lay_out(const Call& call, const LayoutOptions& how);

/// Index of (sequence, head, token, channel) in q, k, v or out. `table`: page table entries or
/// null.
Index token_index(const LayoutOptions& how, bool packed, std::int64_t outer, std::int64_t h,
                  std::int64_t s, std::int64_t d);

/// Overwrites one element of an operand in place (sequence, head, token, channel).
enum class Operand { q, k, v };
void poke(Laid& laid, const Call& call, Operand operand, std::int64_t b, std::int64_t h,
          std::int64_t s, std::int64_t d, double value);

}  // namespace qattn::test
