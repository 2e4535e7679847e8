// Part of libqattn and of every backend's library: the two compare their texts.
#include "core/backend.hpp"
#include "kernels/quantize/host/quantize_check.hpp"
#include "kvcache/gpu/device_ops.hpp"

namespace qattn::detail {

std::string backend_interface() {
  std::string s = QATTN_VERSION;
  for (const std::size_t size :
       {sizeof(Backend), sizeof(Kernel), sizeof(PlanData), sizeof(Problem), sizeof(QuantizeTensors),
        sizeof(QuantizeOptions), sizeof(QuantizeFacts), sizeof(Status), sizeof(kv::AppendState),
        sizeof(kv::DeviceOps), sizeof(kv::AppendCall), sizeof(kv::ObserveCall),
        sizeof(kv::ImportanceCall), sizeof(kv::ForgetCall), sizeof(kv::DeviceDecodeCall),
        sizeof(kv::ForkCall)}) {
    s += '.';
    s += std::to_string(size);
  }
  return s;
}

}  // namespace qattn::detail
