// The warpgroups' asynchronous matrix multiplication.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "isa/emu/units/unit.hpp"

namespace qattn::isa {
enum class Element;
enum class Swizzle;
}  // namespace qattn::isa

namespace qattn::emu {

/// One lane's part of a wgmma.
struct WgmmaArguments {
  std::uint32_t* d;        ///< [n / 2], float or int32
  const std::uint32_t* a;  ///< [4] fragments; null: descriptor_a
  std::uint64_t descriptor_a, descriptor_b;
  bool add;
};
struct WgmmaShape {
  isa::Element a, b;
  int n;
  bool integer, transpose_a, transpose_b;
};

/// Byte address of the 16 bytes, or for transposed operands the 2 bytes, that begin at row `row`
/// (of M or N) and byte `k_byte` (0 to 31) of K.
std::uint32_t descriptor_address(std::uint64_t descriptor, int row, int k_byte, bool transposed);
std::uint64_t make_descriptor(std::uint32_t address, std::uint32_t leading_bytes,
                              std::uint32_t stride_bytes, int swizzle);

/// Accumulators belong to the hardware from the wgmma to the wait that completes it: meanwhile the
/// lanes' variables hold poison, and must stay where they are.
class WgmmaUnit final : public AsyncUnit {
 public:
  using AsyncUnit::AsyncUnit;
  void reset() override;
  std::string check_end() override;

  // Each once per warpgroup, by its last lane to arrive.
  void fence();
  void issue(const WgmmaShape& shape, Arguments<WgmmaArguments> lanes, const Where& where);
  void commit();
  void wait(int groups, const Where& where);
  /// registers_increase and _decrease.
  void set_registers(int count, bool increase, const Where& where);

 private:
  /// The registers of one accumulator tile while they are in flight.
  struct Tile {
    std::array<std::uint32_t*, 128> registers;
    int count = 0;    ///< registers a lane
    int pending = 0;  ///< operations that have not been waited for
    std::vector<std::uint32_t> values;
  };
  struct Operation {
    WgmmaShape shape;
    WgmmaArguments first;                  ///< lane 0's: descriptors and flags
    std::vector<std::uint32_t> fragments;  ///< [128][4] of A in registers
    int tile = 0;
    std::uint32_t time = 0;
    bool done = false;
    Where where;
  };
  struct Warpgroup {
    bool fenced = false;
    std::vector<Tile> tiles;
    Groups<Operation> products;
    int registers = 0;
  };

  Warpgroup& mine();
  int find_tile(Warpgroup& group, const WgmmaShape& shape, Arguments<WgmmaArguments> lanes,
                const Where& where);
  void check_poison(const Tile& tile, const Where& where) const;
  void check_operands(Operation& operation);
  void check_read(std::uint32_t address, std::uint32_t bytes, isa::Swizzle swizzle,
                  const Where& where);
  void gather_fragments(const Operation& operation, std::vector<float>& a) const;
  template <class Put>
  void gather_shared(isa::Element format, std::uint64_t descriptor, int rows, bool transposed,
                     Put put) const;
  void execute(Warpgroup& group, Operation& operation);
  void finish(Warpgroup& group, Operation& operation, const Where& where);

  std::array<Warpgroup, 8> warpgroups_;
};

}  // namespace qattn::emu
