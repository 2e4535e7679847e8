// What refusals add where dimensions fit the layout that the call does not name.
#pragma once

#include <string>

#include "qattn/attention.hpp"

namespace qattn {

inline std::string other_layout(Layout given) {
  const char* tokens_first = "bshd, (batch, tokens, heads, head_dim)";
  const char* heads_first = "bhsd, (batch, heads, tokens, head_dim)";
  const bool first = given == Layout::bshd;
  return std::string("; the call says layout ") + (first ? tokens_first : heads_first) +
         ", and these fit " + (first ? heads_first : tokens_first);
}

}  // namespace qattn
