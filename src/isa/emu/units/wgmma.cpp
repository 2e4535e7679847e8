#include "isa/emu/units/wgmma.hpp"

#include <algorithm>
#include <bit>
#include <cstring>

#include "isa/emu/units/bulk.hpp"
#include "isa/emu/units/matrix.hpp"
#include "isa/isa.hpp"

namespace qattn::emu {
namespace {

constexpr std::uint32_t kPoison = 0x7fc0dead;  // a NaN, and an unlikely integer
constexpr int kRegisterFile = 65536;

isa::Swizzle swizzle_of(std::uint64_t descriptor) {
  constexpr isa::Swizzle modes[] = {isa::Swizzle::none, isa::Swizzle::bytes128,
                                    isa::Swizzle::bytes64, isa::Swizzle::bytes32};
  return modes[descriptor >> 62];
}
std::uint32_t field(std::uint64_t descriptor, int shift) {
  return static_cast<std::uint32_t>(descriptor >> shift & 0x3fffu) << 4;
}

}  // namespace

// ---- Descriptors
// -----------------------------------------------------------------------------------

std::uint64_t make_descriptor(std::uint32_t address, std::uint32_t leading_bytes,
                              std::uint32_t stride_bytes, int swizzle) {
  constexpr std::uint64_t modes[] = {0, 3, 2, 1};  // none, 32, 64, 128 bytes
  const auto units = [](std::uint32_t bytes) -> std::uint64_t { return bytes >> 4 & 0x3fffu; };
  return units(address & 0x3ffffu) | units(leading_bytes) << 16 | units(stride_bytes) << 32 |
         modes[swizzle] << 62;
}

// Canonical layouts: cute/arch/mma_sm90_desc.hpp; S is the swizzle's span, L and B the descriptor's
// leading and stride bytes.
//   K-major     rows S apart in groups of 8, groups B apart; without swizzle the two 16-byte halves
//               of K are L apart
//   transposed  S bytes of M (or N) together, k rows S apart in groups of 8, groups B apart, the
//               next S bytes of M at L; without swizzle L and B change places
std::uint32_t descriptor_address(std::uint64_t descriptor, int row, int k_byte, bool transposed) {
  const isa::Swizzle swizzle = swizzle_of(descriptor);
  const std::uint32_t start = field(descriptor, 0), leading = field(descriptor, 16),
                      stride = field(descriptor, 32);
  const auto span = static_cast<std::uint32_t>(swizzle_span(swizzle));
  const auto r = static_cast<std::uint32_t>(row), k = static_cast<std::uint32_t>(k_byte);
  if (transposed) {
    const std::uint32_t byte = 2 * r, j = k / 2;
    const bool plain = swizzle == isa::Swizzle::none;
    const std::uint32_t next_chunk = plain ? stride : leading, next_k = plain ? leading : stride;
    return swizzled(start + byte / span * next_chunk + j / 8 * next_k + j % 8 * span + byte % span,
                    swizzle);
  }
  const std::uint32_t rows = r / 8 * stride + r % 8 * span;
  if (swizzle == isa::Swizzle::none) return start + rows + k / 16 * leading + k % 16;
  return swizzled(start + rows + k, swizzle);
}

// ---- Issue
// -----------------------------------------------------------------------------------------

void WgmmaUnit::reset() {
  // ptxas gives every thread the same share of the register file, in units of 8.
  const int share = std::min(kRegisterFile / block_.threads() / 8 * 8, 248);
  for (Warpgroup& group : warpgroups_) {
    group = {};
    group.registers = share;
  }
}

std::string WgmmaUnit::check_end() {
  for (const Warpgroup& group : warpgroups_) {
    if (!group.products.empty()) {
      return "the kernel ended with a wgmma in flight, issued at " +
             describe(group.products.operations().front().where);
    }
  }
  return {};
}

WgmmaUnit::Warpgroup& WgmmaUnit::mine() {
  return warpgroups_[static_cast<std::size_t>(current_lane->warp / 4)];
}

void WgmmaUnit::fence() { mine().fenced = true; }

void WgmmaUnit::check_poison(const Tile& tile, const Where& where) const {
  for (std::size_t lane = 0; lane < 128; ++lane) {
    for (int i = 0; i < tile.count; ++i) {
      if (tile.registers[lane][i] != kPoison) {
        throw Error(
            text("accumulator %d of thread %zu was written while a wgmma had it in flight, "
                 "found at %s",
                 i, static_cast<std::size_t>(current_lane->warp / 4) * 128 + lane,
                 describe(where).c_str()));
      }
    }
  }
}

int WgmmaUnit::find_tile(Warpgroup& group, const WgmmaShape& shape, Arguments<WgmmaArguments> lanes,
                         const Where& where) {
  for (std::size_t i = 0; i < group.tiles.size(); ++i) {
    Tile& tile = group.tiles[i];
    if (tile.registers[0] != lanes[0].d) continue;
    if (tile.count != shape.n / 2) {
      throw Error("wgmma: the accumulators are in flight with another N, at " + describe(where));
    }
    check_poison(tile, where);
    return static_cast<int>(i);
  }
  // Tiles that were waited for leave their place to others.
  auto free = std::find_if(group.tiles.begin(), group.tiles.end(),
                           [](const Tile& t) { return t.registers[0] == nullptr; });
  if (free == group.tiles.end()) free = group.tiles.emplace(free);
  Tile& tile = *free;
  tile.count = shape.n / 2;
  tile.values.resize(static_cast<std::size_t>(128 * tile.count));
  for (int lane = 0; lane < 128; ++lane) {
    std::uint32_t* d = lanes[lane].d;
    tile.registers[static_cast<std::size_t>(lane)] = d;
    std::copy_n(d, tile.count, tile.values.begin() + lane * tile.count);
    std::fill_n(d, tile.count, kPoison);
  }
  return static_cast<int>(free - group.tiles.begin());
}

/// `swizzle` is the descriptor's. Bytes that TMA put elsewhere are not the operand.
void WgmmaUnit::check_read(std::uint32_t address, std::uint32_t bytes, isa::Swizzle swizzle,
                           const Where& where) {
  block_.shared().check_place(address, bytes, bytes, "wgmma", where);
  block_.shared().check_readable(address, bytes, "wgmma", where);
  const int written = block_.shared().swizzle(address);
  if (written != 0 && written != static_cast<int>(swizzle)) {
    constexpr const char* texts[] = {"no swizzle", "32 bytes", "64 bytes", "128 bytes"};
    throw Error(
        text("wgmma: the descriptor's swizzle is %s, but TMA wrote shared memory +0x%x "
             "under one of %s, at %s",
             texts[static_cast<int>(swizzle)], SharedMemory::offset(address), texts[written],
             describe(where).c_str()));
  }
  block_.stats.shared_read += bytes;
  if (block_.options().races) {
    block_.races().read(SharedMemory::offset(address), bytes,
                        block_.races().wgmma_agent(current_lane->warp / 4), Proxy::async, where);
  }
}

void WgmmaUnit::check_operands(Operation& operation) {
  const auto check = [&](std::uint64_t descriptor, int rows, bool transposed) {
    if (descriptor >> 49 & 7) {
      throw Error("matrix descriptor: base offset is not 0, at " + describe(operation.where));
    }
    const isa::Swizzle swizzle = swizzle_of(descriptor);
    const auto group = static_cast<std::uint32_t>(8 * swizzle_span(swizzle));
    if (swizzle != isa::Swizzle::none && rows > 8 && field(descriptor, 32) < group) {
      throw Error(text("matrix descriptor: a stride of %u bytes, but 8 rows take %u, at %s",
                       field(descriptor, 32), group, describe(operation.where).c_str()));
    }
    if (transposed) {  // 16 bytes hold 8 rows of one k
      for (int k = 0; k < 32; k += 2) {
        for (int row = 0; row < rows; row += 8) {
          check_read(descriptor_address(descriptor, row, k, true), 16, swizzle, operation.where);
        }
      }
    } else {
      for (int row = 0; row < rows; ++row) {
        for (int k = 0; k < 32; k += 16) {
          check_read(descriptor_address(descriptor, row, k, false), 16, swizzle, operation.where);
        }
      }
    }
  };
  if (block_.options().races) {
    const int group = current_lane->warp / 4;
    operation.time = block_.races().begin_for_all(block_.races().wgmma_agent(group), 128 * group);
  }
  const WgmmaShape& shape = operation.shape;
  if (!operation.first.a) check(operation.first.descriptor_a, 64, shape.transpose_a);
  check(operation.first.descriptor_b, shape.n, shape.transpose_b);
}

void WgmmaUnit::issue(const WgmmaShape& shape, Arguments<WgmmaArguments> lanes,
                      const Where& where) {
  Warpgroup& group = mine();
  if (!group.fenced) {
    throw Error("wgmma without a wgmma_fence since the last wait, at " + describe(where));
  }
  Operation operation;
  operation.shape = shape;
  operation.first = lanes[0];
  operation.where = where;
  for (int lane = 0; lane < 128; ++lane) {
    const WgmmaArguments& l = lanes[lane];
    if (l.descriptor_a != operation.first.descriptor_a ||
        l.descriptor_b != operation.first.descriptor_b || l.add != operation.first.add) {
      throw Error("wgmma: descriptors or `add` differ between lanes, at " + describe(where));
    }
    if (l.a) operation.fragments.insert(operation.fragments.end(), l.a, l.a + 4);
  }
  check_operands(operation);
  operation.tile = find_tile(group, shape, lanes, where);
  ++group.tiles[static_cast<std::size_t>(operation.tile)].pending;
  group.products.begin(std::move(operation));
  if (at_once()) {
    for (Operation& o : group.products.operations()) execute(group, o);  // in order
  }
}

// ---- Execution
// -------------------------------------------------------------------------------------

void WgmmaUnit::gather_fragments(const Operation& operation, std::vector<float>& a) const {
  const int per_register = isa::is_16bit(operation.shape.a) ? 2 : 4, depth = 8 * per_register;
  for (int lane = 0; lane < 128; ++lane) {
    for (int r = 0; r < 4; ++r) {
      const int row = lane / 32 * 16 + lane % 32 / 4 + 8 * (r % 2);
      const int k = per_register * (lane % 4) + 4 * per_register * (r / 2);
      std::uint8_t bytes[4];
      std::memcpy(bytes, &operation.fragments[static_cast<std::size_t>(4 * lane + r)], 4);
      decode(operation.shape.a, bytes, 4, &a[static_cast<std::size_t>(row * depth + k)]);
    }
  }
}

/// put(row, k, value) for each element of a descriptor's tile.
template <class Put>
void WgmmaUnit::gather_shared(isa::Element format, std::uint64_t descriptor, int rows,
                              bool transposed, Put put) const {
  const int depth = isa::is_16bit(format) ? 16 : 32;
  for (int row = 0; row < rows; ++row) {
    std::uint8_t bytes[32];
    const int piece = transposed ? 2 : 16;  // bytes of K that lie together
    for (int k_byte = 0; k_byte < 32; k_byte += piece) {
      const std::uint32_t from = descriptor_address(descriptor, row, k_byte, transposed);
      std::memcpy(bytes + k_byte, block_.shared().at(from), static_cast<std::size_t>(piece));
    }
    float values[32];
    decode(format, bytes, 32, values);
    for (int k = 0; k < depth; ++k) put(row, k, values[k]);
  }
}

void WgmmaUnit::execute(Warpgroup& group, Operation& operation) {
  if (operation.done) return;
  operation.done = true;
  const WgmmaShape& shape = operation.shape;
  const int depth = isa::is_16bit(shape.a) ? 16 : 32, n = shape.n;
  thread_local std::vector<float> a, b, sums;
  a.resize(static_cast<std::size_t>(64 * depth));
  b.resize(static_cast<std::size_t>(depth * n));
  sums.resize(static_cast<std::size_t>(64 * n));
  if (!operation.fragments.empty()) {
    gather_fragments(operation, a);
  } else {
    gather_shared(
        shape.a, operation.first.descriptor_a, 64, shape.transpose_a,
        [&](int row, int k, float v) { a[static_cast<std::size_t>(row * depth + k)] = v; });
  }
  gather_shared(shape.b, operation.first.descriptor_b, n, shape.transpose_b,
                [&](int row, int k, float v) { b[static_cast<std::size_t>(k * n + row)] = v; });
  multiply(a.data(), b.data(), sums.data(), 64, n, depth);
  Tile& tile = group.tiles[static_cast<std::size_t>(operation.tile)];
  for (int lane = 0; lane < 128; ++lane) {
    for (int i = 0; i < tile.count; ++i) {
      const int row = lane / 32 * 16 + lane % 32 / 4 + 8 * (i / 2 % 2);
      const int column = 2 * (lane % 4) + i % 2 + 8 * (i / 4);
      const float sum = sums[static_cast<std::size_t>(row * n + column)];
      std::uint32_t& value = tile.values[static_cast<std::size_t>(lane * tile.count + i)];
      const std::uint32_t old = operation.first.add ? value : 0;
      value = shape.integer ? old + static_cast<std::uint32_t>(static_cast<int>(sum))
                            : std::bit_cast<std::uint32_t>(std::bit_cast<float>(old) + sum);
    }
  }
  const std::uint64_t macs = static_cast<std::uint64_t>(64 * n) * static_cast<unsigned>(depth);
  block_.stats.tensor_macs += macs;
  if (isa::is_16bit(shape.a)) block_.stats.tensor_macs_16bit += macs;
}

void WgmmaUnit::commit() { mine().products.commit(); }

void WgmmaUnit::finish(Warpgroup& group, Operation& operation, const Where& where) {
  execute(group, operation);
  Tile& tile = group.tiles[static_cast<std::size_t>(operation.tile)];
  if (block_.options().races) {
    const int first = 128 * (current_lane->warp / 4);
    for (int lane = first; lane < first + 128; ++lane) {
      block_.races().observe(lane, block_.races().wgmma_agent(first / 128), operation.time);
    }
  }
  if (--tile.pending > 0) return;
  check_poison(tile, where);
  for (std::size_t lane = 0; lane < 128; ++lane) {
    std::copy_n(tile.values.begin() + static_cast<std::ptrdiff_t>(lane) * tile.count, tile.count,
                tile.registers[lane]);
  }
  tile.registers[0] = nullptr;  // free
}

void WgmmaUnit::wait(int groups, const Where& where) {
  Warpgroup& group = mine();
  group.products.wait(groups, [&](Operation& operation) { finish(group, operation, where); });
  if (group.products.empty()) group.tiles.clear();
  group.fenced = false;
}

void WgmmaUnit::set_registers(int count, bool increase, const Where& where) {
  const char* what = increase ? "registers_increase" : "registers_decrease";
  Warpgroup& group = mine();
  if (increase ? count < group.registers : count > group.registers) {
    throw Error(text("%s: to %d, but the warpgroup has %d registers a thread, at %s", what, count,
                     group.registers, describe(where).c_str()));
  }
  const auto total_with = [&] {
    int total = 0;
    for (int g = 0; g < block_.warps() / 4; ++g) {
      const Warpgroup& other = warpgroups_[static_cast<std::size_t>(g)];
      total += 128 * (&other == &group ? count : other.registers);
    }
    // A last, incomplete warpgroup keeps what it was launched with.
    const int share = std::min(kRegisterFile / block_.threads() / 8 * 8, 248);
    return total + block_.warps() % 4 * 32 * share;
  };
  while (total_with() > kRegisterFile) block_.poll(where);
  group.registers = count;
}

}  // namespace qattn::emu
