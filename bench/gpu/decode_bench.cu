// Times decode over a KV cache whose pools and tables are filled on the device: one layer, every
// page in the tiers that a line names, the window of 128 and 16 sinks in 16 bits. Checks some rows
// against float64 over the same codes, and measures what a plain read reaches for comparison.
//   decode_bench [--b 16] [--hq 32] [--hkv 8] [--d 128] [--s 8192,32768] [--page 16]
//     [--cases kv8,mixed] [-o out.json]
// Build, in the repository:
//   nvcc -std=c++20 -O3 --expt-relaxed-constexpr -cudart static -Isrc -Iinclude
//     -gencode arch=compute_90a,code=sm_90a -x cu bench/gpu/decode_bench.cu
//     src/kernels/decode/mixed_kv/host.cpp src/backends/cuda/device.cu src/core/status.cpp
//     -o decode_bench
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "decode_cache.cuh"
#include "formats/f16.hpp"
#include "formats/hadamard.hpp"
#include "formats/kv/codes.hpp"
#include "kernels/decode/mixed_kv/launch.cuh"
// clang-format off: the kernels, behind what makes them
#include "kernels/decode/mixed_kv/instances.inc"
// clang-format on

namespace {

using namespace qattn;
using namespace qattn::bench;

__global__ void read_all(const uint4* from, std::int64_t count, std::uint32_t* to) {
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  std::uint32_t sum = 0;
  std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (; i + 7 * step < count; i += 8 * step) {
    uint4 v[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) v[k] = __ldcs(from + i + k * step);
#pragma unroll
    for (int k = 0; k < 8; ++k) sum ^= v[k].x ^ v[k].y ^ v[k].z ^ v[k].w;
  }
  for (; i < count; i += step) sum ^= from[i].x;
  if (sum == 0x9e3779b9u) *to = sum;
}

// ---- One row in float64 -------------------------------------------------------------------------

/// O of one query head of one sequence over the pages as they are.
std::vector<double> reference(const Shape& s, const Cache& cache, const std::vector<float>& q,
                              std::int64_t b, std::int64_t head) {
  const kv::DeviceCache& v = cache.view;
  const std::int64_t pair = b * s.heads_kv + head / (s.heads_q / s.heads_kv);
  const auto d = static_cast<std::size_t>(s.d);
  const float* raw = q.data() + static_cast<std::size_t>((b * s.heads_q + head) * s.d);
  std::vector<float> rotated(raw, raw + d), mean(d);
  if (v.rotates_k()) formats::rotate(rotated.data(), static_cast<int>(d));
  check(cudaMemcpy(mean.data(), v.k_means + pair * s.d, d * 4, cudaMemcpyDeviceToHost), "mean");
  const double scale = 1 / std::sqrt(static_cast<double>(s.d));
  double offset = 0, sum = 0;
  for (std::size_t c = 0; c < d; ++c) offset += static_cast<double>(raw[c]) * mean[c];
  std::vector<double> plain(d), turned(d);
  std::vector<std::uint8_t> page;
  for (std::int64_t i = 0; i < v.most_pages; ++i) {
    const kv::Entry& e = cache.table[static_cast<std::size_t>(pair * v.most_pages + i)];
    const kv::DevicePool& pool = v.pool[e.tier];
    const formats::KvBlock& k = pool.layout.block;
    const formats::KvPage& layout = pool.layout;
    page.resize(static_cast<std::size_t>(layout.bytes()));
    check(cudaMemcpy(page.data(), pool.page(e.page), page.size(), cudaMemcpyDeviceToHost), "page");
    for (int token = 0; token < v.page_size; ++token) {
      if ((e.live >> token & 1) == 0) continue;
      const int first = token / 16 * layout.block_bytes(), t = token % 16;
      const std::uint8_t* block = page.data() + first;
      const auto half = [&](int at) {
        std::uint16_t code;
        std::memcpy(&code, block + at, 2);
        return static_cast<double>(formats::F16::decode(code));
      };
      const auto channel_scale = [&](int c) {
        return layout.k_by_channel ? half(layout.channel_scales() - first + 2 * c) : 1.0;
      };
      double score = 0;
      for (int c = 0; c < v.d; ++c) {
        const auto at = static_cast<std::size_t>(c);
        score += k.window() ? raw[at] * half((t * v.d + c) * 2)
                            : static_cast<double>(rotated[at]) * channel_scale(c) *
                                  formats::kv_value(formats::kv_code_at(block, 16 * v.d, k.k_bits,
                                                                        formats::kv_place_k(t, c)),
                                                    k.k_bits);
      }
      if (!k.window()) {
        score = score * (layout.k_by_channel ? 1.0 : half(k.k_scales() + 2 * t)) + offset;
      }
      const double p = std::exp(score * scale);
      sum += p;
      const double vs = k.window() ? 0 : half(layout.v_scales() + 2 * t);
      for (int c = 0; c < v.dv; ++c) {
        const auto at = static_cast<std::size_t>(c);
        if (k.window()) {
          plain[at] += p * half(k.v_codes() + (t * v.dv + c) * 2);
        } else {
          turned[at] +=
              p * vs *
              formats::kv_value(formats::kv_code_at(block + k.v_codes(), 16 * v.dv, k.v_bits,
                                                    formats::kv_place_v(v.dv, t, c)),
                                k.v_bits);
        }
      }
    }
  }
  std::vector<float> back(turned.begin(), turned.end());
  formats::unrotate(back.data(), static_cast<int>(d));
  for (std::size_t c = 0; c < d; ++c) plain[c] = (plain[c] + back[c]) / sum;
  return plain;
}

// ---- Measuring ----------------------------------------------------------------------------------

/// Median of 25 with the caches emptied in between.
double median_us(const std::function<void()>& body, const DeviceArray<uint4>& other) {
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin), "event");
  check(cudaEventCreate(&end), "event");
  DeviceArray<std::uint32_t> sink(1);
  std::vector<float> times;
  for (int i = 0; i < 28; ++i) {
    read_all<<<1056, 256>>>(other.get(), 16 << 20, sink.get());  // 256 MiB
    check(cudaEventRecord(begin), "record");
    body();
    check(cudaEventRecord(end), "record");
    check(cudaEventSynchronize(end), "kernels");
    float ms = 0;
    check(cudaEventElapsedTime(&ms, begin, end), "elapsed");
    if (i >= 3) times.push_back(ms * 1e3f);
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  std::nth_element(times.begin(), times.begin() + 12, times.end());
  return times[12];
}

struct Line {
  double us, mass_us, debias_us, decode_us, bytes, error;  ///< debias_us 0: there is none
};

/// A call as serving has it: all its kernels as a graph, behind one launch.
double graph_us(const kernels::DeviceDecodeCall& call, void* workspace,
                const DeviceArray<uint4>& other) {
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  check(cudaStreamCreate(&stream), "stream");
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  check(kernels::run(call, workspace, stream));
  check(cudaStreamEndCapture(stream, &graph), "capture");
  check(cudaGraphInstantiate(&exec, graph, 0), "graph");
  const double us = median_us([&] { check(cudaGraphLaunch(exec, nullptr), "launch"); }, other);
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
  return us;
}

/// The main kernel alone: its neighbours' work has been done.
template <int D, int N, bool ByChannel, bool Small = false>
void launch_alone(const kernels::DecodeParams& p) {
  using Kernel = kernels::Decode<kernels::DecodeConfig{D, D, N, ByChannel, Small}>;
  const isa::LaunchError e = isa::launch<Kernel>(p, {static_cast<int>(p.blocks), 1, 1}, nullptr);
  if (!e.empty()) check(Status(Code::internal, e));
}

void launch_alone(const kernels::DecodeParams& p) {
  const bool narrow = p.unit_rows == 8;
  const auto small = [&](int large_bytes) {
    int most = 0;
    check(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0), "attribute");
    return large_bytes > most;
  };
  if (p.cache.k_by_channel != 0) {
    if (p.cache.d == 64) return launch_alone<64, 1, true>(p);
    using Large = kernels::DecodeShape<kernels::DecodeConfig{128, 128, 1, true, false}>;
    if (p.cache.d == 128 && small(Large::shared_bytes)) return launch_alone<128, 1, true, true>(p);
    return p.cache.d == 128 ? launch_alone<128, 1, true>(p) : launch_alone<256, 1, true>(p);
  }
  if (p.cache.d == 64) {
    return narrow ? launch_alone<64, 1, false>(p) : launch_alone<64, 2, false>(p);
  }
  if (p.cache.d == 128) {
    using Large = kernels::DecodeShape<kernels::DecodeConfig{128, 128, 1, false, false}>;
    if (small(Large::shared_bytes)) return launch_alone<128, 1, false, true>(p);
    return narrow ? launch_alone<128, 1, false>(p) : launch_alone<128, 2, false>(p);
  }
  launch_alone<256, 1, false>(p);
}

Line measure(const Shape& s, const Case& c, const DeviceArray<uint4>& other) {
  const Cache cache(s, c);
  std::mt19937 random(11);
  std::normal_distribution<float> normal;
  std::vector<float> q(static_cast<std::size_t>(s.batch * s.heads_q * s.d));
  for (float& x : q) x = normal(random);
  std::vector<std::int32_t> slots(static_cast<std::size_t>(s.batch));
  std::iota(slots.begin(), slots.end(), 0);
  const DeviceArray<float> q_device(q), out(q.size());
  const DeviceArray<std::int32_t> slots_device(slots);
  kernels::DeviceDecodeCall call;
  call.cache = &cache.view;
  call.slots = TensorView::dense(slots_device.get(), Format::s32, {s.batch});
  call.tensors.q = TensorView::dense(q_device.get(), Format::f32, {s.batch, 1, s.heads_q, s.d});
  call.tensors.out = TensorView::dense(out.get(), Format::f32, {s.batch, 1, s.heads_q, s.d});
  kernels::DeviceDecodeCall with_mass = call;
  const std::int64_t blocks = (s.tokens + 15) / 16;
  const DeviceArray<float> mass(static_cast<std::size_t>(s.batch * s.heads_q * blocks));
  with_mass.tensors.mass = TensorView::dense(mass.get(), Format::f32, {s.batch, s.heads_q, blocks});
  check(kernels::supports(with_mass));
  const DeviceArray<std::uint8_t> workspace(kernels::workspace_bytes(with_mass));
  check(kernels::run(call, workspace.get(), nullptr));
  check(cudaDeviceSynchronize(), "decode");
  double error = 0, norm = 0;
  for (const std::int64_t row : {std::int64_t{0}, s.batch * s.heads_q - 1}) {
    const std::int64_t b = row / s.heads_q, head = row % s.heads_q;
    const std::vector<double> want = reference(s, cache, q, b, head);
    const std::vector<float> got =
        out.fetch(static_cast<std::size_t>(row * s.d), static_cast<std::size_t>(s.d));
    for (std::size_t i = 0; i < want.size(); ++i) {
      error += (got[i] - want[i]) * (got[i] - want[i]);
      norm += want[i] * want[i];
    }
  }

  Line line{0, 0, 0, 0, static_cast<double>(cache.bytes), std::sqrt(error / norm)};
  line.mass_us = graph_us(with_mass, workspace.get(), other);
  line.us = graph_us(call, workspace.get(), other);
  if (!c.by_channel) {
    kernels::DeviceDecodeCall straight = call;
    straight.options.debias = true;
    line.debias_us = graph_us(straight, workspace.get(), other);
  }
  const kernels::DecodeParams p = kernels::params_in(call, workspace.get());
  line.decode_us = median_us([&] { launch_alone(p); }, other);
  return line;
}

std::vector<std::int64_t> numbers(const char* text) {
  std::vector<std::int64_t> all;
  for (char* end = nullptr; *text != '\0'; text = *end == ',' ? end + 1 : end) {
    all.push_back(std::strtoll(text, &end, 10));
    if (end == text) std::exit((std::fprintf(stderr, "%s is no list of numbers\n", text), 2));
  }
  return all;
}

}  // namespace

int main(int argc, char** argv) {
  Shape shape{16, 32, 8, 128, 0, 16};
  std::vector<std::int64_t> lengths = {8192, 32768};
  std::string wanted;  // names with a comma before and behind each; empty: all
  const char* file = nullptr;
  for (int i = 1; i < argc; i += 2) {
    const std::string option = argv[i];
    if (i + 1 == argc) return std::fprintf(stderr, "%s: no value\n", argv[i]), 2;
    const char* value = argv[i + 1];
    if (option == "-o") {
      file = value;
    } else if (option == "--cases") {
      wanted = std::string(",") + value + ",";
    } else if (option == "--s") {
      lengths = numbers(value);
    } else if (std::int64_t* to = option == "--b"      ? &shape.batch
                                  : option == "--hq"   ? &shape.heads_q
                                  : option == "--hkv"  ? &shape.heads_kv
                                  : option == "--d"    ? &shape.d
                                  : option == "--page" ? &shape.page
                                                       : nullptr) {
      *to = numbers(value).at(0);
    } else {
      return std::fprintf(stderr, "%s: unknown option\n", argv[i]), 2;
    }
  }
  cudaDeviceProp device{};
  check(cudaGetDeviceProperties(&device, 0), "device");
  const DeviceArray<uint4> other(std::size_t{128} << 20);  // 2 GiB
  check(cudaMemset(other.get(), 1, other.size() * 16), "memset");
  DeviceArray<std::uint32_t> sink(1);
  const double read_us = median_us(
      [&] {
        read_all<<<1056, 256>>>(other.get(), static_cast<std::int64_t>(other.size()), sink.get());
      },
      other);
  const double read_rate = static_cast<double>(other.size()) * 16 / read_us * 1e-3;
  std::printf("%s: a plain read of 2 GiB reaches %.0f GB/s\n", device.name, read_rate);
  std::printf("%-6s %3s %4s %4s %4s %7s %9s %9s %9s %9s %7s %6s %8s %9s\n", "cache", "B", "Hq",
              "Hkv", "D", "S", "call us", "mass", "debias", "decode us", "GB/s", "%", "decode %",
              "NRMSE");
  std::string json = std::string("{\"device\": \"") + device.name +
                     "\", \"read_gb_per_s\": " + std::to_string(read_rate) + ", \"rows\": [";
  constexpr char format[] =
      "%-6s %3lld %4lld %4lld %4lld %7lld %9.1f %9.1f %9.1f %9.1f %7.0f %6.1f %8.1f %9.2e%s\n";
  const auto n = [](std::int64_t x) { return static_cast<long long>(x); };
  bool wrong = false;
  for (const std::int64_t tokens : lengths) {
    for (const Case& c : all_cases()) {
      if (!wanted.empty() && wanted.find("," + std::string(c.name) + ",") == std::string::npos) {
        continue;
      }
      shape.tokens = tokens;
      const Line l = measure(shape, c, other);
      const double rate = l.bytes / l.us * 1e-3, alone = l.bytes / l.decode_us * 1e-3;
      const bool bad = !(l.error <= 2e-3);
      wrong |= bad;
      std::printf(format, c.name, n(shape.batch), n(shape.heads_q), n(shape.heads_kv), n(shape.d),
                  n(tokens), l.us, l.mass_us, l.debias_us, l.decode_us, rate,
                  100 * rate / read_rate, 100 * alone / read_rate, l.error, bad ? "  WRONG" : "");
      json += std::string(json.back() == '[' ? "" : ",") + "\n  {\"cache\": \"" + c.name + "\"";
      const auto put = [&](const char* name, auto x) {
        json += std::string(", \"") + name + "\": " + std::to_string(x);
      };
      put("batch", shape.batch), put("heads_q", shape.heads_q), put("heads_kv", shape.heads_kv);
      put("d", shape.d), put("tokens", tokens), put("page", shape.page), put("us", l.us);
      put("mass_us", l.mass_us), put("decode_us", l.decode_us);
      if (l.debias_us > 0) put("debias_us", l.debias_us);
      put("bytes", static_cast<long long>(l.bytes)), put("gb_per_s", rate), put("nrmse", l.error);
      json += "}";
    }
  }
  json += "\n]}\n";
  if (file != nullptr) {
    std::FILE* f = std::fopen(file, "w");
    if (f == nullptr) return std::perror(file), 1;
    std::fwrite(json.data(), 1, json.size(), f);
    std::fclose(f);
  }
  return wrong ? 1 : 0;
}
