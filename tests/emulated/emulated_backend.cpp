#include "emulated/emulated_backend.hpp"

#include <cstdlib>
#include <utility>

#include "backends/emulated/backend.hpp"
#include "kernels/attention/gpu.hpp"
#include "kernels/attention/schedule/split_kv.hpp"
#include "kernels/kv_append/kv_device.hpp"

namespace qattn::test {
namespace {
int chosen_architecture = 0;
}

ForceTiming::ForceTiming(const Timing& t) : before_(emu::options()) {
  emu::options().schedule = t.schedule;
  emu::options().order = t.order;
  emu::options().seed = t.seed;
}
ForceTiming::~ForceTiming() { emu::options() = before_; }

OnArchitecture::OnArchitecture(int architecture)
    : before_(std::exchange(chosen_architecture, architecture)) {}
OnArchitecture::~OnArchitecture() { chosen_architecture = before_; }

ForceSplitKv::ForceSplitKv(int pack, int splits, int consumers, int shared_p, int last_splits) {
  kernels::split_kv_override() = {pack, splits, consumers, shared_p, last_splits};
}
ForceSplitKv::~ForceSplitKv() { kernels::split_kv_override() = {}; }

LeaveQueries::LeaveQueries(bool leave)
    : LeaveQueries(leave ? kernels::CodesLeft::queries : kernels::CodesLeft::none) {}
LeaveQueries::LeaveQueries(kernels::CodesLeft left) : before_(kernels::codes_left_override()) {
  kernels::codes_left_override() = left;
}
LeaveQueries::~LeaveQueries() { kernels::codes_left_override() = before_; }

int architecture_for(const Recipe& recipe) {
  if (chosen_architecture != 0) return chosen_architecture;
  if (info(recipe.qk).group > 0 || info(recipe.v).group > 0) return 120;
  return recipe.qk == Format::e4m3 || recipe.v == Format::e4m3 ? 89 : 90;
}

EmulatedBackend::EmulatedBackend(int architecture, bool host_memory)
    : backend_(emulated::make_backend()),
      architecture_before_(std::exchange(emu::options().architecture, architecture)) {
  backend_.device = DeviceType::cpu;
  backend_.host_memory = host_memory;
#ifndef QATTN_SAMPLE  // whose kernels are not in it
  backend_.kv = &kernels::kv_device_ops();
#endif
  detail::use_backend(&backend_);
}

EmulatedBackend::~EmulatedBackend() {
  detail::use_backend(nullptr);
  emu::options().architecture = architecture_before_;
}

std::span<const Timing> every_timing() {
  static const Timing all[] = {{emu::Schedule::late, emu::LaneOrder::forward, 1},
                               {emu::Schedule::early, emu::LaneOrder::reverse, 1},
                               {emu::Schedule::random, emu::LaneOrder::random, 7}};
  return all;
}

std::uint64_t hash_of(std::string_view name) {
  std::uint64_t hash = 14695981039346656037u;  // FNV-1a
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211u;
  return hash >> 32;
}

std::span<const Timing> timings_for(std::string_view name, int timing) {
  const char* schedules = std::getenv("QATTN_EMULATED_SCHEDULES");
  const bool all = schedules != nullptr && std::string_view(schedules) == "all";
  EXPECT_TRUE(all || schedules == nullptr)
      << "QATTN_EMULATED_SCHEDULES=" << schedules << ": \"all\" is the one value that it has";
  const std::uint64_t hash = hash_of(name);
  if (all || hash % 8 == 0) return every_timing();
  return every_timing().subspan(timing >= 0 ? static_cast<std::size_t>(timing) : hash / 8 % 3, 1);
}

Outcome run_emulated(const Call& call, Laid& laid, const Recipe& recipe,
                     std::span<const Timing> timings) {
  const EmulatedBackend backend(architecture_for(recipe));
  laid.freeze();
  Outcome first;
  for (const Timing& timing : timings) {
    const ForceTiming forced(timing);
    Outcome outcome = run_call(call, laid, recipe);
    EXPECT_TRUE(outcome.status.ok()) << outcome.status.message();
    EXPECT_EQ(outcome.violation, "");
    EXPECT_EQ(device_errors({}).message(), "");
    if (!is_emulated_plan(outcome.plan)) {
      ADD_FAILURE() << "another kernel serves this call:\n"
                    << outcome.plan << explain(laid.tensors(), call.options);
    }
    if (&timing == timings.data()) {
      first = std::move(outcome);
    } else {
      EXPECT_TRUE(same_bits(first, outcome))
          << "schedule " << static_cast<int>(timing.schedule) << " changes the result";
    }
    if (testing::Test::HasFailure()) break;
  }
  return first;
}

}  // namespace qattn::test
