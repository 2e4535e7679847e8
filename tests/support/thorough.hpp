// Long tests do a part of their work unless QATTN_THOROUGH is in the environment, as in
// `make test-all`.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <vector>

namespace qattn::test {

inline bool thorough() { return std::getenv("QATTN_THOROUGH") != nullptr; }

/// Of a list that several suites run over, what one of them takes: every third from `first` on, so
/// that all of the list is met by some; all of it where tests are thorough.
template <class T>
std::vector<T> a_third(const std::vector<T>& all, std::size_t first) {
  if (thorough()) return all;
  std::vector<T> some;
  for (std::size_t n = first; n < all.size(); n += 3) some.push_back(all[n]);
  return some;
}

}  // namespace qattn::test
