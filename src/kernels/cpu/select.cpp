#include <cstdlib>
#include <cstring>

#include "kernels/cpu/words.hpp"

namespace qattn::cpu {
namespace {

bool runs_avx512vnni() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512vnni");
#else
  return false;
#endif
}

}  // namespace

Selection select_words() {
  const bool fast = words_avx512vnni() != nullptr && runs_avx512vnni();
  const char* forced = std::getenv("QATTN_CPU_ISA");
  if (forced == nullptr || *forced == '\0') {
    return {fast ? words_avx512vnni() : words_scalar(), nullptr, false};
  }
  if (std::strcmp(forced, "scalar") == 0) return {words_scalar(), nullptr, false};
  if (std::strcmp(forced, "avx512vnni") == 0) {
    if (fast) return {words_avx512vnni(), nullptr, false};
    return {nullptr, "this CPU or build has no AVX-512 VNNI", false};
  }
  return {nullptr, "is not one of scalar, avx512vnni", true};
}

}  // namespace qattn::cpu
