#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <string_view>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "kernels/cpu/words.hpp"

namespace qattn::cpu {
namespace {

#if defined(__x86_64__)

bool runs_avx2() {
  __builtin_cpu_init();
  // F16C by hand (CPUID leaf 1, ECX bit 29): clang 16's builtin does not know its name.
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  const bool f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & 1u << 29) != 0;
  return f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

bool runs_avx512vnni() {
  return runs_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512vnni");
}

/// CPUID leaf 7, subleaf 1: EAX bit 5.
bool runs_avx512bf16() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return runs_avx512vnni() && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) != 0 &&
         (eax & 1u << 5) != 0;
}

/// Tiles need the CPU's word (CPUID leaf 7: EDX bits 22, 24, 25) and the kernel's: Linux hands out
/// the tile state on request, once per process (arch_prctl ARCH_REQ_XCOMP_PERM, XTILEDATA).
bool runs_amx() {
#if defined(__linux__)
  if (!runs_avx512bf16()) return false;
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return false;
  constexpr unsigned tiles = 1u << 22 | 1u << 24 | 1u << 25;
  if ((edx & tiles) != tiles) return false;
  constexpr long request_permission = 0x1023, tile_data = 18;
  return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
  return false;
#endif
}

#else

bool runs_avx2() { return false; }
bool runs_avx512vnni() { return false; }
bool runs_avx512bf16() { return false; }
bool runs_amx() { return false; }

#endif

#if defined(__aarch64__) && defined(__linux__)
bool runs_dotprod() { return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0; }
bool runs_i8mm() { return runs_dotprod() && (getauxval(AT_HWCAP2) & HWCAP2_I8MM) != 0; }
#else
bool runs_dotprod() { return false; }
bool runs_i8mm() { return false; }
#endif

/// Asks once, or a few times where threads meet: every CPUID leaves a virtual machine (together 15
/// us, longer than a small call). Not a static local: a thread that asks while another forks would
/// leave its guard taken in the child.
template <bool (*runs)()>
bool once() {
  enum : int { unasked, no, yes };
  static std::atomic<int> answer = unasked;
  if (answer == unasked) answer = runs() ? yes : no;
  return answer == yes;
}

struct Candidate {
  const char* name;
  const KernelTable* (*words)();
  bool (*runs)();
};

// Best first.
constexpr Candidate candidates[] = {{"amx", words_amx, once<runs_amx>},
                                    {"avx512bf16", words_avx512bf16, once<runs_avx512bf16>},
                                    {"avx512vnni", words_avx512vnni, once<runs_avx512vnni>},
                                    {"avx2", words_avx2, once<runs_avx2>},
                                    {"neon_i8mm", words_neon_i8mm, once<runs_i8mm>},
                                    {"neon_dotprod", words_neon_dotprod, once<runs_dotprod>},
                                    {"scalar", words_scalar, [] { return true; }}};

/// "is not one of " and the candidates.
constexpr auto unknown = [] {
  std::array<char, 128> text{};  // ends with zeros; what does not fit does not compile
  std::size_t at = 0;
  const auto add = [&](std::string_view part) {
    for (const char c : part) text[at++] = c;
  };
  add("is not one of ");
  for (const Candidate& c : candidates) {
    if (&c != candidates) add(", ");
    add(c.name);
  }
  text.at(at) = '\0';
  return text;
}();

}  // namespace

Selection select_words() {
  const char* forced = std::getenv("QATTN_CPU_ISA");
  const bool any = forced == nullptr || *forced == '\0';
  for (const Candidate& c : candidates) {
    if (!any && std::strcmp(forced, c.name) != 0) continue;
    if (c.words() != nullptr && c.runs()) return {c.words(), nullptr, false};
    if (!any) return {nullptr, "is not available on this CPU or in this build", false};
  }
  return {nullptr, unknown.data(), true};
}

}  // namespace qattn::cpu
