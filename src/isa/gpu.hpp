// How much shared memory GPUs have.
#pragma once

namespace qattn::isa {

/// Bytes of shared memory that a block may have (CUDA C++ Programming Guide, Technical
/// Specifications per Compute Capability); a multiprocessor has 1 KiB more, and 1 KiB of every
/// block is the system's.
constexpr int shared_limit(int architecture) {
  const bool large = architecture == 90 || (architecture >= 100 && architecture < 120);
  const bool middle = architecture == 80 || architecture == 87;
  return (large ? 227 : middle ? 163 : 99) * 1024;
}

}  // namespace qattn::isa
