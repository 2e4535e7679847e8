#include "support/covering_array.hpp"

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <optional>
#include <utility>

namespace qattn::test {

int Factor::levels() const {
  return level_of.empty() ? 0 : 1 + *std::ranges::max_element(level_of);
}

namespace {

/// A level of a factor.
struct Level {
  std::size_t factor;
  int level;
  bool operator==(const Level&) const = default;
};
using Levels = std::vector<Level>;
using Contexts = std::vector<std::size_t>;  ///< indices

class Generator {
 public:
  Generator(const std::vector<Factor>& factors, std::size_t context, const Feasible& feasible)
      : factors_(factors), context_(context), feasible_(feasible) {
    for (const Factor& factor : factors) {
      first_.push_back(count_);
      count_ += static_cast<std::size_t>(factor.levels());
      uses_.emplace_back(factor.level_of.size(), 0);
    }
    done_.assign(count_ * count_, false);
    order_.resize(factors.size());
    std::iota(order_.begin(), order_.end(), std::size_t{0});
    std::ranges::stable_sort(order_, std::greater<>(),
                             [&](std::size_t f) { return factors[f].levels(); });
  }

  void take(const Choice& choice) {
    for (std::size_t f = 0; f < choice.size(); ++f) {
      ++uses_[f][choice[f]];
      for (std::size_t g = 0; g < f; ++g) done(level(choice, f), level(choice, g)) = true;
    }
    cases.push_back(choice);
  }

  void cover() {
    find_contexts();
    ask_levels();
    leave_out_infeasible();
    for (std::size_t m = 0; m < order_.size(); ++m) {
      for (std::size_t n = 0; n < m; ++n) cover(order_[n], order_[m]);
    }
    for (std::size_t f = 0; f < factors_.size(); ++f) {
      for (std::size_t v = 0; v < uses_[f].size(); ++v) {
        if (uses_[f][v] == 0) use(f, static_cast<int>(v));
      }
    }
  }

  std::vector<Choice> cases;

 private:
  struct Begun {
    Choice choice;
    std::vector<bool> fixed;
  };

  std::vector<bool>::reference done(Level a, Level b) {
    return done_[number(a) * count_ + number(b)];
  }
  bool is_done(Level a, Level b) const {
    if (a.factor < b.factor) std::swap(a, b);
    return done_[number(a) * count_ + number(b)];
  }
  Level level(const Choice& choice, std::size_t f) const {
    return {f, factors_[f].level_of[choice[f]]};
  }

  double cost(std::size_t f, int value) const {
    return factors_[f].cost.empty() ? 1 : factors_[f].cost[static_cast<std::size_t>(value)];
  }
  double cost(const Choice& choice) const {
    double product = 1;
    for (std::size_t f = 0; f < choice.size(); ++f) product *= cost(f, choice[f]);
    return product;
  }

  /// Some of the level, those first that have cost least: what one is refused for, the others are,
  /// too.
  std::vector<int> values_of(Level wanted) const {
    std::vector<int> values;
    for (std::size_t v = 0; v < factors_[wanted.factor].level_of.size(); ++v) {
      if (factors_[wanted.factor].level_of[v] == wanted.level)
        values.push_back(static_cast<int>(v));
    }
    const std::vector<int>& uses = uses_[wanted.factor];
    std::ranges::stable_sort(values, {},
                             [&](int v) { return (1 + uses[v]) * cost(wanted.factor, v); });
    values.resize(std::min(values.size(), std::size_t{3}));
    return values;
  }

  /// Pairs that the level would bring to what is fixed.
  int gain(const Begun& begun, Level wanted) const {
    int pairs = 0;
    for (std::size_t f = 0; f < begun.choice.size(); ++f) {
      if (f != wanted.factor && begun.fixed[f]) pairs += !is_done(wanted, level(begun.choice, f));
    }
    return pairs;
  }

  /// A case with the wanted levels alone, if it is feasible in one of the contexts. A level's
  /// values take turns with contexts.
  std::optional<Begun> begin(const Levels& wanted, const Contexts& contexts) const {
    for (std::size_t n = 0; n < contexts.size(); ++n) {
      Begun begun{contexts_[contexts[n]], std::vector<bool>(factors_.size(), false)};
      std::fill_n(begun.fixed.begin(), context_, true);
      std::size_t turn = n;
      for (const Level l : wanted) {
        const std::vector<int> values = values_of(l);
        begun.choice[l.factor] = values[turn % values.size()], begun.fixed[l.factor] = true;
        turn /= values.size();
      }
      if (feasible_(begun.choice)) return begun;
    }
    return std::nullopt;
  }
  /// The same, in the context that brings most of those in which either is feasible alone.
  std::optional<Begun> begin(Level one, Level other) const {
    Contexts contexts = contexts_of(one, other);
    const auto pairs = [&](std::size_t n) {
      Begun begun{contexts_[n], std::vector<bool>(factors_.size(), false)};
      for (const Level l : {one, other}) {
        begun.choice[l.factor] = values_of(l)[0], begun.fixed[l.factor] = true;
      }
      int sum = 0;
      for (std::size_t f = 0; f < context_; ++f) sum -= gain(begun, level(begun.choice, f));
      return sum;
    };
    std::ranges::stable_sort(contexts, {}, pairs);
    return begin(Levels{one, other}, contexts);
  }

  /// Contexts in which both levels are feasible alone, or if one never is, the other.
  Contexts contexts_of(Level one, Level other) const {
    Contexts found;
    const std::vector<bool>& a = alone_[number(one)];
    const std::vector<bool>& b = alone_[number(other)];
    const bool any_a = std::ranges::find(a, true) == a.end();
    const bool any_b = std::ranges::find(b, true) == b.end();
    for (std::size_t n = 0; n < contexts_.size(); ++n) {
      if ((any_a || a[n]) && (any_b || b[n])) found.push_back(n);
    }
    return found;
  }

  /// Levels of the factor, those first that bring most, of these the less used.
  std::vector<int> by_gain(const Begun& begun, std::size_t f) const {
    std::vector<std::pair<int, int>> ranked;
    std::vector<int> levels;
    for (int l = 0; l < factors_[f].levels(); ++l) {
      int uses = 0;
      for (std::size_t v = 0; v < uses_[f].size(); ++v) {
        if (factors_[f].level_of[v] == l) uses += uses_[f][v];
      }
      ranked.emplace_back(-gain(begun, {f, l}), uses);
      levels.push_back(l);
    }
    std::ranges::stable_sort(levels, {}, [&](int l) { return ranked[l]; });
    return levels;
  }

  /// All levels of the context factors with one another; the last factor changes last.
  void find_contexts() {
    contexts_ = {Choice(factors_.size(), 0)};
    for (std::size_t f = 0; f < context_; ++f) {
      std::vector<Choice> more;
      for (int l = 0; l < factors_[f].levels(); ++l) {
        for (Choice choice : contexts_) {
          choice[f] = values_of({f, l})[0];
          more.push_back(std::move(choice));
        }
      }
      contexts_ = std::move(more);
    }
    std::erase_if(contexts_, [&](const Choice& choice) { return !feasible_(choice); });
  }

  /// In which contexts is each level feasible?
  void ask_levels() {
    for (std::size_t a = 0; a < count_; ++a) {
      const Level asked = level_at(a);
      alone_.emplace_back(contexts_.size(), false);
      for (std::size_t n = 0; n < contexts_.size(); ++n) {
        alone_[a][n] = asked.factor < context_ ? level(contexts_[n], asked.factor) == asked
                                               : begin(Levels{asked}, Contexts{n}).has_value();
      }
    }
  }

  /// Is the level one of a context factor that is in no context?
  bool never(Level l) const {
    return l.factor < context_ &&
           std::ranges::find(alone_[number(l)], true) == alone_[number(l)].end();
  }

  /// Marks pairs of which no case is feasible, so that nobody asks again.
  void leave_out_infeasible() {
    constexpr std::size_t enough = 12;  // contexts to ask in
    for (std::size_t a = 0; a < count_; ++a) {
      for (std::size_t b = 0; b < a; ++b) {
        const Level one = level_at(a), other = level_at(b);
        if (one.factor == other.factor || is_done(one, other)) continue;
        Contexts contexts = contexts_of(one, other);
        if (never(one) || never(other)) contexts.clear();
        contexts.resize(std::min(contexts.size(), enough));
        if (!begin(Levels{one, other}, contexts)) done(one, other) = true;
      }
    }
  }
  std::size_t number(Level l) const { return first_[l.factor] + static_cast<std::size_t>(l.level); }
  Level level_at(std::size_t n) const {
    const auto next = std::ranges::upper_bound(first_, n);
    const auto f = static_cast<std::size_t>(next - first_.begin()) - 1;
    return {f, static_cast<int>(n - first_[f])};
  }

  void cover(std::size_t f, std::size_t g) {
    for (int a = 0; a < factors_[f].levels(); ++a) {
      for (int b = 0; b < factors_[g].levels(); ++b) {
        if (is_done({f, a}, {g, b})) continue;
        if (auto begun = begin(Level{f, a}, Level{g, b})) finish(*std::move(begun));
      }
    }
  }

  /// A case of the value, wherever it is feasible.
  void use(std::size_t f, int value) {
    for (const Choice& context : contexts_) {
      Begun begun{context, std::vector<bool>(factors_.size(), false)};
      std::fill_n(begun.fixed.begin(), context_, true);
      begun.choice[f] = value, begun.fixed[f] = true;
      if (feasible_(begun.choice)) return finish(std::move(begun));
    }
  }

  /// The levels of other factors that bring most; where none brings anything, the least used.
  void finish(Begun begun) {
    for (const std::size_t f : order_) {
      if (!begun.fixed[f]) choose(begun, f);
    }
    take(begun.choice);
  }
  void choose(Begun& begun, std::size_t f) {
    for (const int l : by_gain(begun, f)) {
      if (factors_[f].rare && gain(begun, {f, l}) == 0) break;
      for (const int value : values_of({f, l})) {
        begun.choice[f] = value;
        const bool dear = cost(f, value) > 1 && cost(begun.choice) > most_cost;
        begun.fixed[f] = value == 0 || (!dear && feasible_(begun.choice));
        if (begun.fixed[f]) return;
      }
    }
    begun.choice[f] = 0;
  }

  const std::vector<Factor>& factors_;
  std::size_t context_;
  const Feasible& feasible_;
  std::vector<Choice> contexts_;          ///< what is feasible without anything else
  std::vector<std::vector<bool>> alone_;  ///< of each level the contexts in which it is feasible
  std::vector<std::size_t> first_;        ///< number of a factor's first level
  std::size_t count_ = 0;                 ///< of levels
  std::vector<bool> done_;                ///< pairs of levels that need no further case
  std::vector<std::vector<int>> uses_;    ///< of a factor's values
  std::vector<std::size_t> order_;        ///< factors, those with most levels first
};

}  // namespace

std::vector<Choice> covering_array(const std::vector<Factor>& factors, std::size_t context,
                                   const Feasible& feasible, std::vector<Choice> cases) {
  Generator generator(factors, context, feasible);
  for (const Choice& choice : cases) generator.take(choice);
  generator.cover();
  return std::move(generator.cases);
}

}  // namespace qattn::test
