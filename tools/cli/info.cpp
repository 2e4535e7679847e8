// qattn info: what this build can do on this machine.
#include <fmt/format.h>

#include "commands.hpp"
#include "console.hpp"
#include "machine.hpp"
#include "qattn/qattn.hpp"

namespace qattn::cli {

namespace {

struct InfoFlags {
  bool json = false;
  void add_to(CLI::App& app) { app.add_flag("--json", json, "print JSON"); }
};

std::string format_name(Format format) {
  return std::string(format == Format::none ? "16-bit" : info(format).name);
}

Json formats_json() {
  Json list = Json::array();
  for (const FormatInfo& f : all_formats()) {
    list.push_back(
        {{"format", f.name}, {"bits", f.bits}, {"group", f.group}, {"scale", info(f.scale).name}});
  }
  return list;
}

Json recipes_json() {
  Json list = Json::array();
  for (const Recipe& r : recipes()) {
    list.push_back({{"recipe", r.name},
                    {"qk", format_name(r.qk)},
                    {"p", format_name(r.p)},
                    {"v", format_name(r.v)},
                    {"q_scale", name(r.q_scale.granularity)},
                    {"k_scale", name(r.k_scale.granularity)},
                    {"v_scale", name(r.v_scale.granularity)}});
  }
  return list;
}

std::string recipes_text() {
  Table table({"recipe", "Q, K", "P", "V", "Q scale", "K scale", "V scale"});
  for (const Recipe& r : recipes()) {
    table.add({r.name, format_name(r.qk), format_name(r.p), format_name(r.v),
               std::string(name(r.q_scale.granularity)), std::string(name(r.k_scale.granularity)),
               std::string(name(r.v_scale.granularity))});
  }
  return table.text();
}

std::string formats_text() {
  Table table({"format", "bits", "group", "scale"});
  for (const FormatInfo& f : all_formats()) {
    table.add({std::string(f.name), std::to_string(f.bits),
               f.group == 0 ? "-" : std::to_string(f.group), std::string(info(f.scale).name)});
  }
  return table.text();
}

Status run_info(const InfoFlags& flags) {
  const Result<Json> machine = provenance(0);
  if (!machine.ok()) return machine.status();
  if (flags.json) {
    Json json = *machine;
    json["backends"] = {"cpu"};
    json["recipes"] = recipes_json();
    json["formats"] = formats_json();
    print_json(json);
    return {};
  }
  print(fmt::format("qattn {}\ncpu      {}\nisa      {}\ncores    {} ({} threads)\nbackend  cpu\n",
                    version(), cpu_model(), (*machine)["isa"].get<std::string>(), available_cores(),
                    thread_count(0)));
  print("\n" + recipes_text() + "\n" + formats_text());
  return {};
}

}  // namespace

void add_info(CLI::App& program, Action& chosen) {
  add_command<InfoFlags>(program, chosen, "info", "version, device, recipes and formats", run_info);
}

}  // namespace qattn::cli
