// Which instruction sets are there: the library's answer against the kernel's list. Tests skip what
// the library says is missing, so a wrong "missing" would leave a whole unit untested.
#include <gtest/gtest.h>

#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "qattn/attention.hpp"
#include "support/isas.hpp"

namespace qattn::test {
namespace {

/// The features that /proc/cpuinfo lists for the first CPU.
std::set<std::string> features_of_this_cpu() {
  std::ifstream file("/proc/cpuinfo");
  std::set<std::string> all;
  for (std::string line; all.empty() && std::getline(file, line);) {
#if defined(__aarch64__)
    const bool features = line.starts_with("Features");
#else
    const bool features = line.starts_with("flags");
#endif
    if (!features) continue;
    std::istringstream words(line.substr(line.find(':') + 1));
    for (std::string word; words >> word;) all.insert(word);
  }
  return all;
}

struct Needs {
  std::string isa;
  std::vector<std::string> features;
};

/// Features of each instruction set, under the names of Linux.
std::vector<Needs> needs() {
  std::vector<Needs> all = {
      {"scalar", {}}, {"neon_dotprod", {"asimddp"}}, {"neon_i8mm", {"asimddp", "i8mm"}}};
  std::vector<std::string> x86 = {"avx2", "fma", "f16c"};
  all.push_back({"avx2", x86});
  for (const char* f : {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"}) {
    x86.push_back(f);
  }
  all.push_back({"avx512vnni", x86});
  x86.push_back("avx512_bf16");
  all.push_back({"avx512bf16", x86});
  for (const char* f : {"amx_tile", "amx_int8", "amx_bf16"}) x86.push_back(f);
  all.push_back({"amx", x86});
  return all;
}

/// Whether Linux grants the tile state, which a CPU with AMX may still refuse a process.
bool grants_tiles() {
#if defined(__clang__) && __clang_major__ < 19
  return false;  // that unit is left out (src/CMakeLists.txt)
#elif defined(__x86_64__) && defined(__linux__)
  constexpr long request_permission = 0x1023, tile_data = 18;
  return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
  return false;
#endif
}

TEST(CpuIsa, ThoseThatTheKernelLists) {
  const std::set<std::string> features = features_of_this_cpu();
  if (features.empty()) GTEST_SKIP() << "/proc/cpuinfo lists no features of this architecture";
  std::size_t count = 0;
  for (const auto& [isa, required] : needs()) {
    bool listed = true;
    for (const std::string& f : required) listed &= features.contains(f);
    if (isa == "amx") listed = listed && grants_tiles();
    // Not the other way: an older kernel or a sandbox may list less than the CPU has.
    EXPECT_TRUE(!listed || ForceIsa(isa).available()) << isa;
    ++count;
  }
  EXPECT_EQ(count, isas().size()) << "an instruction set that this test does not know";
}

/// The library's own list, of what it says to a name that is none.
TEST(CpuIsa, TestsKnowTheLibrarysList) {
  const IsaVariable nonsense("nonsense");
  const Status refused = cpu_isa().status();
  ASSERT_EQ(refused.code(), Code::invalid_argument) << refused.message();
  const std::string& text = refused.message();
  const std::string before = "is not one of ";
  const std::size_t at = text.find(before);
  ASSERT_NE(at, std::string::npos) << text;
  std::multiset<std::string> listed;
  std::istringstream names(text.substr(at + before.size()));
  for (std::string name; std::getline(names >> std::ws, name, ',');) listed.insert(name);
  EXPECT_EQ(listed, std::multiset<std::string>(isas().begin(), isas().end())) << text;
}

}  // namespace
}  // namespace qattn::test
