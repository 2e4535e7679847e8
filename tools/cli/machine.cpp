#include "machine.hpp"

#include <fmt/format.h>
#include <omp.h>
#include <unistd.h>

#include <fstream>
#include <string_view>

namespace qattn::cli {

std::string cpu_model() {
  std::ifstream file("/proc/cpuinfo");
  constexpr std::string_view key = "model name";
  for (std::string line; std::getline(file, line);) {
    const std::size_t colon = line.find(": ");
    if (line.starts_with(key) && colon != std::string::npos) return line.substr(colon + 2);
  }
  return "unknown";
}

int available_cores() { return omp_get_num_procs(); }

int thread_count(int requested) { return requested > 0 ? requested : omp_get_max_threads(); }

std::int64_t memory_bytes() {
  return static_cast<std::int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE);
}

Result<Json> provenance(int threads) {
  const Result<std::string> isa = cpu_isa();
  if (!isa.ok()) return isa.status();
  return Json{{"cpu", cpu_model()},
              {"isa", *isa},
              {"cores", available_cores()},
              {"threads", thread_count(threads)},
              {"version", version()}};
}

Status require_memory(double bytes) {
  const auto present = static_cast<double>(memory_bytes());
  if (bytes <= present) return {};
  constexpr double gib = 1 << 30;
  return {Code::unsupported, fmt::format("{:.1f} GiB of memory are needed, this machine has {:.1f}",
                                         bytes / gib, present / gib)};
}

}  // namespace qattn::cli
