// What the covering arrays cover, told by the cells themselves.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "emulated/composed.hpp"
#include "emulated/emulated_backend.hpp"

namespace qattn::test {
namespace {

/// Levels of two factors.
struct Pair {
  std::size_t f;
  int a;
  std::size_t g;
  int b;
};

bool has(const std::vector<Factor>& factors, const Choice& choice, std::size_t f, int level) {
  return factors[f].level_of[static_cast<std::size_t>(choice[f])] == level;
}

/// All pairs but those that a case has, or only those.
std::vector<Pair> pairs_of(const std::vector<Factor>& factors, const std::vector<Choice>& cases,
                           bool covered) {
  std::vector<Pair> pairs;
  for (std::size_t f = 0; f < factors.size(); ++f) {
    for (std::size_t g = 0; g < f; ++g) {
      for (int a = 0; a < factors[f].levels(); ++a) {
        for (int b = 0; b < factors[g].levels(); ++b) {
          const bool found = std::ranges::any_of(cases, [&](const Choice& choice) {
            return has(factors, choice, f, a) && has(factors, choice, g, b);
          });
          if (found == covered) pairs.push_back({f, a, g, b});
        }
      }
    }
  }
  return pairs;
}

/// The value that the cell has of each factor.
Choice values_of(const Composed& of, const Cell& cell) {
  Choice choice;
  for (std::size_t f = 0; f < of.factors().size(); ++f) {
    const std::vector<Cell>& values = of.values()[f];
    const auto at = std::ranges::find_if(
        values, [&](const Cell& value) { return cell_factors()[f].same(value, cell); });
    EXPECT_NE(at, values.end()) << cell.name << ": " << of.factors()[f].name;
    choice.push_back(static_cast<int>(at - values.begin()));
  }
  return choice;
}

std::vector<int> values_of(const Factor& factor, int level) {
  std::vector<int> values;
  for (std::size_t v = 0; v < factor.level_of.size(); ++v) {
    if (factor.level_of[v] == level) values.push_back(static_cast<int>(v));
  }
  return values;
}

std::string name_of(const Composed& of, std::size_t f, int level) {
  const int value = values_of(of.factors()[f], level)[0];
  return of.factors()[f].name + " of " + of.values()[f][static_cast<std::size_t>(value)].name;
}

/// Formats and head dimensions that the directory serves without anything else.
std::vector<Choice> contexts_of(const Composed& of) {
  std::vector<Choice> all{Choice(of.factors().size(), 0)};
  for (std::size_t f = 0; f < context_factors; ++f) {
    std::vector<Choice> more;
    for (Choice choice : all) {
      for (int l = 0; l < of.factors()[f].levels(); ++l) {
        choice[f] = values_of(of.factors()[f], l)[0];
        more.push_back(choice);
      }
    }
    all = std::move(more);
  }
  std::erase_if(all, [&](const Choice& choice) { return of.served(choice) == Served::no; });
  return all;
}

/// Does the directory serve the pair so without anything else? Values of the levels take turns.
bool is_served(const Composed& of, Served least, const std::vector<Choice>& contexts,
               const Pair& pair) {
  const std::vector<Factor>& factors = of.factors();
  const std::vector<int> a = values_of(factors[pair.f], pair.a);
  const std::vector<int> b = values_of(factors[pair.g], pair.b);
  std::size_t turn = 0;
  for (Choice choice : contexts) {
    if (pair.f < context_factors && !has(factors, choice, pair.f, pair.a)) continue;
    if (pair.g < context_factors && !has(factors, choice, pair.g, pair.b)) continue;
    choice[pair.f] = a[turn % a.size()], choice[pair.g] = b[turn / a.size() % b.size()];
    if (of.served(choice) >= least) return true;
    ++turn;
  }
  return false;
}

/// Cases that the directory serves so; those that it leaves in part to another are none `alone`.
std::vector<Choice> cases_of(const Composed& of, Served least) {
  std::vector<Choice> cases;
  for (const Cell& cell : of.cells()) cases.push_back(values_of(of, cell));
  std::erase_if(cases, [&](const Choice& choice) { return of.served(choice) < least; });
  return cases;
}

TEST(CoveringArray, LacksNoPairThatIsServed) {
  for (const Composed& of : composed()) {
    const std::vector<Choice> contexts = contexts_of(of);
    for (const Served least : {Served::alone, Served::helped}) {
      const std::vector<Choice> cases = cases_of(of, least);
      const std::vector<Pair> lacking = pairs_of(of.factors(), cases, false);
      for (const Pair& pair : lacking) {
        EXPECT_FALSE(is_served(of, least, contexts, pair))
            << of.directory() << ", " << name_of(of, pair.f, pair.a) << ", "
            << name_of(of, pair.g, pair.b) << ": is what is served a level of its own?";
      }
      std::printf("%s%s: %zu cases, %zu pairs of levels, %zu that no kernel serves\n",
                  of.directory().c_str(), least == Served::alone ? " alone" : "", cases.size(),
                  pairs_of(of.factors(), cases, true).size(), lacking.size());
    }
  }
}

TEST(CoveringArray, LacksNoValueThatIsServed) {
  for (const Composed& of : composed()) {
    const std::vector<Choice> cases = cases_of(of, Served::helped), contexts = contexts_of(of);
    EXPECT_EQ(cases.size(), of.cells().size());
    for (std::size_t f = 0; f < of.factors().size(); ++f) {
      for (int v = 0; v < static_cast<int>(of.values()[f].size()); ++v) {
        const auto uses = [&](const Choice& choice) { return choice[f] == v; };
        const auto serves = [&](Choice choice) {
          choice[f] = v;
          return of.served(choice) != Served::no;
        };
        EXPECT_TRUE(std::ranges::any_of(cases, uses) || std::ranges::none_of(contexts, serves))
            << of.directory() << ", " << of.factors()[f].name << " of "
            << of.values()[f][static_cast<std::size_t>(v)].name;
      }
    }
  }
}

/// So the first test can fail.
TEST(CoveringArray, OfHalfTheCasesLacksPairs) {
  const Composed& of = composed()[0];
  std::vector<Choice> cases = cases_of(of, Served::helped);
  const std::size_t all = pairs_of(of.factors(), cases, true).size();
  cases.resize(cases.size() / 2);
  EXPECT_LT(pairs_of(of.factors(), cases, true).size(), all);
}

TEST(CoveringArray, HasEveryFeasiblePairOfASmallTable) {
  const std::vector<Factor> factors = {
      {"context", {0, 1}}, {"a", {0, 1, 2}}, {"b", {0, 1, 2}}, {"alike", {0, 1, 1, 1}}};
  // Level 2 of `a` needs the other context, and never comes with level 2 of `b`.
  const auto feasible = [](const Choice& c) { return c[1] != 2 || (c[0] == 1 && c[2] != 2); };
  const std::vector<Choice> cases = covering_array(factors, 1, feasible);
  EXPECT_TRUE(std::ranges::all_of(cases, feasible));
  EXPECT_LE(cases.size(), 12u);
  const std::vector<Pair> lacking = pairs_of(factors, cases, false);
  ASSERT_EQ(lacking.size(), 2u);  // {a 2, context 0}, {b 2, a 2}
  EXPECT_TRUE(lacking[0].f == 1 && lacking[0].a == 2 && lacking[0].b == 0);
  EXPECT_TRUE(lacking[1].f == 2 && lacking[1].a == 2 && lacking[1].g == 1 && lacking[1].b == 2);
  std::set<int> alike;
  for (const Choice& choice : cases) alike.insert(choice[3]);
  EXPECT_EQ(alike.size(), 4u) << "values of a level take turns";
}

/// A field that no factor has would never be composed: whoever adds one to Feature comes by here.
TEST(CoveringArray, FactorsHaveAllThatFeaturesSet) {
  for (const auto& cells : {paired_cells(), spread_cells(), grouped_cells(), hopper_cells()}) {
    for (const Cell& cell : cells) {
      SCOPED_TRACE(cell.name);
      Cell taken;
      for (const CellFactor& factor : cell_factors()) factor.take(taken, cell);
      const Feature f = settled(taken).feature;
      const auto& [name, sq, sk, used_q, used_k, heads_q, heads_k, dim, dim_v, how, options, mask,
                   boolean_mask, bit_mask, block_mask, sinks, alibi, slope, static_scales, family,
                   behind, loose, tweak, applies] = settled(cell).feature;
      EXPECT_EQ(f.options, options);
      EXPECT_EQ(f.how, how);
      EXPECT_EQ(std::tie(f.sq, f.sk, f.used_q, f.used_k, f.heads_q, f.heads_k, f.dim, f.dim_v),
                std::tie(sq, sk, used_q, used_k, heads_q, heads_k, dim, dim_v));
      EXPECT_EQ(std::tie(f.mask, f.boolean_mask, f.bit_mask, f.block_mask, f.sinks, f.alibi),
                std::tie(mask, boolean_mask, bit_mask, block_mask, sinks, alibi));
      EXPECT_EQ(std::tie(f.slope, f.static_scales, f.family),
                std::tie(slope, static_scales, family));
      EXPECT_EQ(taken.recipe, cell.recipe);
    }
  }
}

/// What GPUs refuse goes to another kernel, and nothing else does.
TEST(Products, AreServedOrRefused) {
  for (const auto& cells : {paired_cells(), spread_cells(), grouped_cells(), hopper_cells()}) {
    for (const Cell& cell : cells) {
      const Result<Plan> planned = plan_shapes(cell);
      ASSERT_TRUE(planned.ok()) << cell.name << ": " << planned.status().message();
      EXPECT_EQ(is_emulated(planned->kernel()), !cell.refused) << cell.name << planned->to_string();
    }
  }
}

}  // namespace
}  // namespace qattn::test
