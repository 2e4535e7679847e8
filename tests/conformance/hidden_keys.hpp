// Ways to hide keys from every query, for tests that what is hidden has no influence.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "support/call.hpp"

namespace qattn::test {

/// What a call has, and which keys nobody sees then.
struct Hiding {
  std::string name;
  std::function<void(Call&)> apply;
  std::function<bool(std::int64_t)> hides;
};

bool is_padding(std::int64_t j);

/// A mask of that shape, the last extent all keys. Of the keys that are no padding each row misses
/// other ones, if rows differ at all.
Mask padding_mask(std::vector<std::int64_t> shape, bool boolean, float visible, float hidden);

/// Every way, for calls of one sequence with four heads, up to 128 queries, and 150 keys. The last
/// one is a function, which CPUs alone have.
std::vector<Hiding> every_hiding(std::int64_t queries, std::int64_t keys);

/// Other contents of the keys and values that are hidden.
void fill_keys(Call& call, const std::function<bool(std::int64_t)>& hides, float value);

}  // namespace qattn::test
