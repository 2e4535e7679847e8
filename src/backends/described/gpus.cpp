#include "backends/described/gpus.hpp"

#include <string>

namespace qattn::described {
namespace {

constexpr Gpu table[] = {
    {"sm_75", "T4", DeviceType::cuda, 75, 40},
    {"sm_80", "A100", DeviceType::cuda, 80, 108},
    {"sm_86", "A40, A10, RTX 3090", DeviceType::cuda, 86, 84},
    {"sm_87", "Jetson AGX Orin", DeviceType::cuda, 87, 16},
    {"sm_89", "L40S, L4, RTX 4090", DeviceType::cuda, 89, 142},
    {"sm_90", "H100, H200, GH200", DeviceType::cuda, 90, 132},
    {"sm_100", "B200, GB200", DeviceType::cuda, 100, 148},
    {"sm_103", "B300, GB300", DeviceType::cuda, 103, 148},
    {"sm_110", "Jetson Thor", DeviceType::cuda, 110, 20},
    {"sm_120", "RTX 5090, RTX PRO 6000", DeviceType::cuda, 120, 170},
    {"sm_121", "GB10", DeviceType::cuda, 121, 48},
    {"gfx942", "MI300X, MI325X", DeviceType::hip, 0, 304},
    {"gfx950", "MI350X, MI355X", DeviceType::hip, 0, 256},
};

}  // namespace

std::span<const Gpu> gpus() { return table; }

Result<Gpu> gpu_named(std::string_view name) {
  std::string names;
  for (const Gpu& gpu : table) {
    if (gpu.name == name) return gpu;
    names += (names.empty() ? "" : ", ") + std::string(gpu.name);
  }
  return Status(Code::invalid_argument,
                "device \"" + std::string(name) + "\": is none of " + names);
}

}  // namespace qattn::described
