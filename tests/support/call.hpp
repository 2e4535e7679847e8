// One attention call by meaning: sequences, heads and numbers, free of layouts, pages and packing.
// The semantic model reads it; tests lay it out in tensors.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "qattn/attention.hpp"

namespace qattn::test {

/// Input families of tools/sim/recipe_sim.py, and zero_sink: the sink's value is exactly zero.
enum class Family { normal, k_shift, outliers, peaky, sink, zero_sink, v_mean, loud };
std::string name(Family family);

struct Sequence {
  std::int64_t room_q = 0, room_k = 0;  ///< tokens that the tensors have room for
  std::int64_t len_q = 0, len_k = 0;    ///< tokens that exist (seqused)
  std::vector<float> q, k, v;           ///< [head][token][dim], `len` tokens each
};

/// Values in row-major order of a shape that broadcasts to (B, Hq, Sq, Sk), aligned right.
struct Mask {
  bool boolean = false;
  bool bits = false;                ///< of a boolean mask: b1, not b8
  std::vector<std::int64_t> shape;  ///< empty: no mask
  std::vector<float> values;

  float at(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) const;
};

struct Call {
  std::int64_t heads_q = 1, heads_k = 1, dim = 64, dim_v = 64;
  std::vector<Sequence> sequences;
  bool packed_q = false;
  AttentionOptions options;
  std::vector<float> sinks;  ///< [head] or empty
  std::vector<float> alibi;  ///< [sequence][head] or empty
  Mask mask;
  Mask block_mask;  ///< boolean, of blocks of options.block_mask_q x block_mask_k tokens
  /// Static scales as the tensors hold them, (B, H, ...) flattened, or empty.
  std::vector<float> static_q, static_k, static_v;

  std::int64_t rows() const;  ///< query rows of a head: Sq, or the sum over packed sequences
  /// Row of (sequence, head, query) in dense (B, Hq, Sq) or packed (Hq, T) order.
  std::int64_t row(std::int64_t b, std::int64_t h, std::int64_t i) const;
  std::int64_t total_rows() const;
};

/// Fills q, k, v of every sequence from `family`, rounded to `format`. Sequences draw from
/// independent streams, so that a sequence's numbers do not depend on its neighbours.
void fill(Call& call, Family family, Format format, std::uint64_t seed);

}  // namespace qattn::test
