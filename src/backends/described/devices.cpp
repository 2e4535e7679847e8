#include "backends/described/devices.hpp"

#include <algorithm>
#include <sstream>
#include <string>

#include "core/backend.hpp"
#include "isa/launch.hpp"
#include "kernels/attention/gpu.hpp"

namespace qattn::described {
namespace {

/// The machine code of one of the library's architectures: "80", "90a", "100f". It runs on later
/// GPUs of its generation, a family's (f) too, and one GPU's (a) there alone.
struct MachineCode {
  isa::Target target;
  bool one = false;

  explicit MachineCode(const std::string& name) {
    target.number = std::stoi(name);
    target.specific = name.back() == 'a' || name.back() == 'f';
    one = name.back() == 'a';
  }
  bool runs_on(int gpu) const {
    const int number = target.number;
    return one ? gpu == number : gpu / 10 == number / 10 && gpu >= number;
  }
};

/// Of the released library: the best machine code, or that of the first, which is there as PTX,
/// too.
isa::DescribedGpu described(const Gpu& gpu) {
  isa::DescribedGpu d;
  d.architecture = gpu.architecture;
  d.multiprocessors = gpu.multiprocessors;
  std::istringstream list(released_code());
  int first = 0;
  for (std::string code; list >> code;) {
    const MachineCode machine(code);
    if (first == 0) first = machine.target.number;
    if (!machine.runs_on(gpu.architecture)) continue;
    d.code_architecture = std::max(d.code_architecture, machine.target.number);
    d.code.push_back(machine.target);
  }
  if (d.code.empty() && gpu.architecture >= first) {
    d.code_architecture = first;
    d.code.push_back({first});
  }
  return d;
}

Status not_here() {
  return Status(Code::unsupported, "the GPU is described and not here: calls are only planned");
}

/// The one that is in front; its kernels' plans point to it.
detail::Backend& front() {
  static detail::Backend backend;
  return backend;
}

}  // namespace

std::string released_code() { return QATTN_RELEASED_ARCHITECTURES; }

OnGpu::OnGpu(const Gpu& gpu) {
  detail::Backend& b = front();
  b = {};
  b.name = gpu.name;
  b.device = gpu.type;
  b.enter = [](int, int*) { return Status(); };
  b.leave = [](int) {};
  b.architecture = [] { return isa::gpu(0).number; };
  b.allocate = [](std::size_t, Stream) -> Result<void*> { return not_here(); };
  b.release = [](void*, Stream) {};
  b.copy_to_host =
      b.copy_to_device = [](void*, const void*, std::size_t, Stream) { return not_here(); };
  b.take_errors = []() -> Result<std::uint32_t> { return not_here(); };
  if (gpu.type == DeviceType::cuda) {
    b.kernels = kernels::gpu_attention_kernels();
    isa::described_gpu() = described(gpu);
  } else {
    b.enter = [](int, int*) {
      return Status(Code::unsupported, "qattn has no kernels for AMD GPUs");
    };
  }
  detail::use_backend(&b);
}

OnGpu::~OnGpu() {
  detail::use_backend(nullptr);
  isa::described_gpu() = {};
}

}  // namespace qattn::described
