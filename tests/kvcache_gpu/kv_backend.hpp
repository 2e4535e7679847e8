// A backend whose device is host memory and whose kernels run in the emulator.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/backend.hpp"
#include "isa/emu/options.hpp"

namespace qattn::test {

/// Of no type of device yet.
detail::Backend emulated_kv_backend();

/// In front of all backends for as long as it lives.
class KvBackend {
 public:
  KvBackend();
  ~KvBackend();
  KvBackend(const KvBackend&) = delete;
  KvBackend& operator=(const KvBackend&) = delete;

  /// Of the allocations that are not released.
  static std::size_t allocated();
  static std::int64_t calls();  ///< allocations and releases so far

 private:
  detail::Backend backend_;
};

/// The emulator's schedule, order of lanes and seed for as long as it lives; `n` chooses.
class Timing {
 public:
  explicit Timing(unsigned n);
  ~Timing() { emu::options() = before_; }
  Timing(const Timing&) = delete;
  Timing& operator=(const Timing&) = delete;

 private:
  emu::Options before_;
};

}  // namespace qattn::test
