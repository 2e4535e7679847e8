#include "isa/emu/units/block_scaled.hpp"

#include <cstring>
#include <map>
#include <tuple>
#include <vector>

#include "formats/e2m1.hpp"
#include "formats/e4m3.hpp"
#include "formats/ue8m0.hpp"
#include "isa/emu/fault.hpp"
#include "isa/isa.hpp"

namespace qattn::emu {
namespace {

using isa::Scaled;

/// What differs between the kinds.
struct Kind {
  int bits, depth, block;  ///< of an element; k of a product; k of a scale

  explicit Kind(Scaled s)
      : bits(s == Scaled::mxfp8 ? 8 : 4),
        depth(s == Scaled::mxfp8 ? 32 : 64),
        block(s == Scaled::nvfp4 ? 16 : 32) {}
  int in_register() const { return 32 / bits; }
  int blocks() const { return depth / block; }
};

float element(const Kind& kind, std::uint32_t word, int i) {
  const std::uint32_t code = word >> kind.bits * i & ((1u << kind.bits) - 1);
  return kind.bits == 8 ? formats::E4m3::decode(static_cast<std::uint8_t>(code))
                        : formats::E2m1::decode(static_cast<std::uint8_t>(code));
}

/// Scale number `i` of a register.
float scale(Scaled s, std::uint32_t word, int i) {
  const auto code = static_cast<std::uint8_t>(word >> 8 * i);
  return s == Scaled::nvfp4 ? formats::E4m3::decode(code) : formats::Ue8m0::decode(code);
}

/// A register's elements, times their scale, to every `step`th place from `to` on. `swap`: element
/// i ^ 1 to place i.
void spread(const Kind& kind, std::uint32_t word, float factor, float* to, int step, int swap = 0) {
  for (int i = 0; i < kind.in_register(); ++i) {
    to[i * step] = element(kind, word, i ^ swap) * factor;
  }
}

/// B's scales of all lanes, [32][n], of this warp's product before this one.
std::vector<std::uint32_t> stale_scales(Arguments<ScaledProduct> lanes, Scaled s, int byte) {
  const int n = lanes[0].product.n;
  std::vector<std::uint32_t> words;
  for (int lane = 0; lane < 32; ++lane) {
    words.insert(words.end(), lanes[lane].sb, lanes[lane].sb + n);
  }
  using Key = std::tuple<int, Scaled, int, int>;
  thread_local std::map<Key, std::vector<std::uint32_t>> before;
  std::vector<std::uint32_t>& last = before[Key{current_lane->warp, s, n, byte}];
  if (last.empty()) last = words;
  std::swap(last, words);
  return words;
}

}  // namespace

PlantedFault& planted_fault() {
  static PlantedFault planted;
  return planted;
}

void multiply_scaled(Block& block, Arguments<ScaledProduct> lanes, Scaled s, int byte) {
  const Kind kind(s);
  const int m_tiles = lanes[0].product.m, n_tiles = lanes[0].product.n;
  const int rows = 16 * m_tiles, columns = 8 * n_tiles, each = kind.in_register();
  const PlantedFault& planted = planted_fault();
  const bool here = planted.column_tiles == 0 || planted.column_tiles == n_tiles;
  const Fault fault = here ? planted.fault : Fault::none;
  const int other_lane = fault == Fault::scale_lane, swap = fault == Fault::neighbours;
  const int other_byte = fault == Fault::scale_byte;
  std::vector<std::uint32_t> stale;
  if (fault == Fault::stale_scales) stale = stale_scales(lanes, s, byte);
  thread_local std::vector<float> a, b, sums;
  a.resize(static_cast<std::size_t>(rows * kind.depth));
  b.resize(static_cast<std::size_t>(kind.depth * columns));
  sums.resize(static_cast<std::size_t>(rows * columns));
  for (int lane = 0; lane < 32; ++lane) {
    const int g = lane / 4, t = lane % 4;
    const Product& p = lanes[lane].product;
    for (int r = 0; r < 4; ++r) {
      const int k = each * t + 4 * each * (r / 2);
      for (int m = 0; m < m_tiles; ++m) {
        // Rows g and g + 8 have their scales in the first two lanes of four.
        const std::uint32_t word = lanes[4 * g + (r % 2 ^ other_lane)].sa[m];
        const int row = 16 * m + g + 8 * (r % 2);
        spread(kind, p.a[4 * m + r], scale(s, word, (byte + k / kind.block) ^ other_byte),
               &a[static_cast<std::size_t>(row * kind.depth + k)], 1, swap);
      }
      for (int n = 0; n < n_tiles && r < 2; ++n) {
        const int at = each * t + 4 * each * r;
        const std::uint32_t word = stale.empty()
                                       ? lanes[4 * g].sb[n]
                                       : stale[static_cast<std::size_t>(4 * g * n_tiles + n)];
        spread(kind, p.b[2 * n + r], scale(s, word, (byte + at / kind.block) ^ other_byte),
               &b[static_cast<std::size_t>(at * columns + 8 * n + g)], columns);
      }
    }
  }
  multiply(a.data(), b.data(), sums.data(), rows, columns, kind.depth);
  for (int lane = 0; lane < 32; ++lane) {
    const int g = lane / 4, t = lane % 4;
    float* d = static_cast<float*>(lanes[lane].product.d);
    for (int m = 0; m < m_tiles; ++m) {
      for (int n = 0; n < n_tiles; ++n) {
        for (int i = 0; i < 4; ++i, ++d) {
          const int row = 16 * m + g + 8 * (i / 2), column = 8 * n + 2 * t + i % 2;
          *d += sums[static_cast<std::size_t>(row * columns + column)];
        }
      }
    }
  }
  const std::uint64_t instructions = static_cast<std::uint64_t>(m_tiles) * n_tiles;
  block.count(s == Scaled::mxfp8 ? Word::mma_mxfp8 : Word::mma_fp4, 32 * (instructions - 1));
  block.stats.tensor_macs += static_cast<std::uint64_t>(rows) * columns * kind.depth;
}

void load_bytes_transposed(Block& block, Arguments<MatrixRows> lanes) {
  const int count = lanes[0].count, first_thread = 32 * current_lane->warp;
  block.count(Word::load_bytes_transposed, 32 * static_cast<std::uint64_t>(count - 1));
  for (int n = 0; n < count; ++n) {
    const std::uint8_t* data[32];
    for (int i = 0; i < 32; ++i) {
      data[i] = block.read_as(first_thread + i, lanes[i].rows[n], 16, "load_bytes_transposed",
                              lanes[i].where);
    }
    for (int lane = 0; lane < 32; ++lane) {
      const int g = lane / 4, t = lane % 4;
      for (int i = 0; i < 4; ++i) {  // register i: tile i / 2, columns g + 8 (i % 2)
        std::uint8_t bytes[4];
        for (int k = 0; k < 4; ++k) bytes[k] = data[16 * (i / 2) + 4 * t + k][g + 8 * (i % 2)];
        std::memcpy(&lanes[lane].registers[4 * n + i], bytes, 4);
      }
    }
  }
}

}  // namespace qattn::emu
