// copy_async: each lane's copies of 4, 8 or 16 bytes, in groups.
#pragma once

#include <cstdint>
#include <vector>

#include "isa/emu/units/unit.hpp"

namespace qattn::emu {

class CopyAsync final : public AsyncUnit {
 public:
  using AsyncUnit::AsyncUnit;
  void reset() override;
  std::string check_end() override { return {}; }  // what nobody waited for was never read

  // Each for the current lane.
  void copy(int size, std::uint32_t to, const void* from, int bytes, const Where& where);
  void commit();
  void wait(int groups_in_flight);

 private:
  /// Of `size` bytes, `bytes` of them from memory; `done`: it has been written already.
  struct Copy {
    std::uint32_t to;
    const void* from;
    int size, bytes;
    bool done;
    Where where;
  };
  Groups<Copy>& mine() { return lanes_[static_cast<std::size_t>(current_lane->thread)]; }
  void write(const Copy& copy);
  void land(const Copy& copy);

  std::vector<Groups<Copy>> lanes_;
};

}  // namespace qattn::emu
