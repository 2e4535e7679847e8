// Which devices there are, and what a call may ask of them.
#include "core/problem.hpp"

namespace qattn {

std::string device_text(Device device) {
  switch (device.type) {
    case DeviceType::cpu:
      return device.index == 0 ? "cpu" : "cpu:" + std::to_string(device.index);
    case DeviceType::cuda:
      return "cuda:" + std::to_string(device.index);
    case DeviceType::hip:
      return "hip:" + std::to_string(device.index);
  }
  return "device type " + std::to_string(static_cast<std::int32_t>(device.type));
}

Status check_threads(int threads) {
  if (threads >= 0 && threads <= 4096) return {};
  return Status(Code::invalid_argument,
                "threads: " + std::to_string(threads) + " is not in [0, 4096]");
}

Status check_device(const char* name, Device device, int threads) {
  if (device.type == DeviceType::cpu) return {};
  if (device.type != DeviceType::cuda && device.type != DeviceType::hip) {
    return Status(Code::invalid_argument,
                  std::string(name) + ": " + device_text(device) + " is none of cpu, cuda, hip");
  }
  if (device.index < 0) {
    return Status(Code::invalid_argument, std::string(name) + ": device index " +
                                              std::to_string(device.index) + " is negative");
  }
  if (threads != 0) {
    return Status(Code::invalid_argument, "threads: " + std::to_string(threads) +
                                              " is for CPUs, and " + name + " lies on " +
                                              device_text(device));
  }
  return {};
}

}  // namespace qattn
