// mbarriers: arrivals, bytes, phases.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "isa/emu/block/block.hpp"

namespace qattn::emu {

struct Mbarrier {
  int index = 0, count = 0, pending = 0;
  std::int64_t missing_bytes = 0;
  std::uint32_t phase = 0;
  int initialiser = 0;
  bool fenced = false;
  std::vector<Lane*> waiting;
  std::vector<int> arrived;  ///< threads, in this phase
  Clock arriving, completed;
};

class Mbarriers {
 public:
  explicit Mbarriers(Block& block) : block_(block) {}
  void reset() { all_.clear(); }
  /// What the kernel's end must not leave behind; empty: nothing.
  std::string check_end();

  // ---- For lanes ----
  void init(std::uint32_t address, int arrivals, const Where& where);
  void fence_init();
  void arrive(std::uint32_t address, const Where& where);
  void expect(std::uint32_t address, std::uint32_t bytes, const Where& where);
  void wait(std::uint32_t address, std::uint32_t parity, const Where& where);
  bool test(std::uint32_t address, std::uint32_t parity, const Where& where);
  std::string describe(std::uint32_t address, std::uint32_t parity);

  // ---- For units ----
  /// The barrier at which an operation that begins now will end. `what`: the word.
  Mbarrier& ready(std::uint32_t address, const char* what, const Where& where);
  /// An operation of `agent`, begun at `time`, has ended there and moved so many bytes.
  void complete(std::uint32_t address, std::uint32_t bytes, int agent, std::uint32_t time,
                const Where& where);

 private:
  Mbarrier& find(std::uint32_t address, const char* what, const Where& where);
  void end_phase(std::uint32_t address, Mbarrier& barrier, const Where& where);

  Block& block_;
  std::map<std::uint32_t, Mbarrier> all_;
};

}  // namespace qattn::emu
