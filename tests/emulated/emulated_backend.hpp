// The GPU kernels in the emulator, in front of the CPU's: ordinary plan() and run() get them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <string_view>

#include "conformance/runner.hpp"
#include "core/backend.hpp"
#include "isa/emu/options.hpp"
#include "kernels/attention/gpu.hpp"

namespace qattn::test {

/// The GPU that a recipe is emulated on: 120 for scales of groups, 89 where the portable kernel
/// needs FP8 products, else 90.
int architecture_for(const Recipe& recipe);

/// Another GPU instead, for as long as it lives; 0: none.
class OnArchitecture {
 public:
  explicit OnArchitecture(int architecture);
  ~OnArchitecture();
  OnArchitecture(const OnArchitecture&) = delete;
  OnArchitecture& operator=(const OnArchitecture&) = delete;

 private:
  int before_;
};

/// What plans take instead of their own choice of packed heads, splits and consumers (0: nothing),
/// of the place of P (-1: nothing) and of splits of the last works, for as long as it lives.
class ForceSplitKv {
 public:
  ForceSplitKv(int pack, int splits, int consumers = 0, int shared_p = -1, int last_splits = 0);
  ~ForceSplitKv();
  ForceSplitKv(const ForceSplitKv&) = delete;
  ForceSplitKv& operator=(const ForceSplitKv&) = delete;
};

/// Kernels that can make Q's codes do so, or none does, for as long as it lives.
class LeaveQueries {
 public:
  explicit LeaveQueries(bool leave);
  explicit LeaveQueries(kernels::CodesLeft left);
  ~LeaveQueries();
  LeaveQueries(const LeaveQueries&) = delete;
  LeaveQueries& operator=(const LeaveQueries&) = delete;

 private:
  std::optional<kernels::CodesLeft> before_;
};

/// In front for as long as it lives. quantize() has no kernels there: the semantic model and the
/// reference run without it. `host_memory` false: index tensors are checked by the kernels alone.
class EmulatedBackend {
 public:
  explicit EmulatedBackend(int architecture, bool host_memory = true);
  ~EmulatedBackend();
  EmulatedBackend(const EmulatedBackend&) = delete;
  EmulatedBackend& operator=(const EmulatedBackend&) = delete;

 private:
  detail::Backend backend_;
  int architecture_before_;
};

/// When asynchronous copies land and which lanes run first.
struct Timing {
  emu::Schedule schedule = emu::Schedule::late;
  emu::LaneOrder order = emu::LaneOrder::forward;
  std::uint64_t seed = 1;
};

/// Sets the emulator's options for as long as it lives.
class ForceTiming {
 public:
  explicit ForceTiming(const Timing& t);
  ~ForceTiming();
  ForceTiming(const ForceTiming&) = delete;
  ForceTiming& operator=(const ForceTiming&) = delete;

 private:
  emu::Options before_;
};

/// Early, late and one random schedule, each with another order of lanes.
std::span<const Timing> every_timing();

/// A number that belongs to a name, the same on every machine.
std::uint64_t hash_of(std::string_view name);

/// Those under which one of many cases runs: for every eighth name all three, for the others one of
/// them. With QATTN_EMULATED_SCHEDULES=all in the environment every case has all three. Names
/// choose, so that a new case moves no other, unless the case has a `timing` of its own.
std::span<const Timing> timings_for(std::string_view name, int timing = -1);

/// run_call() on the emulated kernels once per timing. Records a failure where results differ in a
/// bit, or where another kernel served the call.
Outcome run_emulated(const Call& call, Laid& laid, const Recipe& recipe,
                     std::span<const Timing> timings = every_timing());

/// Does this begin with the name of one of the emulated kernels?
inline bool is_emulated(std::string_view text) {
  return std::ranges::any_of(kernels::gpu_attention_kernels(),
                             [&](const auto& own) { return text.starts_with(own.name); });
}
/// The same of a plan's text.
inline bool is_emulated_plan(std::string_view text) {
  constexpr std::string_view begin = "kernel: ";
  return text.starts_with(begin) && is_emulated(text.substr(begin.size()));
}

}  // namespace qattn::test
