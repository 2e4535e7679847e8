// emulated_attention: attention on your tensors by the real GPU kernels of one architecture, in the
// emulator. For a result to look into, and for what each word was called.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <vector>

#include "backends/described/gpus.hpp"
#include "backends/emulated/backend.hpp"
#include "cli/attend.hpp"
#include "cli/program.hpp"
#include "isa/emu/options.hpp"
#include "kernels/attention/gpu.hpp"

namespace qattn::cli {
namespace {

/// As `--arch` calls them: sm80, sm90a.
struct Architecture {
  std::string name;
  kernels::Architecture of;
};
/// From the oldest on.
std::vector<Architecture> architectures() {
  std::vector<Architecture> all;
  for (const kernels::GpuKernels& own : kernels::gpu_architectures()) {
    for (const kernels::Architecture& of : own.architectures) {
      std::string name = emu::name(of.target);
      std::erase(name, '_');
      all.push_back({name, of});
    }
  }
  std::ranges::sort(all, {}, [](const Architecture& a) { return a.of.target.number; });
  return all;
}
constexpr std::array schedules = {"early", "late", "random"};    // emu::Schedule
constexpr std::array orders = {"forward", "reverse", "random"};  // emu::LaneOrder

struct EmulatedFlags {
  OperandFlags operands;
  MeaningFlags call;
  ResultFlags results;
  std::string architecture, schedule = "late", order = "forward";
  std::optional<std::uint64_t> seed;
  std::optional<int> multiprocessors;

  void add_to(CLI::App& app) {
    std::string known;
    for (const auto& a : architectures()) known += fmt::format("; {}: {}", a.name, a.of.what);
    app.add_option("--arch", architecture, "whose kernels" + known)->required();
    operands.add_to(app);
    results.add_to(app);
    call.add_to(app);
    app.add_option("--schedule", schedule,
                   "when asynchronous words take effect: early, late (default) or random");
    app.add_option("--order", order, "of lanes: forward (default), reverse or random");
    app.add_option("--seed", seed, "of what is random (default 1)");
    app.add_option("--multiprocessors", multiprocessors, "of the GPU (default: a product's)");
  }
};

/// The place of `text` in `names`.
template <class Names>
Result<int> one_of(const char* option, const Names& names, const std::string& text) {
  std::string known;
  int place = 0;
  for (const std::string_view name : names) {
    if (name == text) return place;
    known.append(place++ > 0 ? ", " : "").append(name);
  }
  return usage_error(fmt::format("{} {}: one of {} is needed", option, text, known));
}

/// What the emulator is told.
Result<emu::Options> emulator_options(const EmulatedFlags& flags) {
  std::vector<std::string> names;
  for (const Architecture& a : architectures()) names.push_back(a.name);
  const Result<int> place = one_of("--arch", names, flags.architecture);
  if (!place.ok()) return place.status();
  const isa::Target target = architectures()[static_cast<std::size_t>(*place)].of.target;
  const Result<described::Gpu> gpu = described::gpu_named(emu::name(isa::Target{target.number}));
  if (!gpu.ok()) return gpu.status();
  const Result<int> schedule = one_of("--schedule", schedules, flags.schedule);
  if (!schedule.ok()) return schedule.status();
  const Result<int> order = one_of("--order", orders, flags.order);
  if (!order.ok()) return order.status();
  emu::Options options;
  options.architecture = gpu->architecture;
  options.multiprocessors = flags.multiprocessors.value_or(gpu->multiprocessors);
  options.schedule = static_cast<emu::Schedule>(*schedule);
  options.order = static_cast<emu::LaneOrder>(*order);
  if (options.multiprocessors < 1 || options.multiprocessors > 4096) {
    return usage_error(
        fmt::format("--multiprocessors {}: is not in [1, 4096]", options.multiprocessors));
  }
  const bool random =
      options.schedule == emu::Schedule::random || options.order == emu::LaneOrder::random;
  if (flags.seed && !random) {
    return usage_error(
        fmt::format("--seed {}: neither --schedule nor --order is random", *flags.seed));
  }
  options.seed = flags.seed.value_or(options.seed);
  return options;
}

Json json_of(const emu::Stats& stats) {
  Json words;
  for (int w = 0; w < static_cast<int>(emu::Word::count); ++w) {
    const auto word = static_cast<emu::Word>(w);
    if (const double n = stats.warp_instructions(word); n > 0) words[emu::name(word)] = n;
  }
  return {{"warp_instructions", words},
          {"blocks", stats.blocks},
          {"shared_bytes_read", stats.shared_read},
          {"shared_bytes_written", stats.shared_written},
          {"global_bytes_read", stats.global_read},
          {"global_bytes_written", stats.global_written},
          {"bulk_bytes", stats.bulk_bytes},
          {"multiply_accumulates", stats.tensor_macs}};
}

Status run_emulated(const EmulatedFlags& flags) {
  const Result<emu::Options> emulator = emulator_options(flags);
  if (!emulator.ok()) return emulator.status();
  const Result<AttentionOptions> options = flags.call.options();
  if (!options.ok()) return options.status();
  emu::options() = *emulator;
  const detail::Backend backend = emulated::make_backend();
  detail::use_backend(&backend);
  const Result<Computed> computed =
      attend(flags.operands, *options, flags.results, {DeviceType::cuda, 0});
  detail::use_backend(nullptr);
  if (!computed.ok()) return computed.status();
  const emu::Stats stats = emu::take_stats();
  if (!flags.results.json) {
    const bool random = flags.schedule == "random" || flags.order == "random";
    print(text_of(flags.results, *computed));
    print(fmt::format("emulated: {}, {} multiprocessors; schedule {}, lanes {}{}\n\n{}",
                      flags.architecture, emulator->multiprocessors, flags.schedule, flags.order,
                      random ? fmt::format(", seed {}", emulator->seed) : "", stats.report()));
    return {};
  }
  Json json = json_of(flags.results, *computed);
  json["arch"] = flags.architecture;
  json["multiprocessors"] = emulator->multiprocessors;
  json["schedule"] = flags.schedule;
  json["order"] = flags.order;
  json["seed"] = emulator->seed;
  json["plan"] = computed->plan;
  json["counted"] = json_of(stats);
  print_json(json);
  return {};
}

}  // namespace
}  // namespace qattn::cli

int main(int argc, char** argv) {
  namespace cli = qattn::cli;
  CLI::App program("emulated_attention: your tensors through the GPU kernels, in the emulator",
                   "emulated_attention");
  cli::EmulatedFlags flags;
  flags.add_to(program);
  return cli::run_program(program, [&flags] { return cli::run_emulated(flags); }, argc, argv);
}
