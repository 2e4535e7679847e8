// How long a call of the C++ interface keeps the host, on a GPU: attention(), which takes its
// workspace itself, and run() of a plan. Small tensors, so that the GPU waits for the host. Prints
// JSON: host_time CALLS ROUNDS. For bench/bench.py host.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

#include "qattn/qattn.hpp"

using namespace qattn;

static void check(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.message().c_str());
  std::exit(1);
}

static void check(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s\n", cudaGetErrorString(error));
  std::exit(1);
}

static void* device_memory(std::size_t bytes) {
  void* memory = nullptr;
  check(cudaMalloc(&memory, std::max<std::size_t>(bytes, 1)));
  check(cudaMemset(memory, 0, bytes));
  return memory;
}

/// Median of rounds, in microseconds a call; the GPU is idle when a round begins.
static double microseconds(int calls, int rounds, const std::function<Status()>& call) {
  std::vector<double> found;
  for (int round = -1; round < rounds; ++round) {
    check(cudaDeviceSynchronize());
    const auto begin = std::chrono::steady_clock::now();
    for (int n = 0; n < calls; ++n) check(call());
    const std::chrono::duration<double, std::micro> time = std::chrono::steady_clock::now() - begin;
    if (round >= 0) found.push_back(time.count() / calls);  // the first one warms up
  }
  std::sort(found.begin(), found.end());
  return found[found.size() / 2];
}

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: host_time CALLS ROUNDS\n");
    return 2;
  }
  const int calls = std::atoi(argv[1]), rounds = std::atoi(argv[2]);
  const char* comma = "";
  std::printf("[");
  for (const std::int64_t d : {64, 128}) {
    const std::int64_t tokens = 128, heads = 8;
    const std::size_t bytes = static_cast<std::size_t>(tokens * heads * d) * 2;
    AttentionTensors t;
    for (TensorView* view : {&t.q, &t.k, &t.v, &t.out}) {
      *view = TensorView::dense(device_memory(bytes), Format::bf16, {1, tokens, heads, d});
      view->device = {DeviceType::cuda, 0};
    }
    for (const char* recipe : {"bf16", "int8", "int8_full", "fp8"}) {
      AttentionOptions o;
      o.recipe = *recipe_named(recipe);
      const Result<Plan> made = plan(t, o);
      check(made.status());
      void* workspace = device_memory(made->workspace_bytes());
      const double whole = microseconds(calls, rounds, [&] { return attention(t, o); });
      const double planned = microseconds(
          calls, rounds, [&] { return run(*made, t, o, workspace, made->workspace_bytes()); });
      std::printf("%s\n{\"recipe\": \"%s\", \"d\": %lld, \"attention_us\": %.2f, \"run_us\": %.2f}",
                  comma, recipe, static_cast<long long>(d), whole, planned);
      comma = ",";
      check(cudaFree(workspace));
    }
  }
  std::printf("\n]\n");
  return 0;
}
