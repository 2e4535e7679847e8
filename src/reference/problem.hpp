// Where things are: sequences, pages and layouts of one call, as the reference sees them.
#pragma once

#include <cstdint>
#include <vector>

#include "qattn/attention.hpp"

namespace qattn::reference {

/// Address of (sequence, token, head) in q, k, v or out, in elements.
struct Operand {
  TensorView view;
  std::int64_t heads = 0, dim = 0;
  std::int64_t outer = 0, token = 0, head = 0, channel = 0;  ///< strides; outer: batch or page
  std::vector<std::int64_t> first;  ///< packed: first token of each sequence; otherwise empty
  TensorView pages;                 ///< paged: (B, pages per sequence) s32; otherwise absent
  std::int64_t page_size = 0;

  std::int64_t offset(std::int64_t b, std::int64_t s, std::int64_t h) const;
};

struct Problem {
  Operand q, k, v;
  std::int64_t batch = 0;
  std::int64_t rows = 0;              ///< query rows a head has room for: Sq, or T where packed
  bool packed_q = false;              ///< out is (Hq, T, Dv) and lse (Hq, T)
  std::vector<std::int64_t> room_q;   ///< query rows of each sequence, used or not
  std::vector<std::int64_t> len_q;    ///< queries that exist (seqused_q)
  std::vector<std::int64_t> len_k;    ///< keys that exist (seqused_k)
  std::vector<std::int64_t> first_q;  ///< first row of each sequence inside a head's rows
  double softmax_scale = 0;
};

/// Reads the index tensors and checks what plan() cannot know: their contents.
/// Errors: invalid_argument names the tensor, the entry and the rule.
Result<Problem> make_problem(const AttentionTensors& tensors, const AttentionOptions& options);

}  // namespace qattn::reference
