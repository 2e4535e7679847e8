#include "model/bound.hpp"

#include <algorithm>

namespace qattn::model {
namespace {

struct UnitText {
  const char *name, *quantity;
};
constexpr UnitText texts[units] = {
    {"tensor", "8-bit multiply-accumulates (16-bit ones twice)"},
    {"special", "EX2, LG2, RCP"},
    {"convert", "conversions between formats"},
    {"integer", "PRMT, LOP3, minima and maxima, byte dot products"},
    {"fma", "FFMA by name"},
    {"issue", "warp instructions of the vocabulary"},
    {"shared", "bytes of shared memory"},
    {"l2", "bytes between L2 and multiprocessors"},
    {"tma", "bytes of them by TMA and bulk copies"},
    {"dram", "bytes of Q, K, V and O, each once"},
};

template <class Operation>
Amounts each(const Amounts& a, const Amounts& b, Operation operation) {
  Amounts c;
  for (int i = 0; i < units; ++i) c.of[i] = operation(a.of[i], b.of[i]);
  return c;
}

double ceil_div(std::int64_t a, std::int64_t b) { return static_cast<double>((a + b - 1) / b); }

/// Products of wgmma, which no word tells apart, have one weight on all machines that have them.
double products_of(const emu::Stats& s, const Products& products) {
  const struct {
    emu::Word word;
    double macs, counted, weight;  ///< of an instruction; as the counters have it, as it is
  } kinds[] = {
      {emu::Word::mma_f16, 16 * 8 * 16, 2, products.wide},
      {emu::Word::mma_bf16, 16 * 8 * 16, 2, products.wide},
      {emu::Word::mma_int8, 16 * 8 * 32, 1, products.integer},
      {emu::Word::mma_fp8, 16 * 8 * 32, 1, products.fp8},
      {emu::Word::mma_f8f6f4, 16 * 8 * 32, 1, products.fp8},
      {emu::Word::mma_mxfp8, 16 * 8 * 32, 1, products.scaled_fp8},
      {emu::Word::mma_fp4, 16 * 8 * 64, 1, products.fp4},
  };
  double sum = static_cast<double>(s.tensor_macs + s.tensor_macs_16bit);
  for (const auto& kind : kinds) {
    sum += s.warp_instructions(kind.word) * kind.macs * (kind.weight - kind.counted);
  }
  return sum;
}

}  // namespace

const char* name(Unit unit) { return texts[static_cast<int>(unit)].name; }
const char* quantity(Unit unit) { return texts[static_cast<int>(unit)].quantity; }

Amounts operator+(const Amounts& a, const Amounts& b) {
  return each(a, b, [](double x, double y) { return x + y; });
}
Amounts operator-(const Amounts& a, const Amounts& b) {
  return each(a, b, [](double x, double y) { return x - y; });
}
Amounts operator*(double factor, const Amounts& a) {
  return each(a, a, [&](double x, double) { return factor * x; });
}

Amounts amounts_of(const emu::Stats& s, const Products& products) {
  const auto number = [](std::uint64_t n) { return static_cast<double>(n); };
  const auto lanes = [&](emu::Pipe pipe) { return 32 * s.warp_instructions(pipe); };
  Amounts a;
  a[Unit::tensor] = products_of(s, products);
  a[Unit::special] = lanes(emu::Pipe::special);
  a[Unit::convert] = lanes(emu::Pipe::convert);
  a[Unit::integer] = lanes(emu::Pipe::integer);
  a[Unit::fma] = lanes(emu::Pipe::fma);
  for (int p = 0; p < static_cast<int>(emu::Pipe::count); ++p) {
    a[Unit::issue] += s.warp_instructions(static_cast<emu::Pipe>(p));
  }
  // A matrix is eight rows of 16 bytes, one clock; rows that share banks take more.
  const double conflicts = 128 * (number(s.matrix_waves) - number(s.matrix_rows));
  a[Unit::shared] = number(s.shared_read + s.shared_written) + conflicts;
  a[Unit::l2] = number(s.global_read + s.global_written);
  a[Unit::tma] = number(s.bulk_bytes);
  return a;
}

double Machine::seconds(Unit unit, double amount, double blocks) const {
  if (unit == Unit::dram) return amount / dram_bytes_per_second;
  const double busy = std::min(multiprocessors, blocks);
  return amount / (per_clock[static_cast<int>(unit)] * busy * hertz);
}

Tiles tiles_of(const Shape& s, Block block) {
  const double heads = static_cast<double>(s.batch * (s.heads_q / block.pack));
  const auto blocks = static_cast<std::int64_t>(ceil_div(s.queries * block.pack, block.rows));
  Tiles t{heads * static_cast<double>(blocks), 0,
          static_cast<double>(s.batch * s.heads_kv) * ceil_div(s.keys, tile)};
  for (std::int64_t i = 0; i < blocks; ++i) {
    const std::int64_t last = std::min((i + 1) * block.rows, s.queries);
    const std::int64_t seen =
        s.causal ? std::max<std::int64_t>(last + s.keys - s.queries, 0) : s.keys;
    t.tiles += heads * ceil_div(seen, tile);
  }
  return t;
}

PerTile PerTile::fit(const Runs& r) {
  PerTile p;
  // A tile of one block is one of scores and one of keys.
  const Amounts slope = 1 / (r.more - r.few) * (r.one_more - r.one_few);
  p.block = r.one_few - r.few * slope;
  // With keys apart from it, two_more = 2 block + both (slope - keys) + more keys.
  p.keys = 1 / (r.both - r.more) * (2 * p.block + r.both * slope - r.two_more);
  p.tile = slope - p.keys;
  return p;
}

double Bound::in_turn() const {
  double other = 0;
  for (int i = 0; i < units; ++i) {
    if (static_cast<Unit>(i) != Unit::tensor) other = std::max(other, seconds[i]);
  }
  return seconds[static_cast<int>(Unit::tensor)] + other;
}

Bound bound_of(const Amounts& amounts, const Machine& machine, double blocks) {
  Bound b;
  b.amounts = amounts;
  for (int i = 0; i < units; ++i) {
    const auto unit = static_cast<Unit>(i);
    b.seconds[i] = machine.seconds(unit, amounts[unit], blocks);
    if (b.seconds[i] > b.predicted()) b.limit = unit;
  }
  return b;
}

}  // namespace qattn::model
