// A lower bound on a kernel's time for each execution unit: how much work the emulator counted,
// divided by what the unit does in a clock.
//
// What is scaled: a kernel's work is a * blocks of 128 queries + b * tiles of 128 x 128 scores + c
// * tiles of 128 keys, whatever the kernel's own tiles are (they divide 128, but for blocks of 192
// queries, which take the place of 128). a: the beginning and the end, and under causality the tile
// on the diagonal, which every block of queries has once. c:
// what is done once for all queries that share a key, such as looking for bad values. Three
// emulated sizes give the three; sequences count as whole tiles.
#pragma once

#include <compare>
#include <cstdint>
#include <string>
#include <vector>

#include "isa/emu/options.hpp"

namespace qattn::model {

inline constexpr std::int64_t tile = 128;  ///< queries and keys of one

/// One unit of the machine and how much of it a kernel needs.
enum class Unit : std::uint8_t {
  tensor,
  special,
  convert,
  integer,
  fma,
  issue,
  shared,
  l2,
  tma,
  dram
};
inline constexpr int units = 10;
const char* name(Unit unit);
const char* quantity(Unit unit);  ///< what is counted

/// Amounts by Unit. tensor: multiply-accumulates of 8 bits, 16-bit ones count twice.
struct Amounts {
  double of[units] = {};

  double& operator[](Unit u) { return of[static_cast<int>(u)]; }
  double operator[](Unit u) const { return of[static_cast<int>(u)]; }
};
Amounts operator+(const Amounts& a, const Amounts& b);
Amounts operator-(const Amounts& a, const Amounts& b);
Amounts operator*(double factor, const Amounts& a);

/// As how many of 8 bits a multiply-accumulate of mma.sync counts, by what it multiplies: the rate
/// of s8 (on Hopper that of wgmma) over its own. Sums are float32.
struct Products {
  double integer = 1;     ///< s8 and u8
  double wide = 2;        ///< f16 and bf16
  double fp8 = 1;         ///< e4m3 without scales
  double scaled_fp8 = 1;  ///< with them
  double fp4 = 1;
};

/// What the emulator counted; dram is left 0, for the emulator knows no caches.
Amounts amounts_of(const emu::Stats& stats, const Products& products = {});

struct Machine {
  std::string key, name;
  struct {
    int best, portable;  ///< whose kernels run: its own, or those for GPUs without any
  } architecture;
  double multiprocessors, hertz;
  double per_clock[units];  ///< of one multiprocessor
  double dram_bytes_per_second;
  Products products;
  const char* source;

  /// Where `blocks` thread blocks share the work: each runs on one multiprocessor.
  double seconds(Unit unit, double amount, double blocks) const;
};
const std::vector<Machine>& machines();                ///< all that the model knows
const Machine* machine_named(const std::string& key);  ///< nullptr: it does not know it
const Machine& h200();

struct Shape {
  std::int64_t batch = 1, heads_q = 1, heads_kv = 1, queries = 1, keys = 1, dim = 1;
  bool causal = false;
};

/// What a thread block works on at a time.
struct Block {
  std::int64_t pack = 1;     ///< query heads that share it; their queries fit into one
  std::int64_t rows = tile;  ///< queries
  int shared_p = -1;         ///< P in shared memory, where a kernel says so; else -1
  auto operator<=>(const Block&) const = default;
};

/// Blocks of queries and tiles of scores of all query heads, tiles of keys of all KV heads.
struct Tiles {
  double blocks = 0, tiles = 0, keys = 0;
};
Tiles tiles_of(const Shape& shape, Block block = {});

/// What one block of queries needs, one tile of scores and one of keys.
struct PerTile {
  Amounts block, tile, keys;

  /// From three emulated runs on one head: one block of queries over `few` tiles and over `more`,
  /// and two blocks over `more` tiles of keys, which are `both` tiles of scores.
  struct Runs {
    Amounts one_few, one_more, two_more;
    double few, more, both;
  };
  static PerTile fit(const Runs& runs);
  Amounts scaled(const Tiles& t) const { return t.blocks * block + t.tiles * tile + t.keys * keys; }
};

struct Bound {
  Amounts amounts;
  double seconds[units] = {};
  Unit limit = Unit::tensor;  ///< the unit that takes longest

  double predicted() const { return seconds[static_cast<int>(limit)]; }
  /// Where nothing else runs beside the products: the longest of the other units comes on top.
  double in_turn() const;
};
/// The kernel can take no less: units overlap at best, and `blocks` thread blocks are as long as
/// each other at best.
Bound bound_of(const Amounts& amounts, const Machine& machine, double blocks);

}  // namespace qattn::model
