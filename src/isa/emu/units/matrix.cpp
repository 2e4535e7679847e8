#include "isa/emu/units/matrix.hpp"

#include <array>
#include <bit>
#include <cstring>

#include "formats/e2m1.hpp"
#include "formats/e4m3.hpp"
#include "formats/e5m2.hpp"
#include "formats/f16.hpp"
#include "isa/isa.hpp"

namespace qattn::emu {
namespace {

using isa::Element;

// ---- Decoding
// --------------------------------------------------------------------------------------

using ByteTable = std::array<float, 256>;

template <class Codec>
ByteTable table_of() {
  ByteTable table;
  for (int i = 0; i < 256; ++i) {
    table[static_cast<std::size_t>(i)] = Codec::decode(static_cast<std::uint8_t>(i));
  }
  return table;
}

const ByteTable& byte_table(Element element) {
  struct S8 {
    static float decode(std::uint8_t v) { return static_cast<std::int8_t>(v); }
  };
  struct U8 {
    static float decode(std::uint8_t v) { return v; }
  };
  struct PaddedE2m1 {
    static float decode(std::uint8_t v) {
      return formats::E2m1::decode(static_cast<std::uint8_t>(v >> 2));
    }
  };
  static const ByteTable e2m1 = table_of<PaddedE2m1>();
  static const ByteTable s8 = table_of<S8>(), u8 = table_of<U8>();
  static const ByteTable e4m3 = table_of<formats::E4m3>(), e5m2 = table_of<formats::E5m2>();
  switch (element) {
    case Element::s8:
      return s8;
    case Element::u8:
      return u8;
    case Element::e4m3:
      return e4m3;
    case Element::e2m1:
      return e2m1;
    default:
      return e5m2;
  }
}

const float* f16_table() {
  static const std::vector<float> table = [] {
    std::vector<float> t(65536);
    for (std::uint32_t i = 0; i < 65536; ++i) {
      t[i] = formats::F16::decode(static_cast<std::uint16_t>(i));
    }
    return t;
  }();
  return table.data();
}

/// The 2 or 4 elements of a register, lowest first.
void decode_register(Element element, std::uint32_t value, float* to) {
  if (element == Element::bf16) {
    to[0] = std::bit_cast<float>(value << 16);
    to[1] = std::bit_cast<float>(value & 0xffff0000u);
  } else if (element == Element::f16) {
    const float* table = f16_table();
    to[0] = table[value & 0xffffu];
    to[1] = table[value >> 16];
  } else {
    const ByteTable& table = byte_table(element);
    for (int i = 0; i < 4; ++i) to[i] = table[value >> (8 * i) & 0xffu];
  }
}

// ---- Multiplication
// ----------------------------------------------------------------------------------

// GCC and clang lower these eight floats to whatever vectors the target has.
using Floats8 [[gnu::vector_size(32)]] = float;

/// Strip of `8 * kVectors` columns; the sums stay in registers.
template <int kVectors>
[[gnu::always_inline]] inline void multiply_strip(const float* a, const float* b, float* d,
                                                  int rows, int columns, int depth) {
  for (int r = 0; r < rows; ++r) {
    Floats8 sum[kVectors] = {};
    for (int k = 0; k < depth; ++k) {
      const float factor = a[r * depth + k];
      for (int v = 0; v < kVectors; ++v) {
        Floats8 row;
        std::memcpy(&row, b + k * columns + 8 * v, sizeof row);
        sum[v] += factor * row;
      }
    }
    std::memcpy(d + r * columns, sum, sizeof sum);
  }
}

[[gnu::always_inline]] inline void multiply_all(const float* a, const float* b, float* d, int rows,
                                                int columns, int depth) {
  int c = 0;
  for (; c + 32 <= columns; c += 32) multiply_strip<4>(a, b + c, d + c, rows, columns, depth);
  for (; c < columns; c += 8) multiply_strip<1>(a, b + c, d + c, rows, columns, depth);
}

#if defined(__x86_64__)
[[gnu::target("avx2")]] void multiply_avx2(const float* a, const float* b, float* d, int rows,
                                           int columns, int depth) {
  multiply_all(a, b, d, rows, columns, depth);
}
#endif

}  // namespace

void multiply(const float* a, const float* b, float* d, int rows, int columns, int depth) {
#if defined(__x86_64__)
  static const bool avx2 = __builtin_cpu_supports("avx2");
  if (avx2) return multiply_avx2(a, b, d, rows, columns, depth);
#endif
  multiply_all(a, b, d, rows, columns, depth);
}

void decode(Element element, const std::uint8_t* bytes, int count, float* to) {
  const int elements_in_register = isa::is_16bit(element) ? 2 : 4;
  for (int i = 0; i < count; i += 4, to += elements_in_register) {
    std::uint32_t value;
    std::memcpy(&value, bytes + i, 4);
    decode_register(element, value, to);
  }
}

Word mma_word(Element a) {
  switch (a) {
    case Element::f16:
      return Word::mma_f16;
    case Element::bf16:
      return Word::mma_bf16;
    case Element::s8:
    case Element::u8:
      return Word::mma_int8;
    default:
      return Word::mma_fp8;
  }
}

// ---- mma
// ---------------------------------------------------------------------------------------------

namespace {

/// Adds a lane's share of the sums to its accumulators.
void accumulate(const Product& lane, int index, const float* sums, AccumulatorKind kind) {
  const int g = index / 4, t = index % 4, columns = 8 * lane.n;
  for (int m = 0; m < lane.m; ++m) {
    for (int n = 0; n < lane.n; ++n) {
      float sum[4];
      for (int i = 0; i < 4; ++i) {
        sum[i] = sums[(16 * m + g + 8 * (i / 2)) * columns + 8 * n + 2 * t + i % 2];
      }
      const std::size_t tile = static_cast<std::size_t>(m * lane.n + n);
      if (kind == AccumulatorKind::float32) {
        float* d = static_cast<float*>(lane.d) + 4 * tile;
        for (int i = 0; i < 4; ++i) d[i] += sum[i];
      } else if (kind == AccumulatorKind::int32) {
        // The hardware wraps; so does this.
        std::int32_t* d = static_cast<std::int32_t*>(lane.d) + 4 * tile;
        for (int i = 0; i < 4; ++i) {
          d[i] = static_cast<std::int32_t>(static_cast<std::uint32_t>(d[i]) +
                                           static_cast<std::uint32_t>(static_cast<int>(sum[i])));
        }
      } else {
        std::uint32_t* d = static_cast<std::uint32_t*>(lane.d) + 2 * tile;
        for (int i = 0; i < 4; ++i) {
          const int shift = 16 * (i % 2);
          const float old = f16_table()[d[i / 2] >> shift & 0xffffu];
          const std::uint32_t code = formats::F16::encode(old + sum[i]);
          d[i / 2] = (d[i / 2] & ~(0xffffu << shift)) | code << shift;
        }
      }
    }
  }
}

}  // namespace

void multiply_accumulate(Block& block, Arguments<Product> lanes, Element a, Element b,
                         AccumulatorKind kind, Word word) {
  const int m_tiles = lanes[0].m, n_tiles = lanes[0].n;
  const int per_register = isa::is_16bit(a) ? 2 : 4;
  const int depth = 8 * per_register, rows = 16 * m_tiles, columns = 8 * n_tiles;
  thread_local std::vector<float> a_values, b_values, sums;
  a_values.resize(static_cast<std::size_t>(rows * depth));
  b_values.resize(static_cast<std::size_t>(depth * columns));
  sums.resize(static_cast<std::size_t>(rows * columns));
  for (int lane = 0; lane < 32; ++lane) {
    const int g = lane / 4, t = lane % 4;
    const Product& p = lanes[lane];
    for (int m = 0; m < m_tiles; ++m) {
      for (int r = 0; r < 4; ++r) {
        const int row = 16 * m + g + 8 * (r % 2);
        const int k = per_register * t + 4 * per_register * (r / 2);
        decode_register(a, p.a[4 * m + r], &a_values[static_cast<std::size_t>(row * depth + k)]);
      }
    }
    for (int n = 0; n < n_tiles; ++n) {
      for (int r = 0; r < 2; ++r) {
        float values[4];
        decode_register(b, p.b[2 * n + r], values);
        const int k = per_register * t + 4 * per_register * r;
        float* column = &b_values[static_cast<std::size_t>(k * columns + 8 * n + g)];
        for (int e = 0; e < per_register; ++e) column[e * columns] = values[e];
      }
    }
  }
  multiply(a_values.data(), b_values.data(), sums.data(), rows, columns, depth);
  for (int lane = 0; lane < 32; ++lane) accumulate(lanes[lane], lane, sums.data(), kind);
  const std::uint64_t instructions = static_cast<std::uint64_t>(m_tiles) * n_tiles;
  block.count(word, 32 * (instructions - 1));  // the collective itself counted one
  const std::uint64_t macs = static_cast<std::uint64_t>(rows) * columns * depth;
  block.stats.tensor_macs += macs;
  if (isa::is_16bit(a)) block.stats.tensor_macs_16bit += macs;
}

// ---- ldmatrix, stmatrix
// --------------------------------------------------------------------------------

namespace {

/// Rows of one matrix share the 32 banks: the worst 16-byte column tells the cycles it takes.
void count_waves(Block& block, const std::uint32_t (&rows)[8]) {
  int uses[8] = {}, worst = 0;
  for (int i = 0; i < 8; ++i) {
    bool repeated = false;  // the same row twice is one access
    for (int j = 0; j < i; ++j) repeated = repeated || rows[j] == rows[i];
    if (repeated) continue;
    worst = std::max(worst, ++uses[rows[i] / 16 % 8]);
  }
  ++block.stats.matrix_rows;
  block.stats.matrix_waves += static_cast<std::uint64_t>(worst);
}

}  // namespace

void load_matrix(Block& block, Arguments<MatrixRows> lanes, bool transposed) {
  const int count = lanes[0].count, matrices = lanes[0].matrices;
  block.count(Word::load_matrix, 32 * static_cast<std::uint64_t>(count - 1));
  const int first_thread = 32 * current_lane->warp;
  for (int n = 0; n < count; ++n) {
    for (int m = 0; m < matrices; ++m) {
      std::uint32_t rows[8];
      const std::uint8_t* data[8];
      for (int row = 0; row < 8; ++row) {
        const int giver = 8 * m + row;
        rows[row] = lanes[giver].rows[n];
        data[row] =
            block.read_as(first_thread + giver, rows[row], 16, "load_matrix", lanes[giver].where);
      }
      count_waves(block, rows);
      for (int lane = 0; lane < 32; ++lane) {
        const int g = lane / 4, t = lane % 4;
        std::uint32_t& to = lanes[lane].registers[n * matrices + m];
        if (!transposed) {
          std::memcpy(&to, data[g] + 4 * t, 4);
          continue;
        }
        std::uint16_t low, high;
        std::memcpy(&low, data[2 * t] + 2 * g, 2);
        std::memcpy(&high, data[2 * t + 1] + 2 * g, 2);
        to = low | static_cast<std::uint32_t>(high) << 16;
      }
    }
  }
}

void store_matrix(Block& block, Arguments<MatrixRows> lanes, bool transposed) {
  const int count = lanes[0].count, matrices = lanes[0].matrices;
  block.count(Word::store_matrix, 32 * static_cast<std::uint64_t>(count - 1));
  const int first_thread = 32 * current_lane->warp;
  for (int n = 0; n < count; ++n) {
    for (int m = 0; m < matrices; ++m) {
      std::uint32_t rows[8];
      for (int row = 0; row < 8; ++row) {
        const int giver = 8 * m + row;
        rows[row] = lanes[giver].rows[n];
        std::uint8_t* to =
            block.write_as(first_thread + giver, rows[row], 16, "store_matrix", lanes[giver].where);
        const auto held = [&](int lane) { return lanes[lane].registers[n * matrices + m]; };
        for (int column = 0; column < 8; ++column) {
          const std::uint32_t pair =
              transposed ? held(4 * column + row / 2) : held(4 * row + column / 2);
          const int which = transposed ? row % 2 : column % 2;
          const auto element = static_cast<std::uint16_t>(pair >> (16 * which));
          std::memcpy(to + 2 * column, &element, 2);
        }
      }
      count_waves(block, rows);
    }
  }
}

}  // namespace qattn::emu
