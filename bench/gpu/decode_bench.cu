// Times decode over a KV cache whose pools and tables are filled on the device: one layer, every
// page in the tiers that a line names, the window of 128 and 16 sinks in 16 bits. Checks some rows
// against float64 over the same codes, and measures what a plain read reaches for comparison.
//   decode_bench [--b 16] [--hq 32] [--hkv 8] [--d 128] [--s 8192,32768] [--page 16]
//     [--cases kv8,mixed] [-o out.json]
// Build, in the repository:
//   nvcc -std=c++20 -O3 --expt-relaxed-constexpr -cudart static -Isrc -Iinclude
//     -gencode arch=compute_90a,code=sm_90a -x cu bench/gpu/decode_bench.cu
//     src/kernels/attn_decode/sm80.cpp src/backends/cuda/device.cu src/core/status.cpp
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

#include "formats/f16.hpp"
#include "formats/hadamard.hpp"
#include "formats/kv.hpp"
#include "kernels/attn_decode/sm80_launch.cuh"
// clang-format off: the kernels, behind what makes them
#include "kernels/attn_decode/sm80_decode_instances.inc"
// clang-format on

namespace {

using namespace qattn;

void check(cudaError_t e, const char* what) {
  if (e == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(e));
  std::exit(1);
}
void check(const Status& s) {
  if (s.ok()) return;
  std::fprintf(stderr, "%s\n", s.message().c_str());
  std::exit(1);
}

template <class T>
class DeviceArray {
 public:
  explicit DeviceArray(std::size_t count) : count_(count) {
    check(cudaMalloc(&data_, std::max<std::size_t>(count * sizeof(T), 256)), "cudaMalloc");
  }
  explicit DeviceArray(const std::vector<T>& host) : DeviceArray(host.size()) {
    check(cudaMemcpy(data_, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice), "copy");
  }
  DeviceArray(DeviceArray&& x) noexcept : data_(x.data_), count_(x.count_) { x.data_ = nullptr; }
  DeviceArray& operator=(DeviceArray&&) = delete;
  ~DeviceArray() { cudaFree(data_); }
  T* get() const { return static_cast<T*>(data_); }
  std::size_t size() const { return count_; }
  std::vector<T> fetch(std::size_t first, std::size_t count) const {
    std::vector<T> host(count);
    check(cudaMemcpy(host.data(), get() + first, count * sizeof(T), cudaMemcpyDeviceToHost),
          "fetch");
    return host;
  }

 private:
  void* data_ = nullptr;
  std::size_t count_;
};

// ---- Filling ------------------------------------------------------------------------------------

__device__ std::uint32_t mix(std::uint64_t x) {
  x ^= x >> 33;
  x *= 0xff51afd7ed558ccdull;
  x ^= x >> 33;
  x *= 0xc4ceb9fe1a85ec53ull;
  return static_cast<std::uint32_t>(x >> 32);
}

/// Random codes; scales that make a code's value about N(0,1)'s size; rows uniform in [-1.7, 1.7].
__global__ void fill_pool(std::uint8_t* pool, formats::KvBlock block, std::int64_t blocks) {
  const std::int64_t halves = blocks * block.bytes() / 2;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
       i < halves; i += step) {
    const std::uint32_t random = mix(static_cast<std::uint64_t>(i) + 0x1234567);
    const int at = static_cast<int>(i % (block.bytes() / 2)) * 2;
    auto code = static_cast<std::uint16_t>(random);
    if (block.window() || at >= block.k_scales()) {
      const float u = static_cast<float>(random >> 8) * 0x1p-24f;
      const int bits = at >= block.v_scales() ? block.v_bits : block.k_bits;
      const float x = block.window() ? 3.4f * (u - 0.5f)
                                     : 3.4f / static_cast<float>(1 << bits) * (0.75f + 0.5f * u);
      code = formats::F16::encode(x);
    }
    reinterpret_cast<std::uint16_t*>(pool)[i] = code;
  }
}

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

// ---- Cases --------------------------------------------------------------------------------------

struct Shape {
  std::int64_t batch, heads_q, heads_kv, d, tokens, page;
};

struct Case {
  const char* name;
  std::vector<std::pair<KvTier, int>> tiers;  ///< and how many pages of 100
};

const std::vector<Case>& all_cases() {
  static const std::vector<Case> cases = {
      {"kv8", {{{8, 8}, 100}}},
      {"kv4", {{{4, 4}, 100}}},
      {"kv3", {{{3, 3}, 100}}},
      {"kv2", {{{2, 2}, 100}}},
      {"mixed", {{{8, 8}, 5}, {{4, 4}, 25}, {{3, 3}, 40}, {{2, 2}, 30}}},
      {"k4v2", {{{4, 2}, 100}}},
  };
  return cases;
}

class Cache {
 public:
  Cache(const Shape& s, const Case& c) {
    kv::DeviceCache& v = view;
    v.d = v.dv = static_cast<std::int32_t>(s.d);
    v.page_size = static_cast<std::int32_t>(s.page);
    v.window_tokens = 128;
    v.sinks = 16;
    v.layers = 1;
    v.heads_kv = static_cast<std::int32_t>(s.heads_kv);
    v.slots = static_cast<std::int32_t>(s.batch);
    v.most_pages = static_cast<std::int32_t>((s.tokens + s.page - 1) / s.page);
    v.pools = static_cast<std::int32_t>(1 + c.tiers.size());
    v.rotate = v.smooth_k = 1;
    const auto layout = [&](int k_bits, int v_bits) {
      return formats::KvPage{{v.d, v.dv, k_bits, v_bits}, v.blocks_per_page(), false};
    };
    v.pool[0].layout = layout(formats::kv_window_bits, formats::kv_window_bits);
    for (std::size_t i = 0; i < c.tiers.size(); ++i) {
      v.pool[i + 1].layout = layout(c.tiers[i].first.k_bits, c.tiers[i].first.v_bits);
    }
    make_tables(s, c);
    for (int i = 0; i < v.pools; ++i) make_pool(v.pool[i]);
    const std::vector<std::int32_t> lengths(static_cast<std::size_t>(s.batch),
                                            static_cast<std::int32_t>(s.tokens));
    lengths_.emplace_back(lengths);
    std::vector<float> means(static_cast<std::size_t>(s.batch * s.heads_kv * s.d));
    for (std::size_t i = 0; i < means.size(); ++i) means[i] = static_cast<float>(i % 13) * 0.1f;
    means_.emplace_back(means);
    const std::vector<std::int32_t> ones(static_cast<std::size_t>(s.batch), 1);
    lengths_.emplace_back(ones);
    v.lengths = lengths_[0].get();
    v.has_mean = lengths_[1].get();
    v.k_means = means_[0].get();
  }

  kv::DeviceCache view;
  std::vector<kv::Entry> table;  ///< as on the device
  std::int64_t bytes = 0;        ///< of pages that a step reads

 private:
  void make_tables(const Shape& s, const Case& c) {
    std::mt19937 random(5);
    const std::int64_t pages = view.most_pages;
    for (std::int64_t head = 0; head < s.batch * s.heads_kv; ++head) {
      for (std::int64_t i = 0; i < pages; ++i) {
        kv::Entry e;
        const std::int64_t first = i * s.page, left = s.tokens - first;
        e.first = static_cast<std::int32_t>(first);
        e.live = left >= 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << left) - 1;
        if (s.page < 64) e.live &= (std::uint64_t{1} << s.page) - 1;
        const bool window = first < view.sinks || first + s.page > s.tokens - view.window_tokens;
        if (!window) {
          int share = static_cast<int>(random() % 100);
          e.tier = 1;
          for (const auto& [tier, percent] : c.tiers) {
            if (share < percent) break;
            share -= percent;
            ++e.tier;
          }
        }
        view.pool[e.tier].capacity++;
        table.push_back(e);
      }
    }
    // Pages of a pool lie in any order.
    std::vector<std::vector<std::int32_t>> numbers(static_cast<std::size_t>(view.pools));
    for (int t = 0; t < view.pools; ++t) {
      auto& n = numbers[static_cast<std::size_t>(t)];
      n.resize(static_cast<std::size_t>(view.pool[t].capacity));
      std::iota(n.begin(), n.end(), 0);
      std::shuffle(n.begin(), n.end(), random);
    }
    for (kv::Entry& e : table) {
      e.page = numbers[e.tier].back();
      numbers[e.tier].pop_back();
      bytes += std::int64_t{view.pool[e.tier].layout.block.bytes()} * kv::live_blocks(e);
    }
    entries_.emplace_back(table);
    counts_.emplace_back(
        std::vector<std::int32_t>(static_cast<std::size_t>(s.batch * s.heads_kv), view.most_pages));
    view.entries = entries_[0].get();
    view.counts = counts_[0].get();
  }

  void make_pool(kv::DevicePool& pool) {
    const std::int64_t blocks = std::int64_t{pool.capacity} * view.blocks_per_page();
    pages_.emplace_back(static_cast<std::size_t>(blocks * pool.layout.block.bytes()));
    pool.pages = pages_.back().get();
    if (blocks == 0) return;
    fill_pool<<<2048, 256>>>(pool.pages, pool.layout.block, blocks);
    check(cudaDeviceSynchronize(), "fill_pool");
  }

  std::vector<DeviceArray<std::uint8_t>> pages_;
  std::vector<DeviceArray<kv::Entry>> entries_;
  std::vector<DeviceArray<std::int32_t>> counts_, lengths_;
  std::vector<DeviceArray<float>> means_;
};

// ---- One row in float64 -------------------------------------------------------------------------

/// O of one query head of one sequence over the pages as they are.
std::vector<double> reference(const Shape& s, const Cache& cache, const std::vector<float>& q,
                              std::int64_t b, std::int64_t head) {
  const kv::DeviceCache& v = cache.view;
  const std::int64_t pair = b * s.heads_kv + head / (s.heads_q / s.heads_kv);
  const auto d = static_cast<std::size_t>(s.d);
  const float* raw = q.data() + static_cast<std::size_t>((b * s.heads_q + head) * s.d);
  std::vector<float> rotated(raw, raw + d), mean(d);
  formats::rotate(rotated.data(), static_cast<int>(d));
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
    page.resize(static_cast<std::size_t>(k.bytes()) * v.blocks_per_page());
    check(cudaMemcpy(page.data(), pool.page(e.page), page.size(),
                     cudaMemcpyDeviceToHost),
          "page");
    for (int token = 0; token < v.page_size; ++token) {
      if ((e.live >> token & 1) == 0) continue;
      const std::uint8_t* block = page.data() + token / 16 * k.bytes();
      const int t = token % 16;
      const auto half = [&](int at) {
        std::uint16_t code;
        std::memcpy(&code, block + at, 2);
        return static_cast<double>(formats::F16::decode(code));
      };
      double score = 0;
      for (int c = 0; c < v.d; ++c) {
        const auto at = static_cast<std::size_t>(c);
        score += k.window() ? raw[at] * half((t * v.d + c) * 2)
                            : static_cast<double>(rotated[at]) *
                                  formats::kv_value(formats::kv_code_at(block, 16 * v.d, k.k_bits,
                                                                        formats::kv_place_k(t, c)),
                                                    k.k_bits);
      }
      if (!k.window()) score = score * half(k.k_scales() + 2 * t) + offset;
      const double p = std::exp(score * scale);
      sum += p;
      const double vs = k.window() ? 0 : half(k.v_scales() + 2 * t);
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
  double us, mass_us, decode_us, bytes, error;
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
template <int D, int N>
void launch_alone(const kernels::DecodeParams& p) {
  const isa::LaunchError e = isa::launch<kernels::Decode<kernels::DecodeConfig{D, D, N}>>(
      p, {static_cast<int>(p.blocks), 1, 1}, nullptr);
  if (!e.empty()) check(Status(Code::internal, e));
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

  Line line{0, 0, 0, static_cast<double>(cache.bytes), std::sqrt(error / norm)};
  line.mass_us = graph_us(with_mass, workspace.get(), other);
  line.us = graph_us(call, workspace.get(), other);
  const kernels::DecodeParams p = kernels::params_in(call, workspace.get());
  line.decode_us = median_us(
      [&] {
        const bool narrow = p.unit_rows == 8;
        if (s.d == 64) return narrow ? launch_alone<64, 1>(p) : launch_alone<64, 2>(p);
        if (s.d == 128) return narrow ? launch_alone<128, 1>(p) : launch_alone<128, 2>(p);
        launch_alone<256, 1>(p);
      },
      other);
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
  std::printf("%-6s %3s %4s %4s %4s %7s %10s %10s %10s %7s %6s %10s %9s\n", "cache", "B", "Hq",
              "Hkv", "D", "S", "call us", "with mass", "decode us", "GB/s", "%", "decode %",
              "NRMSE");
  std::string json = std::string("{\"device\": \"") + device.name +
                     "\", \"read_gb_per_s\": " + std::to_string(read_rate) + ", \"rows\": [";
  constexpr char format[] =
      "%-6s %3lld %4lld %4lld %4lld %7lld %10.1f %10.1f %10.1f %7.0f %6.1f %10.1f %9.2e%s\n";
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
                  n(tokens), l.us, l.mass_us, l.decode_us, rate, 100 * rate / read_rate,
                  100 * alone / read_rate, l.error, bad ? "  WRONG" : "");
      json += std::string(json.back() == '[' ? "" : ",") + "\n  {\"cache\": \"" + c.name + "\"";
      const auto put = [&](const char* name, auto x) {
        json += std::string(", \"") + name + "\": " + std::to_string(x);
      };
      put("batch", shape.batch), put("heads_q", shape.heads_q), put("heads_kv", shape.heads_kv);
      put("d", shape.d), put("tokens", tokens), put("page", shape.page), put("us", l.us);
      put("mass_us", l.mass_us), put("decode_us", l.decode_us);
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
