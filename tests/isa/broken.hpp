// Kernels that are broken in one place each, and their correct twins. A twin passes, with the same
// results, under every schedule, lane order and seed; the broken one is caught, and the message
// says what is wrong and where.
#pragma once

#include <algorithm>

#include "emulate.hpp"

namespace qattn::isa_test {

using namespace isa;

using Words = std::vector<std::uint32_t>;
using Kernel = std::function<void(bool broken, Words& out)>;

inline SharedAddress word_of(int index) {
  return shared_base() + static_cast<SharedAddress>(4 * index);
}
inline std::uint32_t number(int v) { return static_cast<std::uint32_t>(v); }

struct Case {
  int threads, shared_bytes;
  Kernel kernel;
};

inline void expect_twin_passes(const Case& c) {
  Words first;
  for (const Options& options : all_schedules()) {
    Words out(1024);
    EXPECT_EQ(error_of(c.threads, c.shared_bytes, options, [&] { c.kernel(false, out); }), "")
        << describe(options);
    if (first.empty()) first = out;
    EXPECT_EQ(out, first) << describe(options);
  }
}

/// `expected` gives the texts of which the message must contain one, for the schedule.
using Expected = std::function<std::vector<std::string>(const Options&)>;

inline void expect_caught(const Case& c, const Expected& expected) {
  expect_twin_passes(c);
  for (const Options& options : all_schedules()) {
    Words out(1024);
    const std::string error =
        error_of(c.threads, c.shared_bytes, options, [&] { c.kernel(true, out); });
    const std::vector<std::string> texts = expected(options);
    EXPECT_TRUE(
        std::any_of(texts.begin(), texts.end(),
                    [&](const std::string& t) { return error.find(t) != std::string::npos; }))
        << describe(options) << "\nwant: " << texts.front() << "\ngot: " << error;
    EXPECT_NE(error.find("_test.cpp:"), std::string::npos) << error;
  }
}

inline void expect_caught(const Case& c, const std::string& text) {
  expect_caught(c, [&](const Options&) { return std::vector{text}; });
}

}  // namespace qattn::isa_test
