// A GPU as launches, the hosts of kernels and the emulator know it.
#pragma once

#include <string>

#include "isa/constexpr.hpp"

namespace qattn::isa {

enum class Vendor { nvidia, amd };

struct Gpu {
  Vendor vendor = Vendor::nvidia;
  int number = 0;        ///< its maker's: 90 of sm_90, 942 of gfx942; 0: there is none
  int wave = 32;         ///< lanes of a warp, which AMD calls a wavefront
  int shared_bytes = 0;  ///< that a block may have

  /// Does it run code of sm_`code` that is not specific to that GPU?
  constexpr bool runs_sm(int code) const { return vendor == Vendor::nvidia && number >= code; }
  /// "sm_90", "gfx942"
  std::string name() const {
    return (vendor == Vendor::amd ? "gfx" : "sm_") + std::to_string(number);
  }
};

/// Numbers of AMD begin with 900, and NVIDIA's are far below.
QATTN_CONSTEXPR Vendor vendor_of(int number) {
  return number >= 900 ? Vendor::amd : Vendor::nvidia;
}

/// CUDA C++ Programming Guide, Technical Specifications per Compute Capability (a multiprocessor
/// has 1 KiB more, and 1 KiB of every block is the system's). AMD: the LDS of a compute unit
/// (instruction set guides of CDNA 3 and 4).
constexpr int shared_bytes_of(int number) {
  if (vendor_of(number) == Vendor::amd) return (number == 950 ? 160 : 64) * 1024;
  const bool large = number == 90 || (number >= 100 && number < 120);
  const bool middle = number == 80 || number == 87;
  return (large ? 227 : middle ? 163 : 99) * 1024;
}

constexpr Gpu gpu_of(int number) {
  const Vendor vendor = vendor_of(number);
  return {vendor, number, vendor == Vendor::amd ? 64 : 32, shared_bytes_of(number)};
}

}  // namespace qattn::isa
