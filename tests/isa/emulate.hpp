// Runs small kernels in the emulator under chosen and under all schedules.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "isa/launch.hpp"

namespace qattn::isa_test {

using emu::LaneOrder;
using emu::Options;
using emu::Schedule;

/// What went wrong in one block; empty: nothing.
inline std::string error_of(int threads, int shared_bytes, const Options& options,
                            const std::function<void()>& kernel) {
  try {
    emu::run({1, 1, 1}, threads, shared_bytes, options, kernel);
  } catch (const emu::Error& e) {
    return e.what();
  }
  return {};
}

/// Every schedule, with every lane order, some with several seeds.
inline std::vector<Options> all_schedules() {
  std::vector<Options> all;
  for (const Schedule schedule : {Schedule::early, Schedule::late, Schedule::random}) {
    for (const LaneOrder order : {LaneOrder::forward, LaneOrder::reverse, LaneOrder::random}) {
      const bool seeds = schedule == Schedule::random || order == LaneOrder::random;
      for (std::uint64_t seed = 1; seed <= (seeds ? 3 : 1); ++seed) {
        all.push_back({.schedule = schedule, .order = order, .seed = seed});
      }
    }
  }
  return all;
}

inline std::string describe(const Options& o) {
  const char* schedules[] = {"early", "late", "random"};
  const char* orders[] = {"forward", "reverse", "random"};
  return emu::text("schedule %s, lanes %s, seed %d", schedules[static_cast<int>(o.schedule)],
                   orders[static_cast<int>(o.order)], static_cast<int>(o.seed));
}

/// One block under the default schedule, which must succeed.
inline void run_block(int threads, int shared_bytes, const std::function<void()>& kernel,
                      int architecture = Options{}.architecture) {
  EXPECT_EQ(error_of(threads, shared_bytes, Options{.architecture = architecture}, kernel), "");
}

}  // namespace qattn::isa_test
