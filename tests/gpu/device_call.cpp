#include "gpu/device_call.hpp"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "support/measure.hpp"

namespace qattn::test {
namespace {

constexpr Device gpu{DeviceType::cuda, 0};
constexpr std::size_t guard = 4096;
constexpr int garbage = 0xFF;

}  // namespace

void need(int cuda_error, const char* what) {
  if (cuda_error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(static_cast<cudaError_t>(cuda_error)));
  std::exit(2);
}

DeviceCopies::~DeviceCopies() {
  for (void* p : allocations_) cudaFree(p);
}

void* DeviceCopies::allocate(std::size_t bytes) {
  if (bytes == 0) return nullptr;
  void* p = nullptr;
  need(cudaMalloc(&p, bytes), "cudaMalloc");
  allocations_.push_back(p);
  return p;
}

TensorView DeviceCopies::add(Tensor& tensor, const TensorView& view) {
  TensorView moved = view;
  if (!view.present()) return moved;
  moved.device = gpu;
  std::vector<std::uint8_t>& bytes = tensor.bytes();
  const auto* element = static_cast<const std::uint8_t*>(tensor.view().data);
  Copy copy{nullptr, bytes.data(), bytes.size()};
  if (memory_ == Memory::exact) {
    // From the first to the last byte of the view; alignment decides between kernels and stays.
    std::int64_t low = 0, high = 0;
    for (int d = 0; d < tensor.view().rank; ++d) {
      if (tensor.view().shape[d] == 0) return moved.data = nullptr, moved;
      (view.stride[d] < 0 ? low : high) += (tensor.view().shape[d] - 1) * tensor.view().stride[d];
    }
    const int bits = info(view.format).bits;
    const std::uint8_t* begin = element + low * bits / 8;
    begin -= reinterpret_cast<std::uintptr_t>(begin) % 16;
    copy.host = bytes.data() + (begin - bytes.data());
    copy.bytes = static_cast<std::size_t>(element + ((high + 1) * bits + 7) / 8 - begin);
  }
  // The address modulo 16 stays what it is on the host.
  const std::size_t shift = reinterpret_cast<std::uintptr_t>(copy.host) % 16;
  copy.device = static_cast<std::uint8_t*>(allocate(copy.bytes + shift)) + shift;
  need(cudaMemcpy(copy.device, copy.host, copy.bytes, cudaMemcpyHostToDevice), "copy to the GPU");
  moved.data = copy.device + (element - copy.host);
  copies_.push_back(copy);
  return moved;
}

void DeviceCopies::fetch() {
  for (const Copy& c : copies_) {
    need(cudaMemcpy(c.host, c.device, c.bytes, cudaMemcpyDeviceToHost), "copy from the GPU");
  }
}

DeviceOutcome run_on_device(const Call& call, Laid& laid, const Recipe& recipe, Memory memory) {
  DeviceOutcome outcome;
  laid.out.clear();
  laid.lse.clear();
  laid.saturated.clear();
  AttentionTensors t = laid.tensors();
  DeviceCopies copies(memory);
  for (const auto& [view, tensor] : {std::pair{&t.q, &laid.q},
                                     {&t.k, &laid.k},
                                     {&t.v, &laid.v},
                                     {&t.out, &laid.out},
                                     {&t.lse, &laid.lse},
                                     {&t.q_scale, &laid.q_scale},
                                     {&t.k_scale, &laid.k_scale},
                                     {&t.v_scale, &laid.v_scale},
                                     {&t.saturated, &laid.saturated},
                                     {&t.sinks, &laid.sinks},
                                     {&t.mask, &laid.mask},
                                     {&t.block_mask, &laid.block_mask},
                                     {&t.alibi_slopes, &laid.alibi},
                                     {&t.cu_seqlens_q, &laid.cu_q},
                                     {&t.cu_seqlens_k, &laid.cu_k},
                                     {&t.seqused_q, &laid.used_q},
                                     {&t.seqused_k, &laid.used_k},
                                     {&t.page_table, &laid.pages}}) {
    if (view->present()) *view = copies.add(*tensor, *view);
  }
  AttentionOptions options = call.options;
  options.recipe = recipe;
  const Result<Plan> planned = plan(t, options);
  outcome.status = planned.status();
  if (!planned.ok()) return outcome;
  outcome.plan = planned->to_string();
  outcome.resolved = planned->recipe();
  outcome.tile_keys = plan_number(*planned, "tile_keys");
  const PlanSplitKv spread = split_kv_of(*planned);
  outcome.splits = spread.splits, outcome.tile_rows = spread.tile_rows;
  const std::size_t bytes = planned->workspace_bytes();
  const bool guarded = memory == Memory::guarded;
  auto* workspace = static_cast<std::uint8_t*>(copies.allocate(bytes + (guarded ? guard : 0)));
  if (guarded) need(cudaMemset(workspace, garbage, bytes + guard), "cudaMemset");
  outcome.status = run(*planned, t, options, workspace, bytes);
  if (!outcome.status.ok()) return outcome;
  const Status found = device_errors(gpu);
  copies.fetch();
  outcome.violation = found.ok() ? laid.violation() : found.message();
  if (guarded) {
    std::vector<std::uint8_t> end(guard);
    need(cudaMemcpy(end.data(), workspace + bytes, guard, cudaMemcpyDeviceToHost), "guard bytes");
    if (std::any_of(end.begin(), end.end(), [](std::uint8_t b) { return b != garbage; })) {
      outcome.violation = "a byte past the workspace was written";
    }
  }
  outcome.out = laid.read_out(call);
  outcome.lse = laid.read_lse(call);
  return outcome;
}

}  // namespace qattn::test
