// Long tests do a part of their work unless QATTN_THOROUGH is in the environment, as in
// `make test-all`.
#pragma once

#include <cstdlib>

namespace qattn::test {

inline bool thorough() { return std::getenv("QATTN_THOROUGH") != nullptr; }

}  // namespace qattn::test
