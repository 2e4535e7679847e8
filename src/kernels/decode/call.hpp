// A decode call as every kernel takes it: checked, and in strides.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/decode/options.hpp"
#include "kvcache/data.hpp"

namespace qattn::kv {

/// Of a call's tensors; blocks of -1: mass may have any number.
struct DecodeExtents {
  std::int64_t batch = 0, queries = 0, heads_q = 0, blocks = 0;
};

/// Shapes, formats, device and strides of q and out for a batch of extents.batch; sets queries and
/// heads_q.
Status check_queries(const KvCacheOptions& cache, const KvDecodeTensors& tensors, Layout layout,
                     Device device, DecodeExtents& extents);
/// Those of the other tensors, and that no output shares memory with any other tensor.
Status check_the_rest(const KvDecodeTensors& tensors, Device device, const DecodeExtents& extents);

struct DecodeCall : DecodeExtents {
  const detail::KvCacheData* cache = nullptr;
  std::vector<const Layer*> layers;  ///< [batch]
  KvDecodeTensors tensors;
  /// Strides in elements.
  struct Strides {
    std::int64_t batch = 0, query = 0, head = 0;
  } q, out;
  float softmax_scale = 0, softcap = 0;
  bool causal = true, debias = false;
  std::int64_t window_left = -1;
  int threads = 1;
  std::int64_t group_size = 1;  ///< heads of each KV head that this call has

  std::int64_t group() const { return group_size; }
  /// The head of row `r` of a KV head, in tensors whose address is that of the first one's.
  std::int64_t head_of(std::int64_t head_kv, int r) const {
    return head_kv * (heads_q / cache->options.heads_kv) + r / queries;
  }
  /// The call for heads [first, first + count) of each KV head: tiles have room for most_group.
  DecodeCall of_heads(std::int64_t first, std::int64_t count) const;
  /// Rows of one (sequence, KV head): row r is query r % queries of head r / queries of the group.
  int rows() const { return static_cast<int>(group() * queries); }
  std::int64_t position(std::int64_t b, std::int64_t query) const {
    return layers[static_cast<std::size_t>(b)]->length - queries + query;
  }
  /// Tokens [first, end) that a query may see, the tree apart.
  std::int64_t visible_begin(std::int64_t b, std::int64_t query) const {
    const std::int64_t first = position(b, query) - window_left;
    return window_left < 0 || first < 0 ? 0 : first;
  }
  std::int64_t visible_end(std::int64_t b, std::int64_t query) const {
    return causal ? position(b, query) + 1 : layers[static_cast<std::size_t>(b)]->length;
  }
  bool visible(std::int64_t b, std::int64_t query, std::int64_t token) const {
    if (token < visible_begin(b, query) || token >= visible_end(b, query)) return false;
    const std::int64_t newest = token - position(b, 0);
    if (!tensors.tree_mask.present() || newest < 0) return true;
    const auto& st = tensors.tree_mask.stride;
    return static_cast<const std::uint8_t*>(
               tensors.tree_mask.data)[b * st[0] + query * st[1] + newest * st[2]] != 0;
  }
};

/// Checks everything; nothing has been written where it fails.
Status make_call(const detail::KvCacheData& cache, std::int64_t layer,
                 std::span<const std::int64_t> sequences, const KvDecodeTensors& tensors,
                 const KvDecodeOptions& options, DecodeCall& call);

}  // namespace qattn::kv
