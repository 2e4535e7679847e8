// The steps of a GPU attention call as C functions, so that a Python driver can time them beside
// torch in one process (bench/gpu_prefill.py). Not part of the library.
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>

#include "kernels/attn_prefill/gpu.hpp"

using namespace qattn;

/// Opaque to the driver. Not in an unnamed namespace: that would hide the functions that take it.
struct Handle {
  Problem problem;
  std::shared_ptr<detail::PlanData> plan;
  void* workspace = nullptr;
};

static std::string error;

extern "C" {

struct BenchShape {
  std::int64_t batch, heads_q, heads_kv, tokens_q, tokens_k, d;
  std::int32_t causal, f16;
};

/// Why the last call failed.
const char* bench_error() { return error.c_str(); }

/// Q, K, V, out: dense (B, S, H, D) in 16 bits. Null on failure.
Handle* bench_create(const char* recipe, const BenchShape* s, void* q, void* k, void* v,
                     void* out) {
  const Format f = s->f16 ? Format::f16 : Format::bf16;
  AttentionTensors t;
  t.q = TensorView::dense(q, f, {s->batch, s->tokens_q, s->heads_q, s->d});
  t.k = TensorView::dense(k, f, {s->batch, s->tokens_k, s->heads_kv, s->d});
  t.v = TensorView::dense(v, f, {s->batch, s->tokens_k, s->heads_kv, s->d});
  t.out = TensorView::dense(out, f, {s->batch, s->tokens_q, s->heads_q, s->d});
  for (TensorView* x : {&t.q, &t.k, &t.v, &t.out}) x->device = {DeviceType::cuda, 0};
  AttentionOptions o;
  o.recipe = *recipe_named(recipe);
  o.causal = s->causal != 0;
  Result<Problem> problem = Problem::make(t, o);
  if (!problem.ok()) {
    error = problem.status().message();
    return nullptr;
  }
  const detail::Kernel* kernel = nullptr;
  for (const detail::Kernel& k : kernels::gpu_attention_kernels()) {
    const Status status = k.supports(*problem);
    if (status.ok()) {
      kernel = &k;
      break;
    }
    error = status.message();
  }
  if (kernel == nullptr) return nullptr;
  auto* h = new Handle{*problem, kernel->tune(*problem), nullptr};
  if (cudaMalloc(&h->workspace, h->plan->workspace + 64) != cudaSuccess) {
    error = "cudaMalloc";
    delete h;
    return nullptr;
  }
  return h;
}

std::int64_t bench_workspace(const Handle* h) {
  return static_cast<std::int64_t>(h->plan->workspace);
}

/// step 0: quantise and attend, 1: quantise, 2: attend. 0 on success.
int bench_run(Handle* h, int step, void* stream) {
  Status s;
  if (step != 2) s = kernels::quantize_operands(*h->plan, h->problem, h->workspace, stream);
  if (s.ok() && step != 1) s = kernels::attend(*h->plan, h->problem, h->workspace, stream);
  if (!s.ok()) error = s.message();
  return s.ok() ? 0 : 1;
}

void bench_destroy(Handle* h) {
  cudaFree(h->workspace);
  delete h;
}
}
