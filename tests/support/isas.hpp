// The CPU's instruction sets in turn. A program whose tests use this says at its end, on one line,
// which of them ran and which this CPU lacks: a green test of seven may have been one of three.
#pragma once

#include <span>
#include <string>

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

}  // namespace qattn::test
