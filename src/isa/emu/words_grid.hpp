// Order between the blocks of a grid.
#pragma once

#include <chrono>
#include <thread>

#include "isa/emu/words_sm80.hpp"

namespace qattn::isa {
inline namespace QATTN_TARGET {

inline std::uint32_t signal_global(std::uint32_t* p, std::uint32_t v,
                                   Where where = Where::current()) {
  return global_atomic(p, where).fetch_add(v);
}

/// Blocks with lower numbers have started, and nothing of them waits for this one: either they have
/// done it or another worker is at it.
inline void await_global(const std::uint32_t* p, std::uint32_t value,
                         Where where = Where::current()) {
  const auto target = global_atomic(const_cast<std::uint32_t*>(p), where);
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (target.load() != value) {
    if (std::chrono::steady_clock::now() > end) {
      throw emu::Error(emu::text("await_global: block %d waits for %u and finds %u, at %s",
                                 block().x, value, target.load(), emu::describe(where).c_str()));
    }
    std::this_thread::yield();
  }
}

}  // namespace QATTN_TARGET
}  // namespace qattn::isa
