// What a measurement ran on.
#pragma once

#include <cstdint>
#include <string>

#include "console.hpp"

namespace qattn::cli {

/// "unknown" where the system does not say.
std::string cpu_model();
int available_cores();
/// The number that `requested` (0: the default) stands for.
int thread_count(int requested);
std::int64_t memory_bytes();

/// cpu, isa, cores, threads, version. Errors: as cpu_isa().
Result<Json> provenance(int threads);

/// unsupported if `bytes` are more than this machine has, which would end in a kill, not an error.
Status require_memory(double bytes);

}  // namespace qattn::cli
