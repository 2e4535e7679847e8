// How a launch is emulated, and what it counted.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <typeinfo>

#include "isa/emu/block/chain.hpp"
#include "isa/emu/vocabulary.hpp"

namespace qattn::isa {
struct Index3;
}

namespace qattn::emu {

/// When an asynchronous operation takes effect: as soon as it is issued, at the last moment that
/// the kernel's waits allow, or at a seeded random moment between. A correct kernel gives the same
/// bits under all three.
enum class Schedule : std::uint8_t { early, late, random };

/// Which lane runs next when one blocks.
enum class LaneOrder : std::uint8_t { forward, reverse, random };

struct Options {
  Schedule schedule = Schedule::late;
  LaneOrder order = LaneOrder::forward;
  std::uint64_t seed = 1;
  bool races = true;  ///< track happens-before between lanes (about +50% time)
  int workers = 1;    ///< threads that run blocks of the grid
  /// What isa::gpu() and code_architecture() (0: the same) say, so that kernels are chosen
  /// as on that GPU. Of the words there are those that it has.
  int architecture = 90, code_architecture = 0;
  /// What isa::multiprocessors() says: few, so that persistent blocks have more than one piece of
  /// work.
  int multiprocessors = 3;

  // ---- What launch() knows of the kernel ----
  int cluster = 1;     ///< blocks that are launched together
  int warp_lanes = 0;  ///< 0: those of the GPU's waves
  /// Of the words there are those of this target. 0: whatever the GPU has.
  isa::Target target{0};
  const std::type_info* kernel = nullptr;  ///< the kernel's type, for messages

  int warp_lanes_here() const {
    return warp_lanes > 0 ? warp_lanes : isa::gpu_of(architecture).wave;
  }
  Vocabulary vocabulary() const {
    return {target.number > 0 ? target : isa::Target{architecture, true}, architecture};
  }
};

/// What isa::launch uses.
Options& options();

/// Counted over all blocks of a launch. What kernels write as operators of C++ (a + b, other casts
/// than to_float()) leaves no trace: sums over words are lower bounds.
struct Stats {
  /// Executions by single lanes, of as many instructions as the word is on sm_90: a warp's
  /// collective counts 32, a warpgroup's 128.
  std::array<std::uint64_t, static_cast<std::size_t>(Word::count)> lanes{};
  std::uint64_t shared_read = 0, shared_written = 0;  ///< bytes
  std::uint64_t global_read = 0, global_written = 0;  ///< bytes, copies and TMA included
  std::uint64_t bulk_bytes = 0;                       ///< moved by bulk copies and TMA, whole boxes
  std::uint64_t matrix_rows = 0;        ///< 8-row matrices that load_matrix and store_matrix moved
  std::uint64_t matrix_waves = 0;       ///< shared-memory cycles they took: equal without conflicts
  std::uint64_t tensor_macs = 0;        ///< multiply-accumulates of mma and wgmma
  std::uint64_t tensor_macs_16bit = 0;  ///< of them, on operands of 16 bits
  std::uint64_t switches = 0;           ///< of the emulator, between lanes
  std::uint64_t blocks = 0;

  int warp_lanes = 32;

  double warp_instructions(Word word) const {
    return static_cast<double>(lanes[static_cast<std::size_t>(word)]) / warp_lanes;
  }
  double warp_instructions(Pipe which) const;
  Stats& operator+=(const Stats& other);
  /// One line a word that was executed, then the bytes.
  std::string report() const;
};

/// Of the latest launch that ended on this thread.
const Stats& last_stats();
/// Of all launches that ended on this thread since the last call.
Stats take_stats();

/// Why the emulated GPU cannot run the kernel, whatever its words; empty: it can.
std::string check_target(const Options& options);

/// Runs `body` once per thread of the grid. Throws Error. A chain is of launches by one thread.
Stats run(isa::Index3 grid, int threads, int shared_bytes, const Options& options,
          const std::function<void()>& body, Chain chain = Chain::none);

}  // namespace qattn::emu
