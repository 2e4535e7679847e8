// The CPU's instruction sets in turn. A program whose tests use this says at its end, on one line,
// which of them ran and which this CPU lacks: a green test of seven may have been one of three.
#pragma once

#include <gtest/gtest.h>

#include <span>
#include <string>
#include <vector>

namespace qattn::test {

/// Sets QATTN_CPU_ISA for as long as it lives.
class IsaVariable {
 public:
  explicit IsaVariable(const std::string& value);
  ~IsaVariable();
  IsaVariable(const IsaVariable&) = delete;
  IsaVariable& operator=(const IsaVariable&) = delete;

 private:
  std::string before_;
  bool had_ = false;
};

/// Forces an instruction set for as long as it lives.
class ForceIsa {
 public:
  explicit ForceIsa(const std::string& isa);

  /// False where this CPU lacks it; a failure is recorded if the library then uses another one.
  bool available() const { return available_; }

 private:
  IsaVariable variable_;
  bool available_ = false;
};

/// Every instruction set that the library knows; tests skip those that this CPU lacks.
std::span<const std::string> isas();

/// Calls f(), under each instruction set that this CPU has, traced by its name.
template <class Function>
void on_each_isa(Function f) {
  for (const std::string& isa : isas()) {
    const ForceIsa forced(isa);
    if (!forced.available()) continue;
    SCOPED_TRACE(isa);
    f();
  }
}

/// For tests of many cases: of the instruction sets that this CPU has, two a case, which take turns
/// from a start that the test's name gives. All of them where tests are thorough().
class IsaTurns {
 public:
  IsaTurns();
  std::vector<std::string> next();

 private:
  std::size_t turn_ = 0;
};

}  // namespace qattn::test
