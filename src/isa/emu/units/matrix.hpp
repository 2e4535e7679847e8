// What the matrix instructions do, for one warp or warpgroup.
#pragma once

#include <cstddef>
#include <cstdint>

#include "isa/emu/block/block.hpp"

namespace qattn::isa {
enum class Element;
}

namespace qattn::emu {

/// One lane's part of load_matrix: `count` instructions of `matrices` 8 x 16-byte matrices each.
struct MatrixRows {
  std::uint32_t* registers;  ///< [count][matrices]
  const std::uint32_t* rows;
  int count, matrices;
  Where where;
};
void load_matrix(Block& block, Arguments<MatrixRows> lanes, bool transposed);
void store_matrix(Block& block, Arguments<MatrixRows> lanes, bool transposed);

/// One lane's part of an mma over m x n tiles.
struct Product {
  void* d;                 ///< [m][n][4], or [m][n][2] of f16 pairs
  const std::uint32_t* a;  ///< [m][4]
  const std::uint32_t* b;  ///< [n][2]
  int m, n;
};
enum class AccumulatorKind : std::uint8_t { float32, int32, float16 };

/// Floats are summed in float32 from zero over ascending k, exact products, then added to d: one
/// fixed order, the same on every machine. Sums of 8-bit integers stay below 2^24 and so are exact.
/// Instructions are counted as `word`.
void multiply_accumulate(Block& block, Arguments<Product> lanes, isa::Element a, isa::Element b,
                         AccumulatorKind kind, Word word);

/// d[rows][columns] = a[rows][depth] * b[depth][columns], in float32; columns a multiple of 8.
void multiply(const float* a, const float* b, float* d, int rows, int columns, int depth);

/// The elements in `count` bytes, as floats.
void decode(isa::Element element, const std::uint8_t* bytes, int count, float* to);

Word mma_word(isa::Element a);

}  // namespace qattn::emu
