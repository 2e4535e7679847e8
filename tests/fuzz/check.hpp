// What every fuzz target promises; a broken promise stops the process where the fuzzer sees it.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <string>

namespace qattn::fuzz {

inline void require(bool good, const char* rule, const std::string& detail = {}) {
  if (good) return;
  std::fprintf(stderr, "broken: %s\n%s\n", rule, detail.c_str());
  std::abort();
}

}  // namespace qattn::fuzz
