#include "support/isas.hpp"

#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <set>
#include <sstream>
#include <vector>

#include "qattn/attention.hpp"
#include "support/thorough.hpp"

namespace qattn::test {
namespace {

constexpr const char* isa_variable = "QATTN_CPU_ISA";

/// What ForceIsa was asked for in this process.
struct Seen {
  std::set<std::string> ran, lacking;
};

Seen& seen() {
  static Seen all;
  return all;
}

std::string listed(const std::set<std::string>& names) {
  std::string text;
  for (const std::string& isa : isas()) {
    if (names.contains(isa)) text += (text.empty() ? "" : " ") + isa;
  }
  return text.empty() ? "none" : text;
}

class Say : public testing::Environment {
 public:
  void TearDown() override {
    const auto& [ran, lacking] = seen();
    if (ran.empty() && lacking.empty()) return;
    std::printf("instruction sets that ran: %s; not on this CPU: %s\n", listed(ran).c_str(),
                listed(lacking).c_str());
    testing::Test::RecordProperty("instruction_sets", listed(ran));
    testing::Test::RecordProperty("instruction_sets_lacking", listed(lacking));
    // What must have run here: an emulated CPU that has it, say.
    const char* expected = std::getenv("QATTN_EXPECT_ISAS");
    std::istringstream names(expected != nullptr ? expected : "");
    for (std::string isa; std::getline(names, isa, ',');) {
      EXPECT_TRUE(ran.contains(isa)) << "FAILED: " << isa << " should have run";
    }
  }
};

// GoogleTest owns it.
[[maybe_unused]] testing::Environment* const say = testing::AddGlobalTestEnvironment(new Say);

}  // namespace

IsaVariable::IsaVariable(const std::string& value) {
  if (const char* before = std::getenv(isa_variable)) {
    had_ = true;
    before_ = before;
  }
  setenv(isa_variable, value.c_str(), 1);
}

IsaVariable::~IsaVariable() {
  if (had_) {
    setenv(isa_variable, before_.c_str(), 1);
  } else {
    unsetenv(isa_variable);
  }
}

ForceIsa::ForceIsa(const std::string& isa) : variable_(isa) {
  const Result<std::string> used = cpu_isa();
  available_ = used.ok();
  (available_ ? seen().ran : seen().lacking).insert(isa);
  if (used.ok()) {
    EXPECT_EQ(*used, isa) << "forced by " << isa_variable;
  } else {
    EXPECT_EQ(used.status().code(), Code::unsupported) << used.status().message();
    EXPECT_NE(isa, "scalar") << "scalar must run anywhere";
  }
}

std::span<const std::string> isas() {
  static const std::vector<std::string> all = {"scalar", "avx2",         "avx512vnni", "avx512bf16",
                                               "amx",    "neon_dotprod", "neon_i8mm"};
  return all;
}

namespace {

const std::vector<std::string>& available_isas() {
  static const std::vector<std::string> all = [] {
    std::vector<std::string> found;
    for (const std::string& isa : isas()) {
      const IsaVariable variable(isa);
      cpu_isa().ok() ? found.push_back(isa) : void(seen().lacking.insert(isa));
    }
    return found;
  }();
  return all;
}

}  // namespace

IsaTurns::IsaTurns() {
  const testing::TestInfo* test = testing::UnitTest::GetInstance()->current_test_info();
  const std::string name = std::string(test->test_suite_name()) + "." + test->name();
  turn_ = std::hash<std::string>()(name);
}

std::vector<std::string> IsaTurns::next() {
  const std::vector<std::string>& all = available_isas();
  if (all.size() <= 2 || thorough()) return all;
  const std::size_t first = turn_++ % all.size();
  return {all[first], all[(first + 1 + turn_ / all.size() % (all.size() - 1)) % all.size()]};
}

}  // namespace qattn::test
