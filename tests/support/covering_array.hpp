// Cases in which every two levels of different factors meet, as far as they may.
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace qattn::test {

/// What a case chooses one value of. Values of one level are alike, and take turns.
struct Factor {
  std::string name;
  std::vector<int> level_of;  ///< of each value; levels are 0, 1, ...
  bool rare = false;          ///< plain wherever nothing else is asked; others' levels take turns
  std::vector<double> cost = {};  ///< of each value, times the plain one's; empty: 1

  int levels() const;
};

/// A value of each factor; 0 is the plain one.
using Choice = std::vector<int>;
using Feasible = std::function<bool(const Choice&)>;

/// Cases gather levels until they cost as many times the plain one.
constexpr double most_cost = 8;

/// Greedy and deterministic: cases for all pairs of levels that are in no case of `cases`, and for
/// all values. A pair is left out if no case of it is feasible in which the factors behind the
/// first `context` are plain but for its own. Feasible cases must stay so where one of those
/// factors becomes plain.
std::vector<Choice> covering_array(const std::vector<Factor>& factors, std::size_t context,
                                   const Feasible& feasible, std::vector<Choice> cases = {});

}  // namespace qattn::test
