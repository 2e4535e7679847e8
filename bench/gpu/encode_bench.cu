// Times the encode kernels, the whole pass (whose kernels overlap) and each alone, and checks their
// codes against the CPU's.
//   encode_bench [result.json]
// Build: nvcc -std=c++20 -O3 --fmad=false --expt-relaxed-constexpr -cudart static -Isrc -Iinclude
//   -gencode arch=compute_90a,code=sm_90a bench/gpu/encode_bench.cu -x cu
//   src/kernels/quantize/gpu/prepare.cpp src/backends/cuda/device.cu libqattn.a -lgomp -ldl
//   -o encode_bench
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "formats/bf16.hpp"
#include "kernels/operand/prepare.hpp"
#include "kernels/quantize/gpu/encode.cuh"
#include "qattn/quantize.hpp"

namespace {

using namespace qattn;
using kernels::Prepared;

void check(cudaError_t e, const char* what) {
  if (e == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(e));
  std::exit(1);
}

struct Shape {
  std::int64_t batch, tokens, heads, d;
  std::int64_t elements() const { return batch * tokens * heads * d; }
};

/// Q, K and V in bf16 on the host and on the device.
struct Operands {
  Shape shape;
  std::vector<std::uint16_t> host[3];
  void* device[3] = {};
  void* out = nullptr;

  explicit Operands(const Shape& s) : shape(s) {
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    // One block of values, repeated: the time depends on no value.
    std::vector<std::uint16_t> some(1 << 20);
    for (auto& x : some) x = formats::Bf16::encode(normal(random) + 0.25f);
    for (int i = 0; i < 3; ++i) {
      host[i].resize(static_cast<std::size_t>(s.elements()));
      for (std::size_t n = 0; n < host[i].size(); ++n) {
        host[i][n] = some[(n + static_cast<std::size_t>(i) * 77) % some.size()];
      }
      const std::size_t bytes = host[i].size() * 2;
      check(cudaMalloc(&device[i], bytes), "cudaMalloc");
      check(cudaMemcpy(device[i], host[i].data(), bytes, cudaMemcpyHostToDevice), "copy");
    }
    check(cudaMalloc(&out, static_cast<std::size_t>(s.elements()) * 2), "cudaMalloc");
  }
  ~Operands() {
    for (void* p : device) cudaFree(p);
    cudaFree(out);
  }

  AttentionTensors tensors() const {
    const auto view = [&](void* data) {
      TensorView v =
          TensorView::dense(data, Format::bf16, {shape.batch, shape.tokens, shape.heads, shape.d});
      v.device = {DeviceType::cuda, 0};
      return v;
    };
    AttentionTensors t;
    t.q = view(device[0]);
    t.k = view(device[1]);
    t.v = view(device[2]);
    t.out = view(out);
    return t;
  }
};

Recipe default_recipe(bool smooth) {
  Recipe r = *recipe_named("int8_full");
  r.q_scale = {Granularity::per_token, 128, 16};
  r.k_scale = {Granularity::per_block, 64, 16};
  r.v_scale = {Granularity::per_token, 128, 16};
  r.smooth_k = smooth ? Toggle::on : Toggle::off;
  r.smooth_q = r.smooth_v = r.rotate = Toggle::off;
  return r;
}
/// As the Hopper kernel asks for them.
Recipe thread_recipe() {
  Recipe r = default_recipe(true);
  r.k_scale = r.v_scale = {Granularity::per_thread, 64, 16};
  return r;
}
Recipe floating_recipe(const char* name) {
  Recipe r = *recipe_named(name);
  r.q_scale = {Granularity::per_token, 128, 16};
  r.k_scale = {Granularity::per_thread, 64, 16};
  r.v_scale = {Granularity::per_channel, 128, 16};
  r.smooth_k = Toggle::on;
  r.smooth_q = r.smooth_v = r.rotate = Toggle::off;
  return r;
}
Recipe smooth_q_recipe() {
  Recipe r = default_recipe(true);
  r.smooth_q = Toggle::on;
  return r;
}
Recipe coarse_recipe() {
  Recipe r = default_recipe(true);
  r.k_scale = {Granularity::per_block, 128, 16};
  r.q_scale = {Granularity::per_warp, 128, 16};
  return r;
}

/// A planned call with its workspace.
struct Call {
  Problem problem;
  Recipe recipe;
  kernels::PrepareLayout layout;
  void* workspace = nullptr;
  Prepared out;

  Call(const Operands& x, const Recipe& r, const kernels::PrepareNeeds& needs) : recipe(r) {
    AttentionOptions o;
    o.recipe = r;
    Result<Problem> p = Problem::make(x.tensors(), o);
    if (!p.ok()) {
      std::fprintf(stderr, "%s\n", p.status().message().c_str());
      std::exit(1);
    }
    problem = *p;
    layout = kernels::plan_prepare(problem, recipe, needs);
    check(cudaMalloc(&workspace, layout.bytes), "cudaMalloc");
    check(cudaMemset(workspace, 0xcd, layout.bytes), "cudaMemset");
    out = kernels::prepared_in(problem, recipe, layout, workspace);
  }
  ~Call() { cudaFree(workspace); }

  void run() {
    const isa::LaunchError e = kernels::prepare(problem, recipe, layout, workspace, nullptr);
    if (!e.empty()) {
      std::fprintf(stderr, "prepare: %s\n", e.c_str());
      std::exit(1);
    }
  }
};

double median_ms(const std::function<void()>& body) {
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin), "event");
  check(cudaEventCreate(&end), "event");
  for (int i = 0; i < 5; ++i) body();
  std::vector<float> times;
  for (int i = 0; i < 41; ++i) {
    check(cudaEventRecord(begin), "record");
    body();
    check(cudaEventRecord(end), "record");
    check(cudaEventSynchronize(end), "kernels");
    float ms = 0;
    check(cudaEventElapsedTime(&ms, begin, end), "elapsed");
    times.push_back(ms);
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  std::nth_element(times.begin(), times.begin() + 20, times.end());
  return times[20];
}

template <class T>
std::vector<T> fetch(const T* device, std::int64_t count) {
  std::vector<T> host(static_cast<std::size_t>(count));
  check(cudaMemcpy(host.data(), device, host.size() * sizeof(T), cudaMemcpyDeviceToHost), "copy");
  return host;
}

/// Codes and scales of one operand from the CPU.
struct Judge {
  std::vector<std::uint8_t> codes;
  std::vector<float> scale, mean;
  QuantizeShapes shapes;
  Scaling scaling;
  Role role;

  Judge(const Operands& x, const Recipe& r, Role which) : role(which) {
    QuantizeOptions o;
    o.role = role;
    o.format = role == Role::v ? r.v : r.qk;
    o.scaling = scaling = role == Role::q ? r.q_scale : role == Role::k ? r.k_scale : r.v_scale;
    o.smooth = (role == Role::q && r.smooth_q == Toggle::on) ||
               (role == Role::k && r.smooth_k == Toggle::on);
    const Shape& s = x.shape;
    QuantizeTensors t;
    t.x = TensorView::dense(x.host[static_cast<int>(role)].data(), Format::bf16,
                            {s.batch, s.tokens, s.heads, s.d});
    shapes = *quantize_shapes(t.x, o);
    const auto count = [](const TensorView& v) {
      std::int64_t n = 1;
      for (int i = 0; i < v.rank; ++i) n *= v.shape[static_cast<std::size_t>(i)];
      return static_cast<std::size_t>(n);
    };
    codes.resize(count(shapes.codes));
    scale.resize(count(shapes.scale));
    t.codes = shapes.codes;
    t.codes.data = codes.data();
    t.scale = shapes.scale;
    t.scale.data = scale.data();
    if (o.smooth) {
      mean.resize(count(shapes.mean));
      t.mean = shapes.mean;
      t.mean.data = mean.data();
    }
    if (const auto report = quantize(t, o); !report.ok()) {
      std::fprintf(stderr, "%s\n", report.status().message().c_str());
      std::exit(1);
    }
  }
  float scale_of(std::int64_t b, std::int64_t h, std::int64_t s, int c) const {
    return scale[static_cast<std::size_t>(
        ScaleMap{scaling, role}.offset(shapes.scale, b, h, s, c))];
  }
};

/// Differences of codes and scales of a small case from the CPU's.
std::int64_t differences(const Recipe& recipe, std::int64_t d) {
  const Operands x({2, 300, 2, d});
  Call call(x, recipe, {true, true, true, false});
  call.run();
  check(cudaDeviceSynchronize(), "kernels");
  const Shape& s = x.shape;
  std::int64_t wrong = 0;
  const std::int64_t slots_per_sequence = (s.tokens + 63) / 64 * 64;
  for (const Role role : {Role::q, Role::k, Role::v}) {
    const Judge judge(x, recipe, role);
    const kernels::PreparedRows& rows = role == Role::q ? call.out.q : call.out.k;
    const kernels::PreparedTiles& v = call.out.v;
    const bool tiles = role == Role::v;
    const kernels::TileOffsets at = kernels::tile_offsets(v.channels);
    const std::int64_t slots = tiles ? v.slots : rows.slots;
    const std::vector<std::uint8_t> bytes =
        tiles ? fetch(v.tiles, s.heads * (slots / 64) * at.bytes)
              : fetch(rows.codes, s.heads * slots * rows.row_bytes);
    const std::vector<float> scales =
        tiles ? std::vector<float>() : fetch(rows.scale, s.heads * slots);
    for (std::int64_t b = 0; b < s.batch; ++b) {
      for (std::int64_t t = 0; t < s.tokens; ++t) {
        for (std::int64_t h = 0; h < s.heads; ++h) {
          const std::int64_t slot = h * slots + b * slots_per_sequence + t;
          int place = 0;
          while (kernels::p_key(place) != t % 16) ++place;
          for (std::int64_t c = 0; c < s.d; ++c) {
            const std::int64_t from =
                tiles ? slot / 64 * at.bytes + c * 64 + slot % 64 / 16 * 16 + place
                      : slot * rows.row_bytes + c;
            const std::int64_t to = ((b * s.tokens + t) * s.heads + h) * s.d + c;
            wrong +=
                bytes[static_cast<std::size_t>(from)] != judge.codes[static_cast<std::size_t>(to)];
          }
          if (!tiles) {
            wrong += scales[static_cast<std::size_t>(slot)] != judge.scale_of(b, h, t, 0);
          }
        }
      }
    }
  }
  return wrong;
}

/// The launches that make the mean of K, each on its own.
struct MeanKernels {
  kernels::MeanParams params;
  std::int64_t sum_blocks, finish_blocks;

  explicit MeanKernels(const Call& call) {
    const kernels::PrepareLayout::Part& part = call.layout.part[static_cast<int>(Role::k)];
    const auto at = [&](std::size_t offset) {
      return reinterpret_cast<float*>(static_cast<char*>(call.workspace) + offset);
    };
    kernels::MeanRole& m = params.role[0];
    m.rows = kernels::rows_of(call.problem, Role::k);
    m.aligned = true;
    m.sums = at(part.sums);
    m.mean = at(part.mean);
    m.tiles = part.slots / kernels::slot_tile;
    m.padded = kernels::prepared_channels(m.rows.channels);
    sum_blocks = kernels::SumRows::blocks(m.tiles, m.rows.heads, m.padded);
    finish_blocks =
        kernels::FinishMeans::blocks(std::int64_t{m.rows.batches} * m.rows.heads, m.padded);
    params.blocks[0] = sum_blocks;
  }

  template <class K>
  void run(std::int64_t blocks) const {
    const isa::LaunchError e = isa::launch<K>(params, {static_cast<int>(blocks), 1, 1}, nullptr);
    if (e.empty()) return;
    std::fprintf(stderr, "launch: %s\n", e.c_str());
    std::exit(1);
  }
};

struct Line {
  std::string name;
  std::int64_t d;
  double ms, bytes;
};

void measure(std::vector<Line>& lines, std::int64_t d) {
  const Operands x({1, 16384, 32, d});
  for (const std::int64_t tokens : {1024, 4096}) {
    const Operands few({1, tokens, 32, d});
    for (const char* name : {"int8_full", "fp8"}) {
      const bool integer = name == std::string("int8_full");
      Call call(few, integer ? thread_recipe() : floating_recipe(name), {true, true, true, false});
      lines.push_back({std::string(name) + ", " + std::to_string(tokens) + " tokens", d,
                       median_ms([&] { call.run(); }),
                       (integer ? 11.0 : 13.0) * static_cast<double>(few.shape.elements())});
    }
  }
  const auto n = static_cast<double>(x.shape.elements());
  const auto time = [&](const char* name, const Recipe& r, kernels::PrepareNeeds needs,
                        double bytes) {
    Call call(x, r, needs);
    lines.push_back({name, d, median_ms([&] { call.run(); }), bytes});
  };
  time("int8_full: mean of K and codes of Q, K, V", default_recipe(true), {true, true, true, false},
       2 * n + 9 * n);
  {
    const Call call(x, default_recipe(true), {true, true, true, false});
    const MeanKernels mean(call);
    lines.push_back({"SumRows alone", d,
                     median_ms([&] { mean.run<kernels::SumRows>(mean.sum_blocks); }), 2 * n});
    lines.push_back({"FinishMeans alone", d,
                     median_ms([&] { mean.run<kernels::FinishMeans>(mean.finish_blocks); }),
                     n / 16});
  }
  time("EncodePlain alone: int8_full without smooth_k", default_recipe(false),
       {true, true, true, false}, 9 * n);
  time("Q alone", default_recipe(false), {true, false, false, false}, 3 * n);
  time("K alone, smooth_k", default_recipe(true), {false, true, false, false}, 5 * n);
  time("V alone", default_recipe(false), {false, false, true, false}, 3 * n);
  time("int8_full with smooth_q", smooth_q_recipe(), {true, true, true, false}, 13 * n);
  time("Q per warp, K per 128 tokens", coarse_recipe(), {true, true, true, false}, 13 * n);
  for (const char* name : {"int8_full", "int8_fp8", "fp8"}) {
    const bool integer = name == std::string("int8_full");
    const Recipe r = integer ? thread_recipe() : floating_recipe(name);
    time((std::string("scales for Hopper: ") + name).c_str(), r, {true, true, true, false},
         (integer ? 11 : 13) * n);
  }
  void* copy = nullptr;
  check(cudaMalloc(&copy, static_cast<std::size_t>(x.shape.elements()) * 2), "cudaMalloc");
  lines.push_back({"cudaMemcpy of Q", d, median_ms([&] {
                     check(cudaMemcpyAsync(copy, x.device[0], static_cast<std::size_t>(2 * n),
                                           cudaMemcpyDeviceToDevice),
                           "copy");
                   }),
                   4 * n});
  cudaFree(copy);
}

}  // namespace

int main(int argc, char** argv) {
  cudaDeviceProp device{};
  check(cudaGetDeviceProperties(&device, 0), "device");
  std::int64_t wrong = 0;
  for (const std::int64_t d : {64, 80, 128, 256}) {
    for (const Recipe& r :
         {default_recipe(true), default_recipe(false), thread_recipe(), smooth_q_recipe(),
          floating_recipe("fp8"), floating_recipe("int8_fp8"), coarse_recipe()}) {
      const std::int64_t count = differences(r, d);
      wrong += count;
      if (count > 0) {
        std::printf("recipe %s, head_dim %lld: %lld differences from the CPU\n", r.name.c_str(),
                    static_cast<long long>(d), static_cast<long long>(count));
      }
    }
  }
  std::printf("%s: codes and scales %s the CPU's\n", device.name, wrong ? "DIFFER from" : "equal");
  std::vector<Line> lines;
  for (const std::int64_t d : {128, 64}) measure(lines, d);
  std::string json = std::string("{\"device\": \"") + device.name +
                     "\", \"differences\": " + std::to_string(wrong) + ", \"rows\": [";
  for (const Line& l : lines) {
    const double rate = l.bytes / l.ms * 1e-6;
    std::printf("D %3lld  %-46s %8.4f ms  %7.0f GB/s\n", static_cast<long long>(l.d),
                l.name.c_str(), l.ms, rate);
    json += std::string(json.back() == '[' ? "" : ",") + "\n  {\"name\": \"" + l.name +
            "\", \"d\": " + std::to_string(l.d) + ", \"ms\": " + std::to_string(l.ms) +
            ", \"gb_per_s\": " + std::to_string(rate) + "}";
  }
  json += "\n]}\n";
  if (argc > 1) {
    std::FILE* f = std::fopen(argv[1], "w");
    if (f == nullptr) return std::perror(argv[1]), 1;
    std::fwrite(json.data(), 1, json.size(), f);
    std::fclose(f);
  }
  return wrong > 0;
}
